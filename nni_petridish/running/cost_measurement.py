"""Measure a few training steps of a search's seed, with its candidates and without."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from nni_petridish.core.grow import attach_candidates
from nni_petridish.running.config import SearchConfig
from nni_petridish.running.cost import Cost
from nni_petridish.tasks.device import resolve_device
from nni_petridish.tasks.optim import make_optimizer
from nni_petridish.tasks.vision.task import VisionTask

_STEPS = 3


def measure_cost(config: SearchConfig) -> Cost:
    """Train the seed for a few steps, then its candidates along with it, on the recipe's device."""
    task: Any = config.load_task()
    device = resolve_device(config.recipe.device)
    net = task.build(task.seed()).to(device)
    step = _image_step if isinstance(task, VisionTask) else _text_step
    plain = _seconds(step(task, net, device))
    weak = _seconds(step(task, attach_candidates(net, config.settings.l1), device))
    return Cost(plain, weak, task.steps(1), _peak_memory(device))


def _seconds(step: Callable[[], object]) -> float:
    """Return the seconds of a step: the fastest of a few, the first of which warms up."""
    times = []
    for _ in range(_STEPS):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return min(times)


def _image_step(task: VisionTask, net: nn.Module, device: torch.device) -> Callable[[], object]:
    batch = task.recipe.batch_size
    images = torch.rand(batch, *task.space.image_shape, device=device)
    labels = torch.zeros(batch, dtype=torch.int64, device=device)
    recipe = task.recipe
    optimizer = make_optimizer(
        net, lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay
    )

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        return float(loss.detach())  # waits for a GPU

    return step


def _text_step(task: Any, net: nn.Module, device: torch.device) -> Callable[[], object]:
    from nni_petridish.tasks.language.training import fit_language

    recipe = replace(task.recipe, epochs=1)
    words = task.corpus.train[: recipe.batch_size * (recipe.bptt + 1)]  # one sequence
    return lambda: fit_language(net, words, recipe, seed=0, progress=False)


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
