"""Augmentation of whole batches on the device they are on: random crop, flip and cutout.

Functions first, with the random numbers as arguments; `Augmentation` draws them for a whole epoch
at once, on the CPU, so that every device sees the same and a step draws nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


def shift_and_flip(
    images: Tensor, rows: Tensor, columns: Tensor, flips: Tensor | None, padding: int
) -> Tensor:
    """Crop images padded with zeros on all sides back to their size, then mirror some.

    Parameters
    ----------
    images
        (N, C, H, W), any type; the result has its NHWC memory order (channels_last).
    rows, columns
        (N,), first row and column of each crop in the padded image, 0 ... 2·padding.
    flips
        (N,) booleans, which images to mirror left to right; None mirrors none.
    padding
        Zeros added on each side.
    """
    n, channels, height, width = images.shape
    device = images.device
    pixels = images.permute(0, 2, 3, 1)
    if padding:
        pixels = F.pad(pixels, (0, 0, padding, padding, padding, padding))
    _, tall, wide, _ = pixels.shape
    across = torch.arange(width, device=device).expand(n, width)
    if flips is not None:
        across = torch.where(flips[:, None], width - 1 - across, across)
    # Shift and mirror are one gather, and over flat positions a fast one.
    first = torch.arange(n, device=device)[:, None] * (tall * wide)
    down = first + (rows[:, None] + torch.arange(height, device=device)) * wide
    positions = down[:, :, None] + (columns[:, None] + across)[:, None, :]
    chosen = pixels.reshape(-1, channels).index_select(0, positions.view(-1))
    return chosen.view(n, height, width, channels).permute(0, 3, 1, 2)


def cutout(images: Tensor, rows: Tensor, columns: Tensor, size: int) -> Tensor:
    """Set a square of `size` around the pixel (row, column) of each image to zero, in place.

    The square may stick out of the image, as in the cutout paper; of an even size, the center is
    the first pixel of its second half.
    """
    _, _, height, width = images.shape
    down = torch.arange(height, device=images.device) - (rows[:, None] - size // 2)
    across = torch.arange(width, device=images.device) - (columns[:, None] - size // 2)
    inside_rows = (down >= 0) & (down < size)
    inside_columns = (across >= 0) & (across < size)
    return images.masked_fill_((inside_rows[:, :, None] & inside_columns[:, None, :])[:, None], 0)


class Draws(NamedTuple):
    """The random numbers of one epoch, one row per image in the order of the batches."""

    crops: Tensor | None
    flips: Tensor | None
    holes: Tensor | None


@dataclass(frozen=True)
class Augmentation:
    """Random crop, then flip, then normalization, then cutout: zero is black, then the mean."""

    crop_padding: int = 0
    flip: bool = False
    cutout: int = 0

    def draw(
        self, images: int, size: tuple[int, int], generator: torch.Generator, device: torch.device
    ) -> Draws:
        """Draw for `images` images of height and width `size`."""
        crops = flips = holes = None
        if self.crop_padding:
            shape = (2, images)
            crops = torch.randint(2 * self.crop_padding + 1, shape, generator=generator).to(device)
        if self.flip:
            flips = (torch.rand(images, generator=generator) < 0.5).to(device)
        if self.cutout:
            sides = [torch.randint(side, (images,), generator=generator) for side in size]
            holes = torch.stack(sides).to(device)
        return Draws(crops, flips, holes)

    def apply(
        self, images: Tensor, draws: Draws, start: int, normalize: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Augment and normalize a batch of raw images whose first one is the epoch's `start`-th."""
        here = slice(start, start + len(images))
        if draws.crops is not None or draws.flips is not None:
            flips = None if draws.flips is None else draws.flips[here]
            if draws.crops is None:
                rows = columns = torch.zeros(len(images), dtype=torch.int64, device=images.device)
            else:
                rows, columns = draws.crops[:, here]
            images = shift_and_flip(images, rows, columns, flips, self.crop_padding)
        images = normalize(images)
        if draws.holes is not None:
            images = cutout(images, draws.holes[0, here], draws.holes[1, here], self.cutout)
        return images
