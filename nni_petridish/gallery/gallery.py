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

import logging
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nni_petridish.errors import DamagedModelError, GalleryError, SearchError
from nni_petridish.gallery.description import (
    DESCRIPTION,
    make_description,
    read_description,
    refuse_differences,
    refuse_other_folders,
    write_description,
)
from nni_petridish.gallery.files import (
    Sweep,
    in_one_line,
    make_folder,
    refuse_link,
    seal,
    sync_folder,
    write_file,
    write_folder,
)
from nni_petridish.gallery.journal import Journal
from nni_petridish.gallery.locks import ExclusiveLock
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
from nni_petridish.search.records import Growth, Outcome, growth_number

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)
OWN_FOLDERS = ("models", "quarantine", "work", "trunks", "final", "pictures")
"""The folders of a gallery; none of them may be a link."""


class Gallery:
    """An existing gallery; `Gallery.create` creates one.

    Parameters
    ----------
    folder
        The folder of the gallery.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        description = read_description(self.folder)
        if description is None:
            raise GalleryError(f"There is no gallery in {self.folder}: gallery.json is missing.")
        self.space: dict[str, Any] = description["space"]
        self.settings: dict[str, Any] = description["settings"]
        self.journal = Journal(self.folder / "journal.jsonl")
        self._models = self.folder / "models"
        self._quarantine = self.folder / "quarantine"
        self._work = self.folder / "work"
        for name in OWN_FOLDERS:
            refuse_link(self.folder / name)
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
        wanted = make_description(space, settings)
        found = read_description(folder)
        with in_one_line(f"make a gallery in {folder}"):
            if found is None:
                refuse_other_folders(folder)
                # Private to the user: its workers do as its files say.
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                found = write_description(folder, wanted)
            refuse_differences(folder, found, wanted)
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
        found = read_description(folder)
        if found is not None:
            refuse_differences(folder, found, make_description(space, settings))
            return
        refuse_other_folders(folder)
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        if not existing.is_dir():
            raise GalleryError(f"Cannot make a gallery in {folder}: {existing} is not a folder.")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise GalleryError(f"Cannot make a gallery in {folder}: {existing} is not writable.")

    def change_settings(self, **changes: Any) -> None:
        """Change the description of a gallery that has no model yet."""
        self.settings = {**self.settings, **changes}
        document = make_description(self.space, self.settings)
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
        self.record_again(id)
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
        self.record_quarantine(id, reason)
        return True

    def _repr_html_(self) -> str:
        """Return the report for a notebook."""
        return notebook_html(self.folder)

    # Running growths.

    def work_folder(self, id: str, attempt: int) -> Path:
        """Create and return the folder for the checkpoints of a running growth."""
        folder = self._work / f"{_checked(id)}-{attempt:d}"
        refuse_link(folder)
        make_folder(folder)
        return folder

    def remove_work(self, id: str) -> None:
        """Remove the checkpoints of all attempts of a growth."""
        for folder in self._work.glob(f"{_checked(id)}-*"):
            for _ in range(2):  # a heartbeat may write into it while it is being removed
                shutil.rmtree(folder, ignore_errors=True)

    def worked_on(self) -> set[str]:
        """Return the ids of the growths that have work folders."""
        with in_one_line(f"read {self._work}"):
            return {name.rsplit("-", 1)[0] for name in os.listdir(self._work)}

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

    # The journal.

    def model_line(self, id: str) -> Event:
        """Return the event of a model by its own documents."""
        return _model_event(id, self.load_documents(id))

    def record_model(self, id: str) -> None:
        """Make sure that a model is in the journal; its writer may have failed after saving it."""
        if not any(e["event"] == "model" and e["id"] == id for e in self.journal.read_all()):
            self.record_again(id)

    def record_again(self, id: str) -> bool:
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

    def record_quarantine(self, id: str, reason: str) -> None:
        """Record in the journal that a model is quarantined, and say so."""
        self.journal.append(quarantine_event(id, reason))
        _log.warning("Model %s is quarantined and the search goes on without it: %s", id, reason)

    def sweep(self) -> list[str]:
        """Remove temporary files that dead processes left behind; return their names."""
        return self._sweep.run()

    # Helpers.

    def _is_taken(self, id: str) -> bool:
        return self.has_model(id) or (self._quarantine / id).exists()

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
        if folder.is_symlink():
            raise DamagedModelError(f"Model {id} is damaged: its folder is a link.")
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
