"""Inference on raw images: the facts that a saved model keeps, and predictions by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from nni_petridish.core.modes import evaluation_mode
from nni_petridish.errors import DataError

if TYPE_CHECKING:
    from nni_petridish.tasks.vision.data import DataSet

FACTS_VERSION = 1
UNKNOWN_NORMALIZATION = (
    "The normalization of the images is unknown: the model is of an earlier version, and its data"
    " are not at hand."
)
_BATCH = 256
DEFAULT_RANGE = (0, 255)


def image_facts(data: DataSet) -> dict[str, Any]:
    """Return the facts of images that a model needs to take raw pixels and name its classes.

    ``normalisation`` has mean and standard deviation of each channel in the units of the pixels,
    ``pixel_range`` the smallest and the largest pixel, ``classes`` a name for each label.
    """
    split: Any = data.train
    return {
        "version": FACTS_VERSION,
        "normalisation": {"mean": split.mean.tolist(), "std": split.std.tolist()},
        "pixel_range": [DEFAULT_RANGE[0], data.largest_pixel],
        "classes": list(data.classes) or [str(label) for label in range(data.num_classes)],
    }


class ImagePredictor:
    """Predictions of a classifier for raw images.

    Parameters
    ----------
    net
        The network; it takes normalized images.
    image_shape
        Channels, height and width of its images.
    facts
        The facts of its `SavedModel`, see `image_facts`.
    """

    def __init__(
        self, net: nn.Module, image_shape: Sequence[int], facts: Mapping[str, Any]
    ) -> None:
        self._net = net
        self._shape = tuple(int(size) for size in image_shape)
        self._statistics = facts.get("normalisation")
        self._range = tuple(facts.get("pixel_range") or DEFAULT_RANGE)
        self._classes = facts.get("classes")

    def __call__(self, images: Any, *, names: bool = False) -> Tensor | list[str]:
        """Return the class of each image.

        Parameters
        ----------
        images
            Raw pixels, whole numbers or floats of the same range as the training images (0 to 255;
            0 to 16 for digits), as a tensor, an array or nested lists: (n, channels, height,
            width), (n, height, width) for one channel, or one image.
        names
            Whether to return the names of the classes instead of their labels.

        Returns
        -------
        Tensor or list of str
            The labels, int64 of shape (n,), or a list of n names.
        """
        normalized = self._normalized(images)
        device = next(self._net.parameters()).device
        with torch.no_grad(), evaluation_mode(self._net):
            parts = [self._net(part.to(device)).argmax(1).cpu() for part in normalized]
        labels = torch.cat([torch.empty(0, dtype=torch.int64), *parts])
        if not names:
            return labels
        return [self._name(label) for label in labels.tolist()]

    def _name(self, label: int) -> str:
        return str(self._classes[label] if self._classes else label)

    def _normalized(self, images: Any) -> list[Tensor]:
        """Return normalized images in batches; raise `DataError` unless they are raw pixels."""
        if self._statistics is None:
            raise DataError(UNKNOWN_NORMALIZATION)
        pixels = self._in_form(_numbers(images))
        self._check_range(pixels)
        mean, std = (
            torch.tensor(self._statistics[key], dtype=torch.float32).view(1, -1, 1, 1)
            for key in ("mean", "std")
        )
        batches = pixels.split(_BATCH) if len(pixels) else ()
        return [(part.float() - mean) / std for part in batches]

    def _in_form(self, images: Tensor) -> Tensor:
        """Return images as (n, channels, height, width)."""
        channels, height, width = self._shape
        shape = tuple(images.shape)
        if shape[-2:] == (height, width):
            if images.dim() == 4 and shape[1] == channels:
                return images
            if images.dim() == 3 and shape[0] == channels != 1:
                return images[None]
            if channels == 1 and images.dim() in (2, 3):
                return images.reshape(-1, 1, height, width)
        flat = f" or (n, {height}, {width})" if channels == 1 else ""
        raise DataError(
            f"images must have the shape (n, {channels}, {height}, {width}){flat} but got {shape}."
        )

    def _check_range(self, pixels: Tensor) -> None:
        """Refuse what can be no raw pixels: scaled or normalized images would predict nonsense."""
        if not pixels.numel():
            return
        low, high = self._range
        smallest, largest = float(pixels.min()), float(pixels.max())
        allowed = f"images must be raw pixels from {low:g} to {high:g}"
        for value in (smallest, largest):
            if not low <= value <= high:
                raise DataError(f"{allowed} but got {value:g}.")
        if pixels.is_floating_point() and 0 < largest <= 1 < high:
            raise DataError(
                f"{allowed} but the largest is {largest:g}: multiply images of 0 to 1 by {high:g}."
            )


def _numbers(images: Any) -> Tensor:
    """Return images as a tensor on the CPU."""
    try:
        found = images if isinstance(images, Tensor) else torch.as_tensor(np.asarray(images))
    except (TypeError, ValueError) as error:
        raise DataError(f"images must be numbers: {error}.") from None
    return found.detach().cpu()
