"""Tuning in a configuration: the section ``tuner.classArgs.tuning``.

It stands among the arguments of the tuner because there NNI lets any key pass: one file is good
for a search, for nnictl and for a study. Nothing here imports Optuna.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge

from nni_petridish.errors import ConfigError
from nni_petridish.registry import ARGUMENTS, DEFAULT_KIND, kind_of
from nni_petridish.search.constraints import (
    Count,
    Folder,
    OneOf,
    check_fields,
    prefix,
    read_mapping,
    refuse_unknown,
)
from nni_petridish.search.settings import check_number

PLACE = f"{ARGUMENTS}.tuning"
SAMPLERS = ("tpe", "random", "gp", "nsgaii", "grid")
PRUNERS = ("median", "hyperband", "none")
LARGEST_GRID = 10_000
LARGEST_NUMBER = 2**53
"""Beyond it not every whole number is a float, which Optuna's samplers count with."""
_LOGARITHMIC = ("l1", "recipe.lr", "recipe.weight_decay")

Value = float | int | str | bool
Values = dict[str, Any]
"""A setting: the value of every dimension, by its name."""


@dataclass(frozen=True)
class Dimension:
    """One hyper-parameter of a study: a range or a list.

    Parameters
    ----------
    low, high
        The ends of a range, both included; whole numbers make it a range of whole numbers.
    log
        Whether its logarithm is uniform.
    choices
        The values of a list; empty for a range.
    """

    low: float | None = None
    high: float | None = None
    log: bool = False
    choices: tuple[Value, ...] = ()

    @classmethod
    def read(cls, name: str, given: object) -> Dimension:
        """Read the mapping that a user wrote; raise `ConfigError` if it is wrong.

        >>> Dimension.read("l1", {"low": 1e-5, "high": 0.1})
        Dimension(low=1e-05, high=0.1, log=True, choices=())
        """
        keys = read_mapping(name, given)
        refuse_unknown(keys, ("low", "high", "log", "choices"), name)
        if "choices" in keys:
            return cls(choices=_read_choices(name, keys))
        for end in ("low", "high"):
            if end not in keys:
                raise ConfigError(f"{name}.{end} is missing: give low and high, or choices.")
            check_number(f"{name}.{end}", keys[end], 0)
            if keys[end] > LARGEST_NUMBER:
                raise ConfigError(f"{name}.{end} must be at most {LARGEST_NUMBER}.")
        log = keys.get("log", name in _LOGARITHMIC)
        if not isinstance(log, bool):
            raise ConfigError(f"{name}.log must be true or false but got {log!r}.")
        low, high = keys["low"], keys["high"]
        if log and low <= 0:
            raise ConfigError(f"{name}.low must be above 0 but got {low!r}.")
        if low > high:
            raise ConfigError(
                f"{name}.low must be at most {name}.high but got {low!r} and {high!r}."
            )
        return cls(low, high, log)

    @property
    def is_whole(self) -> bool:
        """Whether it is a range of whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def holds(self, value: Any) -> bool:
        """Return whether the value can be chosen."""
        if self.choices:
            return value in self.choices
        assert self.low is not None
        assert self.high is not None
        fits = isinstance(value, int if self.is_whole else int | float)
        return fits and self.low <= value <= self.high

    def corners(self) -> tuple[Value, ...]:
        """Return the extreme values: if these are valid, all are."""
        if self.choices:
            return self.choices
        assert self.low is not None
        assert self.high is not None
        return (self.low, self.high)

    def grid(self) -> Sequence[Value]:
        """Return all values; empty for a continuous range."""
        if self.choices:
            return self.choices
        if not self.is_whole:
            return ()
        assert self.low is not None
        assert self.high is not None
        return range(int(self.low), int(self.high) + 1)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        if self.choices:
            return {"choices": list(self.choices)}
        return {"low": self.low, "high": self.high, "log": self.log}


def default_space(kind: str = DEFAULT_KIND) -> dict[str, Dimension]:
    """Return the ranges that a study of searches of this kind tries by default."""
    return {
        name: Dimension(low, high, log=name in _LOGARITHMIC)
        for name, (low, high) in kind_of({"space": kind}).TUNED_RANGES.items()
    }


@dataclass(frozen=True)
class TuningSettings:
    """Settings of a study.

    Parameters
    ----------
    study
        Its name.
    storage
        URL of a database, or ``journal:FILE``; None for a SQLite file in ``folder``.
    folder
        The folder of the trials' galleries, shared by all processes of the study; by default the
        search's gallery with ``-tuning`` appended.
    space
        The tuned settings, by their names below ``tuner.classArgs``: ``l1``, ``recipe.lr``, ...
    trials
        The number of settings to try.
    repeats
        Searches of each setting, with random seeds that follow one another; averaged.
    max_multiply_adds
        Only models within this limit count; None for no limit.
    multi_objective
        Whether to minimize error and multiply-adds instead of the error alone.
    sampler, pruner
        The names of the sampler and the pruner.
    seed
        The random seed of the sampler.
    lost_after
        Seconds of silence after which a trial's process counts as dead.
    """

    study: str = "petridish"
    storage: str | None = None
    folder: Folder | None = None
    space: dict[str, Dimension] = field(default_factory=default_space)
    trials: Count = 12
    repeats: Count = 1
    max_multiply_adds: Annotated[float, Ge(1)] | None = None
    multi_objective: bool = False
    sampler: Annotated[str, OneOf(SAMPLERS)] = "tpe"
    pruner: Annotated[str, OneOf(PRUNERS)] = "median"
    seed: Annotated[int, Ge(0)] = 0
    lost_after: Annotated[float, Ge(1)] = 60.0

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.space:
            raise ConfigError("space must name at least one setting to tune.")
        if self.sampler == "grid":
            self._check_grid()

    @classmethod
    def read(cls, given: object, kind: str = DEFAULT_KIND) -> TuningSettings:
        """Read the mapping that a user wrote, for a search in a space of this kind."""
        from nni_petridish.running.schema import check, part_of  # pydantic: not for --help

        check(part_of(TuningSettings), given, PLACE)
        keys = read_mapping(PLACE, given)
        usual = default_space(kind)
        with prefix(f"{PLACE}."):
            if "space" not in keys:
                keys["space"] = usual
            else:
                space = read_mapping("space", keys["space"])
                for name in space:
                    if not isinstance(name, str):
                        raise ConfigError(f"space must have names as its keys but got {name!r}.")
                keys["space"] = {
                    name: Dimension.read(f"space.{name}", _with_log(name, dimension))
                    for name, dimension in space.items()
                }
                _check_known(keys["space"])
            return cls(**keys)

    def _check_grid(self) -> None:
        settings = 1
        for name, dimension in self.space.items():
            if not dimension.grid():
                raise ConfigError(
                    f"sampler grid needs choices or whole numbers but space.{name} is a range"
                    f" from {dimension.low!r} to {dimension.high!r}."
                )
            settings *= len(dimension.grid())
            if settings > LARGEST_GRID:
                raise ConfigError(
                    f"sampler grid can try {LARGEST_GRID} settings at most but space has more."
                )


def check_tuning(given: object) -> None:
    """Raise a ConfigError in one line unless the section is well-formed."""
    TuningSettings.read(given)


def _with_log(name: str, given: object) -> object:
    """Add ``log`` by the plain name, since `Dimension.read` gets the name with its place."""
    if isinstance(given, Mapping) and "choices" not in given and "log" not in given:
        return {**given, "log": name in _LOGARITHMIC}
    return given


def _check_known(space: Mapping[str, Dimension]) -> None:
    """Refuse values of λ and I_max that no search accepts."""
    i_max = space.get("i_max")
    if i_max is not None:
        for value in i_max.corners():
            check_number("space.i_max", value, 1, whole=True)
    l1 = space.get("l1")
    if l1 is not None:
        for value in l1.corners():
            check_number("space.l1", value, 0)
            if not l1.choices and value <= 0:  # type: ignore[operator]
                raise ConfigError(f"space.l1 must be above 0 but got {value!r}.")


def _read_choices(name: str, keys: Mapping[str, Any]) -> tuple[Value, ...]:
    choices = keys["choices"]
    if len(keys) > 1:
        raise ConfigError(f"{name} must have low and high, or choices, but got both.")
    if not isinstance(choices, list) or not choices:
        raise ConfigError(f"{name}.choices must be a list of values but got {choices!r}.")
    for choice in choices:
        if not isinstance(choice, Value):
            raise ConfigError(f"{name}.choices must be numbers or texts but got {choice!r}.")
    return tuple(dict.fromkeys(choices))
