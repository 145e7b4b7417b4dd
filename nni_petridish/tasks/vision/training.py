"""Training and evaluation of image classifiers by the paper's recipe.

Gradients of weak learners are clipped apart, so that candidates never change the step of their
network, and α and η do not decay.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import Any, NamedTuple, Protocol, Unpack, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nni_petridish.core.modes import evaluation_mode
from nni_petridish.errors import DataError, TrainingError
from nni_petridish.tasks.averaging import (
    AVERAGED_STEPS,
    STATISTICS_BATCHES,
    AveragedWeights,
    first_averaged_epoch,
)
from nni_petridish.tasks.device import resolve_device
from nni_petridish.tasks.distributed import current_world
from nni_petridish.tasks.loop import Bar, History, LoopOptions, Steps, check_seed, run
from nni_petridish.tasks.optim import clip_groups, make_optimizer, take_step
from nni_petridish.tasks.recipes import recipe_identity
from nni_petridish.tasks.task import Record
from nni_petridish.tasks.vision.augment import Augmentation
from nni_petridish.tasks.vision.epoch_metrics import EpochMetrics
from nni_petridish.tasks.vision.recipe import Recipe
from nni_petridish.tasks.vision.splits import Split, steps_per_epoch

_EVALUATION_BATCH = 256


@runtime_checkable
class HasDropPath(Protocol):
    """A network with drop-path."""

    def set_drop_path(self, keep: float, progress: float) -> object:
        """Set the probability of keeping the deepest path, at this fraction of the training."""
        ...


@runtime_checkable
class HasAuxiliary(Protocol):
    """A network that may have an auxiliary head, ``auxiliary``, or None there."""

    def forward_with_auxiliary(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the logits and those of the auxiliary head."""
        ...


class Metrics(NamedTuple):
    """Result of `evaluate`: the mean cross-entropy, and fractions of the images."""

    loss: float
    error: float
    accuracy: float
    n: int


def fit(
    net: nn.Module,
    train: Split,
    recipe: Recipe,
    *,
    seed: int,
    validation: Split | None = None,
    **options: Unpack[LoopOptions],
) -> History:
    """Train a network in place.

    A network that is `HasDropPath` is told before every step the recipe's keep probability and the
    fraction of steps done; of one that is `HasAuxiliary` the auxiliary head, if there is one, is
    trained as well.

    Parameters
    ----------
    net
        Any image classifier. It is moved to the recipe's device and stays there, in train mode.
    train
        The images, see `nni_petridish.tasks.vision.data.load_data`.
    recipe
        The recipe of the training.
    seed
        The random seed of the order of images, their augmentation, and drop-path. The caller's
        random state is left alone.
    validation
        Images to measure on after every epoch; None for no validation.
    options
        See `LoopOptions`.

    Raises
    ------
    TrainingError
        As soon as the loss is not finite (on CUDA within 50 steps).
    """
    if len(train) == 0:
        raise DataError("training needs at least 1 image but got 0.")
    check_seed(seed)
    device = resolve_device(recipe.device)
    _place(net, device, recipe)
    trainer = _ImageTrainer(net, train.to(device), recipe, device, seed, validation)
    return run(trainer, recipe.epochs, seed, **options)


def evaluate(net: nn.Module, split: Split, recipe: Recipe | None = None) -> Metrics:
    """Return loss and error of a network on a split.

    Evaluation mode, no augmentation, no label smoothing; every module's mode is restored. Without
    a recipe the network is measured where it is.
    """
    if len(split) == 0:
        raise DataError("evaluation needs at least 1 image but got 0.")
    if recipe is None:
        recipe, device = Recipe(), next(net.parameters()).device
    else:
        device = resolve_device(recipe.device)
    _place(net, device, recipe)
    split = split.to(device)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    with evaluation_mode(net), torch.inference_mode():
        for raw, labels in split.batches(_EVALUATION_BATCH):
            images = _laid_out(split.normalize(raw), recipe)
            with _autocast(recipe, device):
                logits = net(images)
            loss += F.cross_entropy(logits.float(), labels, reduction="sum")
            wrong += (logits.argmax(1) != labels).sum()
    n = len(split)
    mean_loss, error = float(loss) / n, int(wrong) / n
    if not math.isfinite(mean_loss):
        raise TrainingError("the loss is not finite in evaluation.")
    return Metrics(mean_loss, error, 1 - error, n)


class _ImageTrainer:
    """One training on images."""

    def __init__(
        self,
        net: nn.Module,
        train: Split,
        recipe: Recipe,
        device: torch.device,
        seed: int,
        validation: Split | None,
    ) -> None:
        self.net, self.train, self.recipe, self.device = net, train, recipe, device
        self.validation = validation
        recipe.check_image(train.image_shape)
        self.image_size = train.image_shape[1:]
        self.world = current_world()
        self.share = self.world.share(recipe.batch_size)
        if self.world.size > 1 and len(train) < recipe.batch_size:
            raise DataError(
                f"training in {self.world.size} processes needs at least one batch"
                f" ({recipe.batch_size}) of images but got {len(train)}."
            )
        self.outputs = self.world.parallel(_Outputs(net))
        self.steps = steps_per_epoch(len(train), recipe.batch_size)
        self.bar = Bar(self.steps, "step")
        self.augmentation = Augmentation(recipe.crop_padding, recipe.flip, recipe.cutout)
        self.optimizer = make_optimizer(
            net, lr=recipe.lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay
        )
        self.clip_groups = clip_groups(net)
        settings = recipe_identity(recipe)
        del settings["device"]  # a run may move to another machine
        self._identity = {"seed": seed, "images": len(train), "recipe": settings}
        first = first_averaged_epoch(recipe.epochs, recipe.average, recipe.hold_epochs)
        self.average = AveragedWeights(net, first, self._show)

    @property
    def state(self) -> nn.Module:
        """The network, and the average of its weights if there is one."""
        return self.average.state

    def facts(self) -> dict[str, Any]:
        """Return what identifies the run, and how many steps were averaged."""
        return self._identity | self.average.facts()

    def resume(self, tensors: dict[str, Tensor], facts: dict[str, Any], epochs: int) -> bool:
        """Restore weights, averages and momenta of the same run."""
        steps = facts.pop(AVERAGED_STEPS, None)
        return facts == self._identity and self.average.resume(tensors, self.optimizer, steps)

    def epoch(self, epoch: int, seed: int, steps: Steps) -> Record:
        """Show every image once, augmented."""
        recipe, world, total = self.recipe, self.world, self.steps * self.recipe.epochs
        generator = torch.Generator().manual_seed(seed)
        # A set smaller than a batch draws numbers that it does not use.
        images = self.steps * recipe.batch_size
        draws = self.augmentation.draw(images, self.image_size, generator, self.device)
        metrics = EpochMetrics(epoch, self.device)
        lr = recipe.lr
        self.average.before(epoch)
        batches = self.train.batches(recipe.batch_size, generator, world)
        for index, (raw, labels) in enumerate(batches):
            steps.before(f"step {index + 1}")
            step = epoch * self.steps + index
            if isinstance(self.net, HasDropPath):
                self.net.set_drop_path(recipe.drop_path_keep, step / total)
            start = index * recipe.batch_size + world.rank * self.share
            augmented = self.augmentation.apply(raw, draws, start, self.train.normalize)
            loss, logits = self._loss(_laid_out(augmented, recipe), labels)
            metrics.add(loss.detach(), logits.detach(), labels)
            lr = recipe.learning_rate(step, total, self.steps)
            self._update(loss, lr)
            steps.after(1, lambda: f"loss {metrics.loss:.3f}, error {metrics.error:.1%}")
        metrics.check()
        metrics.gather(world)
        return {"loss": metrics.loss, "error": metrics.error, "lr": lr}

    def validate(self, before: list[Record]) -> Record:
        """Measure on the validation images, with the averaged weights if there are any."""
        if self.validation is None:
            return {}
        with self.average.in_place():
            metrics = evaluate(self.net, self.validation, self.recipe)
        return {"validation_loss": metrics.loss, "validation_error": metrics.error}

    def finish(self) -> None:
        """Give the network the averaged weights, if there are any."""
        self.average.settle()

    def _loss(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        smoothing = self.recipe.label_smoothing
        with _autocast(self.recipe, self.device):
            logits, *sides = self.outputs(images)
            loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
            for auxiliary in sides:
                side = F.cross_entropy(auxiliary, labels, label_smoothing=smoothing)
                loss = loss + self.recipe.auxiliary_weight * side
            return loss, logits

    def _update(self, loss: Tensor, lr: float) -> None:
        take_step(self.optimizer, loss, self.clip_groups, self.recipe.clip, lambda group: lr)
        self.average.add()

    def _show(self) -> None:
        """Show the network some training images as they are, always in the same order."""
        batches = self.train.batches(self.recipe.batch_size, torch.Generator().manual_seed(0))
        for raw, _ in islice(batches, STATISTICS_BATCHES):
            with _autocast(self.recipe, self.device):
                self.net(_laid_out(self.train.normalize(raw), self.recipe))


class _Outputs(nn.Module):
    """All logits of a network: its own, and those of an auxiliary head if it has one."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        net = self.net
        if isinstance(net, HasAuxiliary) and net.auxiliary is not None:
            return net.forward_with_auxiliary(images)
        return (net(images),)


def _place(net: nn.Module, device: torch.device, recipe: Recipe) -> None:
    if recipe.channels_last:
        cast(Any, net).to(device=device, memory_format=torch.channels_last)
    else:
        net.to(device)


def _laid_out(images: Tensor, recipe: Recipe) -> Tensor:
    layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
    return images.contiguous(memory_format=layout)


def _autocast(recipe: Recipe, device: torch.device) -> torch.autocast:
    enabled = recipe.amp and device.type == "cuda"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)
