"""Growths, their outcomes, and the resulting models.

All classes are frozen and convert to JSON and back without loss: growths are sent to the workers as
parameters, and outcomes come back as metrics.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from nni_petridish.errors import SearchError, show

FULL = "full"
"""The metric of a model that marks that it has reached the limits of its space."""
CHOICES = "choices"
"""The metric with the number of architectures that can be grown from a model, if it is small."""


LATENCY = "latency"
"""The metric with the measured milliseconds of a forward pass, where a search goes by it."""
PAYMENT, PAYS = "payment", "pays"
"""The metric that compares a growth with training its parent on, and its key for the verdict."""
SMALLEST_CHILD = "smallest_child"
"""The metric with the sizes of about the smallest child of a model, by the name of the size."""


@dataclass(frozen=True)
class Growth:
    """A task for a worker: grow ``parent``, or train a seed model if ``parent`` is None.

    Parameters
    ----------
    id
        Id of the growth and of the resulting model.
    parent
        Id of the model to grow; None for a seed model.
    seed
        Random seed of this growth, unique among all growths and attempts of a search.
    l1, i_max
        λ and I_max.
    attempt
        1, or 2 when the first attempt failed.
    within
        The largest sizes of the child, by ``multiply_adds``, ``parameters`` or ``latency``; None if
        it may have any size.
    last
        Whether the limits forbid to grow the child: it need not be kept fit for growing. Told only
        if the settings have ``anneal``.
    trains_on
        Whether nothing is grown: the parent is trained on for as long as a network after a growth.
    """

    id: str
    parent: str | None
    seed: int
    l1: float
    i_max: int
    attempt: int = 1
    within: Mapping[str, float] | None = field(default=None, hash=False)
    last: bool = False
    trains_on: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; what is not said is left out, as in earlier versions."""
        data = {f: getattr(self, f) for f in _GROWTH_FIELDS}
        if self.within is not None:
            data["within"] = dict(self.within)
        return data | {name: True for name in _MARKS if getattr(self, name)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Growth:
        """Read the result of `to_dict`; other keys are ignored."""
        known = _known(data, _GROWTH_FIELDS, "growth")
        marks: dict[str, Any] = {name: data.get(name, False) is True for name in _MARKS}
        growth = cls(**known, within=data.get("within"), **marks)
        growth._check()
        return growth

    def _check(self) -> None:
        """Raise a SearchError unless all values are possible; lineages without an end are not."""
        number, parent = growth_number(self.id), self.parent
        wholes = {"seed": (self.seed, 0), "i_max": (self.i_max, 1), "attempt": (self.attempt, 1)}
        for name, (value, least) in wholes.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SearchError(f"{name} of {self.id} must be at least {least}: {show(value)}.")
        if isinstance(self.l1, bool) or not isinstance(self.l1, int | float):
            raise SearchError(f"l1 of {self.id} must be a number but got {show(self.l1)}.")
        if self.within is not None and not _are_sizes(self.within):
            raise SearchError(f"within of {self.id} must hold numbers but got {show(self.within)}.")
        if parent is None and self.trains_on:
            raise SearchError(f"{self.id} must have a parent to train it on.")
        if parent is not None and growth_number(parent) >= number:
            raise SearchError(f"The parent of {self.id} must be older but is {parent}.")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a growth.

    Parameters
    ----------
    id
        Id of the growth.
    error
        Validation error. If it is not finite, the model is kept but never grown.
    multiply_adds, parameters
        Size of the model.
    epochs
        Number of epochs trained.
    metrics
        Further metrics, as plain data.
    """

    id: str
    error: float
    multiply_adds: int
    parameters: int
    epochs: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            error = math.nan if self.error is None else float(self.error)
            sizes = {name: int(getattr(self, name)) for name in _SIZES}
        except (TypeError, ValueError, OverflowError) as problem:
            raise SearchError(f"The outcome of {self.id} needs numbers: {problem}.") from problem
        # JSON has neither infinity nor NaN, and the hull ignores both.
        object.__setattr__(self, "error", error if math.isfinite(error) else math.nan)
        for name, value in sizes.items():
            if value < 0:
                raise SearchError(f"{name} of {self.id} must be at least 0 but got {value}.")
            object.__setattr__(self, name, value)
        if not isinstance(self.metrics, Mapping):
            raise SearchError(f"The metrics of {self.id} must be a mapping: {show(self.metrics)}.")
        object.__setattr__(self, "metrics", plain(self.metrics))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; an error that is not finite becomes None."""
        data = {f: getattr(self, f) for f in _OUTCOME_FIELDS}
        return {**data, "error": None if math.isnan(self.error) else self.error}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """Read the result of `to_dict`; other keys are ignored."""
        outcome = cls(**_known(data, _OUTCOME_FIELDS, "outcome"))
        growth_number(outcome.id)
        return outcome


@dataclass(frozen=True)
class ModelRecord:
    """A finished model: its growth and the outcome."""

    growth: Growth
    outcome: Outcome

    @property
    def id(self) -> str:
        """Id of the model."""
        return self.outcome.id

    @property
    def parent(self) -> str | None:
        """Id of the parent model; None for a seed model."""
        return self.growth.parent

    @property
    def error(self) -> float:
        """Validation error; NaN if it was not finite."""
        return self.outcome.error

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds for one example."""
        return self.outcome.multiply_adds

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self.outcome.parameters


@dataclass(frozen=True)
class Wait:
    """An answer of a search: there is no growth to start until more results arrive."""

    reason: str


@dataclass(frozen=True)
class Done:
    """An answer of a search: it is finished."""

    reason: str


def growth_id(number: int) -> str:
    """Return the id of the growth with this number.

    >>> growth_id(7)
    'g00007'
    """
    return f"g{number:05d}"


def growth_number(id: str) -> int:
    """Return the number in the id of a growth.

    >>> growth_number("g00007")
    7
    """
    if not (isinstance(id, str) and re.fullmatch(r"g[0-9]{1,15}", id)):
        raise SearchError(f"A growth is named like 'g00007' but got {show(id)}.")
    return int(id[1:])


def plain(value: Any) -> Any:
    """Convert ``value`` to plain data for JSON; numbers that are not finite become None.

    >>> plain({"loss": float("nan"), "sizes": (1, 2)})
    {'loss': None, 'sizes': [1, 2]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    # Scalars of NumPy and torch.
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return plain(value.item())
    raise SearchError(f"Expected numbers, strings, lists and mappings but got {show(value)}.")


def _are_sizes(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(size, int | float) and not isinstance(size, bool) for size in value.values()
    )


def _known(data: Mapping[str, Any], names: tuple[str, ...], what: str) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise SearchError(f"The {what} must be a mapping but is {show(data)}.")
    missing = [name for name in names if name not in data]
    if missing:
        raise SearchError(f"The {what} lacks {', '.join(missing)}: {show(dict(data))}.")
    return {name: data[name] for name in names}


_SIZES = ("multiply_adds", "parameters", "epochs")
_MARKS = ("last", "trains_on")
_GROWTH_FIELDS = tuple(f.name for f in fields(Growth) if f.name not in ("within", *_MARKS))
_OUTCOME_FIELDS = tuple(f.name for f in fields(Outcome))
