"""Models and journal compared: what a process that died, or a damaged file, left different."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from nni_petridish.errors import DamagedModelError, GalleryError, SearchError
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.search.events import Event, quarantine_event
from nni_petridish.search.records import ModelRecord, Outcome, growth_number

_log = logging.getLogger(__name__)
_BETWEEN_SECONDS = 0.3
_GONE = "its folder is gone"
"""Reason for which a model is taken out of a search when its folder is missing."""


@dataclass(frozen=True)
class Recovery:
    """Result of `recover`: ids put into the journal or quarantined, leftovers removed."""

    journaled: tuple[str, ...]
    quarantined: tuple[str, ...]
    removed: tuple[str, ...]


@dataclass(frozen=True)
class Differences:
    """Differences between folders and journal: ids without a line, ids whose folder is gone."""

    unrecorded: tuple[str, ...]
    gone: tuple[str, ...]


def recover(gallery: Gallery) -> Recovery:
    """Make models and journal consistent after a process died; for the coordinator."""
    gallery.journal.repair()
    # Read the journal first: every model in it was complete before its line was written.
    events = gallery.journal.read_all()
    differences = compare(gallery, events)
    journaled: list[str] = []
    quarantined: list[str] = []
    for id in differences.unrecorded:
        (journaled if gallery.record_again(id) else quarantined).append(id)
    for id in differences.gone:
        gallery.record_quarantine(id, _GONE)
        quarantined.append(id)
    _remove_finished_work(gallery, events, journaled + quarantined)
    return Recovery(tuple(journaled), tuple(quarantined), tuple(gallery.sweep()))


def compare(gallery: Gallery, events: Iterable[Event]) -> Differences:
    """Compare the folders of models with the events of the journal."""
    of = {"model": set[str](), "quarantine": set[str]()}
    for kind, id in _kinds_and_ids(events):
        of.get(kind, set()).add(id)
    there = gallery.model_ids()
    known = of["model"] | of["quarantine"]
    gone = sorted(of["model"] - of["quarantine"] - set(there), key=growth_number)
    return Differences(tuple(id for id in there if id not in known), tuple(gone))


def read_events(gallery: Gallery) -> list[Event]:
    """Return the events of the journal, completed by what the folders of models show.

    `recover` would write the same lines. What had to be completed is told in a line.
    """
    events = gallery.journal.read_all()
    if any(asdict(compare(gallery, events)).values()):
        time.sleep(_BETWEEN_SECONDS)  # a worker may be between a model and its line
        events = gallery.journal.read_all()
    differences = compare(gallery, events)
    if differences.unrecorded:
        _log.warning(
            "%s lacks %s: read from their own files. Resuming the search adds them.",
            gallery.journal.path,
            _some(differences.unrecorded),
        )
    for id in differences.unrecorded:
        try:
            events.append(gallery.model_line(id))
        except DamagedModelError as error:
            _log.warning("Model %s is left out: %s", id, error)
    for id in differences.gone:
        _log.warning("Model %s is left out: %s.", id, _GONE)
        events.append(quarantine_event(id, _GONE))
    return events


def contradictions(gallery: Gallery, records: Iterable[ModelRecord]) -> list[str]:
    """Return a line for each model whose documents are not what the journal says."""
    lines = []
    for record in records:
        try:
            if Outcome.from_dict(gallery.load_documents(record.id)["metrics"]) != record.outcome:
                lines.append(f"Model {record.id} is damaged: the journal has other metrics.")
        except (GalleryError, SearchError, KeyError) as error:
            lines.append(str(error))
    return lines


def _remove_finished_work(gallery: Gallery, events: Iterable[Event], also: Iterable[str]) -> None:
    """Remove work folders that outlived their growths, as after a kill while cleaning up."""
    over = {id for kind, id in _kinds_and_ids(events) if kind in ("model", "quarantine")}
    over.update(also)
    for id in gallery.worked_on() & over:
        gallery.remove_work(id)


def _some(ids: tuple[str, ...]) -> str:
    return f"{len(ids)} models ({ids[0]}, ...)" if len(ids) > 1 else f"model {ids[0]}"


def _kinds_and_ids(events: Iterable[Event]) -> Iterator[tuple[str, str]]:
    """Yield kind and id of every event that has both; replaying says what is wrong with others."""
    for event in events:
        kind, id = event.get("event"), event.get("id")
        if isinstance(kind, str) and isinstance(id, str):
            yield kind, id
