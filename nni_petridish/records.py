"""What a search is made of: settings, growths, outcomes and the events that tell its story.

Everything here is plain and frozen, and goes to JSON and back without loss: growths travel to the
workers as parameters, outcomes come back as metrics, events are the lines of the journal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from nni_petridish.errors import ConfigError, SearchError

Event = dict[str, Any]

FULL = "full"
"""Among the metrics of a model that has reached the limits of its space and cannot grow."""


@dataclass(frozen=True)
class Limits:
    """Where a search stops; None sets no limit.

    Parameters
    ----------
    max_multiply_adds, max_parameters
        A model that has reached this size is not grown any further.
    max_growths
        Growths in one lineage, from the seed to its last descendant.
    max_models
        Models of the whole search, seeds and running growths included.
    max_epochs
        Epochs of the whole search; a growth that would go beyond them is not started.
    max_seconds
        Time after which nothing new is started.
    """

    max_multiply_adds: float | None = None
    max_parameters: float | None = None
    max_growths: int | None = None
    max_models: int | None = None
    max_epochs: int | None = None
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        for name, minimum, whole in (
            ("max_multiply_adds", 1, False),
            ("max_parameters", 1, False),
            ("max_growths", 0, True),
            ("max_models", 1, True),
            ("max_epochs", 1, True),
            ("max_seconds", 0, False),
        ):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), minimum, whole)


@dataclass(frozen=True)
class SearchSettings:
    """What a search needs to know; the numbers are the paper's for CIFAR-10.

    Parameters
    ----------
    seed
        Decides every random choice of the search.
    l1
        λ, the weight of Σ|α| while weak learners train.
    i_max
        I_max, how many shortcuts a finished weak learner keeps.
    seeds
        Number of seed models the search starts from.
    tolerance
        Relative width of the band above the hull whose models may be parents too.
    limits
        Where the search stops.
    seed_epochs, weak_epochs, final_epochs
        Epochs of a seed model, and of the two phases of a growth; they are only counted here.
    """

    seed: int = 0
    l1: float = 0.001
    i_max: int = 3
    seeds: int = 1
    tolerance: float = 0.0
    limits: Limits = field(default_factory=Limits)
    seed_epochs: int = 200
    weak_epochs: int = 80
    final_epochs: int = 80

    def __post_init__(self) -> None:
        check_number("seed", self.seed, 0, whole=True)
        check_number("l1", self.l1, 0)
        check_number("i_max", self.i_max, 1, whole=True)
        check_number("seeds", self.seeds, 1, whole=True)
        check_number("tolerance", self.tolerance, 0)
        if self.tolerance >= 1:
            raise ConfigError(f"tolerance must be below 1 but got {self.tolerance!r}.")
        if not isinstance(self.limits, Limits):
            raise ConfigError(f"limits must be a Limits object but got {self.limits!r}.")
        for name in ("seed_epochs", "weak_epochs", "final_epochs"):
            check_number(name, getattr(self, name), 0, whole=True)

    def epochs_of(self, growth: Growth) -> int:
        """Return how many epochs a growth is expected to train."""
        return self.seed_epochs if growth.parent is None else self.weak_epochs + self.final_epochs

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; `from_dict` reads it."""
        return asdict(self)

    def identity(self) -> dict[str, Any]:
        """Return what makes this search this one: all but its limits, which may be moved later."""
        return {name: value for name, value in self.to_dict().items() if name != "limits"}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SearchSettings:
        """Build settings from plain data; missing keys keep their defaults."""
        _refuse_unknown(data, cls, "settings")
        limits = data.get("limits", {})
        if not isinstance(limits, Mapping):
            raise ConfigError(f"limits must be a mapping but got {limits!r}.")
        _refuse_unknown(limits, Limits, "limits")
        return cls(**{**data, "limits": Limits(**limits)})


@dataclass(frozen=True)
class Growth:
    """One piece of work: grow ``parent``, or train a seed model if ``parent`` is None.

    Parameters
    ----------
    id
        Name of the growth and of the model it makes.
    parent
        Id of the model to grow.
    seed
        Seeds every random number of this growth; differs between any two growths and attempts.
    l1, i_max
        λ and I_max.
    attempt
        1, or 2 when the first attempt failed.
    """

    id: str
    parent: str | None
    seed: int
    l1: float
    i_max: int
    attempt: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, fit for JSON."""
        return {f: getattr(self, f) for f in _GROWTH_FIELDS}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Growth:
        """Read what `to_dict` wrote; further keys are ignored."""
        return cls(**_known(data, _GROWTH_FIELDS, "growth"))


@dataclass(frozen=True)
class Outcome:
    """What became of a growth.

    Parameters
    ----------
    id
        Id of the growth.
    error
        Validation error; the model is kept but never grown when it is not finite.
    multiply_adds, parameters
        Size of the model.
    epochs
        Epochs that were trained.
    metrics
        Whatever else is worth keeping, as plain data.
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
        except (TypeError, ValueError) as problem:
            raise SearchError(f"The outcome of {self.id} needs numbers: {problem}.") from problem
        # JSON knows no infinity and no NaN, and the hull ignores both alike.
        object.__setattr__(self, "error", error if math.isfinite(error) else math.nan)
        for name, value in sizes.items():
            if value < 0:
                raise SearchError(f"{name} of {self.id} must be at least 0 but got {value}.")
            object.__setattr__(self, name, value)
        object.__setattr__(self, "metrics", plain(self.metrics))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, fit for JSON; an error that is not finite becomes None."""
        data = {f: getattr(self, f) for f in _OUTCOME_FIELDS}
        return {**data, "error": None if math.isnan(self.error) else self.error}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """Read what `to_dict` wrote; further keys are ignored."""
        return cls(**_known(data, _OUTCOME_FIELDS, "outcome"))


@dataclass(frozen=True)
class ModelRecord:
    """A finished model: the growth that made it, and its outcome."""

    growth: Growth
    outcome: Outcome

    @property
    def id(self) -> str:
        """Id of the model."""
        return self.outcome.id

    @property
    def parent(self) -> str | None:
        """Id of the model it was grown from; None for a seed."""
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
    """Nothing to do now; results that are still to come may change that."""

    reason: str


@dataclass(frozen=True)
class Done:
    """Nothing left to do."""

    reason: str


def growth_id(number: int) -> str:
    """Name the growth with this number.

    >>> growth_id(7)
    'g00007'
    """
    return f"g{number:05d}"


def growth_number(id: str) -> int:
    """Return the number in the name of a growth.

    >>> growth_number("g00007")
    7
    """
    if not (isinstance(id, str) and id[:1] == "g" and id[1:].isascii() and id[1:].isdigit()):
        raise SearchError(f"A growth is named like 'g00007' but got {id!r}.")
    return int(id[1:])


def ask_event(growth: Growth, elapsed: float) -> Event:
    """Record that ``growth`` is handed out."""
    return {"event": "ask", "id": growth.id, "growth": growth.to_dict(), "elapsed": elapsed}


def model_event(growth: Growth, outcome: Outcome) -> Event:
    """Record that ``growth`` is finished; repeats the growth, so that no other line is needed."""
    return {
        "event": "model",
        "id": outcome.id,
        "growth": growth.to_dict(),
        "outcome": outcome.to_dict(),
    }


def fail_event(id: str, attempt: int, reason: str) -> Event:
    """Record that an attempt of a growth failed."""
    return {"event": "fail", "id": id, "attempt": attempt, "reason": reason}


def release_event(id: str, attempt: int) -> Event:
    """Record that the worker of a growth is gone, and the growth may be handed out again."""
    return {"event": "release", "id": id, "attempt": attempt}


def quarantine_event(id: str, reason: str) -> Event:
    """Record that a finished model turned out to be damaged."""
    return {"event": "quarantine", "id": id, "reason": reason}


def plain(value: Any) -> Any:
    """Copy ``value`` into what JSON can hold: numbers that are not finite become None.

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
    # Scalars of NumPy and torch know how to become plain ones.
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return plain(value.item())
    raise SearchError(f"Expected numbers, strings, lists and mappings but got {value!r}.")


def check_number(name: str, value: Any, minimum: float, whole: bool = False) -> None:
    """Raise a ConfigError in one line unless ``value`` is a number of at least ``minimum``."""
    kind = "a whole number" if whole else "a number"
    fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    # No whole number is infinite, but some are too large to ask.
    if not fits or (isinstance(value, float) and not math.isfinite(value)):
        raise ConfigError(f"{name} must be {kind} but got {value!r}.")
    if value < minimum:
        raise ConfigError(f"{name} must be at least {minimum} but got {value!r}.")


def _refuse_unknown(data: Mapping[str, Any], kind: type, what: str) -> None:
    known = [f.name for f in fields(kind)]
    for key in data:
        if key not in known:
            allowed = ", ".join(known)
            raise ConfigError(f"Unknown key {key!r} in {what}; allowed are {allowed}.")


def _known(data: Mapping[str, Any], names: tuple[str, ...], what: str) -> dict[str, Any]:
    missing = [name for name in names if name not in data]
    if missing:
        raise SearchError(f"The {what} lacks {', '.join(missing)}: {dict(data)!r}.")
    return {name: data[name] for name in names}


_SIZES = ("multiply_adds", "parameters", "epochs")
_GROWTH_FIELDS = tuple(f.name for f in fields(Growth))
_OUTCOME_FIELDS = tuple(f.name for f in fields(Outcome))
