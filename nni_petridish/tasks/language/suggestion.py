"""Settings of a first search that fit a text: minutes on a few cores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nni_petridish.errors import DataError
from nni_petridish.registry import Suggestion
from nni_petridish.tasks.language.text import TEXT_NAMES, count_vocabulary, is_corpus

_MOST_WORDS = 10_000
"""Rarer words become ``<unk>`` in a first search: the decoder dominates its cost."""


def suggest_for_text(source: str, root: str | None) -> Suggestion | None:
    """Return settings for a text, None if the source is nothing of the kind."""
    data = _find(source, root)
    if data is None:
        return None
    words = count_vocabulary(data["name"], data.get("root"), None)
    if words > _MOST_WORDS:
        data["vocabulary"] = _MOST_WORDS
    settings = {
        "seed_epochs": 5,
        "weak_epochs": 3,
        "final_epochs": 3,
        "limits": {"max_models": 6, "max_growths": 7, "max_seconds": 1800},
    }
    found = f"a text of {words:,} different words"
    space = {"embedding": 100, "max_nodes": 8}
    notes = ("The validation text decides; the search never looks at the test text.",)
    return Suggestion(found, notes, space, data, settings, {"batch_size": 16, "lr": 20.0})


def _find(source: str, root: str | None) -> dict[str, Any] | None:
    if source in TEXT_NAMES and source != "text_folder":
        return {"name": source, **({} if root is None else {"root": root})}
    path = Path(source).expanduser()
    if is_corpus(path):
        return {"name": "text_folder", "root": str(path)}
    if path.suffix == ".txt" and path.is_file():
        raise DataError(
            f"{path} is one text; a search needs a folder with train.txt, valid.txt and test.txt."
        )
    return None
