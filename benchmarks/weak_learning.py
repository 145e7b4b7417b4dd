"""Time of a step of weak learning, measured in one run.

    python benchmarks/weak_learning.py [--steps 15] [--threads 2]

The networks take turns, so that a noisy machine disturbs all alike; medians and their ratios are
printed, and how much memory a step keeps for its backward pass. The plain parent is the parent of
plain PyTorch modules. The reference is the plain way to write Algorithm 1: plain ops in NCHW,
stop-gradient by a hook that zeroes the gradient, ``x_c - sg(x_c)`` for stop-forward, the candidates
summed one by one. On a machine that is shared, ``--threads 1 --clock cpu`` counts the time of the
processor, not that spent waiting for it. ``NNI_PETRIDISH_NATIVE=0`` in the environment shows what
is left where there is no C compiler.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Mapping
from contextlib import nullcontext

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=15, help="timed steps of each network")
parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of torch")
parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="what to count")
parser.add_argument("--cells-per-stage", type=int, default=3)
parser.add_argument("--filters", type=int, default=16)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--growths", type=int, default=0, help="growths before the one measured")
parser.add_argument("--mode", choices=("cell", "macro"), default="cell")
arguments = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # before torch is imported

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from nni_petridish import attach_candidates, finalize_candidates, sites  # noqa: E402
from nni_petridish.core.weak_learner import Candidates  # noqa: E402
from nni_petridish.kernels.native.calls import native_applies  # noqa: E402
from nni_petridish.kernels.switch import plain_ops  # noqa: E402
from nni_petridish.running.process import keep_freed_memory  # noqa: E402
from search_spaces import VisionSpace  # noqa: E402
from search_spaces.vision.network import VisionNetwork  # noqa: E402

PLAIN = ("plain parent", "reference")


class PlainWeakLearner(nn.Module):
    """Algorithm 1 written down as it stands."""

    def __init__(self, ours: Candidates) -> None:
        super().__init__()
        self.table, self.ops, self.adapters = ours.table, ours.ops, ours.adapters

    def forward(self, x_k: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        z = {}
        for source, value in inputs.items():
            stopped = value * 1.0
            if stopped.requires_grad:
                stopped.register_hook(torch.zeros_like)
            z[source] = self.adapters[source](stopped) if source in self.adapters else stopped
        x_c = torch.zeros_like(x_k)
        for i, ((source, _), op) in enumerate(zip(self.table.shortcuts, self.ops, strict=True)):
            x_c = x_c + self.table.alpha[i] * op(z[source])
        return x_k + (x_c - x_c.detach())


def build(kind: str) -> VisionNetwork:
    torch.manual_seed(0)
    space = VisionSpace(
        (3, 32, 32), 10, arguments.cells_per_stage, arguments.filters, mode=arguments.mode
    )
    net = space.build(space.seed())
    for _ in range(arguments.growths):
        finalize_candidates(attach_candidates(net))
    if "parent" not in kind:
        attach_candidates(net)
    if kind == "reference":
        for site in sites(net):
            assert site.weak_learner is not None
            site.weak_learner = PlainWeakLearner(site.weak_learner)  # type: ignore[assignment]
        net.memory_format = torch.contiguous_format
        net.to(memory_format=torch.contiguous_format)
    return net


def stepper(kind: str, net: nn.Module, images: Tensor, labels: Tensor) -> float:
    optimizer = stepper.optimizers.setdefault(  # type: ignore[attr-defined]
        id(net), torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
    )
    with plain_ops() if kind in PLAIN else nullcontext():
        clock = time.process_time if arguments.clock == "cpu" else time.perf_counter
        start = clock()
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()
        return clock() - start


stepper.optimizers = {}  # type: ignore[attr-defined]


def saved_megabytes(kind: str, net: nn.Module, images: Tensor) -> float:
    """Return how much memory the forward pass keeps for the backward pass, parameters apart."""
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    sizes: dict[int, int] = {}
    kept = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with plain_ops() if kind in PLAIN else nullcontext(), hooks:
        net(images)
    return sum(sizes.values()) / 2**20


def main() -> None:
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    nets = {kind: build(kind) for kind in ("parent", "plain parent", "ours", "reference")}
    images = torch.randn(arguments.batch, 3, 32, 32)
    labels = torch.randint(10, (arguments.batch,))
    times: dict[str, list[float]] = {kind: [] for kind in nets}
    for step in range(-3, arguments.steps):
        for kind, net in nets.items():
            seconds = stepper(kind, net, images, labels)
            if step >= 0:
                times[kind].append(seconds)
    median = {kind: statistics.median(seconds) for kind, seconds in times.items()}
    has_native = native_applies(torch.zeros(1, 1, 2, 2))
    print(
        f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores,"
        f" {torch.get_num_threads()} threads; cells_per_stage={arguments.cells_per_stage},"
        f" filters={arguments.filters}, batch {arguments.batch}, 3x32x32, {arguments.mode} mode,"
        f" {arguments.growths} earlier growths; median of {arguments.steps} steps,"
        f" {arguments.clock} time; native kernels {'on' if has_native else 'off'}"
    )
    for kind, seconds in median.items():
        megabytes = saved_megabytes(kind, nets[kind], images)
        print(
            f"{kind:>12} {1000 * seconds:8.1f} ms  {seconds / median['parent']:6.2f} x parent"
            f" {seconds / median['plain parent']:6.2f} x plain parent {megabytes:8.1f} MB kept"
        )
    print(f"reference / ours {median['reference'] / median['ours']:.2f}")


if __name__ == "__main__":
    main()
