"""The events of a search: the lines of its journal, as plain data."""

from __future__ import annotations

from typing import Any

from nni_petridish.search.records import Growth, Outcome

Event = dict[str, Any]

REFUSED = "refused"
"""The kind of a failure by wrong settings: nothing starts until the search is started again."""
EXHAUSTED = "exhausted"
"""The kind of a failure of a parent from which every possible architecture was grown."""

REJECTED = "rejected"
"""The kind of a growth that was not made because it would not pay; no failure, and not retried."""


def ask_event(growth: Growth, elapsed: float) -> Event:
    """Return the event that ``growth`` is handed out."""
    return {"event": "ask", "id": growth.id, "growth": growth.to_dict(), "elapsed": elapsed}


def model_event(growth: Growth, outcome: Outcome) -> Event:
    """Return the event that ``growth`` is finished; it contains the growth, to be complete."""
    return {
        "event": "model",
        "id": outcome.id,
        "growth": growth.to_dict(),
        "outcome": outcome.to_dict(),
    }


def fail_event(id: str, attempt: int, reason: str, kind: str | None = None) -> Event:
    """Return the event that an attempt of a growth failed.

    Parameters
    ----------
    id, attempt
        The growth and its attempt.
    reason
        The reason, in one line.
    kind
        `REFUSED`, `EXHAUSTED`, `REJECTED`, or None for a failure that another attempt may avoid.
    """
    event = {"event": "fail", "id": id, "attempt": attempt, "reason": reason}
    return event if kind is None else {**event, "kind": kind}


def release_event(id: str, attempt: int) -> Event:
    """Return the event that the worker of a growth is gone: it can be handed out again."""
    return {"event": "release", "id": id, "attempt": attempt}


def quarantine_event(id: str, reason: str) -> Event:
    """Return the event that a finished model is damaged."""
    return {"event": "quarantine", "id": id, "reason": reason}


def retry_event(growth: Growth) -> Event:
    """Return the event that a dropped growth is tried again, from its first attempt on."""
    return {"event": "retry", "id": growth.id, "growth": growth.to_dict()}
