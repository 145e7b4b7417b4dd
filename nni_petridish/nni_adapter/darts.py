"""NNI's DARTS on the vision space, trained by our recipe on our images.

The supernet has one switch for every shortcut that Petridish's first growth could add
(`SwitchSpace`). Half of the training images train its weights, the other half its switches.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from nni_petridish.core.genotype import Genotype
from nni_petridish.core.grow import attach_candidates
from nni_petridish.errors import ConfigError, Interrupted
from nni_petridish.nni_adapter.compat.nas import (
    Lightning,
    RawFormatModelSpace,
    SequentialExecutionEngine,
    SupervisedLearningModule,
    Trainer,
    TrainerCallback,
    strategies,
)
from nni_petridish.nni_adapter.evaluators.lengths import seeded, without_chatter
from nni_petridish.nni_adapter.switches import SwitchSpace
from nni_petridish.tasks.device import resolve_device
from nni_petridish.tasks.vision.augment import Augmentation
from nni_petridish.tasks.vision.recipe import Recipe
from nni_petridish.tasks.vision.splits import TensorSplit
from nni_petridish.tasks.vision.task import VisionTask

__all__ = ["search_with_darts"]


def search_with_darts(
    task: Any,
    *,
    share: Callable[[], float],
    on_epoch: Callable[[float], object],
    stop: Callable[[], bool],
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Genotype:
    """Train a supernet and return the architecture that NNI's DARTS exports.

    Parameters
    ----------
    task
        The `VisionTask`; its op_merge is replaced by the weighted sum while DARTS searches.
    share
        Returns how much of the compute is spent. The learning rate follows its cosine; 1 ends the
        search.
    on_epoch
        Called after every epoch with its forward multiply-adds, after the last one too.
    stop
        Asked after every step; true raises `Interrupted`.
    seed
        Random seed.
    options
        Further arguments of NNI's strategy.
    """
    if not isinstance(task, VisionTask) or not isinstance(task.data.train, TensorSplit):
        raise ConfigError("darts needs images that fit in memory.")
    space = replace(task.space, merge="weighted_sum")
    recipe, images = task.recipe, task.data.train
    with seeded(seed), warnings.catch_warnings(), without_chatter():
        warnings.simplefilter("ignore")  # Lightning's, on loaders of its users
        known = {"gradient_clip_val": recipe.clip, **(options or {})}
        try:
            strategy = strategies.DARTS(**known)
        except TypeError as error:
            raise ConfigError(f"options of NNI's DARTS: {error}.") from None
        watch = _Watch(share, on_epoch, stop, _epoch_operations(task))
        order = torch.randperm(len(images))
        halves = [
            _Loader(_Batches(_part(images, half), recipe, seed + i))
            for i, half in enumerate(order.chunk(2))
        ]
        device = resolve_device(recipe.device)
        evaluator = Lightning(
            _Training(recipe, share),
            Trainer(
                max_epochs=-1,
                callbacks=[watch],
                accelerator="gpu" if device.type == "cuda" else "cpu",
                devices=1,
                enable_progress_bar=False,
                enable_model_summary=False,
                enable_checkpointing=False,
                logger=False,
                num_sanity_val_steps=0,
                limit_val_batches=0,
            ),
            train_dataloaders=halves[0],
            val_dataloaders=halves[1],
        )
        model_space = SwitchSpace(space)
        strategy.initialize(
            RawFormatModelSpace.from_model(model_space, evaluator), SequentialExecutionEngine()
        )
        strategy.run()
        (found,) = strategy.list_models(limit=1)
    genotype = model_space.genotype(found.sample)
    return replace(genotype, merge=task.space.merge)


def _epoch_operations(task: VisionTask) -> float:
    """Return the multiply-adds of an epoch: the supernet has the candidates of a first growth."""
    net = attach_candidates(task.build(task.seed()))
    return float(task.operations(net, 1))  # each image once, for weights or for switches


def _part(split: TensorSplit, chosen: Tensor) -> TensorSplit:
    return TensorSplit(split.images[chosen], split.labels[chosen], split.mean, split.std)


class _Batches(IterableDataset[tuple[Tensor, Tensor]]):
    """Augmented batches of images, in another order every epoch."""

    def __init__(self, split: TensorSplit, recipe: Recipe, seed: int) -> None:
        self._split, self._size = split, recipe.batch_size
        self._augmentation = Augmentation(recipe.crop_padding, recipe.flip, recipe.cutout)
        self._seed, self._epoch = seed, 0

    def __len__(self) -> int:
        return max(1, len(self._split) // self._size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self._seed * 100_003 + self._epoch)
        self._epoch += 1
        split, cpu = self._split, torch.device("cpu")
        size = split.image_shape[1:]
        draws = self._augmentation.draw(len(self) * self._size, size, generator, cpu)
        for i, (raw, labels) in enumerate(split.batches(self._size, generator)):
            start = i * self._size
            yield self._augmentation.apply(raw, draws, start, split.normalize), labels


class _Loader(DataLoader[Any]):
    """A loader of batches that are made already."""

    def __init__(self, batches: _Batches) -> None:
        super().__init__(batches, batch_size=None)


class _Training(SupervisedLearningModule):
    """The recipe's SGD, with the cosine of the compute that is spent as its learning rate."""

    def __init__(self, recipe: Recipe, share: Callable[[], float]) -> None:
        super().__init__(nn.CrossEntropyLoss, {}, export_onnx=False)
        self._recipe, self._share = recipe, share
        self._optimizer: torch.optim.Optimizer | None = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer of the weights."""
        recipe = self._recipe
        self._optimizer = torch.optim.SGD(
            cast(nn.Module, self).parameters(),
            lr=recipe.lr,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
        )
        return self._optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        recipe = self._recipe
        progress = min(1.0, self._share())
        lr = recipe.lr_min + (recipe.lr - recipe.lr_min) * (1 + math.cos(math.pi * progress)) / 2
        assert self._optimizer is not None
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        images, labels = batch
        smoothing = recipe.label_smoothing
        return nn.functional.cross_entropy(self(images), labels, label_smoothing=smoothing)

    def _final_report(self) -> None:
        """Report nothing: the architecture is trained afterwards."""


class _Watch(TrainerCallback):
    """Ends the training of the supernet when its compute is spent."""

    def __init__(
        self,
        share: Callable[[], float],
        on_epoch: Callable[[float], object],
        stop: Callable[[], bool],
        operations: float,
    ) -> None:
        self._share, self._on_epoch, self._stop = share, on_epoch, stop
        self._operations = operations
        self._batches = 0

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End at the right moment, also in the middle of an epoch."""
        self._batches += 1
        if self._stop():
            raise Interrupted("the training of the supernet was stopped.")
        if self._share() >= 1:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """Count the epoch, or the part of it that was trained."""
        self._on_epoch(self._operations * self._batches / max(1, trainer.num_training_batches))
        self._batches = 0
