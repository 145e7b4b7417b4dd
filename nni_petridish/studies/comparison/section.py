"""A comparison in a configuration: the section ``tuner.classArgs.compare``.

It stands where the section ``ablations`` stands: the file stays good for a search and for nnictl.
Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le

from nni_petridish.errors import ConfigError
from nni_petridish.registry import ARGUMENTS
from nni_petridish.search.constraints import (
    Count,
    Folder,
    OneOf,
    check_fields,
    prefix,
    read_changes,
    read_mapping,
    refuse_unknown,
)

PLACE = f"{ARGUMENTS}.compare"
GROWTH, TRAIN_ON, WIDEN, DARTS = "growth", "train_on", "widen", "darts"
NNI_STRATEGIES = {"random": "Random", "evolution": "RegularizedEvolution", "tpe": "TPE"}
"""Kinds of methods that are strategies of NNI, and the names of their classes."""
KINDS = (GROWTH, TRAIN_ON, WIDEN, *NNI_STRATEGIES, DARTS)
BUDGETS = ("processor_time", "multiply_adds")
PILOT_OFFSET = 1000
"""Distance of the pilot seeds from those that count."""


@dataclass(frozen=True)
class MethodSettings:
    """One of the compared methods.

    Parameters
    ----------
    kind
        ``growth`` (a Petridish search), ``train_on`` (its seed model, trained on), ``widen`` (the
        seed with more filters), ``random``, ``evolution``, ``tpe`` or ``darts`` (NNI's strategies).
    set
        Changes to the settings of the search by dotted names, such as ``score`` or
        ``searchSpace.mode``.
    options
        Arguments of NNI's strategy.
    share
        The share of the budget that it gets. A training of one network with a decaying learning
        rate is good at its end only: methods that differ in their shares alone are one curve of the
        crossover.
    """

    kind: Annotated[str, OneOf(KINDS)] = GROWTH
    set: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    share: Annotated[float, Gt(0), Le(1)] = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("set", "options"):
            read_changes(name, getattr(self, name))
        if self.options and self.kind not in (*NNI_STRATEGIES, DARTS):
            raise ConfigError(f"options are for strategies of NNI but the kind is {self.kind}.")

    def identity(self) -> dict[str, Any]:
        """Return plain data, without a share that is all: earlier runs stay the same runs."""
        return {k: v for k, v in asdict(self).items() if (k, v) != ("share", 1.0)}


@dataclass(frozen=True)
class FinalSettings:
    """The final training from scratch, the same for the best model of every method.

    Parameters
    ----------
    epochs
        Epochs of the training.
    limit
        Train on so many examples only; None for all that are not for testing.
    recipe
        Changes to the recipe of the search.
    """

    epochs: Count
    limit: Count | None = None
    recipe: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class CompareSettings:
    """Settings of a comparison at equal compute.

    Parameters
    ----------
    folder
        The folder of runs and tables; by default the search's gallery with ``-compare`` appended.
    repeats
        Random seeds of each method, which follow one another.
    pilot
        Random seeds of the pilot, others than those that count; they say which effects can be seen.
    budget
        The compute that is equal: ``processor_time`` (on a GPU the time of the clock), or
        ``multiply_adds`` of the forward passes of all training examples.
    max_multiply_adds
        The most accurate model within this limit counts.
    baseline
        The method whose result the others must reach, for the compute to reach it.
    final
        The final training, see `FinalSettings`; None if the networks as found are all.
    methods
        The methods by name. The first one, of kind ``growth``, sets the budget of each seed.
    """

    folder: Folder | None = None
    repeats: Count = 10
    pilot: Annotated[int, Ge(2)] = 3
    budget: Annotated[str, OneOf(BUDGETS)] = "processor_time"
    max_multiply_adds: Annotated[float, Ge(1)] | None = None
    baseline: str | None = None
    final: dict[str, Any] | None = None
    methods: dict[str, MethodSettings] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.methods) < 2:
            raise ConfigError(f"methods must name at least 2 but got {len(self.methods)}.")
        if self.methods[self.reference].kind != GROWTH:
            raise ConfigError(
                f"methods must begin with one of kind {GROWTH}, which sets the budget, but"
                f" {self.reference} is of kind {self.methods[self.reference].kind}."
            )
        if self.methods[self.reference].share != 1:
            share = self.methods[self.reference].share
            raise ConfigError(
                f"methods.{self.reference}.share must be 1, since it sets the budget, but got"
                f" {share}."
            )
        if self.baseline is not None and self.baseline not in self.methods:
            names = ", ".join(self.methods)
            raise ConfigError(f"baseline must be one of {names} but got {self.baseline!r}.")

    @property
    def reference(self) -> str:
        """The method that sets the budget and that the others are compared with: the first."""
        return next(iter(self.methods))

    @property
    def final_training(self) -> FinalSettings | None:
        """The final training, if there is one."""
        if self.final is None:
            return None
        with prefix("final."):
            return FinalSettings(**self.final)

    @classmethod
    def read(cls, given: object) -> CompareSettings:
        """Read the mapping that a user wrote; raise `ConfigError` if it is wrong."""
        from nni_petridish.running.schema import check, part_of  # pydantic: not for --help

        check(part_of(CompareSettings), given, PLACE)
        keys = read_mapping(PLACE, given)
        with prefix(f"{PLACE}."):
            listed = read_mapping("methods", keys.get("methods"))
            keys["methods"] = {str(n): _read_method(str(n), m) for n, m in listed.items()}
            if keys.get("final") is not None:
                check(part_of(FinalSettings), keys["final"], "final")
            settings = cls(**keys)
            if settings.final is not None:
                settings.final_training  # noqa: B018 - raises if it is wrong
            return settings


def _read_method(name: str, given: object) -> MethodSettings:
    place = f"methods.{name}"
    keys = read_mapping(place, given or {})
    refuse_unknown(keys, ("kind", "set", "options", "share"), place)
    with prefix(f"{place}."):
        return MethodSettings(**keys)


def check_comparison(given: object) -> None:
    """Raise a ConfigError in one line unless the section is well-formed."""
    CompareSettings.read(given)
