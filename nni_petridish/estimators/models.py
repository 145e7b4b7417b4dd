"""The models of a fitted estimator: plain data that pickles, and networks rebuilt from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from nni_petridish.core.genotype import Genotype
from nni_petridish.errors import ConfigError
from nni_petridish.search.complexity import COMPLEXITIES
from nni_petridish.search.events import model_event
from nni_petridish.search.records import Growth, Outcome
from nni_petridish.search.search import Search
from nni_petridish.search.settings import SearchSettings
from nni_petridish.tasks.arrays.spaces import make_space

if TYPE_CHECKING:
    from nni_petridish.estimators.base import Growing

_BATCH = 1024


@dataclass(eq=False)
class GrownModel:
    """A trained model as plain data.

    Parameters
    ----------
    growth, outcome
        Its growth and outcome, as plain data.
    genotype, space
        Its architecture and the space that builds it, as plain data.
    state
        Its weights by name.
    """

    growth: dict[str, Any]
    outcome: dict[str, Any]
    genotype: dict[str, Any]
    space: Mapping[str, Any]
    state: dict[str, NDArray[Any]]
    _net: nn.Module | None = field(default=None, repr=False)

    @property
    def error(self) -> float:
        """The error on the examples set aside: of classes a rate, of numbers 1 - R², about."""
        return Outcome.from_dict(self.outcome).error

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds for one example."""
        return int(self.outcome["multiply_adds"])

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return int(self.outcome["parameters"])

    def size(self, complexity: str) -> float:
        """Return a size of the model by the name of the complexity; NaN if it was not measured."""
        return COMPLEXITIES[complexity].of(Outcome.from_dict(self.outcome))

    def build(self) -> nn.Module:
        """Build the network with its weights, in eval mode."""
        with torch.random.fork_rng([]):
            net = make_space(self.space).build(Genotype.from_dict(self.genotype))
        net.load_state_dict({name: torch.from_numpy(a.copy()) for name, a in self.state.items()})
        return net.eval()

    def outputs(self, inputs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the outputs for standardized inputs.

        They are computed in double precision, so that they do not depend on the batch.
        """
        if self._net is None:
            self._net = self.build().double()
        with torch.inference_mode():
            parts = [
                self._net(torch.from_numpy(inputs[start : start + _BATCH])).numpy()
                for start in range(0, len(inputs), _BATCH)
            ]
        return np.concatenate(parts)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_net": None}


def search_of(models: Sequence[GrownModel], complexity: str) -> Search:
    """Return the state of the search that found these models."""
    search = Search(SearchSettings(complexity=complexity))
    for model in models:
        growth, outcome = Growth.from_dict(model.growth), Outcome.from_dict(model.outcome)
        search.apply(model_event(growth, outcome))
    return search


def hull_models(models: Sequence[GrownModel], complexity: str) -> list[GrownModel]:
    """Return the models on the hull, from the cheapest to the most accurate."""
    by_id = {model.outcome["id"]: model for model in models}
    return [by_id[record.id] for record in search_of(models, complexity).hull()]


class FoundModels(Sequence[GrownModel]):
    """The models on the hull of an estimator, from the smallest to the most accurate.

    Parameters
    ----------
    estimator
        The fitted estimator.
    models
        Its models on the hull.
    """

    def __init__(self, estimator: Growing, models: Sequence[GrownModel]) -> None:
        self._estimator, self._models = estimator, tuple(models)

    def at(self, size: float) -> Growing:
        """Return the estimator with its most accurate model of at most this complexity."""
        fitting = [model for model in self._models if self._size(model) <= size]
        if not fitting:
            name = self._estimator.complexity
            least, got = (
                COMPLEXITIES[name].text(value) for value in (self._size(self._models[0]), size)
            )
            raise ConfigError(
                f"{name} must be at least {least}, the smallest model, but got {got}."
            )
        return self._estimator._with_model(fitting[-1])

    def _size(self, model: GrownModel) -> float:
        return model.size(self._estimator.complexity)

    def __getitem__(self, index: Any) -> Any:
        return self._models[index]

    def __len__(self) -> int:
        return len(self._models)

    def __iter__(self) -> Iterator[GrownModel]:
        return iter(self._models)

    def __repr__(self) -> str:
        text = COMPLEXITIES[self._estimator.complexity].text
        sizes = ", ".join(f"{text(self._size(m))}: {m.error:.4g}" for m in self._models)
        return f"FoundModels({{{sizes}}})"
