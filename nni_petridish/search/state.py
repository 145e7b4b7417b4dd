"""State of a search: the facts about every growth, and the hull that follows from them.

The state changes by events alone. It keeps facts (handed out, failed, finished, ...) and derives
the rest from them, so events of different writers may come in any order: the state is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nni_petridish.errors import SearchError
from nni_petridish.search.events import Event
from nni_petridish.search.hull import Hull
from nni_petridish.search.records import Growth, ModelRecord, Outcome, growth_id, growth_number
from nni_petridish.search.settings import SearchSettings

# A growth that failed is tried once more.
ATTEMPTS = 2
UNKNOWN, RUNNING, WAITING = "unknown", "running", "waiting"
DROPPED, FINISHED, QUARANTINED = "dropped", "finished", "quarantined"


@dataclass
class Facts:
    """All that is known about one growth; ``status`` is derived from the rest."""

    growth: Growth | None = None
    released: bool = False
    failures: dict[int, str] = field(default_factory=dict)
    made_by: Growth | None = None
    outcome: Outcome | None = None
    quarantined: str | None = None
    status: str = UNKNOWN

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, fit for JSON."""
        return {
            "growth": self.growth and self.growth.to_dict(),
            "released": self.released,
            "failures": {str(attempt): self.failures[attempt] for attempt in self.failures},
            "made_by": self.made_by and self.made_by.to_dict(),
            "outcome": self.outcome and self.outcome.to_dict(),
            "quarantined": self.quarantined,
            "status": self.status,
        }


class SearchState:
    """The state of a search.

    Parameters
    ----------
    settings
        Settings of the search: the tolerance of the hull and the epochs of a growth count here.
    """

    def __init__(self, settings: SearchSettings) -> None:
        self.settings = settings
        self._facts: dict[str, Facts] = {}
        self._next_number = 0
        self._seeds = 0
        self._elapsed = 0.0
        self._spent_epochs = 0
        self._running_epochs = 0
        self._times_chosen: Counter[str] = Counter()
        self._depths: dict[str, int] = {}
        self._models = 0
        # Dictionaries without values: sets that keep the order in which things came.
        self._running: dict[str, None] = {}
        self._waiting: dict[str, None] = {}
        self._hull = Hull(settings.tolerance)

    def hull(self) -> list[ModelRecord]:
        """Return the models on the hull, from the cheapest to the most accurate."""
        return [self._record(growth_id(number)) for number in self._hull.ids]

    def best(self) -> ModelRecord | None:
        """Return the most accurate model, the cheapest of several; None without any."""
        return self._record(growth_id(self._hull.ids[-1])) if self._hull.ids else None

    def models(self) -> list[ModelRecord]:
        """Return all finished models that are not quarantined, in the order they were asked for."""
        ids = (id for id, facts in self._facts.items() if facts.status == FINISHED)
        return [self._record(id) for id in sorted(ids, key=growth_number)]

    def running(self) -> list[Growth]:
        """Return the growths that were handed out and have no result yet."""
        growths = (self._facts[id].growth for id in sorted(self._running, key=growth_number))
        return [growth for growth in growths if growth is not None]

    def dropped(self) -> dict[str, str]:
        """Return the growths that were given up, and why."""
        ids = [id for id, facts in self._facts.items() if facts.status == DROPPED]
        return {id: self._last_failure(id) for id in sorted(ids, key=growth_number)}

    def lineage(self, id: str) -> list[str]:
        """Return the ids from the seed to this model."""
        self._asked(id)
        return self._ancestors(id)[::-1]

    def times_chosen(self, id: str) -> int:
        """Return n(m), how often the model was chosen as a parent."""
        self._asked(id)
        return self._times_chosen[id]

    @property
    def elapsed(self) -> float:
        """Seconds that had passed at the last ask."""
        return self._elapsed

    def state(self) -> dict[str, Any]:
        """Return all there is to know, as plain data."""
        return {
            "settings": self.settings.to_dict(),
            "elapsed": self._elapsed,
            "growths": {id: facts.to_dict() for id, facts in self._facts.items()},
            "times_chosen": dict(self._times_chosen),
            "hull": [growth_id(number) for number in self._hull.ids],
        }

    # How events change the state.

    def apply(self, event: Event) -> None:
        """Change the state by one event.

        Events that arrive twice or late change nothing, and events about a growth whose own line
        was lost are kept until that growth is known.
        """
        try:
            change = self._changes()[event["event"]]
            id = event["id"]
            facts = self._facts.get(id) or self._first_seen(id)
            change(facts, event)
        except (KeyError, TypeError) as error:
            raise SearchError(f"Not an event of a search ({error!r}): {event!r}.") from error
        self._update(id, facts)

    def _changes(self) -> dict[str, Callable[[Facts, Event], None]]:
        return {
            "ask": self._apply_ask,
            "model": self._apply_model,
            "fail": self._apply_fail,
            "release": self._apply_release,
            "quarantine": self._apply_quarantine,
        }

    def _first_seen(self, id: str) -> Facts:
        self._next_number = max(self._next_number, growth_number(id) + 1)
        return self._facts.setdefault(id, Facts())

    def _apply_ask(self, facts: Facts, event: Event) -> None:
        growth = Growth.from_dict(event["growth"])
        self._elapsed = max(self._elapsed, float(event.get("elapsed", 0.0)))
        self._learn(facts, growth)
        assert facts.growth is not None
        if growth.attempt >= facts.growth.attempt:
            facts.growth = growth
            facts.released = False

    def _apply_model(self, facts: Facts, event: Event) -> None:
        if facts.outcome is not None:
            return
        growth = Growth.from_dict(event["growth"])
        facts.outcome = Outcome.from_dict(event["outcome"])
        facts.made_by = growth
        self._spent_epochs += facts.outcome.epochs
        self._learn(facts, growth)

    def _apply_fail(self, facts: Facts, event: Event) -> None:
        facts.failures.setdefault(int(event["attempt"]), str(event["reason"]))

    def _apply_release(self, facts: Facts, event: Event) -> None:
        if facts.growth is None or event["attempt"] >= facts.growth.attempt:
            facts.released = True

    def _apply_quarantine(self, facts: Facts, event: Event) -> None:
        if facts.quarantined is None:
            facts.quarantined = str(event["reason"])

    def _learn(self, facts: Facts, growth: Growth) -> None:
        """Count a growth the first time it is heard of, be it by its ask or by its result."""
        if facts.growth is not None:
            return
        facts.growth = growth
        if growth.parent is None:
            self._seeds += 1
        else:
            # n(m) counts choices: further attempts of the same growth are not new ones.
            self._times_chosen[growth.parent] += 1

    def _update(self, id: str, facts: Facts) -> None:
        """Derive the status anew and keep what depends on it in step."""
        before, facts.status = facts.status, self._status(facts)
        if before == facts.status:
            return
        if before == RUNNING:
            del self._running[id]
        elif before == WAITING:
            del self._waiting[id]
        if facts.status == RUNNING:
            self._running[id] = None
        elif facts.status == WAITING:
            self._waiting[id] = None
        if facts.growth is not None:
            planned = self.settings.epochs_of(facts.growth)
            self._running_epochs += planned * ((facts.status == RUNNING) - (before == RUNNING))
        self._models += (facts.status == FINISHED) - (before == FINISHED)
        if facts.status == FINISHED and facts.outcome is not None:
            outcome = facts.outcome
            self._hull.add(growth_number(id), outcome.multiply_adds, outcome.error)
        elif facts.status == QUARANTINED:
            self._forget(id)

    def _status(self, facts: Facts) -> str:
        if facts.quarantined is not None:
            return QUARANTINED
        if facts.growth is None:
            return UNKNOWN
        if facts.outcome is not None:
            return FINISHED
        failed = facts.growth.attempt in facts.failures
        if failed and (facts.growth.attempt >= ATTEMPTS or self._is_quarantined(facts.growth)):
            return DROPPED
        return WAITING if failed or facts.released else RUNNING

    def _is_quarantined(self, growth: Growth) -> bool:
        """Tell whether the parent is damaged: then there is no use in another attempt."""
        parent = self._facts.get(growth.parent) if growth.parent is not None else None
        return parent is not None and parent.quarantined is not None

    def _forget(self, id: str) -> None:
        if growth_number(id) in self._hull.ids or self.settings.tolerance > 0:
            self._hull = Hull(self.settings.tolerance)
            for model in self.models():
                self._hull.add(growth_number(model.id), model.multiply_adds, model.error)
        for child in [*self._running, *self._waiting]:
            self._update(child, self._facts[child])

    # Small things.

    def _asked(self, id: str) -> Facts:
        facts = self._facts.get(id)
        if facts is None or facts.growth is None:
            raise SearchError(f"Growth {id!r} was never asked for.")
        return facts

    def _record(self, id: str) -> ModelRecord:
        facts = self._facts[id]
        assert facts.made_by is not None
        assert facts.outcome is not None
        return ModelRecord(facts.made_by, facts.outcome)

    def _ancestors(self, id: str) -> list[str]:
        """List the model, its parent, and so on."""
        found = [id]
        while (parent := self._parent(found[-1])) is not None:
            found.append(parent)
        return found

    def _parent(self, id: str) -> str | None:
        facts = self._facts.get(id)
        return None if facts is None or facts.growth is None else facts.growth.parent

    def _depth(self, id: str) -> int:
        """Return how many growths lead from a seed to this model, as far as is known."""
        way = [id]
        while way[-1] not in self._depths and (parent := self._parent(way[-1])) is not None:
            way.append(parent)
        depth = self._depths.get(way[-1], 0)
        # A line that is lost may come later, and make the way longer: then nothing is kept.
        is_whole = way[-1] in self._depths or self._is_seed(way[-1])
        for further, ancestor in enumerate(reversed(way)):
            if is_whole:
                self._depths[ancestor] = depth + further
        return depth + len(way) - 1

    def _is_seed(self, id: str) -> bool:
        facts = self._facts.get(id)
        return facts is not None and facts.growth is not None and facts.growth.parent is None

    def _last_failure(self, id: str) -> str:
        failures = self._facts[id].failures
        return failures[max(failures)]
