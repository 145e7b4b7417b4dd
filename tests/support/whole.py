"""Invariants of the gallery of a search, whatever has happened to its processes."""

from __future__ import annotations

import json
from pathlib import Path

from nni_petridish.gallery.gallery import Gallery

DECIDED = ("weights.safetensors", "genotype.json", "metrics.json", "lineage.json")
"""The files of a model with all that a growth decides; others have times."""


def models(folder: Path) -> dict[str, str]:
    """Return the checksums of all that a growth decides, by model and file."""
    gallery = Gallery(folder)
    sums = {}
    for id in gallery.model_ids():
        gallery.load_model(id)  # raises if it is damaged
        found = json.loads((folder / "models" / id / "checksums.json").read_bytes())
        sums |= {f"{id}/{name}": found[name] for name in DECIDED}
    return sums


def leftovers(folder: Path) -> list[str]:
    """Return the temporary files and the folders of growths that are left."""
    left = [str(path.relative_to(folder)) for path in folder.rglob(".tmp-*")]
    return left + [f"work/{path.name}" for path in (folder / "work").iterdir()]


def check_journal(folder: Path) -> None:
    """Assert that every line is readable, no growth failed, and no growth or model is doubled."""
    gallery = Gallery(folder)
    events = gallery.journal.read_all()
    assert len(events) == len((folder / "journal.jsonl").read_bytes().splitlines())
    assert not [event for event in events if event["event"] in ("fail", "quarantine")]
    made = {event["id"] for event in events if event["event"] == "model"}
    assert sorted(made) == sorted(gallery.model_ids())
    asked = {
        (event["growth"]["parent"], event["growth"]["seed"], event["id"])
        for event in events
        if event["event"] == "ask"
    }
    assert len({(parent, seed) for parent, seed, _ in asked}) == len(asked)
    assert len({id for _, _, id in asked}) == len(asked)
