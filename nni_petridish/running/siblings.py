"""Architectures that were grown from the same parent before.

Two growths of one parent often select the same shortcuts. Growths that run at the same time see
each other's selections through a file in their work folders.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nni_petridish._support.reading import read_json
from nni_petridish.core.genotype import Genotype
from nni_petridish.errors import GalleryError, GenotypeError
from nni_petridish.gallery.files import seal, unseal, write_file
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.gallery.locks import file_lock
from nni_petridish.running.worker import LOST_SECONDS, PULSE_FILE
from nni_petridish.search.records import Growth

_log = logging.getLogger(__name__)

SELECTED = "selected.json"


def select_new(
    gallery: Gallery, growth: Growth, folder: Path, select: Callable[[list[Genotype]], Genotype]
) -> None:
    """Let a growth select an architecture, and record it in its work folder.

    Parameters
    ----------
    gallery, growth
        The growth and its gallery.
    folder
        The work folder of the growth. A growth that is continued selects what it has selected
        before.
    select
        Selects an architecture that is not among the given ones, and returns it.
    """
    path = folder / SELECTED
    before = _read(path, growth.id)
    with file_lock(gallery.folder / ".selection.lock"):
        if before is None:
            _forget_training(path)
            taken = [*_finished(gallery, growth), *_running(growth, folder)]
        else:
            taken = before["taken"]
        genotype = select([Genotype.from_dict(one) for one in taken])
        record = {"id": growth.id, "parent": growth.parent, "genotype": genotype.to_dict()}
        write_file(path, seal({**record, "taken": taken}))


def _forget_training(path: Path) -> None:
    """Remove the checkpoint of a training whose selection is lost: another one may be made now."""
    trained = path.with_name("final")
    if trained.exists():
        _log.warning("%s is missing or damaged: the training after it starts anew.", path)
        shutil.rmtree(trained, ignore_errors=True)


def _finished(gallery: Gallery, growth: Growth) -> Iterator[dict[str, Any]]:
    """Yield the genotypes of the parent's other children, as plain data."""
    for event in gallery.journal.read_all():
        if event["event"] == "model" and event["growth"]["parent"] == growth.parent:
            try:
                yield gallery.load_documents(event["id"])["genotype"]
            except GalleryError:
                continue  # quarantined or damaged, and so no model


def _running(growth: Growth, own: Path) -> Iterator[dict[str, Any]]:
    """Yield what the running growths of the same parent have selected."""
    for path in sorted(own.parent.glob(f"*/{SELECTED}")):
        folder = path.parent
        if folder != own and folder.name.rsplit("-", 1)[0] != growth.id and _is_alive(folder, own):
            found = _read(path, folder.name.rsplit("-", 1)[0])
            if found is not None and found["parent"] == growth.parent:
                yield found["genotype"]


def _is_alive(folder: Path, own: Path) -> bool:
    """Return whether the worker of a growth lives, by the clock of the file system."""
    try:
        now, then = ((one / PULSE_FILE).stat().st_mtime for one in (own, folder))
    except OSError:
        return False
    return now - then < LOST_SECONDS


def _read(path: Path, id: str) -> dict[str, Any] | None:
    """Read the selection of a growth; None if there is none, or none that is sound and its own."""
    try:
        record = unseal(read_json(path), path)
        if record.get("id", id) != id:  # files of earlier versions have no id
            return None
        Genotype.from_dict(record["genotype"])
        return {name: record[name] for name in ("parent", "genotype", "taken")}
    except (OSError, ValueError, KeyError, TypeError, GalleryError, GenotypeError):
        return None
