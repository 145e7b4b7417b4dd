"""Running loss and error of an epoch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nni_petridish.errors import TrainingError
from nni_petridish.tasks.distributed import World

#: Reading a number from a GPU waits for its queue, so the loss is read once in so many steps.
_CUDA_CHECK_EVERY = 50


class EpochMetrics:
    """Running sums of an epoch, kept on the device: reading one from a GPU waits for it."""

    def __init__(self, epoch: int, device: torch.device) -> None:
        self.epoch, self.steps, self.images = epoch, 0, 0
        self._check_every = _CUDA_CHECK_EVERY if device.type == "cuda" else 1
        self._loss = torch.zeros((), device=device)
        self._wrong = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch to the sums."""
        self._loss += loss  # once it is not finite, it stays so
        self._wrong += (logits.argmax(1) != labels).sum()
        self.steps += 1
        self.images += len(labels)
        if self.steps % self._check_every == 0:
            self.check()

    def check(self) -> None:
        """Raise `TrainingError` if the loss is not finite."""
        if not math.isfinite(float(self._loss)):
            raise TrainingError(
                f"the loss is not finite at epoch {self.epoch + 1}, step {self.steps}."
            )

    def gather(self, world: World) -> None:
        """Add up the sums of all processes; their parts of a batch are equally large."""
        self._loss = world.sum(self._loss) / world.size
        self._wrong = world.sum(self._wrong)
        self.images *= world.size

    @property
    def loss(self) -> float:
        """The mean over the steps."""
        return float(self._loss) / self.steps

    @property
    def error(self) -> float:
        """The share of images that were classified wrongly."""
        return int(self._wrong) / self.images
