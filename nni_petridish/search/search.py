"""The search as an ask/tell state machine that chooses the next growth.

`Search` does not train, does not access files, and has no clock. It changes by plain events only,
in `SearchState.apply`, so resuming a search is replaying its events.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Protocol, runtime_checkable

from nni_petridish.errors import SearchError
from nni_petridish.search.complexity import COMPLEXITIES
from nni_petridish.search.events import (
    REFUSED,
    REJECTED,
    Event,
    ask_event,
    fail_event,
    model_event,
    quarantine_event,
    release_event,
    retry_event,
)
from nni_petridish.search.hull import choose_parent
from nni_petridish.search.records import (
    CHOICES,
    FULL,
    PAYMENT,
    PAYS,
    SMALLEST_CHILD,
    Done,
    Growth,
    ModelRecord,
    Outcome,
    Wait,
    growth_id,
    growth_number,
)
from nni_petridish.search.settings import SKIP, TRAIN_ON, Limits, SearchSettings, check_number
from nni_petridish.search.state import (
    ATTEMPTS,
    DROPPED,
    FINISHED,
    QUARANTINED,
    RUNNING,
    SearchState,
)

__all__ = [
    "Chooser",
    "Done",
    "Event",
    "Growth",
    "Limits",
    "ModelRecord",
    "Outcome",
    "RangedChooser",
    "Search",
    "SearchSettings",
    "Wait",
]

# A function that returns (λ, I_max) for the growth with a given number. It may be called again for
# the same number if the growth could not be recorded. It is never called in a replay.
Chooser = Callable[[int], tuple[float, int]]


@runtime_checkable
class RangedChooser(Protocol):
    """A `Chooser` that tells which I_max it may choose.

    A parent without new children for one I_max is then grown with another one. Without the range it
    is not grown any more, because nothing tells whether there is another one.
    """

    @property
    def i_max_range(self) -> range:
        """Every I_max that may be chosen."""

    def __call__(self, number: int) -> tuple[float, int]:
        """Return (λ, I_max) for the growth with this number."""


REJECTIONS = 2
"""Growths that a parent may have rejected: the candidates of the second one start elsewhere."""


class Search(SearchState):
    """Forward search over the hull of error and multiply-adds.

    Parameters
    ----------
    settings
        The settings of the search.
    chooser
        Chooses λ and I_max of each growth. By default, those of the settings are used.
    commit
        Called with each new event; it must lead to a call of `apply`. A coordinator writes the
        event to its journal and applies the events it reads back. By default, the event is applied
        directly.

    Examples
    --------
    >>> search = Search(SearchSettings(limits=Limits(max_models=2)))
    >>> seed = search.ask()
    >>> search.ask()
    Wait(reason='no model to grow from is ready')
    >>> search.tell(Outcome(seed.id, error=0.3, multiply_adds=100, parameters=10))
    True
    >>> child = search.ask()
    >>> child.parent
    'g00000'
    >>> search.fail(child.id, "out of memory")
    True
    >>> search.ask().attempt
    2
    >>> search.tell(Outcome(child.id, error=0.2, multiply_adds=150, parameters=15))
    True
    >>> search.ask()
    Done(reason='max_models=2 is reached')
    >>> [model.id for model in search.hull()]
    ['g00000', 'g00001']
    """

    def __init__(
        self,
        settings: SearchSettings,
        chooser: Chooser | None = None,
        commit: Callable[[Event], object] | None = None,
    ) -> None:
        super().__init__(settings)
        self._chooser = chooser
        self._commit = commit or self.apply

    def ask(self, elapsed: float = 0.0) -> Growth | Wait | Done:
        """Return the next growth, if there is one.

        Parameters
        ----------
        elapsed
            Running time of the search in seconds, for ``max_seconds``.

        Returns
        -------
        Growth, Wait or Done
            `Wait` while growths are running whose results may change the answer.
        """
        answer = self._decide(elapsed)
        if isinstance(answer, Growth):
            self._commit(ask_event(answer, elapsed))
        return answer

    def why_ended(self, elapsed: float) -> str | None:
        """Return why no growth can start any more.

        Parameters
        ----------
        elapsed
            Running time of the search in seconds, for ``max_seconds``.

        Returns
        -------
        str or None
            None while a growth is running or can start.
        """
        return None if self._running else self._obstacle(elapsed)

    def tell(self, outcome: Outcome) -> bool:
        """Record the outcome of a growth, even of a dropped one; return False if it is known."""
        facts = self._asked(outcome.id)
        if facts.outcome is not None or facts.quarantined is not None:
            return False
        assert facts.growth is not None
        self._commit(model_event(facts.growth, outcome))
        return True

    def fail(
        self, id: str, reason: str, attempt: int | None = None, kind: str | None = None
    ) -> bool:
        """Record that a growth failed: it is tried once more, then dropped.

        Parameters
        ----------
        id
            Id of the growth.
        reason
            The reason, in one line.
        attempt
            The attempt that failed. By default, the current one.
        kind
            The kind of the failure, see `fail_event`.

        Returns
        -------
        bool
            False if nothing changes, because the growth is finished or the attempt is an old one.
        """
        facts = self._asked(id)
        assert facts.growth is not None
        current = facts.growth.attempt
        attempt = current if attempt is None else attempt
        if attempt > current:
            raise SearchError(f"Attempt {attempt} of {id} failed but only {current} was asked for.")
        is_over = facts.status in (FINISHED, DROPPED, QUARANTINED, REFUSED, REJECTED)
        if is_over or attempt < current or attempt in facts.failures:
            return False
        self._commit(fail_event(id, attempt, str(reason) or "no reason given", kind))
        return True

    def release(self, id: str) -> bool:
        """Release a running or refused growth: a later `ask` returns it again, seed included."""
        facts = self._asked(id)
        if facts.status not in (RUNNING, REFUSED):
            return False
        assert facts.growth is not None
        self._commit(release_event(id, facts.growth.attempt))
        return True

    def quarantine(self, id: str, reason: str = "damaged") -> bool:
        """Remove a damaged model from the hull permanently; its descendants stay."""
        if self._asked(id).quarantined is not None:
            return False
        self._commit(quarantine_event(id, str(reason) or "damaged"))
        return True

    def retry(self, id: str) -> bool:
        """Try a dropped growth again, with the seed of its first attempt, as if it were new.

        Returns
        -------
        bool
            False if it is not dropped, or cannot succeed because of its parent.
        """
        facts = self._asked(id)
        assert facts.growth is not None
        if facts.status != DROPPED or self._is_hopeless(facts.growth, facts):
            return False
        seed = _random_seed(self.settings.seed, growth_number(id), attempt=1)
        self._commit(retry_event(replace(facts.growth, attempt=1, seed=seed)))
        return True

    @classmethod
    def replay(
        cls,
        settings: SearchSettings,
        events: Iterable[Event],
        chooser: Chooser | None = None,
        commit: Callable[[Event], object] | None = None,
    ) -> Search:
        """Return the search with these events applied."""
        search = cls(settings, chooser, commit)
        for event in events:
            search.apply(event)
        return search

    # Choice of the next growth.

    def _decide(self, elapsed: float) -> Growth | Wait | Done:
        obstacle = self._obstacle(elapsed)
        return self._next() if obstacle is None else self._nothing_now(obstacle)

    def _next(self) -> Growth:
        """Return the next growth of a search that nothing keeps from going on."""
        if self._waiting:
            return self._again(min(self._waiting, key=growth_number))
        if self._seeds < self.settings.seeds:
            return self._new(None)
        # One generator per growth, so that the search has no hidden random state.
        rng = random.Random(f"{self.settings.seed}:{self._next_number}")
        parent = choose_parent(self._parents(), self._times_chosen, rng)
        return self._new(parent, trains_on=not self._may_grow(parent))

    def _obstacle(self, elapsed: float) -> str | None:
        """Return what keeps the next growth from starting; None if nothing does."""
        if self._refused:
            id, reason = next(iter(self.refused().items()))
            return f"{id} was refused: {reason.removesuffix('.')}"
        if gave_up := self.gave_up():
            return gave_up
        if self._waiting or self._seeds < self.settings.seeds:
            return self._limit(self.settings.epochs_of(self._next()), elapsed)
        limit = self._limit(self.settings.weak_epochs + self.settings.final_epochs, elapsed)
        if limit:
            return limit
        return None if any(True for _ in self._parents()) else self._why_no_parent()

    def _parents(self) -> Iterator[str]:
        band = map(growth_id, self._hull.band())
        return (id for id in band if self._may_grow(id) or self._may_train_on(id))

    def _nothing_now(self, reason: str) -> Wait | Done:
        return Wait(reason) if self._running else Done(reason)

    def _limit(self, epochs: int, elapsed: float) -> str | None:
        """Return the limit that prevents a growth of this many epochs; None if there is none."""
        limits = self.settings.limits
        if limits.max_seconds is not None and elapsed >= limits.max_seconds:
            return f"max_seconds={limits.max_seconds} is reached"
        if limits.max_models is not None and self._models + len(self._running) >= limits.max_models:
            return f"max_models={limits.max_models} is reached"
        taken = self._spent_epochs + self._running_epochs
        if limits.max_epochs is not None and taken + epochs > limits.max_epochs:
            return f"max_epochs={limits.max_epochs} leaves no room: {taken} taken, {epochs} needed"
        return None

    def _may_grow(self, id: str) -> bool:
        return self._has_room(id) and not self._is_unpaid(id)

    def _may_train_on(self, id: str) -> bool:
        """Return whether a model whose lineage did not pay is trained on: once, if at all."""
        if self.settings.limits.unpaid != TRAIN_ON or not self._is_unpaid(id):
            return False
        growths = (facts.growth for facts in self._facts.values())
        return self._has_room(id) and not any(g and g.trains_on and g.parent == id for g in growths)

    def _has_room(self, id: str) -> bool:
        """Return whether the limits and the space leave room to grow a model."""
        limits, outcome = self.settings.limits, self._facts[id].outcome
        assert outcome is not None
        if outcome.metrics.get(FULL) or self._is_exhausted(id):
            return False
        if self._rejections[id] >= REJECTIONS:
            return False
        sizes = limits.sizes()
        if any(COMPLEXITIES[name].of(outcome) >= limit for name, limit in sizes.items()):
            return False
        child = outcome.metrics.get(SMALLEST_CHILD) if limits.oversize == SKIP else None
        if child and any(child.get(name, 0) > limit for name, limit in sizes.items()):
            return False
        if limits.max_growths is not None:
            return self._depth(id) < limits.max_growths
        return True

    def _is_unpaid(self, id: str) -> bool:
        """Return whether the last growths of a lineage all fell short of training on."""
        wanted, growths = self.settings.limits.max_unpaid, 0
        current: str | None = id
        while wanted is not None and current is not None and growths < wanted:
            facts = self._facts[current]
            found = facts.outcome.metrics.get(PAYMENT) if facts.outcome is not None else None
            if not isinstance(found, dict) or found.get(PAYS) is not False:
                return False
            growths += 1
            current = facts.growth.parent if facts.growth is not None else None
        return wanted is not None and growths == wanted

    def _is_exhausted(self, id: str) -> bool:
        """Return whether every architecture that can be grown from a model is one already."""
        if self._chooser is not None:
            # The number of choices depends on I_max, which differs from growth to growth.
            return id in self._exhausted and not self._open_i_max(id)
        outcome = self._facts[id].outcome
        choices = None if outcome is None else outcome.metrics.get(CHOICES)
        is_used_up = choices and self._children[id] >= choices
        return bool(is_used_up) or id in self._exhausted

    def _open_i_max(self, id: str) -> list[int]:
        """Return each I_max of a range for which a model may still have a new child."""
        if not isinstance(self._chooser, RangedChooser):
            return []
        return [i_max for i_max in self._chooser.i_max_range if i_max not in self._exhausted[id]]

    def _why_no_parent(self) -> str:
        if self._hull.ids:
            limits = self.settings.limits
            names = ("max_multiply_adds", "max_parameters", "max_latency", "max_growths")
            set_ = [f"{n}={getattr(limits, n)}" for n in names if getattr(limits, n) is not None]
            over = [m.outcome.metrics.get(FULL) or self._is_exhausted(m.id) for m in self.hull()]
            if all(over):
                within = f" within {', '.join(set_)}" if set_ else ""
                return f"the space is exhausted: the models on the hull have no new child{within}"
            if any(over):
                set_.append("the space has no more")
            if any(
                self._rejections[m.id] >= REJECTIONS or self._is_unpaid(m.id) for m in self.hull()
            ):
                set_.append("growing would not pay")
            return f"no model on the hull may grow further ({', '.join(set_)})"
        dropped = [] if self._running else list(self.dropped().items())
        if dropped:
            return f"no model to grow from: {dropped[-1][0]} failed ({dropped[-1][1]})"
        return "no model to grow from is ready" if self._running else "no model to grow from"

    def _new(self, parent: str | None, trains_on: bool = False) -> Growth:
        number = self._next_number
        l1, i_max = self.settings.l1, self.settings.i_max
        if self._chooser is not None and parent is not None:
            l1, i_max = self._chooser(number)
            check_number("l1", l1, 0)
            check_number("i_max", i_max, 1, whole=True)
            if i_max in self._exhausted.get(parent, ()):
                i_max = min(self._open_i_max(parent), key=lambda other: abs(other - i_max))
        seed = _random_seed(self.settings.seed, number, attempt=1)
        sizes = self.settings.limits.sizes()
        within = sizes if sizes and self.settings.limits.oversize == SKIP else None
        last = self.settings.anneal > 0 and self._is_last(parent)
        return Growth(growth_id(number), parent, seed, l1, i_max, 1, within, last, trains_on)

    def _is_last(self, parent: str | None) -> bool:
        """Return whether the limits forbid to grow the next child of a model."""
        limits = self.settings.limits
        depth = 0 if parent is None else self._depth(parent) + 1
        is_deepest = limits.max_growths is not None and depth >= limits.max_growths
        taken = self._models + len(self._running) + 1
        return is_deepest or (limits.max_models is not None and taken >= limits.max_models)

    def _again(self, id: str) -> Growth:
        facts = self._facts[id]
        assert facts.growth is not None
        if facts.growth.attempt not in facts.failures:
            return facts.growth
        attempt = facts.growth.attempt + 1
        seed = _random_seed(self.settings.seed, growth_number(id), attempt)
        return replace(facts.growth, attempt=attempt, seed=seed)


def _random_seed(search_seed: int, number: int, attempt: int) -> int:
    """Return the random seed of a growth, a number of 31 bits.

    With an odd factor this is a permutation of the numbers below 2³¹, so that two growths or
    attempts of one search never have the same seed, as hashes could.
    """
    digest = hashlib.sha256(f"petridish:{search_seed}".encode()).digest()
    factor = int.from_bytes(digest[:4], "big") | 1
    offset = int.from_bytes(digest[4:8], "big")
    return (factor * (ATTEMPTS * number + attempt - 1) + offset) % 2**31
