"""Images of the tables, and training by steps: of parents, and of candidates with looks at them.

The tables are about CIFAR-10, so this module knows images; the rest of the room does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nni_petridish.errors import Interrupted, TrainingError
from nni_petridish.studies.judge.settings import JudgeSettings
from nni_petridish.tasks.optim import clip_groups, make_optimizer, take_step
from nni_petridish.tasks.vision.augment import Augmentation
from nni_petridish.tasks.vision.data import DataSet, load_data
from nni_petridish.tasks.vision.recipe import Recipe
from nni_petridish.tasks.vision.splits import Split, steps_per_epoch
from nni_petridish.tasks.vision.training import evaluate

__all__ = ["DataSet", "cosine", "held_out_losses", "load_images", "train_steps", "validation_error"]

AUGMENTATION = Augmentation(crop_padding=4, flip=True)
"""That of the tables: random crops and flips."""

Lr = Callable[[int], float]


def load_images(root: Path | None) -> DataSet:
    """Load CIFAR-10, which the networks of the tables were trained on."""
    return load_data("cifar10", root)


def validation_error(net: nn.Module, data: DataSet) -> float:
    """Return the error of a network on the validation images."""
    return evaluate(net, data.validation).error


def train_steps(
    net: nn.Module,
    train: Split,
    steps: int,
    settings: JudgeSettings,
    seed: int,
    *,
    lr: Lr,
    after: Callable[[int], object] = lambda step: None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Train a network in place for so many steps.

    Parameters
    ----------
    net, train, settings, seed
        The network, its images, and the settings and the random seed of the training.
    steps
        Number of steps.
    lr
        The learning rate of a step, counted from 0.
    after
        Called after each step, with the number of steps done.
    stop
        Asked before every step; true raises `Interrupted`.
    """
    optimizer = make_optimizer(net, lr=lr(0), momentum=0.9, weight_decay=settings.weight_decay)
    groups = clip_groups(net)
    batches = _endless_batches(train, settings.batch_size, seed)
    for step in range(steps):
        if stop():
            raise Interrupted(f"training was stopped at step {step + 1}.")
        images, labels = next(batches)
        net.train()
        loss = F.cross_entropy(net(images), labels)
        take_step(optimizer, loss, groups, settings.clip, partial(_rate, lr(step)))
        if step % 50 == 0 and not torch.isfinite(loss.detach()):
            raise TrainingError(f"the loss is not finite at step {step + 1}.")
        after(step + 1)


def _rate(lr: float, group: dict[str, Any]) -> float:
    return lr


def cosine(settings: JudgeSettings, steps: int) -> Lr:
    """Return the paper's learning rate, which decays to 0."""
    recipe = Recipe(lr=settings.lr)
    return lambda step: recipe.learning_rate(step, steps, 1)


def held_out_losses(
    validation: Split,
    images: int,
    batch_size: int = 100,
    stop: Callable[[], bool] = lambda: False,
) -> Callable[[nn.Module], Iterator[Tensor]]:
    """Return the losses of the first validation images, each batch's as a sum over its images.

    Parameters
    ----------
    validation, images, batch_size
        The images, how many of them, and how many at a time.
    stop
        Asked before every batch; true raises `Interrupted`.
    """

    def losses(net: nn.Module) -> Iterator[Tensor]:
        left = images
        for raw, labels in validation.batches(batch_size):
            if stop():
                raise Interrupted("scoring was stopped.")
            inputs = validation.normalize(raw[:left])
            inputs = inputs.contiguous(memory_format=torch.channels_last)
            yield F.cross_entropy(net(inputs), labels[:left], reduction="sum")
            left -= len(inputs)
            if left <= 0:
                return

    return losses


def _endless_batches(train: Split, batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    epoch = 0
    while True:
        state = np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint64)
        generator = torch.Generator().manual_seed(int(state[0]))
        images = steps_per_epoch(len(train), batch_size) * batch_size
        size = train.image_shape[1], train.image_shape[2]
        draws = AUGMENTATION.draw(images, size, generator, torch.device("cpu"))
        for index, (raw, labels) in enumerate(train.batches(batch_size, generator)):
            augmented = AUGMENTATION.apply(raw, draws, index * batch_size, train.normalize)
            yield augmented.contiguous(memory_format=torch.channels_last), labels
        epoch += 1
