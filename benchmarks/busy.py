"""Weak learning of a small network beside other load, measured in one run.

    python benchmarks/busy.py [--seconds 8] [--load 2] [--repeats 3] [--watched]

Processes that only compute (``--load`` of them) run beside one that trains a tiny network: 8
filters, 1 cell per stage, 8 x 8 images, batch 32. It trains with 1 thread and with 2, in each
policy of waiting threads, with and without the watch of `nni_petridish.kernels.waiting`. Steps per
second are wall time; the first three seconds, in which the watch sees the load, are not counted.
The rows take turns; medians and ranges of the repeats.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--seconds", type=float, default=8.0, help="time of each row")
parser.add_argument("--load", type=int, default=2, help="processes that compute beside")
parser.add_argument("--repeats", type=int, default=3)
parser.add_argument("--watched", action="store_true", help="no rows of 2 threads without the watch")
arguments = parser.parse_args()

TRAIN = """
import sys, time, torch
import torch.nn.functional as F
from nni_petridish import attach_candidates
from nni_petridish.kernels import waiting
from nni_petridish.tasks.optim import make_optimizer, take_step
from search_spaces import VisionSpace
if sys.argv[2] == "off":
    waiting._start_watching = lambda process: None
torch.manual_seed(0)
space = VisionSpace((3, 8, 8), 10, 1, 8)
net = attach_candidates(space.build(space.seed()))
optimizer = make_optimizer(net, lr=0.01, weight_decay=0.0)
images, labels = torch.randn(32, 3, 8, 8), torch.randint(10, (32,))
waiting.watch_the_machine()
def train(seconds):
    steps, began, used = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        loss = F.cross_entropy(net(images), labels)
        take_step(optimizer, loss, (), 5.0, lambda group: 0.01)
        steps += 1
    return steps / (time.perf_counter() - began), (time.process_time() - used) / steps
train(3)
print(*train(float(sys.argv[1])))
"""
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
ROWS: tuple[tuple[str, dict[str, str], str], ...] = (
    ("1", {}, "off"),
    ("2", {}, "off"),
    ("2", PASSIVE | {"GOMP_SPINCOUNT": "2000"}, "off"),
    ("2", PASSIVE, "off"),
    ("2", {}, "on"),
    ("2", PASSIVE | {"GOMP_SPINCOUNT": "2000"}, "on"),
)
if arguments.watched:
    ROWS = tuple(row for row in ROWS if row[0] == "1" or row[2] == "on")


def main() -> None:
    spin = [sys.executable, "-c", "while True: sum(range(100000))"]
    others = [subprocess.Popen(spin) for _ in range(arguments.load)]
    found: list[list[tuple[float, float]]] = [[] for _ in ROWS]
    try:
        for _ in range(arguments.repeats):
            for row, results in zip(ROWS, found, strict=True):
                results.append(run(*row))
    finally:
        for other in others:
            other.kill()
    print(f"{os.cpu_count()} cores, {arguments.load} processes that compute beside\n")
    print("| threads | waiting threads | watch | steps per second | processor ms per step |")
    print("| ---: | --- | --- | ---: | ---: |")
    for (threads, policy, watch), results in zip(ROWS, found, strict=True):
        name = "spin" if not policy else f"spin {policy.get('GOMP_SPINCOUNT', 0)}, then sleep"
        rates, used = ([*column] for column in zip(*results, strict=True))
        print(f"| {threads} | {name} | {watch} | {shown(rates)} | {shown(used)} |")


def run(threads: str, policy: dict[str, str], watch: str) -> tuple[float, float]:
    """Return the steps per second of a process, and its processor time for each in ms."""
    clean = {name: value for name, value in os.environ.items() if "OMP_" not in name}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRAIN, str(arguments.seconds), watch],
        env={**clean, **policy, "OMP_NUM_THREADS": threads},
        capture_output=True,
        text=True,
        check=True,
    )
    rate, used = map(float, done.stdout.split())
    return rate, 1000 * used


def shown(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    main()
