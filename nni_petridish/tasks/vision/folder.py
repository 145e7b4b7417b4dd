"""Images in folders, one for each class: found without reading them, and loaded."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nni_petridish.errors import DataError

if TYPE_CHECKING:
    from nni_petridish.tasks.vision.splits import Split

LARGEST_DEFAULT = 224
"""The usual side of the crops of photographs; smaller images keep their size."""
_SAMPLE = 64
"""Images that are looked at to find their size."""

#: ImageNet's well-known statistics; measuring 1.2 million JPEGs first would take an hour.
_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
#: torchvision's ImageFolder reads these.
_SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


def check_folder(root: Path) -> None:
    """Raise `DataError` unless ``root`` has folders of images for training and test."""
    for part in ("train", "val"):
        if not classes_of(root / part):
            raise DataError(
                f"{root / part} must hold one folder of images per class but does not; put "
                f"your images there (ImageNet: register at https://image-net.org/download)."
            )


def classes_of(folder: Path) -> list[str]:
    """Return the names of the classes, sorted; none if there is no such folder."""
    if not folder.is_dir():
        return []
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir())


def image_files(folder: Path) -> Iterator[Path]:
    """Yield the images of a folder of classes, one class after the other."""
    for name in classes_of(folder):
        yield from _files(folder / name)


def holds_images(folder: Path) -> bool:
    """Return whether folders in a folder have images; only the first files of each are seen."""
    files = (islice((folder / name).iterdir(), _SAMPLE) for name in classes_of(folder))
    return any(path.suffix.lower() in _SUFFIXES for path in chain.from_iterable(files))


def has_more_images(folder: Path, count: int) -> bool:
    """Return whether a folder of classes has more than so many images; stops counting then."""
    return next(islice(image_files(folder), count, None), None) is not None


def find_image_size(root: Path) -> int:
    """Return the side of the crops that fits the images: theirs, or 224 if they are larger.

    The shorter sides of some images of every class are looked at; the result is their median.
    """
    from PIL import Image

    folder = root / "train"
    names = classes_of(folder)
    each = max(1, _SAMPLE // max(1, len(names)))
    sample = chain.from_iterable(islice(_files(folder / name), each) for name in names[:_SAMPLE])
    sides, unread = [], None
    for path in sample:
        try:
            with Image.open(path) as image:
                sides.append(min(image.size))
        except (OSError, ValueError, Image.DecompressionBombError):
            unread = path  # one among many is named when training meets it
    if not sides and unread is not None:
        raise DataError(f"{folder} must hold images but none can be read, such as {unread}.")
    if not sides:
        return LARGEST_DEFAULT
    return min(LARGEST_DEFAULT, int(statistics.median_low(sides)))


def load_folder(
    root: Path, image_size: int, seed: int, workers: int
) -> tuple[list[int], tuple[str, ...], dict[str, Split]]:
    """Load images in folders.

    Returns
    -------
    tuple
        The order of the training images, the names of the classes, and the images as splits:
        ``train`` augmented, ``unchanged`` the same without augmentation, and ``test``.
    """
    import torch
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    from nni_petridish.tasks.vision.splits import FolderSplit

    # The standard ImageNet augmentation and the standard central crop.
    augmented = transforms.Compose(
        [
            transforms.RandomResizedCrop(image_size),
            transforms.RandomHorizontalFlip(),
            transforms.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4),
            transforms.PILToTensor(),
        ]
    )
    central = transforms.Compose(
        [
            transforms.Resize(image_size * 8 // 7),
            transforms.CenterCrop(image_size),
            transforms.PILToTensor(),
        ]
    )
    try:
        train = ImageFolder(str(root / "train"), augmented, loader=_read_image)
        unchanged = ImageFolder(str(root / "train"), central, loader=_read_image)
        test = ImageFolder(str(root / "val"), central, loader=_read_image)
    except FileNotFoundError as error:  # a class without an image
        raise DataError(f"{root}: {str(error).splitlines()[0]}") from None
    if train.classes != test.classes:
        raise DataError(f"{root}: train and val must hold the same classes but do not.")
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed)).tolist()
    split = partial(
        FolderSplit,
        image_shape=(3, image_size, image_size),
        mean=255 * torch.tensor(_IMAGENET_MEAN),
        std=255 * torch.tensor(_IMAGENET_STD),
        workers=workers,
    )
    parts: dict[str, Split] = {
        "train": split(train),
        "unchanged": split(unchanged),
        "test": split(test),
    }
    return order, tuple(train.classes), parts


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in _SUFFIXES:
            yield path


def _read_image(path: str) -> Any:
    """Read an image in color; `DataError` names a file that is none."""
    from PIL import Image
    from torchvision.datasets.folder import default_loader

    try:
        return default_loader(path)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = "" if str(path) in str(error) else f" ({error})"
        raise DataError(f"{path} cannot be read as an image{reason}: take it away.") from None
