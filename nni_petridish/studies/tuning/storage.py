"""Storage of a study: a SQLite file, any database that SQLAlchemy knows, or a journal file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection

from nni_petridish.errors import ConfigError
from nni_petridish.gallery.description import find_differences
from nni_petridish.gallery.locks import file_lock
from nni_petridish.search.ranges import quiet
from nni_petridish.search.records import plain
from nni_petridish.studies.tuning.section import Dimension
from nni_petridish.studies.tuning.settings import Tuning

IDENTITY = "petridish"
"""The attribute of a study with the settings that its trials share."""
LOCK_FILE = ".study.lock"
_JOURNAL = "journal:"
_BUSY_SECONDS = 60.0


def open_study(
    tuning: Tuning, create: bool = True, storage: BaseStorage | None = None
) -> optuna.Study:
    """Open or create the study; raise `ConfigError` if that fails.

    Parameters
    ----------
    tuning
        Settings of the study.
    create
        Whether to create a study that is not there.
    storage
        The storage, in place of the one that the settings name.
    """
    if not create and not tuning.folder.is_dir():
        raise ConfigError(f"There is no study yet: {tuning.folder} does not exist.")
    with _made(tuning.folder):
        return _open_in_folder(tuning, create, storage)


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make a folder; if the block raises, remove what was made and is still empty."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}.") from None
    try:
        yield
    except ConfigError:
        if missing:
            with suppress(OSError):
                (folder / LOCK_FILE).unlink()
        for path in missing:
            with suppress(OSError):  # another process is using it
                path.rmdir()
        raise


def _open_in_folder(tuning: Tuning, create: bool, storage: BaseStorage | None) -> optuna.Study:
    section = tuning.section
    directions = [StudyDirection.MINIMIZE] * (2 if section.multi_objective else 1)
    # Two processes that make the same tables, or the same study, at once would disturb each other.
    with file_lock(tuning.folder / LOCK_FILE), quiet():
        storage = storage or open_storage(tuning.storage)
        names = optuna.get_all_study_names(storage)
        if section.study not in names and not create:
            known = ", ".join(map(repr, names)) or "none"
            raise ConfigError(f"There is no study {section.study!r} in the storage but {known}.")
        study = optuna.create_study(
            storage=storage,
            study_name=section.study,
            directions=directions,
            load_if_exists=True,
        )
        _check_identity(study, plain(tuning.identity()))
    return study


def open_storage(url: str) -> BaseStorage:
    """Open a storage by its URL; ``journal:FILE`` is a journal file."""
    try:
        if url.startswith(_JOURNAL):
            path = Path(url[len(_JOURNAL) :]).expanduser()
            return JournalStorage(JournalFileBackend(str(path)))
        if _is_forgotten(url):
            raise ValueError("a database in memory is gone when its process ends")
        # SQLite gives up after 5 s if another process is writing.
        waits = {"connect_args": {"timeout": _BUSY_SECONDS}} if url.startswith("sqlite") else {}
        return RDBStorage(url, engine_kwargs=waits)
    except Exception as error:  # whatever a database driver may raise
        reason = _reason(error)
        raise ConfigError(f"storage {_shown(url)} cannot be opened: {reason}.") from None


def distributions_of(space: dict[str, Dimension]) -> dict[str, BaseDistribution]:
    """Return the space as Optuna knows it."""
    return {name: _distribution(dimension) for name, dimension in space.items()}


def _distribution(dimension: Dimension) -> BaseDistribution:
    if dimension.choices:
        return CategoricalDistribution(dimension.choices)
    assert dimension.low is not None
    assert dimension.high is not None
    if dimension.is_whole:
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.log)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log)


def _check_identity(study: optuna.Study, wanted: dict[str, Any]) -> None:
    found = study.user_attrs.get(IDENTITY)
    if found is None:
        if study.get_trials(deepcopy=False):
            raise ConfigError(f"The study {study.study_name!r} is not one of Petridish.")
        study.set_user_attr(IDENTITY, wanted)
        return
    lines = find_differences(found, wanted)
    if lines:
        raise ConfigError(f"The study {study.study_name!r} is of another kind: {'; '.join(lines)}.")


def _is_forgotten(url: str) -> bool:
    import sqlalchemy

    parts = sqlalchemy.make_url(url)
    return parts.get_backend_name() == "sqlite" and parts.database in (None, "", ":memory:")


def _reason(error: BaseException) -> str:
    """Return the innermost cause in one line: drivers wrap it several times."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    return text.removesuffix(".")


def _shown(url: str) -> str:
    """Return the URL without its password."""
    import sqlalchemy

    try:
        return sqlalchemy.make_url(url).render_as_string(hide_password=True)
    except sqlalchemy.exc.ArgumentError:
        return url
