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
from tests.support.chaos import write_config

# In a process of its own, as under NNI: a tuner watches its search from a thread.
TUNER = """
import itertools, os, sys, yaml
from nni_petridish.nni_adapter import trial
from nni_petridish.nni_adapter.tuner import PetridishTuner
from nni_petridish.search.records import Growth

document = yaml.safe_load(open(sys.argv[1]))
tuner = PetridishTuner(**document["tuner"]["classArgs"])
tuner.update_search_space(document["searchSpace"])
for i in itertools.count():
    handed_out = tuner.generate_multiple_parameters([i])
    if not handed_out:
        break
    (told,) = handed_out
    outcome = trial._grow(Growth.from_dict(told), told["gallery"], trial.Stopping())
    tuner.receive_trial_result(i, told, trial.metrics_of(outcome))
os._exit(0)
"""

STRATEGY = """
import sys, yaml
from nni.tools.nnictl import config_utils
config_utils.Experiments.__init__.__defaults__ = (sys.argv[2],)
from nni.nas.experiment import NasExperiment, NasExperimentConfig
from nni_petridish.nni_adapter import RecipeEvaluator
from nni_petridish.nni_adapter.nnictl import free_port
from nni_petridish.running.config import SearchConfig
from nni_petridish.strategy import Petridish

path, home, engine = sys.argv[1:]
config = SearchConfig.from_yaml(path)
arguments = yaml.safe_load(open(path))["tuner"]["classArgs"]
data, recipe, limits = (arguments.pop(name) for name in ("data", "recipe", "limits"))
strategy = Petridish(**arguments, **limits)
evaluator = RecipeEvaluator(data.pop("name"), data, recipe)
options = NasExperimentConfig(engine, "simplified", "local")
options.trial_concurrency = 1
options.experiment_working_directory = home
space = config.load_task().space.model_space()
experiment = NasExperiment(space, evaluator, strategy, options)
try:
    experiment.run(free_port())
finally:
    experiment.stop()
"""


def alone(path: Path) -> None:
    run_search(SearchConfig.from_yaml(path))


def tuner_and_trials(path: Path) -> None:
    command = [sys.executable, "-c", TUNER, str(path)]
    subprocess.run(command, cwd=path.parent, check=True, capture_output=True, timeout=200)


def strategy(path: Path, engine: str) -> None:
    home = path.parent / "home"
    home.mkdir()
    command = [sys.executable, "-c", STRATEGY, str(path), str(home), engine]
    done = subprocess.run(
        command,
        cwd=path.parent,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout


FRONTS: dict[str, Callable[[Path], None]] = {
    "tuner and trials": tuner_and_trials,
    "strategy in its process": functools.partial(strategy, engine="sequential"),
    "strategy and trials": functools.partial(strategy, engine="ts"),
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
