"""Settings of a first search that fit a table: minutes on a few cores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nni_petridish.registry import Suggestion
from nni_petridish.tasks.tables.splits import split_sizes
from nni_petridish.tasks.tables.table import MOST_TEXTS, column_names, read_table, texts_by_column

_SUFFIXES = (".csv", ".tsv")
_STEPS = 400
"""Steps of the seed model, as far as the bounds on its epochs allow."""
_EPOCHS = (5, 60)
_GROWN = 20
"""Models up to so many times the seed are grown further."""


def suggest_for_table(source: str) -> Suggestion | None:
    """Return settings for a file of comma-separated values, None if the source is none."""
    path = Path(source).expanduser()
    if path.suffix.lower() not in _SUFFIXES or not path.is_file():
        return None
    *_, target = column_names(path)
    texts = texts_by_column(path)
    drop = [name for name, count in texts.items() if name != target and count > MOST_TEXTS]
    data: dict[str, Any] = {"name": "csv", "root": str(path), "target": target}
    if drop:
        data["drop"] = drop
    table = read_table(data)
    kept, data["validation"] = split_sizes(len(table.labels), None)
    width, batch = 32, 32 if kept < 2000 else 64
    epochs = max(_EPOCHS[0], min(_EPOCHS[1], _STEPS * batch // kept))
    size = width * (table.num_features + 2 * width + len(table.classes))
    settings = {
        "seed_epochs": epochs,
        "weak_epochs": max(2, epochs // 2),
        "final_epochs": epochs,
        "limits": {
            "max_models": 8,
            "max_growths": 4,
            "max_multiply_adds": int(float(f"{_GROWN * size:.1e}")),
            "max_seconds": 1800,
        },
    }
    found = (
        f"{len(table.labels):,} rows of {len(table.columns)} columns; {target!r}, the last one, has"
        f" {len(table.classes)} classes"
    )
    rest = len(table.labels) - kept - int(data["validation"])
    notes = [
        f"{data['validation']:,} rows are set aside for validation, {rest:,} as the test set.",
        *(f"Column {name!r} is left out: it has {texts[name]:,} different texts." for name in drop),
    ]
    space = {"width": width, "num_cells": 2}
    return Suggestion(found, tuple(notes), space, data, settings, {"batch_size": batch, "lr": 0.05})
