"""Cost of a search, before it starts: size of the seed, time and memory of a growth.

The size comes from formulas and needs no torch. Time and memory are measured, a few training steps
of the seed with and without candidates, and remembered for this machine: asked again, the answer
is there at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nni_petridish.errors import ConfigError
from nni_petridish.gallery.files import write_file
from nni_petridish.kernels.cache import cache_folder, make_cache_folder
from nni_petridish.registry import kind_of
from nni_petridish.running.config import SearchConfig
from nni_petridish.running.process import cores
from nni_petridish.search.settings import GrowthSettings

_KEPT = 100
"""Number of measurements that are remembered."""


@dataclass(frozen=True)
class Cost:
    """Seconds of a training step of the seed, and of one with its candidates.

    Parameters
    ----------
    plain, weak
        Seconds.
    steps
        Steps of an epoch.
    bytes
        Peak memory of the process, or of the GPU.
    """

    plain: float
    weak: float
    steps: int
    bytes: int


def describe_size(config: SearchConfig) -> str:
    """Return the size of the seed in words."""
    multiply_adds, parameters = kind_of(config.space).seed_size(config.space, config.data)
    return f"Seed: {parameters:,} parameters, {multiply_adds:,} multiply-adds."


def check_limit(config: SearchConfig, limit: float | None, place: str) -> None:
    """Raise if not even the seed model is within the limit: then nothing could be found."""
    if limit is None:
        return
    task = config.load_task()
    smallest, _ = task.size(task.build(task.seed()))
    if smallest > limit:
        raise ConfigError(
            f"{place} must be at least {smallest}, the seed model's, but got {limit!r}."
        )


def describe_cost(config: SearchConfig, anew: bool = False) -> str:
    """Return in words what training takes on this machine.

    Parameters
    ----------
    anew
        Measure even if it was measured before.
    """
    cost = None if anew else _recall(config)
    if cost is None:
        from nni_petridish.running.cost_measurement import measure_cost

        cost = measure_cost(config)
        _remember(config, cost)
    seed, growth = growth_seconds(config.plan, cost)
    return (
        f"On this machine, one worker alone: the seed takes about {_duration(seed)}, its first"
        f" growth {_duration(growth)} (larger models longer), {cost.bytes / 2**30:.1f} GiB."
    )


def growth_seconds(plan: GrowthSettings, cost: Cost) -> tuple[float, float]:
    """Return about how long the seed takes, and the first growth; later ones take longer."""
    growth = plan.weak_epochs * cost.weak + plan.final_epochs * cost.plain
    return cost.steps * plan.seed_epochs * cost.plain, cost.steps * growth


def _store() -> Path:
    return cache_folder() / "costs.json"


def _key(config: SearchConfig) -> str:
    """Return what the cost depends on: network, data, recipe, machine and torch."""
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
    except (OSError, RuntimeError):
        pass  # no place to remember it: it will be measured again


def _read_store() -> dict[str, Any]:
    try:
        found = json.loads(_store().read_bytes())
    except (OSError, ValueError, RuntimeError):  # RuntimeError: no home
        return {}
    return found if isinstance(found, dict) else {}


def _duration(seconds: float) -> str:
    """Return a duration in the unit that fits.

    >>> _duration(42), _duration(5000), _duration(200_000)
    ('42 s', '83 min', '55.6 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
