"""Time of a training step of grown networks, measured in one run.

    python benchmarks/grown.py [--steps 9] [--threads 1] [--growths 1 2 3] [--modes cell macro]

For each mode and number of growths, three networks take turns, so that a noisy machine disturbs
all alike: the grown network, the same network of plain PyTorch modules, and the seed. The shortcuts
of each growth are drawn with fixed seeds from all operations and inputs. A row is the mean of three
such architectures: medians of a step, plain / ours, and the time per multiply-add as a multiple of
the seed's. With one thread, processor time is counted, which does not depend on what else the
machine does; with more, wall time.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import time
from contextlib import nullcontext
from typing import NamedTuple

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=9, help="timed steps of each network")
parser.add_argument("--threads", type=int, default=1, help="threads of torch")
parser.add_argument("--growths", type=int, nargs="+", default=[1, 2, 3])
parser.add_argument("--modes", nargs="+", choices=("cell", "macro"), default=["cell", "macro"])
parser.add_argument("--cells-per-stage", type=int, default=3)
parser.add_argument("--filters", type=int, default=16)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--draws", type=int, default=3, help="architectures for each row")
arguments = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # before torch is imported
clock = time.process_time if arguments.threads == 1 else time.perf_counter

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from nni_petridish.core.genotype import learner_name  # noqa: E402
from nni_petridish.kernels.switch import plain_ops  # noqa: E402
from nni_petridish.running.process import keep_freed_memory  # noqa: E402
from search_spaces import VisionSpace  # noqa: E402
from search_spaces.vision.genotype import VISION_SOURCES, VisionGenotype  # noqa: E402

I_MAX = 3


def grown_genotype(space: VisionSpace, growths: int, seed: int) -> VisionGenotype:
    """Draw the shortcuts of some growths."""
    draw = random.Random(seed)
    cells = {}
    for key in space.seed().cells:
        learners = []
        for i in range(growths):
            sources = [*VISION_SOURCES, *(learner_name(k) for k in range(i))]
            eligible = [(source, op) for source in sources for op in space.ops]
            learners.append(tuple(draw.sample(eligible, I_MAX)))
        cells[key] = tuple(learners)
    return VisionGenotype(space.mode, cells)


class Stepper:
    """Training steps of one network, timed."""

    def __init__(self, net: nn.Module, is_plain: bool = False) -> None:
        self.net, self.is_plain, self.times = net, is_plain, list[float]()
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
        self.images = torch.randn(arguments.batch, 3, 32, 32)
        self.labels = torch.randint(10, (arguments.batch,))

    def step(self) -> None:
        with plain_ops() if self.is_plain else nullcontext():
            began = clock()
            self.optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(self.net(self.images), self.labels).backward()
            self.optimizer.step()
            self.times.append(clock() - began)

    def seconds(self) -> float:
        return statistics.median(self.times[2:])


class Row(NamedTuple):
    """Seconds of a step, and the multiply-adds of an image, summed over architectures."""

    ours: float
    plain: float
    seed: float
    multiply_adds: int
    of_seed: int


def measure(mode: str, growths: int, draw: int) -> Row:
    torch.manual_seed(0)
    space = VisionSpace((3, 32, 32), 10, arguments.cells_per_stage, arguments.filters, mode=mode)
    genotype = grown_genotype(space, growths, draw)
    ours, plain = Stepper(space.build(genotype)), Stepper(space.build(genotype), is_plain=True)
    seed = Stepper(space.build(space.seed()))
    for _ in range(2 + arguments.steps):
        for stepper in (ours, plain, seed):
            stepper.step()
    sizes = (space.size(stepper.net)[0] for stepper in (ours, seed))
    return Row(ours.seconds(), plain.seconds(), seed.seconds(), *sizes)


def main() -> None:
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    print(
        f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores,"
        f" {torch.get_num_threads()} threads, {clock.__name__};"
        f" cells_per_stage={arguments.cells_per_stage}, filters={arguments.filters},"
        f" batch {arguments.batch}; median of {arguments.steps} steps, mean of"
        f" {arguments.draws} architectures\n"
    )
    print(
        "| mode | growths | seed ms | plain ms | ours ms | plain / ours | multiply-adds x seed"
        " | time per multiply-add x seed |"
    )
    print("| --- " + "| ---: " * 7 + "|")
    for mode in arguments.modes:
        for growths in arguments.growths:
            rows = [measure(mode, growths, draw) for draw in range(arguments.draws)]
            total = Row(*map(sum, zip(*rows, strict=True)))
            ours, plain, seed = (1000 * seconds / len(rows) for seconds in total[:3])
            larger = total.multiply_adds / total.of_seed
            print(
                f"| {mode} | {growths} | {seed:.0f} | {plain:.0f} | {ours:.0f} | {plain / ours:.2f}"
                f" | {larger:.2f} | {ours / seed / larger:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
