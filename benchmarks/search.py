"""Scaling of the search itself: asking, telling, replaying a journal, memory. Nothing is trained.

    python benchmarks/search.py [--models 100000]

Outcomes are invented, in three ways: errors that fall slowly with much noise, as in real searches;
errors counted on 5000 images, with a tolerance that keeps many models near the hull; and, the
worst for a hull, models that all lie on it.
"""

from __future__ import annotations

import argparse
import gc
import math
import platform
import random
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from nni_petridish.gallery.journal import Journal, encode
from nni_petridish.search.events import Event
from nni_petridish.search.records import Growth, Outcome
from nni_petridish.search.search import Search
from nni_petridish.search.settings import Limits, SearchSettings

Invent = Callable[[int, random.Random], tuple[int, float]]


def noisy(number: int, rng: random.Random) -> tuple[int, float]:
    """Return multiply-adds and error of the model with this number."""
    return rng.randint(10**6, 10**9), 0.05 + 0.5 * rng.random() / (1 + 0.01 * math.sqrt(number))


def counted(number: int, rng: random.Random) -> tuple[int, float]:
    cost, error = noisy(number, rng)
    return cost, round(error * 5000) / 5000


def convex(number: int, rng: random.Random) -> tuple[int, float]:
    return 10**6 + number, (1 - number / 1e6) ** 2


CASES: dict[str, tuple[Invent, float]] = {
    "noisy": (noisy, 0.0),
    "counted, 2.5 %": (counted, 0.025),
    "all on the hull": (convex, 0.0),
}


def run(invent: Invent, tolerance: float, models: int) -> tuple[Search, list[Event], float, float]:
    """Ask and tell so many models; return the seconds of the slowest tenth as well."""
    events: list[Event] = []
    settings = SearchSettings(tolerance=tolerance, limits=Limits(max_models=models))

    def commit(event: Event) -> None:
        events.append(event)
        search.apply(event)

    search = Search(settings, commit=commit)
    rng = random.Random(0)
    began = time.process_time()
    tenths = [began]
    while isinstance(growth := search.ask(), Growth):
        number = int(growth.id[1:])
        cost, error = invent(number, rng)
        search.tell(Outcome(growth.id, error, cost, 10, metrics={"accuracy": 1 - error}))
        if (number + 1) % (models // 10) == 0:
            tenths.append(time.process_time())
    slowest = max(b - a for a, b in pairwise(tenths))
    return search, events, time.process_time() - began, slowest


def replayed(events: list[Event], settings: SearchSettings) -> tuple[float, float]:
    """Write a journal; return the seconds that reading and replaying take, and bytes per model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        path.write_bytes(b"".join(encode(event) + b"\n" for event in events))
        began = time.process_time()
        search = Search.replay(settings, Journal(path).read_all())
        seconds = time.process_time() - began
        models = len(search.models())
        del search
        tracemalloc.start()
        kept = Search.replay(settings, Journal(path).read_all())
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(kept.models()) == models
    return seconds, size / models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=100_000)
    largest = parser.parse_args().models
    print(f"Python {platform.python_version()}, {platform.machine()}, one thread")
    print(
        f"{'errors':>16} {'models':>7} {'hull':>7} {'ask+tell µs':>12} {'slowest tenth':>14}"
        f" {'lines':>7} {'replay s':>9} {'bytes/model':>12}"
    )
    for name, (invent, tolerance) in CASES.items():
        for models in (largest // 100, largest // 10, largest):
            search, events, seconds, slowest = run(invent, tolerance, models)
            replay, size = replayed(events, search.settings)
            print(
                f"{name:>16} {models:7d} {len(search.hull()):7d} {1e6 * seconds / models:12.0f}"
                f" {1e6 * slowest / (models // 10):14.0f} {len(events):7d} {replay:9.2f}"
                f" {size:12.0f}",
                flush=True,
            )
            del search, events
            gc.collect()  # not in the next one's time


if __name__ == "__main__":
    main()
