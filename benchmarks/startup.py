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
from nni_petridish.nni_adapter.warm.link import address
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
net = task.build(task.seed()); mark("network")
torch.optim.SGD(net.parameters(), lr=0.1); mark("optimizer")
print("; ".join(f"{name}:{b - a}" for (_, a), (name, b) in zip([("", 0)] + marks, marks)))
"""


# The same in a process of `nni_petridish.nni_adapter.warm`, whose processor time begins at 0.
SERVER = f"""
import os, sys
from pathlib import Path
from nni_petridish.nni_adapter.warm.server import serve
path, sys.argv[1] = Path(sys.argv[1]), sys.argv[2]
def run():
    exec({TRIAL!r}, {{}})
    return 0
serve(path, 0, run)
os._exit(0)
"""
CLIENT = """
import sys
from nni_petridish.nni_adapter.trial import run_warm
sys.exit(run_warm())
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
    return parse(done.stdout)


def parse(output: str) -> dict[str, float]:
    parts = (part.split(":") for part in output.strip().split("; "))
    return {name: float(seconds) for name, seconds in parts}


def warm_parts(path: Path, repeats: int) -> list[dict[str, float]]:
    """Return the parts of trials of one server; the one that makes it import all is left out."""
    trial = path.parent / "trials" / "trial"
    trial.mkdir(parents=True)
    server_socket = address(path.parent)
    assert server_socket is not None
    command = [sys.executable, "-c", SERVER, str(server_socket), str(path)]
    found = []
    with subprocess.Popen(command, stdin=subprocess.PIPE) as server:
        while not server_socket.exists():
            time.sleep(0.01)
        for _ in range(1 + repeats):
            client = subprocess.Popen(
                [sys.executable, "-c", CLIENT],
                env={**os.environ, "NNI_SYS_DIR": str(trial), "NNI_EXP_ID": path.parent.name},
                stdout=subprocess.PIPE,
                text=True,
            )
            assert client.stdout is not None
            output = client.stdout.read()
            _, status, usage = os.wait4(client.pid, 0)
            client.returncode = os.waitstatus_to_exitcode(status)
            assert client.returncode == 0, "the trial was not warm"
            waiting = usage.ru_utime + usage.ru_stime
            found.append({**parse(output), "the process that waits for it": waiting})
        assert server.stdin is not None
        server.stdin.close()
    return found[1:]


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


def show(title: str, parts: list[dict[str, float]]) -> None:
    print(title)
    for name in parts[0]:
        print(f"{statistics.median(part[name] for part in parts):8.2f} s  {name}")
    total = statistics.median(sum(part.values()) for part in parts)
    print(f"{total:8.2f} s  in all")


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
        cold = [trial_parts(path) for _ in times]
        show("A trial before its first step, seconds of processor time:", cold)
        show("The same, warm:", warm_parts(path, arguments.repeats))
        if arguments.nnictl:
            print("From nnictl create:")
            for name, seconds in experiment(path).items():
                print(f"{seconds:8.2f} s  {name}")


if __name__ == "__main__":
    main()
