"""Cost of a search, before it starts: size of the seed, time and memory of a growth.

The size comes from formulas and needs no torch. Time and memory are measured by training the seed
for a few steps, with and without candidates, and are remembered for this machine: a recalled answer
needs no torch either.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nni_petridish._support.reading import read_json
from nni_petridish.errors import ConfigError, GalleryError, Interrupted, TrainingError
from nni_petridish.gallery.files import write_file
from nni_petridish.kernels.cache import cache_folder, make_cache_folder
from nni_petridish.registry import kind_of
from nni_petridish.running.config import SearchConfig
from nni_petridish.running.pace import duration
from nni_petridish.running.process import cores
from nni_petridish.search.settings import GrowthSettings

if TYPE_CHECKING:
    from torch import nn

    from nni_petridish.tasks.task import Task

_KEPT = 100
"""Number of measurements that are remembered."""
_STEPS = 3
"""Number of training steps that are timed, after one that warms up."""
_CHEAP = 1.5
"""Time of a step with twice the channels, as a multiple, below which a wider seed is advised: its
multiply-adds are about four times as many."""


@dataclass(frozen=True)
class Cost:
    """Time and memory of training the seed.

    Parameters
    ----------
    plain, weak
        Seconds of a training step, without and with candidates.
    steps
        Steps of an epoch.
    bytes
        Peak memory of the process, or of the GPU.
    wider
        Seconds of a training step of a seed with twice the channels; None if there is none.
    """

    plain: float
    weak: float
    steps: int
    bytes: int
    wider: float | None = None


def describe_size(config: SearchConfig) -> str:
    """Return the size of the seed in words."""
    multiply_adds, parameters = kind_of(config.space).seed_size(config.space, config.data)
    return f"Seed: {parameters:,} parameters, {multiply_adds:,} multiply-adds."


def check_limit(config: SearchConfig, limit: float | None, place: str) -> None:
    """Raise `ConfigError` if even the seed model exceeds the limit: nothing could be found."""
    if limit is None:
        return
    task = config.load_task()
    smallest, _ = task.size(task.build(task.seed()))
    if smallest > limit:
        raise ConfigError(
            f"{place} must be at least {smallest}, the seed model's, but got {limit!r}."
        )


def describe_cost(config: SearchConfig, anew: bool = False) -> str:
    """Return time and memory of training on this machine in words.

    Parameters
    ----------
    config
        The search.
    anew
        Whether to measure even if an earlier measurement is remembered.
    """
    cost = None if anew else _recall(config)
    if cost is None:
        cost = measure_cost(config)
        _remember(config, cost)
    seed, growth = (max(1.0, seconds) for seconds in growth_seconds(config.plan, cost))
    return (
        f"On this machine, one worker alone: the seed takes about {duration(seed)}, its first"
        f" growth {duration(growth)} (larger models longer), {cost.bytes / 2**30:.1f} GiB."
        f"{advise_on_width(cost)}"
    )


def advise_on_width(cost: Cost) -> str:
    """Return a line that advises a wider seed where width costs little time, else nothing.

    Small networks spend a step in overhead, so a narrow seed saves nothing while it is trained, and
    what growing adds is measured against a wider network for the same time.
    """
    if cost.wider is None or cost.wider >= _CHEAP * cost.plain:
        return ""
    ratio = cost.wider / cost.plain
    takes = f"{ratio:.1f} times as long" if ratio >= 1.05 else "no longer"
    return (
        f"\nA seed twice as wide takes {takes}, for about four times the multiply-adds: consider"
        " starting wider."
    )


def growth_seconds(plan: GrowthSettings, cost: Cost) -> tuple[float, float]:
    """Return the approximate seconds of the seed and of the first growth."""
    growth = plan.weak_epochs * cost.weak + plan.final_epochs * cost.plain
    return cost.steps * plan.seed_epochs * cost.plain, cost.steps * growth


def measure_cost(config: SearchConfig) -> Cost:
    """Train the seed for a few steps, then its candidates along with it."""
    from nni_petridish.core.grow import attach_candidates

    task = config.load_task()
    net = task.build(task.seed())
    plain = step_seconds(task, net, "seed")
    weak = step_seconds(task, attach_candidates(net, config.settings.l1), "weak")
    peak = _peak_memory(net)
    return Cost(plain, weak, task.steps(1), peak, _wider_seconds(task))


def _wider_seconds(task: Task) -> float | None:
    """Return the time of a training step of a seed with twice the channels; None without one."""
    from nni_petridish.tasks.task import require_widening

    try:
        wider = require_widening(task).widened(task.seed(), 2.0)
    except ConfigError:
        return None
    return step_seconds(task, task.build(wider), "seed")


def step_seconds(
    task: Task,
    net: nn.Module,
    phase: str,
    steps: int = _STEPS,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the median time of a few training steps.

    The task trains as in a growth and is stopped soon: it asks before every step whether to stop.

    Parameters
    ----------
    task, net
        The task, and a network that it trains for a few steps.
    phase
        The phase that it trains in.
    steps
        The number of steps that are timed, after one that warms up.
    clock
        Returns seconds.
    """
    from nni_petridish.tasks.task import Callbacks, Phase

    times: list[float] = []

    def has_enough() -> bool:
        _wait_for_gpu(net)
        times.append(clock())
        return len(times) > 1 + steps

    with contextlib.suppress(Interrupted):
        # An epoch has one step at least.
        task.train(net, Phase(phase, 2 + steps), Callbacks(should_stop=has_enough))
    seconds = [end - start for start, end in itertools.pairwise(times)]
    if len(seconds) < 2:
        raise TrainingError("a task must ask callbacks.should_stop before every step.")
    return statistics.median(seconds[1:])


def _wait_for_gpu(net: nn.Module) -> None:
    import torch

    device = next(net.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_memory(net: nn.Module) -> int:
    """Return the peak memory of the GPU of a network, or of this process."""
    import torch

    device = next(net.parameters()).device
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _store() -> Path:
    return cache_folder() / "costs.json"


def _key(config: SearchConfig) -> str:
    """Return a digest of what the cost depends on: network, data, recipe, machine and torch."""
    facts = {
        "space": config.space,
        "data": config.data,
        "recipe": asdict(config.recipe),
        "machine": [platform.node(), platform.machine(), cores(), version("torch")],
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "gpu": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _recall(config: SearchConfig) -> Cost | None:
    try:
        return Cost(**_read_store()[_key(config)])
    except (KeyError, TypeError):
        return None


def _remember(config: SearchConfig, cost: Cost) -> None:
    known = {**_read_store(), _key(config): asdict(cost)}
    latest = dict(list(known.items())[-_KEPT:])
    try:
        make_cache_folder()
        write_file(_store(), json.dumps(latest).encode())
    except (OSError, RuntimeError, GalleryError):
        pass  # no place to remember it: it will be measured again


def _read_store() -> dict[str, Any]:
    try:
        found = read_json(_store())
    except (OSError, ValueError, RuntimeError):  # RuntimeError: no home
        return {}
    return found if isinstance(found, dict) else {}
