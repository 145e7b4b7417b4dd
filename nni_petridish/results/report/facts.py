"""Text of a report: facts of each model, failures, times and settings."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nni_petridish.registry import Measure, kind_names
from nni_petridish.results.report.diary import (
    loss_at_selection_and_end,
    predicted_change,
    selected_shortcuts,
)
from nni_petridish.results.report.hull import short_size
from nni_petridish.results.report.pictures import Documents
from nni_petridish.search.records import ModelRecord
from nni_petridish.search.search import Search


@dataclass(frozen=True)
class ModelFacts:
    """The facts of one model that its part of a report shows.

    Parameters
    ----------
    record
        The growth and its outcome.
    error
        The error in its shown form.
    size
        The complexity in words.
    lineage
        Ids from the seed to the model.
    on_hull, is_best
        Whether it is on the hull, and the most accurate one.
    children
        How often it was chosen as a parent.
    is_readable
        Whether its files can be read.
    selected
        The selected shortcuts, by α table.
    candidates
        The number of candidates, by α table.
    changes
        The predicted and the realized changes of the loss and the error, by name.
    seconds
        Training time, if it is known.
    """

    record: ModelRecord
    error: str
    size: str
    lineage: tuple[str, ...]
    on_hull: bool
    is_best: bool
    children: int
    is_readable: bool
    selected: Mapping[str, list[str]]
    candidates: Mapping[str, int]
    changes: Mapping[str, str]
    seconds: float | None

    @property
    def id(self) -> str:
        """Id of the model."""
        return self.record.id

    @property
    def time(self) -> str:
        """Training time in words."""
        return "–" if self.seconds is None else duration(self.seconds)


def model_facts(search: Search, documents: Documents, measure: Measure) -> list[ModelFacts]:
    """Return the facts of all models, in the order of their growths."""
    on_hull = {record.id for record in search.hull()}
    best = search.best()
    models = {record.id: record for record in search.models()}
    facts = []
    for id, record in models.items():
        parts = documents.get(id, {})
        alphas = parts.get("alphas") or {}
        facts.append(
            ModelFacts(
                record=record,
                error=measure.text(record.error),
                size=short_size(record, search.complexity),
                lineage=tuple(search.lineage(id)),
                on_hull=id in on_hull,
                is_best=best is not None and best.id == id,
                children=search.times_chosen(id),
                is_readable=id in documents,
                selected=selected_shortcuts(alphas),
                candidates={key: len(rows) for key, rows in alphas.get("tables", {}).items()},
                changes=_changes(record, models.get(record.parent or ""), parts, measure),
                seconds=_seconds(parts.get("history") or {}),
            )
        )
    return facts


def _changes(
    record: ModelRecord, parent: ModelRecord | None, parts: Mapping[str, Any], measure: Measure
) -> dict[str, str]:
    if record.parent is None or not parts:
        return {}
    predicted = predicted_change(parts.get("alphas") or {})
    losses = loss_at_selection_and_end(parts.get("history") or {})
    difference = record.error - parent.error if parent else None
    return {
        "loss at selection": f"{losses[0]:.4f}" if losses else "–",
        "predicted Δ loss": _signed(predicted),
        "realized Δ loss": _signed(losses[1] - losses[0] if losses else None),
        "loss after training": f"{losses[1]:.4f}" if losses else "–",
        f"Δ {measure.name}{measure.unit}": _signed(
            None if difference is None else measure.scale * difference, 2
        ),
    }


def _seconds(history: Mapping[str, Any]) -> float | None:
    """Return the sum of the times of all epochs; None if they are not known."""
    times = [epoch.get("seconds") for phase in history.values() for epoch in phase]
    known = [t for t in times if isinstance(t, int | float) and math.isfinite(t)]
    return float(sum(known)) if known else None


def failure_rows(search: Search) -> list[dict[str, str]]:
    """Return one row for each failed attempt and each quarantined model."""
    became = dict.fromkeys(search.dropped(), "given up")
    became |= dict.fromkeys(search.rejected(), "not made")
    rows = [
        {
            "growth": f"{id}, attempt {attempt}",
            "what became of it": became.get(id, "tried again"),
            "reason": reason,
        }
        for id, reasons in search.failures().items()
        for attempt, reason in sorted(reasons.items())
    ]
    return rows + [
        {"growth": id, "what became of it": "quarantined", "reason": reason}
        for id, reason in search.quarantined().items()
    ]


def setting_rows(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested settings as dotted names and values.

    >>> list(setting_rows({"data": {"name": "digits"}, "ops": ["identity", "conv"]}))
    [('data.name', 'digits'), ('ops', 'identity, conv')]
    """
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from setting_rows(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield f"{prefix}{name}", ", ".join(map(_plain, value))
        else:
            yield f"{prefix}{name}", _plain(value)


def _plain(value: object) -> str:
    names = {None: "none", True: "yes", False: "no"}
    return names[value] if value is None or isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Usage:
    """Instructions to load a model of a gallery.

    Parameters
    ----------
    folder
        The gallery, as a path from the current folder if it is below.
    has_network
        Whether `load_model` can build its networks: those of NNI's spaces and of a user's own
        modules need the user's code.
    """

    folder: str
    has_network: bool

    @classmethod
    def of(cls, folder: Path, space: Mapping[str, Any]) -> Usage:
        """Return the usage of a gallery."""
        path = os.path.relpath(folder) if folder.is_absolute() else str(folder)
        inside = not path.startswith("..")
        return cls(path if inside else str(folder), space.get("space") in kind_names())

    def python(self, id: str) -> str:
        """Return code that loads a model."""
        if self.has_network:
            return (
                f"import nni_petridish\n\nnet = nni_petridish.load_model({self.folder!r}, {id!r})"
            )
        return (
            "from nni_petridish import Gallery, Genotype\n\n"
            f"weights, documents = Gallery({self.folder!r}).load_model({id!r})\n"
            'genotype = Genotype.from_dict(documents["genotype"])'
        )

    def commands(self, id: str) -> str:
        """Return commands that export a model and train it from scratch; empty if none can."""
        if not self.has_network:
            return ""
        folder = shlex.quote(self.folder)
        return (
            f"nni-petridish export {folder} {id} --format onnx --out {id}.onnx\n"
            f"nni-petridish train {folder} {id}"
        )


def duration(seconds: float) -> str:
    """Return a time in words.

    >>> duration(4.26), duration(75), duration(7300)
    ('4.3 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _signed(value: float | None, digits: int = 4) -> str:
    """Return a change with its sign; a small one with two digits that are not zero."""
    if value is None or value != value:
        return "–"
    is_small = 0 < abs(value) < 10 ** (1 - digits)
    return (f"{value:+.1e}" if is_small else f"{value:+.{digits}f}").replace("-", "−")
