from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nni_petridish.kernels import waiting
from nni_petridish.kernels.waiting import Judgment, Usage, busy_ticks, spare_threads

# Two threads on two cores, and on each core a process that computes. Processor time is measured:
# threads that spin while they wait use it up.
BUSY = """
import os, statistics, subprocess, sys, time
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import torch
from nni_petridish import attach_candidates
from search_spaces import VisionSpace

torch.set_num_threads(2)
space = VisionSpace((1, 8, 8), 10, cells_per_stage=1, filters=8)
net, images = attach_candidates(space.build(space.seed())), torch.randn(32, 1, 8, 8)

def milliseconds(seconds):
    found, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.process_time()
        net(images).square().sum().backward()
        found.append(1000 * (time.process_time() - began))
    return statistics.median(found)

others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
try:
    time.sleep(1.2)
    two = milliseconds(1.5)
    torch.set_num_threads(1)
    print(two, milliseconds(0.7))
finally:
    for other in others:
        other.kill()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize(
    "variables", [{}, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}]
)
def test_threads_that_wait_on_a_busy_machine_do_not_use_it_up(variables: dict[str, str]) -> None:
    outer = {name: value for name, value in os.environ.items() if "OMP_" not in name}
    done = subprocess.run(
        [sys.executable, "-c", BUSY],
        env={**outer, **variables},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    two, one = map(float, done.stdout.split())
    assert two < 3 * one


def test_a_machine_is_busy_at_once_and_calm_after_a_while() -> None:
    judgment = Judgment()
    missing = [0.0, 0.1, 0.5, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert [judgment.after(cores) for cores in missing] == [False] * 2 + [True] * 8 + [False] * 2


@pytest.mark.parametrize(
    ("others", "threads", "missing"), [(0.0, 4, 0), (1.5, 4, 1.5), (1.5, 1, -1.5), (3.0, 2, 1)]
)
def test_cores_that_others_use_are_missing_if_none_is_to_spare(
    others: float, threads: int, missing: float
) -> None:
    before = Usage(moment=10, cores=4, all=100, own=50)
    after = Usage(moment=12, cores=4, all=100 + 7 + 2 * others, own=57)
    assert after.missing_cores(before, threads) == missing


def test_ticks_are_counted_on_the_cores_of_this_process() -> None:
    usage = Usage.now()
    assert usage.cores == len(os.sched_getaffinity(0))
    assert 0 < usage.own < usage.all
    with pytest.raises(KeyError):
        busy_ticks("cpu 1 2 3\n", [0])


@pytest.mark.parametrize(
    ("missing", "spare"), [(0, [1, 2, 8]), (1, [1, 1, 7]), (3, [1, 1, 5]), (9, [1, 1, 1])]
)
def test_the_threads_of_kernels_are_those_that_the_machine_can_spare(
    missing: int, spare: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "_missing", missing)
    assert [spare_threads(threads) for threads in (1, 2, 8)] == spare
