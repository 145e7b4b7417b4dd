"""The fronts of NNI as functions that run a search to its end.

As a command: ``python -m tests.support.fronts tuner CONFIG``, or ``sequential``, or ``ts``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from nni.nas.experiment import NasExperiment, NasExperimentConfig
from nni.tools.nnictl import config_utils

from nni_petridish.errors import PetridishError
from nni_petridish.nni_adapter import RecipeEvaluator
from nni_petridish.nni_adapter.nnictl import free_port
from nni_petridish.running.config import SearchConfig
from nni_petridish.strategy import Petridish
from tests.support.faults import Blow
from tests.support.small_manager import SmallManager


def tuner(config: Path, resumes: bool, counted: str, blows: Sequence[Blow]) -> int:
    """Run a search by the tuner and its trials, each in a process of its own."""
    return SmallManager(config, resumes, counted, blows).run()


def strategy(path: Path, engine: str = "sequential") -> int:
    """Run a search by the strategy in a `NasExperiment`; return an exit code as the command has.

    Parameters
    ----------
    path
        A configuration file; NNI keeps its files beside it.
    engine
        ``sequential`` for growths in this process, ``ts`` for trials of NNI's manager.
    """
    home = path.parent / "home"
    home.mkdir(exist_ok=True)
    config_utils.Experiments.__init__.__defaults__ = (str(home),)
    config = SearchConfig.from_yaml(path)
    arguments = yaml.safe_load(path.read_text())["tuner"]["classArgs"]
    data, recipe, limits = (arguments.pop(name) for name in ("data", "recipe", "limits"))
    evaluator = RecipeEvaluator(data.pop("name"), data, recipe)
    gallery = config.gallery
    options = NasExperimentConfig(engine, "simplified", "local")
    options.trial_concurrency = 1
    options.experiment_working_directory = home
    space = config.load_task().space.model_space()
    try:
        chosen = Petridish(**{**arguments, "gallery": gallery}, **limits)
        experiment = NasExperiment(space, evaluator, chosen, options)
        try:
            experiment.run(free_port())
        finally:
            experiment.stop()
    except PetridishError as error:
        print(f"nni-petridish: {error}", file=sys.stderr)
        return 2
    return 0


def main(front: str, path: Path) -> int:
    """Run a search by the tuner, or by the strategy on an engine."""
    return tuner(path, False, "none", ()) if front == "tuner" else strategy(path, front)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
