"""The events that tell the story of a search: the lines of its journal, as plain data."""

from __future__ import annotations

from typing import Any

from nni_petridish.search.records import Growth, Outcome

Event = dict[str, Any]


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
