"""The base of the estimators: a search in ``fit``, its limits and its models."""

from __future__ import annotations

import copy
import os
import time
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, _fit_context
from sklearn.utils import check_random_state
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.validation import (
    _check_sample_weight,
    check_is_fitted,
    column_or_1d,
    validate_data,
)

from nni_petridish.errors import ConfigError
from nni_petridish.estimators.chart import hull_html
from nni_petridish.estimators.data import Floats, Scaling, merged, split
from nni_petridish.estimators.growing import ONE_AT_A_TIME, grow_models
from nni_petridish.estimators.models import FoundModels, GrownModel, hull_models
from nni_petridish.estimators.pace import paced
from nni_petridish.estimators.plain import plain_network
from nni_petridish.registry import ERROR
from nni_petridish.results.export import export_network
from nni_petridish.search.complexity import COMPLEXITIES
from nni_petridish.search.records import ModelRecord
from nni_petridish.search.settings import SKIP, Limits, SearchSettings
from nni_petridish.tasks.arrays.recipe import ArrayRecipe
from nni_petridish.tasks.arrays.spaces import choose_space, is_image, make_space
from nni_petridish.tasks.arrays.task import ArrayTask


class Growing(BaseEstimator):
    """Base of the estimators: a search in ``fit``, and its models.

    Parameters
    ----------
    max_multiply_adds : float or None
        The largest number of multiply-adds for one example; no larger model is ever returned.
    max_parameters, max_latency : float or None
        Further limits: of parameters, and of milliseconds for one example on this machine. The last
        one needs ``complexity="latency"``.
    complexity : {"multiply_adds", "parameters", "latency"}
        What the models on the hull trade against their error.
    max_seconds : float or None
        Time after which ``fit`` returns the best model so far. Results then depend on the speed of
        the machine.
    max_models : int
        The number of models that ``fit`` trains: a seed, and growths of those on the hull.
    epochs : int or "auto"
        Epochs of the seed model; weak learning and the training after it take half of them each.
        "auto" is about 400 steps, or fewer so that several models fit into ``max_seconds``.
    batch_size : int
        The number of examples of a step.
    learning_rate : float
        The learning rate at the start; it decreases to 0 in each training.
    l1 : float
        λ, the weight of Σ|α| in weak learning.
    i_max : int
        I_max, the number of shortcuts that a growth adds to each layer.
    validation_fraction : float
        The fraction of the examples that is set aside to compare models.
    warm_start : bool
        Whether ``fit`` goes on from the models of the last one.
    random_state : int, RandomState instance or None
        The seed of all random numbers.
    verbose : int
        Whether to print a line for each model, and progress bars on a terminal.
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        "max_multiply_adds": [Interval(Real, 1, None, closed="left"), None],
        "max_parameters": [Interval(Real, 1, None, closed="left"), None],
        "max_latency": [Interval(Real, 0, None, closed="neither"), None],
        "complexity": [StrOptions(set(COMPLEXITIES))],
        "max_seconds": [Interval(Real, 0, None, closed="left"), None],
        "max_models": [Interval(Integral, 1, None, closed="left")],
        "epochs": [Interval(Integral, 1, None, closed="left"), StrOptions({"auto"})],
        "batch_size": [Interval(Integral, 2, None, closed="left")],
        "learning_rate": [Interval(Real, 0, None, closed="neither")],
        "l1": [Interval(Real, 0, None, closed="left")],
        "i_max": [Interval(Integral, 1, None, closed="left")],
        "validation_fraction": [Interval(Real, 0, 1, closed="neither")],
        "warm_start": ["boolean"],
        "random_state": ["random_state"],
        "verbose": ["verbose"],
    }
    _task_type: ClassVar[type[ArrayTask]]
    input_shape_: tuple[int, ...]
    scaling_: Scaling
    models_: list[GrownModel]
    model_: GrownModel

    def __init__(
        self,
        *,
        max_multiply_adds: float | None = None,
        max_parameters: float | None = None,
        max_latency: float | None = None,
        complexity: str = "multiply_adds",
        max_seconds: float | None = None,
        max_models: int = 8,
        epochs: int | str = "auto",
        batch_size: int = 64,
        learning_rate: float = 0.05,
        l1: float = 0.001,
        i_max: int = 2,
        validation_fraction: float = 0.15,
        warm_start: bool = False,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.max_multiply_adds = max_multiply_adds
        self.max_parameters = max_parameters
        self.max_latency = max_latency
        self.complexity = complexity
        self.max_seconds = max_seconds
        self.max_models = max_models
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.l1 = l1
        self.i_max = i_max
        self.validation_fraction = validation_fraction
        self.warm_start = warm_start
        self.random_state = random_state
        self.verbose = verbose

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Grow networks on (X, y) and keep the most accurate one within the limits.

        Ctrl-C, SIGTERM and the time limit end it with the best model so far.

        Parameters
        ----------
        X : array-like
            A table (n, features), or images (n, height, width) or (n, channels, height, width).
        y : array-like of shape (n,)
            Class labels of any type, or numbers to predict.
        sample_weight : array-like of shape (n,) or None
            Weights of the examples. An integer is the same as giving an example so many times.

        Returns
        -------
        self
            The fitted estimator.
        """
        began = time.monotonic()
        goes_on = self.warm_start and "models_" in vars(self)
        before = self.input_shape_ if goes_on else None
        inputs, targets = self._validated(X, y)
        weights = _check_sample_weight(
            sample_weight, inputs, dtype=np.float64, ensure_non_negative=True
        )
        used = weights > 0
        if used.sum() < 2:
            raise ValueError("fit needs at least 2 examples of positive weight.")
        inputs, weights = inputs[used], weights[used]
        targets = self._read_targets(targets[used], goes_on)
        if goes_on and before != inputs.shape[1:]:
            raise ValueError(f"warm_start needs inputs of shape {before}, got {inputs.shape[1:]}.")
        self.input_shape_ = inputs.shape[1:]
        shaped, labels, merged_weights = merged(self._shaped(inputs), targets, weights)
        if not goes_on:
            numbers = None if self._task_type.measure is ERROR else labels
            self.scaling_ = Scaling.of(shaped, merged_weights, numbers)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        with ONE_AT_A_TIME, torch.random.fork_rng([]):
            known: list[GrownModel] = self.models_ if goes_on else []
            task = self._task(shaped, labels, merged_weights, seed, known)
            epochs = self.epochs
            if isinstance(epochs, str):
                task, epochs = paced(task, int(self.max_models), self._seconds_left(began))
            models = grow_models(
                task,
                self._settings(int(epochs), seed, len(known)),
                max_seconds=self._seconds_left(began),
                known=known,
                on_model=self._tell,
                progress=bool(self.verbose),
            )
        self.models_ = models
        self.model_ = self._allowed()[-1]
        return self

    @property
    def hull_(self) -> FoundModels:
        """The best models of all sizes; ``hull_.at(size)`` is an estimator with one of them."""
        check_is_fitted(self)
        return FoundModels(self, self._allowed())

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the model as ONNX: raw inputs in, probabilities or numbers out.

        Parameters
        ----------
        path
            The file to write, ending in ``.onnx``; a file that exists is not overwritten.
        """
        check_is_fitted(self)
        target = Path(path)
        if target.suffix != ".onnx":
            raise ConfigError(f"path must end in .onnx but got {target.name!r}.")
        if os.path.lexists(target):
            raise ConfigError(f"{target} is there already: it is not overwritten.")
        is_classifier = self._task_type.measure is ERROR
        plain = plain_network(self.model_, self.scaling_, self._net_shape(), is_classifier)
        export_network(plain, target, "onnx", {})

    def _outputs(self, X: ArrayLike) -> Floats:
        """Return the outputs of the network for raw inputs."""
        check_is_fitted(self)
        checked = validate_data(self, X, reset=False, dtype=np.float64, allow_nd=True)
        if checked.shape[1:] != self.input_shape_:
            raise ValueError(
                f"X must have inputs of shape {self.input_shape_} but got {checked.shape[1:]}."
            )
        return self.model_.outputs(self.scaling_.inputs(self._shaped(checked)))

    def _validated(self, X: ArrayLike, y: ArrayLike) -> tuple[Floats, Any]:
        inputs, targets = validate_data(
            self, X, y, dtype=np.float64, allow_nd=True, ensure_min_samples=2, multi_output=True
        )
        if inputs.ndim > 4:
            raise ValueError(
                "X must be a table (n, features) or images (n, height, width) or (n, channels,"
                f" height, width) but got {inputs.ndim} dimensions."
            )
        return inputs, column_or_1d(targets, warn=True)

    def _shaped(self, X: Floats) -> Floats:
        return np.ascontiguousarray(X.reshape(len(X), *self._net_shape()))

    def _net_shape(self) -> tuple[int, ...]:
        """Return the shape of one input of the network; small images become vectors."""
        shape = tuple(int(n) for n in self.input_shape_)
        image = (1, *shape) if len(shape) == 2 else shape
        return image if is_image(image) else (int(np.prod(shape)),)

    def _read_targets(self, y: Any, goes_on: bool) -> NDArray[Any]:
        raise NotImplementedError

    def _num_outputs(self) -> int:
        return 1

    def _task(
        self, X: Floats, y: Any, weights: Floats, seed: int, known: list[GrownModel]
    ) -> ArrayTask:
        sizes = self._limits(None).sizes()
        space = (
            make_space(known[0].space)
            if known
            else choose_space(self._net_shape(), self._num_outputs(), sizes)
        )
        training, validation = split(X, y, weights, self.validation_fraction, seed, self.scaling_)
        recipe = ArrayRecipe(batch_size=int(self.batch_size), lr=float(self.learning_rate))
        return self._task_type(space, training, validation, recipe, checkpoints=False)

    def _seconds_left(self, began: float) -> float | None:
        if self.max_seconds is None:
            return None
        return max(0.0, float(self.max_seconds) - (time.monotonic() - began))

    def _settings(self, epochs: int, seed: int, known: int) -> SearchSettings:
        half = max(1, epochs // 2)
        return SearchSettings(
            seed=seed,
            l1=float(self.l1),
            i_max=int(self.i_max),
            limits=self._limits(known + int(self.max_models)),
            seed_epochs=epochs,
            weak_epochs=half,
            final_epochs=half,
            complexity=self.complexity,
        )

    def _limits(self, max_models: int | None) -> Limits:
        return Limits(
            max_multiply_adds=self.max_multiply_adds,
            max_parameters=self.max_parameters,
            max_latency=self.max_latency,
            oversize=SKIP,
            max_models=max_models,
        )

    def _allowed(self) -> list[GrownModel]:
        """Return the hull of the models within the limits."""
        limits = self._limits(None).sizes()
        within = [
            model
            for model in self.models_
            if all(model.size(name) <= limit for name, limit in limits.items())
        ]
        found = hull_models(within, self.complexity)
        if not found:
            shown = ", ".join(f"max_{name}={limit:,.6g}" for name, limit in limits.items())
            raise ConfigError(f"{shown} is below the smallest model: fit without warm_start.")
        return found

    def _with_model(self, model: GrownModel) -> Self:
        other = copy.copy(self)
        other.model_ = model
        return other

    def _tell(self, record: ModelRecord) -> None:
        if self.verbose:
            measure, complexity = self._task_type.measure, COMPLEXITIES[self.complexity]
            error = f"{measure.name} {measure.text(record.error)}"
            size = complexity.phrase(complexity.text(complexity.of(record.outcome)))
            print(f"{record.id}: {error}, {size}")

    def _html_repr(self) -> str:
        html: str = super()._html_repr()
        return (
            html + hull_html(self.models_, self._task_type.measure, self.complexity)
            if "models_" in vars(self)
            else html
        )
