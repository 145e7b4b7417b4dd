"""Image sets by name, split as in the paper.

The last k training images are the validation set, the test set is apart. Nothing is downloaded:
if a set is missing, the error says how to get it. Pixels are normalized per channel by
the mean and standard deviation of the training part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nni_petridish.errors import DataError
from nni_petridish.tasks.vision import class_names, teacher
from nni_petridish.tasks.vision.folder import (
    check_folder,
    classes_of,
    find_image_size,
    has_more_images,
    image_files,
    load_folder,
)
from nni_petridish.tasks.vision.image_files import Arrays, read_cifar, read_digits, read_mnist
from nni_petridish.tasks.vision.npz import describe_npz, read_npz, training_images

if TYPE_CHECKING:
    import numpy as np

    from nni_petridish.tasks.vision.splits import Split

DEFAULT_ROOT = Path("data")


class Description(NamedTuple):
    """The properties of a data set that a network depends on."""

    image_shape: tuple[int, int, int]
    num_classes: int


@dataclass(frozen=True, eq=False)
class DataSet:
    """A data set in its three parts.

    Attributes
    ----------
    name
        The name it was loaded by.
    image_shape
        Channels, height, width.
    num_classes
        Labels are 0 ... num_classes - 1.
    train, validation, test
        Each a `Split`; `validation` is empty (and false) if no image was set aside for it.
    classes
        A name for each label; empty if they are unknown.
    largest_pixel
        The largest value that a pixel can have; the smallest is 0.
    """

    name: str
    image_shape: tuple[int, int, int]
    num_classes: int
    train: Split
    validation: Split
    test: Split
    classes: tuple[str, ...] = ()
    largest_pixel: int = 255


@dataclass(frozen=True)
class _Source:
    """Place and reader of a data set that fits in memory."""

    image_shape: tuple[int, int, int]
    classes: tuple[str, ...]
    validation: int
    read: Callable[[Path, int], Arrays]
    folder: str = ""
    files: tuple[str, ...] = ()
    torchvision: str = ""
    largest_pixel: int = 255
    images: int = 0

    def check(self, root: Path) -> None:
        missing = [f for f in self.files if not (root / self.folder / f).is_file()]
        if missing:
            command = (
                f'python -c "from torchvision.datasets import {self.torchvision} as D; '
                f'D({str(root)!r}, download=True)"'
            )
            raise DataError(
                f"{root / self.folder} must hold {missing[0]} but does not; get it with: {command}"
            )

    def reduced_shape(self, size: int | None) -> tuple[int, int, int]:
        """Return the shape of images with this height; raise unless whole squares make a pixel."""
        channels, height, width = self.image_shape
        if size is None:
            return self.image_shape
        if size < 1 or height % size or width % (height // size):
            raise DataError(f"image_size must divide {height}, the images' own, but got {size}.")
        return channels, size, width * size // height


def load_data(
    name: str,
    root: str | Path | None = None,
    *,
    validation: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    image_size: int | None = None,
    workers: int = 4,
) -> DataSet:
    """Load a data set.

    Parameters
    ----------
    name
        ``digits`` (embedded in scikit-learn), ``teacher`` (labeled by a random network, see
        `tasks.vision.teacher`), ``mnist``, ``fashion_mnist``, ``cifar10``,
        ``cifar100`` (torchvision's layouts), ``image_folder`` (ImageNet's: root/train/CLASS/*,
        and root/val/CLASS/*, the test set) or ``npz`` (a file, see `tasks.vision.npz`).
    root
        The folder that torchvision's classes are given, ``data`` by default; for npz the file.
    validation
        The number of training images, the last ones, to set aside; 0 trains on all (retraining).
        Default: 5000 as in the paper; 300 for digits (1197 remain, 300 are the test set); a tenth
        for npz; 0 for image_folder, whose root/val is the test set.
    limit
        Train on the first `limit` of the remaining training images only, for short searches.
    seed
        Orders the training images where they come sorted, and so decides which are "the last":
        digits come by writer, image_folder by class, npz maybe too. The other sets keep their
        published order, and no test set depends on it.
    image_size
        The side of the images. For image_folder, that of the square crops (default: that of the
        images, at most 224). The other sets are reduced by averaging over squares of pixels, for
        short searches: 16 halves the sides of CIFAR-10.
    workers
        For image_folder: number of reading processes.

    Examples
    --------
    >>> data = load_data("digits")
    >>> data.image_shape, len(data.train), len(data.validation), len(data.test)
    ((1, 8, 8), 1197, 300, 300)
    """
    root = check_data(name, root)
    for what, value, least in (("validation", validation, 0), ("limit", limit, 1)):
        if value is not None and value < least:
            raise DataError(f"{what} must be at least {least} but got {value}.")
    if name == "image_folder":
        return _load_folder(root, validation or 0, limit, seed, image_size, workers)
    return _load_arrays(name, root, validation, limit, seed, image_size)


def check_data(name: str, root: str | Path | None = None) -> Path:
    """Check, without loading, that a set is known and its files are there; return its folder."""
    root = DEFAULT_ROOT if root is None else Path(root).expanduser()
    if name == "image_folder":
        check_folder(root)
    else:
        _source(name, root).check(root)
    return root


def check_validation(name: str, root: str | Path | None, validation: int) -> None:
    """Raise `DataError` unless training images remain if so many are set aside."""
    root = check_data(name, root)
    if name == "image_folder" and has_more_images(root / "train", validation):
        return  # millions of images are not counted
    images = count_training_images(name, root)
    _kept(images, validation, None)


def describe(
    name: str, root: str | Path | None = None, image_size: int | None = None
) -> Description:
    """Return image shape and number of classes without loading.

    For image_folder and npz they are found in `root`.

    Examples
    --------
    >>> describe("cifar10")
    Description(image_shape=(3, 32, 32), num_classes=10)
    """
    if name == "image_folder":
        root = check_data(name, root)
        size = image_size or find_image_size(root)
        return Description((3, size, size), len(classes_of(root / "train")))
    source = _source(name, DEFAULT_ROOT if root is None else Path(root).expanduser())
    return Description(source.reduced_shape(image_size), len(source.classes))


def count_training_images(name: str, root: str | Path | None = None) -> int:
    """Count the training images without loading, those for validation included."""
    root = check_data(name, root)
    if name == "image_folder":
        return sum(1 for _ in image_files(root / "train"))
    return _source(name, root).images


def _source(name: str, root: Path) -> _Source:
    if name == "npz":
        shape, classes, _ = describe_npz(root)
        images = training_images(root)
        return _Source(shape, classes, max(1, images // 10), read_npz, images=images)
    try:
        return _SOURCES[name]
    except KeyError:
        raise DataError(f"data must be one of {', '.join(DATA_NAMES)} but got {name!r}.") from None


def _kept(images: int, validation: int, limit: int | None) -> int:
    """Return the number of training images that are used, the first ones."""
    if validation >= images:
        raise DataError(f"validation must be below {images} (all images) but got {validation}.")
    return min(images - validation, limit or images)


def _load_arrays(
    name: str,
    root: Path,
    validation: int | None,
    limit: int | None,
    seed: int,
    image_size: int | None,
) -> DataSet:
    import torch

    from nni_petridish.tasks.vision.splits import TensorSplit, pixel_statistics

    source = _source(name, root)
    validation = source.validation if validation is None else validation
    images, labels, test_images, test_labels = source.read(root, seed)
    for array, wanted in ((images, labels), (test_images, test_labels)):
        if array.shape[1:] != source.image_shape or len(array) != len(wanted):
            raise DataError(
                f"{root / source.folder} must hold {source.image_shape} images, one per label, "
                f"but holds {array.shape[1:]} images, {len(array)} for {len(wanted)} labels."
            )

        if len(wanted) and int(wanted.max()) >= len(source.classes):
            raise DataError(
                f"{root / source.folder} must hold labels below {len(source.classes)} but holds"
                f" {int(wanted.max())}."
            )

    shape = source.reduced_shape(image_size)

    def tensors(pixels: np.ndarray, targets: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        reduced = _averaged(pixels, shape[1:])
        x = torch.from_numpy(reduced).contiguous(memory_format=torch.channels_last)
        return x, torch.from_numpy(targets.astype("int64"))

    kept, last = _kept(len(labels), validation, limit), len(labels) - validation
    train = tensors(images[:kept], labels[:kept])
    mean, std = pixel_statistics(train[0])
    return DataSet(
        name=name,
        image_shape=shape,
        num_classes=len(source.classes),
        train=TensorSplit(*train, mean, std),
        validation=TensorSplit(*tensors(images[last:], labels[last:]), mean, std),
        test=TensorSplit(*tensors(test_images, test_labels), mean, std),
        classes=source.classes,
        largest_pixel=source.largest_pixel,
    )


def _averaged(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return images (N, C, H, W) reduced to a size, each pixel the mean of a square."""
    n, channels, height, width = pixels.shape
    if (height, width) == size:
        return pixels
    factor = height // size[0]
    squares = pixels.reshape(n, channels, size[0], factor, size[1], factor)
    return squares.mean(axis=(3, 5)).round().astype(pixels.dtype)


def _load_folder(
    root: Path,
    validation: int,
    limit: int | None,
    seed: int,
    image_size: int | None,
    workers: int,
) -> DataSet:
    from torch.utils.data import Subset

    size = image_size or find_image_size(root)
    order, classes, parts = load_folder(root, size, seed, workers)
    kept, last = _kept(len(order), validation, limit), len(order) - validation

    def some(name: str, chosen: list[int]) -> Split:
        whole: Any = parts[name]
        split: Split = replace(whole, dataset=Subset(whole.dataset, chosen))
        return split

    return DataSet(
        name="image_folder",
        image_shape=(3, size, size),
        num_classes=len(classes),
        train=some("train", order[:kept]),
        validation=some("unchanged", order[last:]),
        test=parts["test"],
        classes=classes,
    )


def _mnist(dataset: str, classes: tuple[str, ...]) -> _Source:
    files = tuple(
        f"{part}-{what}-ubyte"
        for part in ("train", "t10k")
        for what in ("images-idx3", "labels-idx1")
    )
    read = partial(read_mnist, dataset)
    return _Source((1, 28, 28), classes, 5000, read, f"{dataset}/raw", files, dataset, images=60000)


def _cifar(
    classes: tuple[str, ...], folder: str, train: tuple[str, ...], test: tuple[str, ...], key: str
) -> _Source:
    read = partial(read_cifar, folder, train, test, key)
    return _Source(
        (3, 32, 32), classes, 5000, read, folder, train + test, f"CIFAR{len(classes)}", images=50000
    )


_SOURCES = {
    "digits": _Source(
        (1, 8, 8), class_names.DIGITS, 300, read_digits, largest_pixel=16, images=1497
    ),
    "mnist": _mnist("MNIST", class_names.DIGITS),
    "fashion_mnist": _mnist("FashionMNIST", class_names.FASHION_MNIST),
    "cifar10": _cifar(
        class_names.CIFAR10,
        "cifar-10-batches-py",
        tuple(f"data_batch_{i}" for i in range(1, 6)),
        ("test_batch",),
        "labels",
    ),
    "cifar100": _cifar(
        class_names.CIFAR100, "cifar-100-python", ("train",), ("test",), "fine_labels"
    ),
    "teacher": _Source(
        (1, teacher.SIZE, teacher.SIZE),
        tuple(map(str, range(teacher.CLASSES))),
        2000,
        teacher.read_teacher,
        images=teacher.TRAINING,
    ),
}

#: The names `load_data` knows.
DATA_NAMES = (*_SOURCES, "image_folder", "npz")
