"""The paper's recipe as an NNI evaluator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import nni
from torch import nn

from nni_petridish.errors import ConfigError
from nni_petridish.nni_adapter.evaluators.lengths import TaskEvaluator
from nni_petridish.tasks.task import Task
from nni_petridish.tasks.vision.data import DataSet, load_data
from nni_petridish.tasks.vision.recipe import Recipe
from nni_petridish.tasks.vision.task import VisionTask
from nni_petridish.tasks.vision.training import evaluate, fit


@nni.trace
class RecipeEvaluator(TaskEvaluator):
    """Evaluator that trains by the paper's recipe on a built-in data set, under any NNI strategy.

    Under `Petridish` it trains exactly as the other fronts do, and an interrupted training
    continues from its last epoch. The data are loaded where they are used, in the trial.

    Parameters
    ----------
    data
        Name of the data set, see `nni_petridish.tasks.vision.data.load_data`.
    data_options
        Further arguments of `load_data`.
    recipe
        Changes to the recipe of the data set, by name.
    seed
        Random seed of the training under other strategies; a growth has its own.
    """

    def __init__(
        self,
        data: str,
        data_options: Mapping[str, Any] | None = None,
        recipe: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.recipe = Recipe.named(data, **(recipe or {}))
        self.seed = seed
        self._arguments = {"name": data, **(data_options or {})}
        self._loaded: DataSet | None = None

    @property
    def data(self) -> DataSet:
        """The data, loaded on first use."""
        if self._loaded is None:
            self._loaded = load_data(**self._arguments)
        return self._loaded

    @property
    def epochs(self) -> int:
        """Epochs of the recipe."""
        return self.recipe.epochs

    def task(self, space: Any) -> Task:
        """Return the task of growing in a space, trained by this recipe."""
        expected = (self.data.image_shape, self.data.num_classes)
        if (tuple(space.image_shape), space.num_classes) != expected:
            raise ConfigError(
                f"the space must be for images {expected[0]} of {expected[1]} classes but is for"
                f" {tuple(space.image_shape)} of {space.num_classes}."
            )
        return VisionTask(space, self.data, self.recipe)

    def evaluate(self, model: nn.Module) -> float:
        """Train a network and report its accuracy on the validation images."""
        fit(
            model,
            self.data.train,
            self.recipe,
            seed=self.seed,
            validation=self.data.validation,
            on_epoch=lambda record: nni.report_intermediate_result(1 - record["validation_error"]),
            progress=False,
        )
        accuracy = evaluate(model, self.data.validation, self.recipe).accuracy
        nni.report_final_result(accuracy)
        return accuracy
