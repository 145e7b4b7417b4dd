"""Growths per hour through nnictl, with one worker and with two.

    python benchmarks/throughput.py [--models 9] [--concurrency 1 2]

The same search on digits, run by real experiments one after the other. What counts is the time from
the first model, the seed's, to the last: start and end of an experiment are measured by
``benchmarks/startup.py``. Each worker has cores / workers threads.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from pathlib import Path

import yaml

from nni_petridish.nni_adapter.nnictl import free_port, run_experiment
from nni_petridish.running.config import SearchConfig
from nni_petridish.search.search import Search

ROOT = Path(__file__).parent.parent


def write_config(folder: Path, concurrency: int, models: int, filters: int) -> Path:
    document = yaml.safe_load((ROOT / "configs" / "petridish.yml").read_text())
    document["trialConcurrency"] = concurrency
    document["tuner"]["codeDirectory"] = "."
    document["searchSpace"]["filters"] = filters
    document["tuner"]["classArgs"] |= {
        "gallery": f"gallery-{concurrency}",
        "seed_epochs": 1,
        "weak_epochs": 1,
        "final_epochs": 1,
        "limits": {"max_models": models, "max_growths": 1},
    }
    path = folder / f"config-{concurrency}.yml"
    path.write_text(yaml.safe_dump(document))
    return path


def growths_per_hour(path: Path) -> float:
    config = SearchConfig.from_yaml(path)
    arrivals: list[float] = []

    def look(search: Search) -> None:
        new = len(search.models()) - len(arrivals)
        arrivals.extend([time.monotonic()] * new)

    run_experiment(
        path,
        config,
        free_port(),
        on_start=lambda experiment: None,
        on_change=look,
        seconds_between=0.2,
    )
    return 3600 * (len(arrivals) - 1) / (arrivals[-1] - arrivals[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=9)
    parser.add_argument("--filters", type=int, default=8)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores; digits, {arguments.filters} filters,"
        f" growths of 1 + 1 epochs, {arguments.models - 1} growths of the seed"
    )
    with tempfile.TemporaryDirectory() as folder:
        for concurrency in arguments.concurrency:
            path = write_config(Path(folder), concurrency, arguments.models, arguments.filters)
            rate = growths_per_hour(path)
            print(f"concurrency {concurrency}: {rate:6.0f} growths per hour", flush=True)


if __name__ == "__main__":
    main()
