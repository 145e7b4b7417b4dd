"""The contract of a retraining: a found architecture, to be trained from scratch.

A kind of problem knows how its architectures are retrained and tested; the repetitions and their
files are the same for all kinds (`nni_petridish.results.retrain`).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor, nn

from nni_petridish.core.genotype import Genotype
from nni_petridish.gallery.files import to_json
from nni_petridish.registry import Measure
from nni_petridish.tasks.device import resolve_device
from nni_petridish.tasks.distributed import World
from nni_petridish.tasks.recipes import recipe_identity
from nni_petridish.tasks.task import Callbacks, Phase, Record

Data = TypeVar("Data")
Net = TypeVar("Net", bound=nn.Module)


@dataclass(frozen=True)
class Retraining(ABC, Generic[Data, Net]):
    """A found architecture with all that its training from scratch depends on.

    Parameters
    ----------
    model
        Id of the model in its gallery, for the records.
    genotype
        Its architecture.
    space
        The space to build it in, which may be wider or deeper than that of the search.
    recipe
        The recipe of the training.
    data
        Arguments of the function that loads the data.
    seed
        The random seed of the first repetition; repetition r has ``seed + r``.
    """

    model: str
    genotype: Genotype
    space: Any
    recipe: Any
    data: dict[str, Any]
    seed: int = 0

    measure: ClassVar[Measure]
    """The number that is measured on the test data."""
    examples: ClassVar[str]
    """The unit of the training data: the key of their number in a result."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of its folder."""

    @property
    @abstractmethod
    def title(self) -> str:
        """A short description for the user."""

    @property
    @abstractmethod
    def widths(self) -> dict[str, int]:
        """The options of the space that decide the size of the network."""

    @abstractmethod
    def size(self) -> tuple[int, int]:
        """Return (multiply-adds, parameters)."""

    @abstractmethod
    def load(self) -> Data:
        """Load the data; called once, and only if something is left to train."""

    @abstractmethod
    def build(self) -> Net:
        """Build the network with fresh weights."""

    @abstractmethod
    def train(self, net: Net, data: Data, phase: Phase, callbacks: Callbacks) -> list[Record]:
        """Train the network in place, in all processes together; return one record per epoch."""

    @abstractmethod
    def test(self, net: Net, data: Data) -> Record:
        """Measure on the test data; return numbers under the names that a result has."""

    @abstractmethod
    def count_examples(self, data: Data) -> int:
        """Return the number of training examples."""

    def data_facts(self, data: Data) -> dict[str, Any]:
        """Return what a user of the model must know of the data, as plain data."""
        return {}

    def weights(self, net: Net) -> dict[str, Tensor]:
        """Return the weights to keep."""
        return net.state_dict()

    def check_world(self, world: World) -> None:
        """Raise `ConfigError` if these processes cannot train it together."""
        resolve_device(self.recipe.device)

    def described_space(self) -> dict[str, Any]:
        """Return the kind of the space and all its options."""
        return {"space": self.genotype.space, **self.space.describe()}

    def identity(self) -> dict[str, Any]:
        """Return what must not change between repetitions, as JSON reads it."""
        document = {
            "model": self.model,
            "genotype": self.genotype.to_dict(),
            "space": self.described_space(),
            "recipe": _without(recipe_identity(self.recipe), ("device",)),
            "data": _without(self.data, ("root", "workers")),
            "seed": self.seed,
        }
        return dict(json.loads(to_json(document)))


def _without(values: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}
