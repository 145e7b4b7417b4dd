"""Parts of a data set as batches: in memory as tensors, or on disk behind a DataLoader.

Both kinds hand out raw pixels (uint8) and normalize on the device, so that augmentation sees the
same thing whichever it is, and a quarter of the bytes travel.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from nni_petridish.errors import DataError
from nni_petridish.tasks.distributed import ALONE, World


class Split(Protocol):
    """One part (train, validation or test) of a data set."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        ...

    def __len__(self) -> int:
        """Return the number of images."""
        ...

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return one normalized image and its label, as torch's own loaders expect."""
        ...

    def to(self, device: torch.device) -> Split:
        """Return the split with whatever it keeps in memory on `device`."""
        ...

    def batches(
        self,
        batch_size: int,
        generator: torch.Generator | None = None,
        world: World = ALONE,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield raw images and labels: in order, or shuffled and without a short last batch.

        Each process of a world gets its part of every shuffled batch.
        """
        ...

    def normalize(self, images: Tensor) -> Tensor:
        """Return raw images as floats of mean 0 and standard deviation 1 per channel."""
        ...


def steps_per_epoch(images: int, batch_size: int) -> int:
    """Return the number of training batches in an epoch; a short last batch is left out.

    A batch of one or two images would disturb the batch normalizations. The next epoch has another
    order, so no image is always left out. A set smaller than one batch is one batch.
    """
    return max(1, images // batch_size)


def _own_parts(order: Tensor, batch_size: int, world: World) -> Iterator[Tensor]:
    """Yield this process's part of every batch; the parts are of equal size."""
    size = world.share(batch_size)
    for step in range(steps_per_epoch(len(order), batch_size)):
        start = step * batch_size + world.rank * size
        yield order[start : start + size]


def pixel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation per channel, in the units of the stored pixels."""
    channels = images.shape[1]
    if images.numel() == 0:
        return torch.zeros(channels), torch.ones(channels)
    # A histogram is exact and needs no float copy of the whole set.
    means, stds = [], []
    for channel in range(channels):
        counts = torch.bincount(images[:, channel].flatten().int(), minlength=256).double()
        values = torch.arange(counts.numel(), dtype=torch.float64)
        mean = (counts * values).sum() / counts.sum()
        variance = (counts * (values - mean) ** 2).sum() / counts.sum()
        means.append(float(mean))
        stds.append(float(variance.sqrt()))
    # A channel that never changes carries no information: leave it at zero, not at infinity.
    return torch.tensor(means), torch.tensor([std if std > 0 else 1.0 for std in stds])


class _Normalizing:
    """Normalization by mean and standard deviation per channel."""

    mean: Tensor
    std: Tensor

    def normalize(self, images: Tensor) -> Tensor:
        """Return raw images as floats of mean 0 and standard deviation 1 per channel."""
        shape = (1, -1, 1, 1)
        return images.to(torch.float32).sub_(self.mean.view(shape)).div_(self.std.view(shape))

    def normalise(self, images: Tensor) -> Tensor:
        """Call `normalize`, the new name of this method."""
        warnings.warn("normalise is now normalize", DeprecationWarning, stacklevel=2)
        return self.normalize(images)


@dataclass(frozen=True, eq=False)
class TensorSplit(_Normalizing):
    """Images held in memory: a batch is one gather, without worker processes.

    Parameters
    ----------
    images
        uint8, (N, C, H, W), best in channels_last memory order.
    labels
        int64, (N,).
    mean, std
        Per channel, of the training part, in the units of `images`.
    """

    images: Tensor
    labels: Tensor
    mean: Tensor
    std: Tensor

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        _, channels, height, width = self.images.shape
        return channels, height, width

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.normalize(self.images[index][None])[0], int(self.labels[index])

    def to(self, device: torch.device) -> TensorSplit:
        """Return the split with its tensors on `device`."""
        tensors = (self.images, self.labels, self.mean, self.std)
        return TensorSplit(*(tensor.to(device) for tensor in tensors))

    def batches(
        self,
        batch_size: int,
        generator: torch.Generator | None = None,
        world: World = ALONE,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield raw images and labels, see `Split.batches`."""
        if generator is None:
            yield from zip(
                self.images.split(batch_size), self.labels.split(batch_size), strict=True
            )
            return
        # Drawn on the CPU: the same order on every device.
        order = torch.randperm(len(self), generator=generator).to(self.images.device)
        # Gathered in NHWC, the order in memory, so that a batch is channels_last at no cost.
        pixels = self.images.permute(0, 2, 3, 1)
        for chosen in _own_parts(order, batch_size, world):
            yield pixels[chosen].permute(0, 3, 1, 2), self.labels[chosen]


@dataclass(frozen=True, eq=False)
class FolderSplit(_Normalizing):
    """Images on disk, read and cropped by worker processes.

    Parameters
    ----------
    dataset
        Map-style, of (uint8 image, label) pairs.
    image_shape
        Channels, height, width.
    mean, std
        Per channel, in the units of the pixels.
    workers
        Processes that read; 0 reads in this one.
    device
        The device of the batches.
    """

    dataset: Any
    image_shape: tuple[int, int, int]
    mean: Tensor
    std: Tensor
    workers: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.dataset[index]
        return self.normalize(image[None].to(self.device))[0], int(label)

    def to(self, device: torch.device) -> FolderSplit:
        """Return the split with its batches on `device`."""
        mean, std = self.mean.to(device), self.std.to(device)
        return replace(self, mean=mean, std=std, device=device)

    def batches(
        self,
        batch_size: int,
        generator: torch.Generator | None = None,
        world: World = ALONE,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield raw images and labels, see `Split.batches`."""
        options: dict[str, Any] = {"batch_size": batch_size}
        if generator is not None:
            order = torch.randperm(len(self), generator=generator)
            parts = [part.tolist() for part in _own_parts(order, batch_size, world)]
            # Seeds the reading processes, hence their random crops: other ones in each process.
            seed = int(torch.randint(2**62, (1,), generator=generator)) + world.rank
            crops = torch.Generator().manual_seed(seed)
            options = {"batch_sampler": parts, "generator": crops}
        with warnings.catch_warnings():
            # Random crops depend on the number of readers: it must not follow that of the cores.
            warnings.filterwarnings("ignore", "This DataLoader will create .* worker processes")
            loader = torch.utils.data.DataLoader(
                self.dataset,
                num_workers=self.workers,
                pin_memory=self.device.type == "cuda",
                **options,
            )
            batches = iter(loader)
        while (batch := _next_of(batches)) is not None:
            images, labels = batch
            yield (
                images.to(self.device, non_blocking=True),
                labels.to(self.device, non_blocking=True),
            )


def _next_of(batches: Iterator[Any]) -> Any:
    """Return the next batch, None at the end; an error of a reading process is its last line."""
    try:
        return next(batches, None)
    except DataError as error:  # with the traceback of the process in its text
        last = str(error).strip().splitlines()[-1]
        raise DataError(last.removeprefix(f"{DataError.__module__}.DataError: ")) from None
