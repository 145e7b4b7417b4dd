"""Settings of a search and of its growths: frozen, checked, and plain data in and out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from nni_petridish.core.l1 import L1_SCHEDULES, WEAK_LEARNING
from nni_petridish.errors import ConfigError
from nni_petridish.search.records import Growth


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
class Plan:
    """How long each phase lasts and in which variant; the numbers are the paper's for CIFAR-10.

    Parameters
    ----------
    seed_epochs, weak_epochs, final_epochs
        Epochs of a seed model, of weak learning, and after finalising.
    l1_schedule
        λ over weak learning: ``"constant"``, or a ramp ``"linear"`` or ``"cosine"`` up to λ.
    weak_learning
        ``"isolated"`` or ``"joint"``.
    """

    seed_epochs: int = 200
    weak_epochs: int = 80
    final_epochs: int = 80
    l1_schedule: str = "constant"
    weak_learning: str = "isolated"

    def __post_init__(self) -> None:
        # A model to start from may be taken as it is.
        for name, least in (("seed_epochs", 0), ("weak_epochs", 1), ("final_epochs", 1)):
            check_number(name, getattr(self, name), least, whole=True)
        for name, allowed in (
            ("l1_schedule", L1_SCHEDULES),
            ("weak_learning", WEAK_LEARNING),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name} must be one of {', '.join(allowed)} but got {getattr(self, name)!r}."
                )


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
