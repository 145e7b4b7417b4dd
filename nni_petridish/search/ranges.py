"""Ranges of λ and I_max, from which Optuna chooses a pair for every growth of a search.

The value of a pair is the gain of its growth: the decrease of the error per added multiply-add. The
journal has every pair (in its ask events) and every result, so the chooser has no state of its own:
it creates a study from the journal and asks it for one pair. A search that was killed and resumed
chooses the same pairs as one that was not.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nni_petridish.errors import ConfigError
from nni_petridish.search.constraints import refuse_unknown
from nni_petridish.search.events import Event
from nni_petridish.search.records import Growth, ModelRecord
from nni_petridish.search.search import Chooser, Search
from nni_petridish.search.settings import SearchSettings, check_number

if TYPE_CHECKING:
    import optuna

ReadEvents = Callable[[], list[Event]]
"""A function that returns all events of a search so far, such as `Journal.read_all`."""
RANGED = ("l1", "i_max")
"""The settings that may be ranges."""
STARTUP = 4
"""Number of finished growths before Optuna's model replaces random choice."""


@dataclass(frozen=True)
class Range:
    """The range of a setting, both ends included."""

    low: float
    high: float

    @classmethod
    def read(cls, name: str, given: Mapping[str, Any]) -> Range:
        """Check the range that a user gave; λ must be above 0, because its logarithm is drawn.

        >>> Range.read("i_max", {"low": 2, "high": 4})
        Range(low=2, high=4)
        """
        refuse_unknown(given, ("low", "high"), name)
        whole = name == "i_max"
        for end in ("low", "high"):
            if end not in given:
                raise ConfigError(f"{name}.{end} is missing: a range has low and high.")
            check_number(f"{name}.{end}", given[end], 1 if whole else 0, whole=whole)
            if given[end] <= 0:
                raise ConfigError(f"{name}.{end} must be above 0 but got {given[end]!r}.")
        if given["low"] > given["high"]:
            raise ConfigError(
                f"{name}.low must be at most {name}.high but got"
                f" {given['low']!r} and {given['high']!r}."
            )
        return cls(given["low"], given["high"])

    def nearest(self, value: float) -> float:
        """Return the number in the range nearest to ``value``."""
        return min(max(value, self.low), self.high)


def split_ranges(
    given: Mapping[str, Any], usual: SearchSettings | None = None
) -> tuple[dict[str, Any], dict[str, Range]]:
    """Separate ranges from numbers.

    Parameters
    ----------
    given
        Settings of a search, some of which may be ranges.
    usual
        The default settings of such a search. By default, the paper's λ and I_max.

    Returns
    -------
    tuple
        The settings with each range replaced by its number nearest to the default, which the first
        growth uses; and the ranges.

    Examples
    --------
    >>> split_ranges({"l1": {"low": 0.01, "high": 0.1}, "i_max": 3})
    ({'l1': 0.01, 'i_max': 3}, {'l1': Range(low=0.01, high=0.1)})
    """
    ranges = {
        name: Range.read(name, given[name])
        for name in RANGED
        if isinstance(given.get(name), Mapping)
    }
    usual = usual or SearchSettings()
    starts = {name: range.nearest(getattr(usual, name)) for name, range in ranges.items()}
    return {**given, **starts}, ranges


def make_chooser(
    ranges: Mapping[str, Range], settings: SearchSettings, read_events: ReadEvents
) -> Chooser | None:
    """Return the chooser of λ and I_max of a search; None without ranges."""
    return OptunaChooser(ranges, settings, read_events) if ranges else None


class OptunaChooser:
    """Chooser of (λ, I_max) by Optuna's TPE, with λ on a logarithmic scale.

    Parameters
    ----------
    ranges
        The ranges of ``l1``, ``i_max`` or both. A setting without a range is fixed.
    settings
        The settings of the search.
    read_events
        Returns the events of the search, with the results of earlier pairs.
    """

    def __init__(
        self, ranges: Mapping[str, Range], settings: SearchSettings, read_events: ReadEvents
    ) -> None:
        self._ranges, self._settings, self._read_events = dict(ranges), settings, read_events

    @property
    def i_max_range(self) -> range:
        """Every I_max that may be chosen."""
        fixed = Range(self._settings.i_max, self._settings.i_max)
        found = self._ranges.get("i_max", fixed)
        return range(int(found.low), int(found.high) + 1)

    def __call__(self, number: int) -> tuple[float, int]:
        """Return (λ, I_max) for the growth with this number."""
        events = self._read_events()
        chosen = {"l1": self._settings.l1, "i_max": self._settings.i_max}
        if any(_is_choice(event) for event in events):
            chosen |= self._ask(events, number)
        return float(chosen["l1"]), int(chosen["i_max"])

    def _ask(self, events: list[Event], number: int) -> dict[str, Any]:
        import optuna

        seed = hashlib.sha256(f"chooser:{self._settings.seed}:{number}".encode()).digest()
        sampler = optuna.samplers.TPESampler(
            seed=int.from_bytes(seed[:4], "big"), n_startup_trials=STARTUP
        )
        with quiet():
            study = optuna.create_study(direction="maximize", sampler=sampler)
            distributions = self._distributions()
            for growth, value in self._history(events):
                study.add_trial(_trial_of(growth, value, distributions))
            return dict(study.ask(distributions).params)

    def _history(self, events: list[Event]) -> list[tuple[Growth, float | None]]:
        """Return the growths so far with their gain; None for running ones."""
        search = Search.replay(self._settings, events)
        models = {record.id: record for record in search.models()}
        finished: list[tuple[Growth, float]] = [
            (record.growth, gain(models[record.parent], record))
            for record in models.values()
            if record.parent in models
        ]
        result: list[tuple[Growth, float | None]] = []
        result += [(growth, value) for growth, value in finished if math.isfinite(value)]
        result += [(growth, None) for growth in search.running() if growth.parent is not None]
        return result

    def _distributions(self) -> dict[str, optuna.distributions.BaseDistribution]:
        from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution

        result: dict[str, BaseDistribution] = {}
        for name, range in self._ranges.items():
            if name == "i_max":
                result[name] = IntDistribution(int(range.low), int(range.high))
            else:
                result[name] = FloatDistribution(range.low, range.high, log=True)
        return result


def _trial_of(
    growth: Growth,
    value: float | None,
    distributions: dict[str, optuna.distributions.BaseDistribution],
) -> optuna.trial.FrozenTrial:
    import optuna

    states = optuna.trial.TrialState
    return optuna.trial.create_trial(
        # A running trial keeps others from choosing the same pair (TPE's constant liar).
        state=states.RUNNING if value is None else states.COMPLETE,
        value=value,
        params={name: getattr(growth, name) for name in distributions},
        distributions=distributions,
    )


def gain(parent: ModelRecord, child: ModelRecord) -> float:
    """Return the decrease of the error per added multiply-add; NaN if one of the errors is NaN.

    A growth without additional multiply-adds (identities, pooling) counts as one.
    """
    added = max(1, child.multiply_adds - parent.multiply_adds)
    return (parent.error - child.error) / added


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress Optuna's messages about every study and trial in this context."""
    import optuna

    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(level, optuna.logging.WARNING))
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)


def _is_choice(event: Event) -> bool:
    return event["event"] == "ask" and event["growth"]["parent"] is not None
