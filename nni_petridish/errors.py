"""The exceptions of this package: one family, so that one ``except`` catches them all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def show(value: object, length: int = 200) -> str:
    """Return the repr of a value for an error message, cut to a length."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more than 4300 digits
        text = "a number with thousands of digits"
    return text if len(text) <= length else text[: length - 3] + "..."


class PetridishError(Exception):
    """Base of every error raised on purpose by this package; its text is one clear line."""


class GenotypeError(PetridishError):
    """A genotype is malformed, or does not fit the space it is built in."""


class MissingPackageError(PetridishError, ImportError):
    """An optional package is missing; an `ImportError`, which code that tries imports expects."""


class ConfigError(PetridishError):
    """A setting has a value that is not allowed."""


class DataError(PetridishError):
    """A data set is unknown, missing or does not fit."""


class GrowthError(PetridishError):
    """A network cannot be grown the way it was asked to."""


class ExhaustedError(GrowthError):
    """Every architecture that a growth could select was grown from its parent already."""


class RejectedError(GrowthError):
    """A growth would not lower the loss on held-out data, so it was not made: no failure."""


class GalleryError(PetridishError):
    """A gallery, or a model in it, is missing, damaged or of another search."""


class DamagedModelError(GalleryError):
    """The files of a model are damaged."""


class StorageError(GalleryError):
    """The disk of a gallery is full, read-only, broken or gone: a fault of no growth.

    Whoever meets it waits and tries again, see `nni_petridish.running.patience`.
    """


class SearchError(PetridishError):
    """An event contradicts the state of a search, or a search found no model."""


class TrainingError(PetridishError):
    """Training broke down, for instance by a loss that is not finite."""


class WorkerError(PetridishError):
    """All processes that shared a piece of work crashed."""


class Interrupted(PetridishError):
    """Training was stopped on request; the last checkpoint is whole."""


class Orphaned(PetridishError):
    """The front that handed out a growth is gone; the next one will hand it out again."""


EXTRAS = {
    "nni": ("nni", "pytorch_lightning", "pkg_resources", "requests"),
    "lightning": ("pytorch_lightning",),
    "export": ("onnx", "onnxscript", "onnxruntime"),
}
"""The modules of each extra of the package (``setup.cfg``) that may be missing."""


@contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Raise a `MissingPackageError` if an import in this context fails for want of an extra.

    Parameters
    ----------
    extra
        A key of `EXTRAS`.
    what
        The part of the package that needs it, for the message.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS[extra]:
            raise
        raise MissingPackageError(
            f"{what} needs the package {missing}, which is missing:"
            f' pip install "nni-petridish[{extra}]".'
        ) from None
