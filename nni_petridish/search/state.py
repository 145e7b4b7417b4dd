"""State of a search: facts about every growth, and the hull derived from them.

The state changes by events only. It stores facts (handed out, failed, finished, ...) and derives
the rest from them, so that it does not depend on the order of events from different writers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from nni_petridish.errors import SearchError, show
from nni_petridish.search.complexity import COMPLEXITIES
from nni_petridish.search.events import EXHAUSTED, REFUSED, REJECTED, Event
from nni_petridish.search.hull import Hull
from nni_petridish.search.records import Growth, ModelRecord, Outcome, growth_id, growth_number
from nni_petridish.search.settings import SearchSettings

# A failed growth is tried once more.
ATTEMPTS = 2
UNKNOWN, RUNNING, WAITING = "unknown", "running", "waiting"
DROPPED, FINISHED, QUARANTINED = "dropped", "finished", "quarantined"


@dataclass
class GrowthFacts:
    """The facts about one growth; ``status`` is derived from the others."""

    growth: Growth | None = None
    released: bool = False
    failures: dict[int, str] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)
    made_by: Growth | None = None
    outcome: Outcome | None = None
    quarantined: str | None = None
    status: str = UNKNOWN

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "growth": self.growth and self.growth.to_dict(),
            "released": self.released,
            "failures": {str(attempt): self.failures[attempt] for attempt in self.failures},
            "kinds": {str(attempt): self.kinds[attempt] for attempt in self.kinds},
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
        The settings of the search, of which tolerance, complexity and epochs are used here.
    """

    def __init__(self, settings: SearchSettings) -> None:
        self.settings = settings
        self.complexity = COMPLEXITIES[settings.complexity]
        self._facts: dict[str, GrowthFacts] = {}
        self._next_number = 0
        self._seeds = 0
        self._elapsed = 0.0
        self._spent_epochs = 0
        self._running_epochs = 0
        self._times_chosen: Counter[str] = Counter()
        self._depths: dict[str, int] = {}
        self._models = 0
        # Dictionaries used as ordered sets.
        self._running: dict[str, None] = {}
        self._waiting: dict[str, None] = {}
        self._refused: dict[str, None] = {}
        # Each I_max with which every possible architecture was grown, and children, by parent.
        self._exhausted: dict[str, set[int]] = {}
        self._children: Counter[str] = Counter()
        self._rejections: Counter[str] = Counter()
        self._failed: dict[str, None] = {}
        self._newest_model = -1
        self._hull = Hull(settings.tolerance)

    def hull(self) -> list[ModelRecord]:
        """Return the models on the hull, from the cheapest to the most accurate."""
        return [self._record(growth_id(number)) for number in self._hull.ids]

    def best(self) -> ModelRecord | None:
        """Return the most accurate model, the cheapest one in case of ties; None without models."""
        return self._record(growth_id(self._hull.ids[-1])) if self._hull.ids else None

    def models(self) -> list[ModelRecord]:
        """Return all finished models that are not quarantined, in the order of their growths."""
        ids = (id for id, facts in self._facts.items() if facts.status == FINISHED)
        return [self._record(id) for id in sorted(ids, key=growth_number)]

    def running(self) -> list[Growth]:
        """Return the growths that were handed out and have no outcome yet."""
        growths = (self._facts[id].growth for id in sorted(self._running, key=growth_number))
        return [growth for growth in growths if growth is not None]

    def refused(self) -> dict[str, str]:
        """Return the reasons of refusal of the growths that the settings do not allow, by id."""
        return {id: self._last_failure(id) for id in sorted(self._refused, key=growth_number)}

    def dropped(self) -> dict[str, str]:
        """Return the reasons of failure of dropped growths, by id."""
        ids = [id for id, facts in self._facts.items() if facts.status == DROPPED]
        return {id: self._last_failure(id) for id in sorted(ids, key=growth_number)}

    def rejected(self) -> dict[str, str]:
        """Return the reasons of the growths that were not made because they would not pay."""
        ids = [id for id, facts in self._facts.items() if facts.status == REJECTED]
        return {id: self._last_failure(id) for id in sorted(ids, key=growth_number)}

    def failures(self) -> dict[str, dict[int, str]]:
        """Return the reasons of all failed attempts by id and attempt, of retried growths too."""
        ids = [id for id, facts in self._facts.items() if facts.failures]
        return {id: dict(self._facts[id].failures) for id in sorted(ids, key=growth_number)}

    def quarantined(self) -> dict[str, str]:
        """Return the reasons why models were quarantined, by id."""
        ids = [id for id, facts in self._facts.items() if facts.quarantined is not None]
        return {id: self._facts[id].quarantined or "" for id in sorted(ids, key=growth_number)}

    def failed_attempts(self) -> int:
        """Return the number of attempts that failed since the newest growth with a model."""
        return sum(len(facts.failures) for facts in self._failed_since_model())

    def gave_up(self) -> str | None:
        """Return why the search gave up, if too many growths in a row failed."""
        failed = [facts for facts in self._failed_since_model() if facts.status == DROPPED]
        limit = self.settings.limits.max_failures
        if limit is None or len(failed) < limit:
            return None
        assert failed[0].growth is not None
        last = failed[0].growth.id
        return f"{len(failed)} growths in a row failed, the last one, {last}, with: " + (
            self._last_failure(last).removesuffix(".")
        )

    def lineage(self, id: str) -> list[str]:
        """Return the ids from the seed model to this model."""
        self._asked(id)
        return self._ancestors(id)[::-1]

    def times_chosen(self, id: str) -> int:
        """Return n(m), the number of times the model was chosen as a parent."""
        self._asked(id)
        return self._times_chosen[id]

    @property
    def elapsed(self) -> float:
        """Running time in seconds at the last `ask`."""
        return self._elapsed

    def state(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {
            "settings": self.settings.to_dict(),
            "elapsed": self._elapsed,
            "growths": {id: facts.to_dict() for id, facts in self._facts.items()},
            "times_chosen": dict(self._times_chosen),
            "hull": [growth_id(number) for number in self._hull.ids],
        }

    # Events.

    def apply(self, event: Event) -> None:
        """Apply one event.

        Duplicate and late events change nothing. Events about a growth whose ask event is missing
        are kept until the growth is known.
        """
        try:
            change = self._changes()[event["event"]]
            id = event["id"]
            facts = self._facts.get(id) or self._first_seen(id)
            change(facts, event)
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise SearchError(f"Not an event of a search ({error!r}): {show(event)}.") from error
        self._update(id, facts)

    def _changes(self) -> dict[str, Callable[[GrowthFacts, Event], None]]:
        return {
            "ask": self._apply_ask,
            "model": self._apply_model,
            "fail": self._apply_fail,
            "release": self._apply_release,
            "quarantine": self._apply_quarantine,
            "retry": self._apply_retry,
        }

    def _first_seen(self, id: str) -> GrowthFacts:
        self._next_number = max(self._next_number, growth_number(id) + 1)
        return self._facts.setdefault(id, GrowthFacts())

    def _apply_ask(self, facts: GrowthFacts, event: Event) -> None:
        growth = Growth.from_dict(event["growth"])
        self._elapsed = max(self._elapsed, float(event.get("elapsed", 0.0)))
        self._learn(facts, growth)
        assert facts.growth is not None
        if growth.attempt >= facts.growth.attempt:
            facts.growth = growth
            facts.released = False

    def _apply_model(self, facts: GrowthFacts, event: Event) -> None:
        if facts.outcome is not None:
            return
        growth = Growth.from_dict(event["growth"])
        facts.outcome = Outcome.from_dict(event["outcome"])
        facts.made_by = growth
        self._newest_model = max(self._newest_model, growth_number(event["id"]))
        self._spent_epochs += facts.outcome.epochs
        self._learn(facts, growth)

    def _apply_fail(self, facts: GrowthFacts, event: Event) -> None:
        attempt = int(event["attempt"])
        if attempt not in facts.failures:
            facts.failures[attempt] = str(event["reason"])
            if event.get("kind") is not None:
                facts.kinds[attempt] = str(event["kind"])
        self._failed[event["id"]] = None

    def _apply_release(self, facts: GrowthFacts, event: Event) -> None:
        if facts.growth is None or event["attempt"] >= facts.growth.attempt:
            facts.released = True
            if facts.kinds.get(event["attempt"]) == REFUSED:
                del facts.kinds[event["attempt"]], facts.failures[event["attempt"]]

    def _apply_quarantine(self, facts: GrowthFacts, event: Event) -> None:
        if facts.quarantined is None:
            facts.quarantined = str(event["reason"])

    def _apply_retry(self, facts: GrowthFacts, event: Event) -> None:
        if facts.status == DROPPED and facts.growth is not None:
            facts.growth = Growth.from_dict(event["growth"])
            facts.failures, facts.kinds = {}, {}
            facts.released = True

    def _learn(self, facts: GrowthFacts, growth: Growth) -> None:
        """Store and count a growth when it first occurs, in its ask event or its outcome."""
        if facts.growth is not None:
            return
        facts.growth = growth
        if growth.parent is None:
            self._seeds += 1
        else:
            # n(m) counts choices: another attempt of the same growth is not a new choice.
            self._times_chosen[growth.parent] += 1

    def _update(self, id: str, facts: GrowthFacts) -> None:
        """Derive the status and update all values that depend on it."""
        before, facts.status = facts.status, self._status(facts)
        if before == facts.status:
            return
        listed = {RUNNING: self._running, WAITING: self._waiting, REFUSED: self._refused}
        if before in listed:
            del listed[before][id]
        if facts.status in listed:
            listed[facts.status][id] = None
        if facts.growth is not None:
            planned = self.settings.epochs_of(facts.growth)
            self._running_epochs += planned * ((facts.status == RUNNING) - (before == RUNNING))
            self._count_child(facts, before)
            if facts.status == REJECTED and facts.growth.parent is not None:
                self._rejections[facts.growth.parent] += 1
                self._spent_epochs += self.settings.weak_epochs
        self._models += (facts.status == FINISHED) - (before == FINISHED)
        if facts.status == FINISHED and facts.outcome is not None:
            outcome = facts.outcome
            self._hull.add(growth_number(id), self.complexity.of(outcome), outcome.error)
        elif facts.status == QUARANTINED:
            self._forget(id)

    def _count_child(self, facts: GrowthFacts, before: str) -> None:
        """Count a growth as a child while it is on its way to a model, or is one."""
        assert facts.growth is not None
        parent = facts.growth.parent
        if parent is None or facts.growth.trains_on:
            return
        alive = (RUNNING, WAITING, FINISHED)
        self._children[parent] += (facts.status in alive) - (before in alive)
        if facts.kinds.get(facts.growth.attempt) == EXHAUSTED:
            self._exhausted.setdefault(parent, set()).add(facts.growth.i_max)

    def _status(self, facts: GrowthFacts) -> str:
        if facts.quarantined is not None:
            return QUARANTINED
        if facts.growth is None:
            return UNKNOWN
        if facts.outcome is not None:
            return FINISHED
        kind = facts.kinds.get(facts.growth.attempt)
        if kind in (REFUSED, REJECTED):
            return kind
        failed = facts.growth.attempt in facts.failures
        if failed and (
            facts.growth.attempt >= ATTEMPTS
            or kind == EXHAUSTED
            or self._has_quarantined_parent(facts.growth)
        ):
            return DROPPED
        return WAITING if failed or facts.released else RUNNING

    def _has_quarantined_parent(self, growth: Growth) -> bool:
        """Return whether the parent is damaged, so that another attempt is useless."""
        parent = self._facts.get(growth.parent) if growth.parent is not None else None
        return parent is not None and parent.quarantined is not None

    def _forget(self, id: str) -> None:
        if growth_number(id) in self._hull.ids or self.settings.tolerance > 0:
            self._hull = Hull(self.settings.tolerance)
            for model in self.models():
                cost = self.complexity.of(model.outcome)
                self._hull.add(growth_number(model.id), cost, model.error)
        for child in [*self._running, *self._waiting]:
            self._update(child, self._facts[child])

    # Helpers.

    def _failed_since_model(self) -> Iterator[GrowthFacts]:
        """Yield the growths that failed after the newest one with a model, the newest first.

        Rejected growths and those that failed because of their parent are left out. The order
        of growths counts, not that of events: the result is the same whichever worker is first.
        """
        for id in sorted(self._failed, key=growth_number, reverse=True):
            facts = self._facts[id]
            if growth_number(id) < self._newest_model:
                return
            if facts.growth is None or facts.outcome is not None:
                continue
            if facts.failures and not self._is_hopeless(facts.growth, facts):
                yield facts

    def _is_hopeless(self, growth: Growth, facts: GrowthFacts) -> bool:
        """Return whether the parent, damaged or exhausted, or a rejection is the reason."""
        by_parent = {EXHAUSTED, REJECTED} & set(facts.kinds.values())
        return bool(by_parent) or self._has_quarantined_parent(growth)

    def _asked(self, id: str) -> GrowthFacts:
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
        """Return the model, its parent, and so on to the seed model."""
        found = [id]
        while (parent := self._parent(found[-1])) is not None:
            found.append(parent)
        return found

    def _parent(self, id: str) -> str | None:
        facts = self._facts.get(id)
        return None if facts is None or facts.growth is None else facts.growth.parent

    def _depth(self, id: str) -> int:
        """Return the number of known growths from a seed model to this model."""
        path = [id]
        while path[-1] not in self._depths and (parent := self._parent(path[-1])) is not None:
            path.append(parent)
        depth = self._depths.get(path[-1], 0)
        # A missing event may arrive later and make the path longer: only complete ones are kept.
        is_complete = path[-1] in self._depths or self._is_seed(path[-1])
        for further, ancestor in enumerate(reversed(path)):
            if is_complete:
                self._depths[ancestor] = depth + further
        return depth + len(path) - 1

    def _is_seed(self, id: str) -> bool:
        facts = self._facts.get(id)
        return facts is not None and facts.growth is not None and facts.growth.parent is None

    def _last_failure(self, id: str) -> str:
        failures = self._facts[id].failures
        return failures[max(failures)]
