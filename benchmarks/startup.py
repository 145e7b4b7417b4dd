"""Cost of a start: imports, a trial, and the way from ``nnictl create`` to the first step.

    python benchmarks/startup.py [--repeats 5] [--nnictl]

With ``--nnictl`` a real experiment is started (and stopped again): a search on digits whose epochs
are one step long, so that the first epoch in the gallery is the first training step.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from nni_petridish.nni_adapter.nnictl import Experiment, free_port
from nni_petridish.running.config import SearchConfig

ROOT = Path(__file__).parent.parent

# Processor time and not wall-clock: it does not depend on what else the machine does.
TRIAL = """
import sys, time
marks = [("python", time.process_time())]
def mark(name): marks.append((name, time.process_time()))
import nni, nni_petridish.trial; mark("import nni")
import torch; mark("import torch")
from nni_petridish.running.config import SearchConfig
import nni_petridish.running.growth, nni_petridish.running.worker; mark("import nni_petridish")
config = SearchConfig.from_yaml(sys.argv[1])
task = config.load_task(); mark("data (digits)")
task.build(task.seed()); mark("network")
print("; ".join(f"{name}:{b - a}" for (_, a), (name, b) in zip([("", 0)] + marks, marks)))
"""


def write_config(folder: Path) -> Path:
    """Write the example with epochs of one step."""
    document = yaml.safe_load((ROOT / "configs" / "petridish.yml").read_text())
    document["tuner"]["codeDirectory"] = "."
    document["tuner"]["classArgs"] |= {
        "gallery": "gallery",
        "data": {"name": "digits", "limit": 32},
        "seed_epochs": 1,
        "weak_epochs": 1,
        "final_epochs": 1,
        "limits": {"max_models": 3},
    }
    path = folder / "config.yml"
    path.write_text(yaml.safe_dump(document))
    return path


def wall(*command: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def trial_parts(path: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", TRIAL, str(path)], stdout=subprocess.PIPE, text=True, check=True
    )
    parts = (part.split(":") for part in done.stdout.strip().split("; "))
    return {name: float(seconds) for name, seconds in parts}


def experiment(path: Path) -> dict[str, float]:
    """Return the seconds from ``nnictl create`` to its milestones."""
    gallery = SearchConfig.from_yaml(path).gallery
    running = Experiment(path, free_port())
    wanted: dict[str, Callable[[], bool]] = {
        "nnictl create has returned": lambda: True,
        "the first trial works": lambda: any(gallery.glob("work/g00000-1/pulse")),
        "first training step done": lambda: (
            any(gallery.glob("work/g00000-1/seed/*")) or any(gallery.glob("models/g00000"))
        ),
        "first model": lambda: any(gallery.glob("models/g00000")),
        "third model": lambda: any(gallery.glob("models/g00002")),
        "experiment done": lambda: running.status() == "DONE",
    }
    found: dict[str, float] = {}
    began = time.perf_counter()
    with running:
        for name, reached in wanted.items():
            while not reached():
                time.sleep(0.02)
            found[name] = time.perf_counter() - began
    found["nnictl stop has returned"] = time.perf_counter() - began
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--nnictl", action="store_true", help="start a real experiment, too")
    arguments = parser.parse_args()
    times = range(arguments.repeats)
    print(f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores")
    for name, command in (
        ("python -c pass", ("-c", "pass")),
        ("import nni_petridish", ("-c", "import nni_petridish")),
        ("nni-petridish --help", ("-m", "nni_petridish", "--help")),
    ):
        print(f"{statistics.median(wall(*command) for _ in times):8.2f} s  {name}")
    with tempfile.TemporaryDirectory() as folder:
        path = write_config(Path(folder))
        parts = [trial_parts(path) for _ in times]
        print("A trial before its first step, seconds of processor time:")
        for name in parts[0]:
            print(f"{statistics.median(part[name] for part in parts):8.2f} s  {name}")
        if arguments.nnictl:
            print("From nnictl create:")
            for name, seconds in experiment(path).items():
                print(f"{seconds:8.2f} s  {name}")


if __name__ == "__main__":
    main()
