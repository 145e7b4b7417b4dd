from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nni_petridish.running import process
from nni_petridish.running.config import SearchConfig
from nni_petridish.running.process import container_cores, per_machine
from nni_petridish.search.records import Growth
from tests.support.chaos import write_config

ALL = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("concurrency", "variables", "expected"),
    [
        (1, {}, 8),
        (2, {}, 4),
        (3, {}, 2),
        (20, {}, 1),
        (2, {"OMP_NUM_THREADS": "64"}, 4),  # too many are cut
        (2, {"OMP_NUM_THREADS": "3"}, 3),  # fewer are the user's choice
        (2, {"OMP_NUM_THREADS": "4,2"}, 4),
        (2, {"OMP_NUM_THREADS": "0"}, 4),
        (1, {"LOCAL_WORLD_SIZE": "4"}, 2),  # torchrun
        (2, {"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "8"}, 2),
    ],
)
def test_a_process_gets_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, concurrency: int, variables: dict[str, str], expected: int
) -> None:
    environment = {"PATH": os.environ["PATH"], **variables}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(process, "cores", lambda: 8)
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # as if it were not there yet
    assert process.set_threads(concurrency) == expected
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == str(expected)
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["GOMP_SPINCOUNT"] == "2000"


def test_how_threads_wait_is_left_to_who_chose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"OMP_WAIT_POLICY": "ACTIVE", "OMP_NUM_THREADS": "1"}
    monkeypatch.setattr(os, "environ", environment)
    process.set_threads(1)
    assert environment["OMP_WAIT_POLICY"] == "ACTIVE"
    assert "GOMP_SPINCOUNT" not in environment


def test_a_torch_that_is_there_already_is_told_and_never_given_more_than_it_had() -> None:
    code = (
        "import torch; from nni_petridish.running import process\n"
        "for had, concurrency in ((4, 2), (4, 4), (3, 1)):\n"
        "    torch.set_num_threads(had)\n"
        "    process.cores = lambda: 8\n"
        "    print(process.set_threads(concurrency), torch.get_num_threads())\n"
    )
    assert run(code, OMP_NUM_THREADS="64").split() == ["4", "4", "2", "2", "2", "2"]


def run(code: str, *arguments: str, **variables: str) -> str:
    """Run code in a process of its own, with these variables."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, math.inf),
        ({"cpu.max": "max 100000\n"}, math.inf),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
    ],
)
def test_a_container_has_the_cores_it_is_given(
    tmp_path: Path, files: dict[str, str], cores: float
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert container_cores(tmp_path) == cores


def test_seeds_train_alone_and_machines_share_the_growths(tmp_path: Path) -> None:
    config = SearchConfig.from_yaml(write_config(tmp_path, 3, concurrency=4))
    assert config.at_once(Growth("g00000", None, 0, 0.1, 1)) == 1
    assert config.at_once(Growth("g00001", "g00000", 0, 0.1, 1)) == 4
    assert per_machine(is_seed=False, seeds=1, concurrency=5, machines=2) == 3
    assert per_machine(is_seed=True, seeds=8, concurrency=4, machines=2) == 2


# How many threads torch uses where the work is done, whatever the environment says.

PROBE = """
import sys
import {home} as home

def probe(*arguments, **options):
    import torch
    print("threads", torch.get_num_threads(), flush=True)
    raise SystemExit(0)

home.{function} = probe
{call}
"""
COMMAND = "import nni_petridish.__main__; nni_petridish.__main__.main(['{}', sys.argv[1]])"
TRIAL = """
import nni, nni_petridish.trial
growth = dict(id="g00001", parent="g00000", seed=0, l1=0.1, i_max=1, attempt=1)
nni.get_next_parameter = lambda: {**growth, "gallery": sys.argv[1], "concurrency": 2}
nni_petridish.trial.main()
"""
ENTRIES = {
    "search": ("nni_petridish.running.runner", "run_search", COMMAND.format("search"), 1),
    "tune": ("nni_petridish.studies.tuning.study", "_carry_out", COMMAND.format("tune"), 1),
    "trial": ("nni_petridish.nni_adapter.trial", "_grow", TRIAL, 2),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_no_environment_makes_a_process_use_more_than_its_share(tmp_path: Path, entry: str) -> None:
    home, function, call, concurrency = ENTRIES[entry]
    output = run(
        PROBE.format(home=home, function=function, call=call),
        str(write_config(tmp_path, 2)),
        OMP_NUM_THREADS="64",
        MKL_NUM_THREADS="64",
    )
    assert f"threads {max(1, ALL // concurrency)}\n" in output
