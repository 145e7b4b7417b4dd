"""What a search will cost, before it starts: size of the seed, time and memory of a growth."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from nni_petridish.complexity import count_multiply_adds, count_parameters
from nni_petridish.config import SearchConfig
from nni_petridish.data import describe
from nni_petridish.errors import ConfigError
from nni_petridish.grow import attach_candidates
from nni_petridish.recipe import Recipe
from nni_petridish.sgd import make_optimizer
from nni_petridish.splits import steps_per_epoch
from nni_petridish.training import resolve_device
from search_spaces import VisionSpace

_STEPS = 3


@dataclass(frozen=True)
class StepCost:
    """Seconds of a training step of the seed, of one with its candidates, and peak memory."""

    plain: float
    weak: float
    bytes: int


def describe_cost(config: SearchConfig, measure: bool = False) -> str:
    """Return the size of the seed in words; if asked to, what training takes as well."""
    multiply_adds, parameters = seed_size(config)
    text = f"Seed: {parameters:,} parameters, {multiply_adds:,} multiply-adds."
    if not measure:
        return text
    images: Any = config.load_task()
    cost = step_cost(config)
    seed, growth = growth_seconds(config, cost, len(images.data.train))
    return (
        f"{text}\nOn this machine, one worker alone: the seed takes about {_duration(seed)}, its"
        f" first growth {_duration(growth)} (larger models longer), {cost.bytes / 2**30:.1f} GiB."
    )


def seed_size(config: SearchConfig) -> tuple[int, int]:
    """Return (multiply-adds, parameters) of the seed; nothing is computed and no data are read."""
    space = _space(config)
    with torch.device("meta"):
        net = space.build(space.seed())
        return count_multiply_adds(net, space.image_shape), count_parameters(net)


def step_cost(config: SearchConfig) -> StepCost:
    """Measure a few training steps on random images, on the recipe's device."""
    space, recipe = _space(config), config.recipe
    device = resolve_device(recipe)
    net = space.build(space.seed()).to(device)
    plain = _seconds(net, space, recipe, device)
    weak = _seconds(attach_candidates(net, 0.001), space, recipe, device)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:  # of the whole process; macOS counts bytes, Linux kilobytes
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return StepCost(plain, weak, peak)


def growth_seconds(config: SearchConfig, cost: StepCost, images: int) -> tuple[float, float]:
    """Return about how long the seed takes, and the first growth; later ones take longer."""
    steps, plan = steps_per_epoch(images, config.recipe.batch_size), config.plan
    growth = plan.weak_epochs * cost.weak + plan.final_epochs * cost.plain
    return steps * plan.seed_epochs * cost.plain, steps * growth


def _seconds(net: Any, space: VisionSpace, recipe: Recipe, device: torch.device) -> float:
    """Return the seconds of a step: the fastest of a few, the first of which warms up."""
    images = torch.rand(recipe.batch_size, *space.image_shape, device=device)
    labels = torch.zeros(recipe.batch_size, dtype=torch.int64, device=device)
    optimizer = make_optimizer(net, recipe)
    times = []
    for _ in range(_STEPS):
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        float(loss.detach())  # waits for a GPU
        times.append(time.perf_counter() - began)
    return min(times)


def _space(config: SearchConfig) -> VisionSpace:
    if config.space["space"] != "vision":
        raise ConfigError(f"An estimate is for vision but the space is {config.space['space']}.")
    data = config.data
    shape, classes = describe(data["name"], data.get("root"), data.get("image_size") or 224)
    options = {key: value for key, value in config.space.items() if key != "space"}
    return VisionSpace(shape, classes, **options)


def _duration(seconds: float) -> str:
    """Return a duration in the unit that fits.

    >>> _duration(42), _duration(5000), _duration(200_000)
    ('42 s', '83 min', '55.6 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
