"""The contract of a front: the same search gives the same models, whoever runs it."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nni_petridish import Gallery
from nni_petridish.running.config import SearchConfig
from nni_petridish.running.runner import run_search
from tests.support.chaos import ROOT, write_config


def alone(path: Path) -> None:
    run_search(SearchConfig.from_yaml(path))


def in_a_process(path: Path, front: str) -> None:
    command = [sys.executable, "-m", "tests.support.fronts", front, str(path)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout


FRONTS: dict[str, Callable[[Path], None]] = {
    "tuner and trials": functools.partial(in_a_process, front="tuner"),
    "strategy in its process": functools.partial(in_a_process, front="sequential"),
    "strategy and trials": functools.partial(in_a_process, front="ts"),
}
"""Each runs the search of a configuration file to its end; list a new one here."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    """The models of the front in one process, which all others are compared with."""
    path = write_config(tmp_path_factory.mktemp("alone"), 3, concurrency=1)
    alone(path)
    return Gallery(path.parent / "gallery")


@pytest.mark.slow
@pytest.mark.parametrize("front", FRONTS)
def test_every_front_finds_the_same_models(front: str, expected: Gallery, tmp_path: Path) -> None:
    path = write_config(tmp_path, 3, concurrency=1)
    FRONTS[front](path)
    found = Gallery(tmp_path / "gallery")
    assert found.model_ids() == expected.model_ids()
    assert len(found.model_ids()) == 3
    for id in found.model_ids():
        weights, documents = found.load_model(id)
        wanted_weights, wanted = expected.load_model(id)
        for name in ("genotype", "metrics", "lineage", "alphas"):
            assert documents[name] == wanted[name]
        assert weights.keys() == wanted_weights.keys()
        assert all(torch.equal(weights[name], wanted_weights[name]) for name in weights)
