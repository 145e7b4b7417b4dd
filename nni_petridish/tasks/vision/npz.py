"""Images in one ``.npz`` file, as numpy writes it: described by its headers, and read.

The arrays have the names of Keras's files (``x_train``, ``y_train``, ``x_test``, ``y_test``) or of
MedMNIST's (``train_images``, ``train_labels``, ...), or are ``x`` and ``y``, of which a sixth is
the test set. Images are whole numbers from 0 to 255 of shape (n, height, width),
(n, height, width, channels) or (n, channels, height, width).
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nni_petridish.errors import DataError
from nni_petridish.tasks.vision.image_files import Arrays

if TYPE_CHECKING:
    import numpy as np

_TEST_SEED = 0
"""Draws the test set where the file has none; it does not depend on the seed of a search."""
_TEST_SHARE = 6
_NAMES = (
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
    ("x", "y", None, None),
    ("images", "labels", None, None),
)
_CHANNELS = (1, 3, 4)
_CLASSES = "classes"


def check_npz(path: Path) -> None:
    """Raise `DataError` unless the file holds images and labels that can be read."""
    describe_npz(path)


def describe_npz(path: Path) -> tuple[tuple[int, int, int], tuple[str, ...], int]:
    """Return (channels, height, width), the names of the classes and the number of images.

    Of the images only the headers are read.
    """
    import numpy as np

    with _opened(path) as archive:
        images, labels, test, _ = _names(path, archive)
        shapes = {name: _header(archive, name) for name in (images, test) if name is not None}
        targets = _labels(path, archive, labels)
        named = archive[_CLASSES] if _CLASSES in archive.files else None
    for name, (shape, dtype) in shapes.items():
        if dtype.kind not in "ui":
            raise DataError(f"{path}: {name} must be whole numbers from 0 to 255 but is {dtype}.")
        if _form(shape) is None:
            raise DataError(
                f"{path}: {name} must have the shape (n, h, w), (n, h, w, c) or (n, c, h, w) but"
                f" has {shape}."
            )
    count, *rest = shapes[images][0]
    if count != len(targets):
        raise DataError(f"{path} must have a label for each image: {count} and {len(targets)}.")
    channels, height, width = _moved((count, *rest))
    classes = max(int(targets.max(initial=0)) + 1, 2)
    if named is not None and np.ndim(named) == 1 and len(named) >= classes:
        return (channels, height, width), tuple(str(name) for name in named), count
    return (channels, height, width), tuple(str(label) for label in range(classes)), count


def read_npz(path: Path, seed: int) -> Arrays:
    """Read training and test images; ``seed`` orders the training images, which may be sorted."""
    import numpy as np

    describe_npz(path)
    with _opened(path) as archive:
        images, labels, test_images, test_labels = _names(path, archive)
        x, y = _images(path, archive, images), _labels(path, archive, labels)
        if test_images is None:
            order = np.random.default_rng(_TEST_SEED).permutation(len(y))
            cut = max(1, len(y) // _TEST_SHARE)
            test, rest = order[:cut], order[cut:]
            x, y, tests = x[rest], y[rest], (x[test], y[test])
        else:
            tests = (_images(path, archive, test_images), _labels(path, archive, test_labels))
    order = np.random.default_rng(seed).permutation(len(y))
    return x[order], y[order], *tests


def training_images(path: Path) -> int:
    """Return the number of training images, those for validation included."""
    with _opened(path) as archive:
        images, _, test, _ = _names(path, archive)
        count = int(_header(archive, images)[0][0])
    return count if test is not None else count - max(1, count // _TEST_SHARE)


def _opened(path: Path) -> Any:
    import numpy as np

    if not path.is_file():
        raise DataError(f"{path} must be an .npz file but there is none; nothing is downloaded.")
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, zipfile.BadZipFile):
        # numpy's own words for anything that it does not know advise to unpickle it.
        raise DataError(f"{path} is not an .npz file of plain arrays.") from None
    if not isinstance(found, np.lib.npyio.NpzFile):
        raise DataError(f"{path} must be an .npz file but is a single array.")
    return found


def _names(path: Path, archive: Any) -> tuple[str, str, str | None, str | None]:
    for names in _NAMES:
        if all(name is None or name in archive.files for name in names):
            return names
    raise DataError(
        f"{path} must hold x_train, y_train, x_test, y_test (or x and y) but holds"
        f" {', '.join(archive.files) or 'nothing'}."
    )


def _header(archive: Any, name: str) -> tuple[tuple[int, ...], Any]:
    """Return shape and type of an array, without reading it."""
    from numpy.lib import format

    with archive.zip.open(f"{name}.npy") as file:
        version = format.read_magic(file)
        read = format.read_array_header_1_0 if version == (1, 0) else format.read_array_header_2_0
        shape, _, dtype = read(file)
    return shape, dtype


def _images(path: Path, archive: Any, name: str) -> np.ndarray:
    """Return images as (n, channels, height, width)."""
    import numpy as np

    images = _array(path, archive, name)
    if images.size and not 0 <= int(images.min()) <= int(images.max()) <= 255:
        raise DataError(f"{path}: {name} must be pixels from 0 to 255 but has {images.max()}.")
    form = _form(images.shape)
    images = images.astype(np.uint8)
    if form == "nhw":
        return images[:, None]
    return images if form == "nchw" else np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def _labels(path: Path, archive: Any, name: str | None) -> np.ndarray:
    labels = _array(path, archive, str(name))
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "ui" or (labels.size and labels.min() < 0):
        raise DataError(f"{path}: {name} must be one whole number from 0 on for each image.")
    return labels.astype("int64")


def _array(path: Path, archive: Any, name: str) -> np.ndarray:
    try:
        array: np.ndarray = archive[name]
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: {name} cannot be read: {error}.") from None
    return array


def _form(shape: tuple[int, ...]) -> str | None:
    """Return the order of the dimensions; None if the shape is not one of images."""
    if len(shape) == 3:
        return "nhw"
    if len(shape) == 4:
        return "nhwc" if shape[3] in _CHANNELS else "nchw" if shape[1] in _CHANNELS else None
    return None


def _moved(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return channels, height and width of images of this shape."""
    if _form(shape) == "nhw":
        return 1, shape[1], shape[2]
    if _form(shape) == "nhwc":
        return shape[3], shape[1], shape[2]
    return shape[1], shape[2], shape[3]
