"""Growth of the cost of weak learning: with filters, cells, image size and earlier growths.

    python benchmarks/scaling.py [--steps 5] [--threads 1] [--plot docs/images/scaling.png]

Each row gives the time of a training step of the parent and of weak learning (medians; the two and
a large matrix product take turns, so that a noisy machine disturbs all alike; processor time with
one thread), and the ratio of
weak learning to its lower bound: the multiply-adds of the step at the speed of that product. A step
takes three times the multiply-adds of its forward pass, but twice where no gradient of the input is
needed: in the stem, and in the first conv of every candidate, because of stop-gradient.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=5, help="timed steps of each network")
parser.add_argument("--threads", type=int, default=1, help="threads of torch")
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--plot", type=Path, help="where to draw the picture")
arguments = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # before torch is imported
# Processor time does not depend on what else the machine does, but waiting threads burn it too.
clock = time.process_time if arguments.threads == 1 else time.perf_counter

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from nni_petridish import attach_candidates, finalize_candidates, sites  # noqa: E402
from nni_petridish.kernels.switch import plain_ops  # noqa: E402
from nni_petridish.running.process import keep_freed_memory  # noqa: E402
from search_spaces import VisionSpace  # noqa: E402
from search_spaces.vision.network import VisionNetwork  # noqa: E402

MATRIX = 1024
BASE = {"filters": 16, "cells": 1, "image": 32, "growths": 0}
NAMES = {
    "filters": "filters",
    "cells": "cells per stage",
    "image": "image side",
    "growths": "earlier growths",
}
LINES = (("parent", "parent", "s-"), ("weak", "weak learning", "o-"), ("bound", "its bound", "--"))
POINTS: dict[str, tuple[int, ...]] = {
    "filters": (8, 16, 32, 64),
    "cells": (1, 2, 3, 4),
    "image": (8, 16, 32, 64),
    "growths": (0, 1, 2, 3, 4),
}


@dataclass(frozen=True)
class Row:
    """Measurement at one point: seconds, and seconds of the lower bound."""

    value: int
    candidates: int
    parent: float
    weak: float
    bound: float


def build(growths: int, image: int, cells: int, filters: int) -> tuple[VisionNetwork, ...]:
    """Return a parent and the same network with candidates."""
    space = VisionSpace((3, image, image), 10, cells, filters)
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        net = space.build(space.seed())
        for _ in range(growths):
            finalize_candidates(attach_candidates(net))
        nets.append(net)
    attach_candidates(nets[1])
    return tuple(nets)


def count_step(net: nn.Module, image: int) -> int:
    """Return the multiply-adds of a training step for one image, candidates included."""
    total = 0

    def count(module: nn.Module, inputs: Any, output: Tensor) -> None:
        nonlocal total
        if isinstance(module, nn.Conv2d):
            taps = module.weight[0].numel()
        else:
            assert isinstance(module, nn.Linear)
            taps = module.in_features
        # Forward, gradient of the weights, and of the input if anybody wants it.
        total += taps * output.numel() * (2 + inputs[0].requires_grad)

    counted = [m for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    handles = [module.register_forward_hook(count) for module in counted]
    net.eval()  # in which the batch may be a single image; candidates run as long as grad is on
    with plain_ops():
        net(torch.zeros(1, 3, image, image))
    net.train()
    for handle in handles:
        handle.remove()
    return total


class Stepper:
    """Times training steps of one network."""

    def __init__(self, net: nn.Module, image: int) -> None:
        self.net, self.times = net, list[float]()
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
        self.images = torch.randn(arguments.batch, 3, image, image)
        self.labels = torch.randint(10, (arguments.batch,))

    def step(self) -> None:
        began = clock()
        self.optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(self.net(self.images), self.labels).backward()
        self.optimizer.step()
        self.times.append(clock() - began)

    def seconds(self) -> float:
        return statistics.median(self.times[2:])


def product_seconds(matrix: Tensor) -> float:
    """Return how long one multiply-add takes in a large matrix product."""
    began = clock()
    matrix @ matrix
    return (clock() - began) / MATRIX**3


def measure(name: str, value: int) -> Row:
    options = {**BASE, name: value}
    image = options["image"]
    parent, weak = (Stepper(net, image) for net in build(**options))
    matrix = torch.randn(MATRIX, MATRIX)
    products = []
    for _ in range(2 + arguments.steps):
        parent.step()
        weak.step()
        products.append(product_seconds(matrix))
    candidates = [len(site.weak_learner.ops) for site in sites(weak.net) if site.weak_learner]
    bound = count_step(weak.net, image) * arguments.batch * statistics.median(products)
    return Row(value, sum(candidates), parent.seconds(), weak.seconds(), bound)


def draw(rows: dict[str, list[Row]], path: Path) -> None:
    """Draw the times of a step over each of the four sizes, both on logarithmic scales."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.2), layout="constrained")
    for axes, (name, measured) in zip(
        figure.subplots(1, 4, sharey=True), rows.items(), strict=True
    ):
        values = [row.value for row in measured]
        for field, label, mark in LINES:
            axes.plot(values, [1000 * getattr(row, field) for row in measured], mark, label=label)
        axes.set(xlabel=NAMES[name], yscale="log", xticks=values, xticklabels=map(str, values))
        if name in ("filters", "image"):
            axes.set(xscale="log", xticks=values, xticklabels=map(str, values))
            axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("ms per step")
    figure.axes[0].legend()
    figure.savefig(path, dpi=100)


def main() -> None:
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    print(
        f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores,"
        f" {torch.get_num_threads()} threads; batch {arguments.batch}; median of {arguments.steps}"
        f" steps; unless varied: {', '.join(f'{NAMES[n]} {v}' for n, v in BASE.items())}\n"
    )
    rows: dict[str, list[Row]] = {}
    for name, values in POINTS.items():
        print(
            f"| {NAMES[name]} | candidates | parent ms | weak ms | weak / parent | weak / bound |"
        )
        print("| ---: " * 6 + "|")
        for value in values:
            row = measure(name, value)
            rows.setdefault(name, []).append(row)
            print(
                f"| {row.value} | {row.candidates} | {1000 * row.parent:.0f}"
                f" | {1000 * row.weak:.0f} | {row.weak / row.parent:.1f}"
                f" | {row.weak / row.bound:.1f} |",
                flush=True,
            )
        print()
    if arguments.plot:
        draw(rows, arguments.plot)


if __name__ == "__main__":
    main()
