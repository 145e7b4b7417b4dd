"""The gallery: a folder with every model of a search, shared by all its workers.

::

    gallery.json             format version, the space and the settings of the search
    journal.jsonl            the events, one per line
    models/<id>/             weights.safetensors, *.json, checksums.json; complete or absent
    quarantine/<id>/         damaged models
    work/<id>-<attempt>/     checkpoints of running growths

A model is written under a temporary name, synced, renamed, and then recorded in the journal. A
writer that dies in between leaves nothing that a reader could mistake for a model. Nothing is ever
unpickled. Opening a gallery and reading its journal and documents does not need torch.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nni_petridish._support.reading import read_json
from nni_petridish.errors import DamagedModelError, GalleryError, SearchError, show
from nni_petridish.gallery.files import (
    Sweep,
    in_one_line,
    make_folder,
    seal,
    sync_folder,
    to_json,
    unseal,
    write_file,
    write_folder,
)
from nni_petridish.gallery.journal import Journal
from nni_petridish.gallery.locks import ExclusiveLock, file_lock
from nni_petridish.gallery.model_files import (
    WEIGHTS,
    check_names,
    decode_documents,
    decode_weights,
    encode_model,
    read_checksums,
    read_files,
)
from nni_petridish.registry import notebook_html
from nni_petridish.search.events import Event, model_event, quarantine_event
from nni_petridish.search.records import Growth, ModelRecord, Outcome, growth_number

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)
_VERSION = 1
DESCRIPTION = "gallery.json"
_BETWEEN_SECONDS = 0.3
GONE = "its folder is gone"
"""Reason for which a model is taken out of a search when its folder is missing."""


@dataclass(frozen=True)
class Recovery:
    """Result of `Gallery.recover`: ids put into the journal or quarantined, leftovers removed."""

    journaled: tuple[str, ...]
    quarantined: tuple[str, ...]
    removed: tuple[str, ...]


@dataclass(frozen=True)
class Differences:
    """Differences between folders and journal: ids without a line, ids whose folder is gone."""

    unrecorded: tuple[str, ...]
    gone: tuple[str, ...]


class Gallery:
    """An existing gallery; `Gallery.create` creates one.

    Parameters
    ----------
    folder
        The folder of the gallery.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        description = _read_description(self.folder)
        if description is None:
            raise GalleryError(f"There is no gallery in {self.folder}: gallery.json is missing.")
        self.space: dict[str, Any] = description["space"]
        self.settings: dict[str, Any] = description["settings"]
        self.journal = Journal(self.folder / "journal.jsonl")
        self._models = self.folder / "models"
        self._quarantine = self.folder / "quarantine"
        self._work = self.folder / "work"
        self._sweep = Sweep((self.folder, self._models, self.folder / "pictures"))

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        space: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> Gallery:
        """Create a gallery, or open it if it exists and belongs to the same search.

        Parameters
        ----------
        folder
            The folder of the gallery. It must be a gallery, empty, or absent.
        space
            Description of the search space, as plain data.
        settings
            The settings that must not change during the search, as plain data.
        """
        folder = Path(folder)
        wanted = _description(space, settings)
        found = _read_description(folder)
        with in_one_line(f"make a gallery in {folder}"):
            if found is None:
                _refuse_other_folders(folder)
                # Private to the user: its workers do as its files say.
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                found = _write_description(folder, wanted)
            _refuse_differences(folder, found, wanted)
            for name in ("models", "quarantine", "work"):
                (folder / name).mkdir(exist_ok=True)
        return cls(folder)

    @classmethod
    def check(
        cls,
        folder: str | os.PathLike[str],
        space: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> None:
        """Raise a GalleryError if `create` would, as far as can be checked without writing."""
        folder = Path(folder)
        found = _read_description(folder)
        if found is not None:
            _refuse_differences(folder, found, _description(space, settings))
            return
        _refuse_other_folders(folder)
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        if not existing.is_dir():
            raise GalleryError(f"Cannot make a gallery in {folder}: {existing} is not a folder.")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise GalleryError(f"Cannot make a gallery in {folder}: {existing} is not writable.")

    def change_settings(self, **changes: Any) -> None:
        """Change the description of a gallery that has no model yet."""
        self.settings = {**self.settings, **changes}
        document = _description(self.space, self.settings)
        write_file(self.folder / DESCRIPTION, seal(document))

    # Models.

    def save_model(
        self, id: str, weights: Mapping[str, Tensor], documents: Mapping[str, Any]
    ) -> bool:
        """Save a finished model and record it in the journal.

        Parameters
        ----------
        id
            Id of the growth.
        weights
            State dict of the network.
        documents
            Plain data by name, each saved as ``<name>.json``. Two are required for the journal:
            ``lineage`` with the keys of `Growth`, and ``metrics`` with the keys of `Outcome`. Other
            keys and other documents are allowed.

        Returns
        -------
        bool
            False if another worker has saved the model before; this one is discarded.
        """
        event = _model_event(id, documents)
        if not self._is_taken(id):
            files = encode_model(weights, documents)
            if write_folder(self._models / id, files):
                self.journal.append(event)
                return True
        self._journal_again(id)
        return False

    def load_model(self, id: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Read the weights and documents of a model, and verify their checksums.

        Raises
        ------
        DamagedModelError
            If a file is missing or damaged.
        GalleryError
            If there is no such model.
        """
        files = self._read_files(id, with_weights=True)
        weights = decode_weights(id, files.pop(WEIGHTS))
        return weights, _own_documents(id, files)

    def load_documents(self, id: str) -> dict[str, Any]:
        """Read and verify the documents of a model, without its weights and without torch."""
        return _own_documents(id, self._read_files(id, with_weights=False))

    def checksum(self, id: str) -> str:
        """Return the checksum of a model's weights."""
        return read_checksums(self._models / _checked(id))[WEIGHTS]

    def has_model(self, id: str) -> bool:
        """Return whether a model exists."""
        return (self._models / _checked(id)).is_dir()

    def model_ids(self) -> list[str]:
        """Return the ids of all models, oldest growth first."""
        with in_one_line(f"read {self._models}"):
            return sorted(filter(_is_id, os.listdir(self._models)), key=growth_number)

    def quarantine(self, id: str, reason: str) -> bool:
        """Quarantine a damaged model and record that; return False if it is gone already."""
        with in_one_line(f"quarantine model {id}"):
            try:
                self._move_to_quarantine(id)
            except FileNotFoundError:
                return False
        self._journal_quarantine(id, reason)
        return True

    def _repr_html_(self) -> str:
        """Return the report for a notebook."""
        return notebook_html(self.folder)

    # Running growths.

    def work_folder(self, id: str, attempt: int) -> Path:
        """Create and return the folder for the checkpoints of a running growth."""
        folder = self._work / f"{_checked(id)}-{attempt:d}"
        make_folder(folder)
        return folder

    def remove_work(self, id: str) -> None:
        """Remove the checkpoints of all attempts of a growth."""
        for folder in self._work.glob(f"{_checked(id)}-*"):
            for _ in range(2):  # a heartbeat may write into it while it is being removed
                shutil.rmtree(folder, ignore_errors=True)

    # The coordinator of a search.

    def lock_coordinator(self) -> ExclusiveLock:
        """Lock the gallery for one search; a GalleryError names the process that holds the lock."""
        what = f"Another search uses the gallery {self.folder}"
        return ExclusiveLock(self.folder / "coordinator.lock", what).acquire()

    def refuse_if_in_use(self, seconds: float = 2.0) -> None:
        """Raise a GalleryError if a search uses the gallery and still does after some seconds.

        A tuner whose manager was killed needs a second to notice it.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.lock_coordinator().release()
                return
            except GalleryError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def recover(self) -> Recovery:
        """Make models and journal consistent after a process died; for the coordinator."""
        self.journal.repair()
        # Read the journal first: every model in it was complete before its line was written.
        events = self.journal.read_all()
        differences = self.compare(events)
        journaled: list[str] = []
        quarantined: list[str] = []
        for id in differences.unrecorded:
            (journaled if self._journal_again(id) else quarantined).append(id)
        for id in differences.gone:
            self._journal_quarantine(id, GONE)
            quarantined.append(id)
        self._remove_finished_work(events, journaled + quarantined)
        return Recovery(tuple(journaled), tuple(quarantined), tuple(self.sweep()))

    def compare(self, events: Iterable[Event]) -> Differences:
        """Compare the folders of models with the events of the journal."""
        of = {"model": set[str](), "quarantine": set[str]()}
        for kind, id in _kinds_and_ids(events):
            of.get(kind, set()).add(id)
        there = self.model_ids()
        known = of["model"] | of["quarantine"]
        gone = sorted(of["model"] - of["quarantine"] - set(there), key=growth_number)
        return Differences(tuple(id for id in there if id not in known), tuple(gone))

    def read_events(self) -> list[Event]:
        """Return the events of the journal, completed by what the folders of models show.

        `recover` would write the same lines. What had to be completed is told in a line.
        """
        events = self.journal.read_all()
        if any(asdict(self.compare(events)).values()):
            time.sleep(_BETWEEN_SECONDS)  # a worker may be between a model and its line
            events = self.journal.read_all()
        differences = self.compare(events)
        if differences.unrecorded:
            _log.warning(
                "%s lacks %s: read from their own files. Resuming the search adds them.",
                self.journal.path,
                _some(differences.unrecorded),
            )
        for id in differences.unrecorded:
            try:
                events.append(self.model_line(id))
            except DamagedModelError as error:
                _log.warning("Model %s is left out: %s", id, error)
        for id in differences.gone:
            _log.warning("Model %s is left out: %s.", id, GONE)
            events.append(quarantine_event(id, GONE))
        return events

    def contradictions(self, records: Iterable[ModelRecord]) -> list[str]:
        """Return a line for each model whose documents are not what the journal says."""
        lines = []
        for record in records:
            try:
                if Outcome.from_dict(self.load_documents(record.id)["metrics"]) != record.outcome:
                    lines.append(f"Model {record.id} is damaged: the journal has other metrics.")
            except (GalleryError, SearchError, KeyError) as error:
                lines.append(str(error))
        return lines

    def model_line(self, id: str) -> Event:
        """Return the event of a model by its own documents."""
        return _model_event(id, self.load_documents(id))

    def record_model(self, id: str) -> None:
        """Make sure that a model is in the journal; its writer may have failed after saving it."""
        if not any(e["event"] == "model" and e["id"] == id for e in self.journal.read_all()):
            self._journal_again(id)

    def sweep(self) -> list[str]:
        """Remove temporary files that dead processes left behind; return their names."""
        return self._sweep.run()

    # Helpers.

    def _is_taken(self, id: str) -> bool:
        return self.has_model(id) or (self._quarantine / id).exists()

    def _journal_again(self, id: str) -> bool:
        """Record a model in the journal whose writer may have died before it did.

        Readers ignore a duplicate line, in case the writer is only slow.
        """
        if not self.has_model(id):
            return False
        try:
            self.journal.append(self.model_line(id))
        except DamagedModelError as error:
            self.quarantine(id, str(error))
            return False
        return True

    def _remove_finished_work(self, events: Iterable[Event], also: Iterable[str]) -> None:
        """Remove work folders that outlived their growths, as after a kill while cleaning up."""
        over = {id for kind, id in _kinds_and_ids(events) if kind in ("model", "quarantine")}
        over.update(also)
        with in_one_line(f"read {self._work}"):
            names = os.listdir(self._work)
        for id in {name.rsplit("-", 1)[0] for name in names} & over:
            self.remove_work(id)

    def _journal_quarantine(self, id: str, reason: str) -> None:
        self.journal.append(quarantine_event(id, reason))
        _log.warning("Model %s is quarantined and the search goes on without it: %s", id, reason)

    def _move_to_quarantine(self, id: str) -> None:
        target = self._quarantine / _checked(id)
        target.parent.mkdir(exist_ok=True)
        number = 1
        while target.exists():
            number += 1
            target = target.with_name(f"{id}-{number}")
        os.rename(self._models / id, target)
        sync_folder(self._models)
        sync_folder(self._quarantine)

    def _read_files(self, id: str, with_weights: bool) -> dict[str, bytes]:
        folder = self._models / _checked(id)
        if not folder.is_dir():
            # An NFS client may have cached that the name is missing; opening the parent folder
            # refreshes the cache.
            os.close(os.open(self._models, os.O_RDONLY))
            if not folder.is_dir():
                raise GalleryError(f"There is no model {id} in the gallery {self.folder}.")
        return read_files(folder, with_weights)


def _own_documents(id: str, files: Mapping[str, bytes]) -> dict[str, Any]:
    """Decode the documents of a model, and check that they are its own."""
    documents = decode_documents(id, files)
    for name in ("lineage", "metrics"):
        named = documents.get(name)
        if isinstance(named, Mapping) and named.get("id", id) != id:
            raise DamagedModelError(f"Model {id} is damaged: its files are of {named['id']!r}.")
    return documents


def _some(ids: tuple[str, ...]) -> str:
    return f"{len(ids)} models ({ids[0]}, ...)" if len(ids) > 1 else f"model {ids[0]}"


def _kinds_and_ids(events: Iterable[Event]) -> Iterator[tuple[str, str]]:
    """Yield kind and id of every event that has both; replaying says what is wrong with others."""
    for event in events:
        kind, id = event.get("event"), event.get("id")
        if isinstance(kind, str) and isinstance(id, str):
            yield kind, id


def _is_id(name: str) -> bool:
    try:
        return growth_number(name) >= 0
    except SearchError:
        return False


def _checked(id: str) -> str:
    """Return the id if it is valid: it becomes a file name."""
    try:
        growth_number(id)
    except SearchError as error:
        raise GalleryError(str(error)) from error
    return id


def _model_event(id: str, documents: Mapping[str, Any]) -> Event:
    for name in ("lineage", "metrics"):
        if not isinstance(documents.get(name), Mapping):
            raise GalleryError(f"Model {id} needs the document {name!r}, a mapping.")
    check_names(documents)
    try:
        growth = Growth.from_dict(documents["lineage"])
        outcome = Outcome.from_dict(documents["metrics"])
    except SearchError as error:
        raise GalleryError(str(error)) from error
    if not _checked(id) == growth.id == outcome.id:
        raise GalleryError(
            f"Model {id} has the lineage of {growth.id!r} and the metrics of {outcome.id!r}."
        )
    return model_event(growth, outcome)


def _description(space: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    document = {"version": _VERSION, "space": dict(space), "settings": dict(settings)}
    return dict(json.loads(to_json(document)))


def _read_description(folder: Path) -> dict[str, Any] | None:
    path = folder / DESCRIPTION
    try:
        with in_one_line(f"read {path}"):
            try:
                description = read_json(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
    except ValueError as error:
        raise GalleryError(f"{path} is damaged: {error}.") from error
    version = description.get("version") if isinstance(description, dict) else None
    if version != _VERSION:
        raise GalleryError(f"{path} must have version {_VERSION} but has {show(version)}.")
    for name in ("space", "settings"):
        if not isinstance(description.get(name), dict):
            raise GalleryError(f"{path} is damaged: {name} must be a mapping.")
    return unseal(description, path)


def _write_description(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    # If several processes start at once, the first one writes.
    with file_lock(folder / ".create.lock"):
        found = _read_description(folder)
        if found is None:
            write_file(folder / DESCRIPTION, seal(wanted))
    return found or wanted


def _refuse_other_folders(folder: Path) -> None:
    if folder.is_dir():
        # Another process may be creating the gallery right now: its lock and temporary file do not
        # count, and nothing does once gallery.json exists.
        visible = [name for name in os.listdir(folder) if not name.startswith(".")]
        if visible and _read_description(folder) is None:
            raise GalleryError(f"{folder} is not a gallery and not empty: it has {visible[0]}.")


def _refuse_differences(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    differences = _differences(
        {name: found[name] for name in ("space", "settings")},
        {name: wanted[name] for name in ("space", "settings")},
    )
    if differences:
        raise GalleryError(f"The gallery {folder} is of another search: {'; '.join(differences)}.")


def _differences(found: Any, wanted: Any, name: str = "") -> list[str]:
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        return [
            line
            for key in dict.fromkeys([*found, *wanted])
            for line in _differences(found.get(key), wanted.get(key), f"{name}.{key}".strip("."))
        ]
    return [] if found == wanted else [f"{name} is {show(found)} there but {show(wanted)} here"]
