"""The paper's training recipe as a plain PyTorch loop.

Whatever is attached to a network trains along with it: the loop knows nothing of weak learners but
that their gradients are clipped apart, so that candidates never change the step of the network they
hang on, and that α and η do not decay.

A run is determined by network, data, recipe and seed, to the bit on a CPU (on CUDA as far as
`torch.use_deterministic_algorithms` goes), and so is one interrupted and continued: every epoch
seeds its own random numbers, and the checkpoint holds the rest.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from nni_petridish.core.modes import evaluation_mode
from nni_petridish.errors import ConfigError, DataError, Interrupted, TrainingError
from nni_petridish.tasks.checkpoint import fits, load_checkpoint, restore, save_checkpoint
from nni_petridish.tasks.distributed import current_world
from nni_petridish.tasks.language.recipe import LanguageRecipe
from nni_petridish.tasks.optim import clip_gradients, clip_groups, make_optimizer
from nni_petridish.tasks.vision.augment import Augmentation
from nni_petridish.tasks.vision.recipe import Recipe
from nni_petridish.tasks.vision.splits import Split, steps_per_epoch
from nni_petridish.tasks.vision.tally import Tally

__all__ = [
    "History",
    "Metrics",
    "Recipe",
    "evaluate",
    "fit",
    "resolve_device",
]

_EVALUATION_BATCH = 256

Record = dict[str, float]


class Metrics(NamedTuple):
    """What `evaluate` measured; `loss` is the mean cross-entropy, the others are fractions."""

    loss: float
    error: float
    accuracy: float
    n: int


@dataclass(frozen=True)
class History:
    """One record per epoch, those from before an interruption included.

    Each holds ``epoch`` (from 1), ``loss``, ``error``, ``lr`` (of its last step), ``seconds``, and
    if validated ``validation_loss`` and ``validation_error``. `resumed_at` epochs were read from
    the checkpoint.
    """

    records: tuple[Record, ...]
    resumed_at: int = 0


def resolve_device(recipe: Recipe | LanguageRecipe) -> torch.device:
    """Return the device a recipe names, `ConfigError` if this machine has none such."""
    if recipe.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device must be available on this machine but got 'cuda'.")
    if recipe.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(recipe.device)


def fit(
    net: nn.Module,
    train: Split,
    recipe: Recipe,
    *,
    seed: int,
    validation: Split | None = None,
    on_epoch: Callable[[Record], object] | None = None,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    label: str = "training",
    stop: Callable[[], bool] | None = None,
) -> History:
    """Train a network in place.

    If the network has ``set_drop_path(keep, progress)`` it is called before every step with the
    recipe's keep probability and the fraction of steps done; if ``net.auxiliary`` is not None,
    ``forward_with_auxiliary(images) -> (logits, auxiliary_logits)`` is trained.

    Parameters
    ----------
    net
        Any image classifier. It is moved to the recipe's device and stays there, in train mode.
    train
        The images, see `nni_petridish.tasks.vision.data.load_data`.
    seed
        Of the order of images, their augmentation, and drop-path. The caller's random state is
        left alone.
    validation
        Measured after every epoch if given.
    on_epoch
        Called with each new epoch's record, after its checkpoint is written; may raise to end.
    checkpoint
        Folder. The state is written there after every epoch, and training goes on from what is
        found there if it is of the same network, recipe, number of images and seed; a finished one
        only restores the weights. Of several processes (see `tasks.distributed`) the first
        one writes, and all must see the folder.
    progress
        Show a bar on stderr if that is a terminal.
    label
        What the bar calls this.
    stop
        Asked before every step; true raises `Interrupted`.

    Raises
    ------
    TrainingError
        As soon as the loss is not finite (on CUDA within 50 steps).
    """
    if len(train) == 0:
        raise DataError("training needs at least 1 image but got 0.")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"seed must be a whole number of at least 0 but got {seed!r}.")
    device = resolve_device(recipe)
    _place(net, device, recipe)
    run = _Run(net, train.to(device), recipe, device, seed)
    folder = None if checkpoint is None else Path(checkpoint)
    records = [] if folder is None else run.resume(folder)
    start = len(records)
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    bar = tqdm(
        total=run.total,
        initial=start * run.steps,
        desc=label,
        unit="step",
        mininterval=0.5,
        disable=None if progress and run.world.is_main else True,  # None: shown on terminals only
    )
    with torch.random.fork_rng(devices), bar:
        for epoch in range(start, recipe.epochs):
            bar.set_description(f"{label}, epoch {epoch + 1}/{recipe.epochs}", refresh=False)
            record = run.epoch(epoch, bar, stop)
            if validation is not None:
                metrics = evaluate(net, validation, recipe)
                record |= {"validation_loss": metrics.loss, "validation_error": metrics.error}
            records.append(record)
            if folder is not None and run.world.is_main:
                save_checkpoint(folder, net, run.optimizer, run.facts | {"records": records})
            if on_epoch is not None:
                on_epoch(dict(record))
    net.train()
    return History(tuple(records), start)


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
        device = resolve_device(recipe)
    _place(net, device, recipe)
    split = split.to(device)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    with evaluation_mode(net), torch.inference_mode():
        for raw, labels in split.batches(_EVALUATION_BATCH):
            images = _laid_out(split.normalise(raw), recipe)
            with _autocast(recipe, device):
                logits = net(images)
            loss += F.cross_entropy(logits.float(), labels, reduction="sum")
            wrong += (logits.argmax(1) != labels).sum()
    n = len(split)
    mean_loss, error = float(loss) / n, int(wrong) / n
    if not math.isfinite(mean_loss):
        raise TrainingError("the loss is not finite in evaluation.")
    return Metrics(mean_loss, error, 1 - error, n)


class _Run:
    """One training run: what stays the same over its epochs."""

    def __init__(
        self, net: nn.Module, train: Split, recipe: Recipe, device: torch.device, seed: int
    ) -> None:
        self.net, self.train, self.recipe, self.device, self.seed = net, train, recipe, device, seed
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
        self.total = self.steps * recipe.epochs
        self.augmentation = Augmentation(recipe.crop_padding, recipe.flip, recipe.cutout)
        self.optimizer = make_optimizer(net, recipe)
        self.clip_groups = clip_groups(net)
        self.set_drop_path: Callable[[float, float], object] | None = getattr(
            net, "set_drop_path", None
        )
        settings = asdict(recipe)
        del settings["device"]  # a run may move to another machine
        self.facts = {"seed": seed, "images": len(train), "recipe": settings}

    def resume(self, folder: Path) -> list[Record]:
        """Restore what `folder` holds; return the records of the epochs done."""
        found = load_checkpoint(folder)
        known = None if found is None else len(found[1].get("records", []))
        if self.world.on_main(lambda: known) != known:  # also waits until all have read it
            raise TrainingError(f"{folder} must be a folder that all processes share.")
        if found is None:
            return []
        tensors, facts = found
        records: list[Record] = facts.pop("records", [])
        if facts != self.facts or not fits(tensors, self.net, self.optimizer):
            warnings.warn(
                f"{folder} holds a checkpoint of another run; training starts anew.", stacklevel=3
            )
            return []
        restore(tensors, self.net, self.optimizer)
        return records

    def epoch(
        self,
        epoch: int,
        bar: tqdm[Any],
        stop: Callable[[], bool] | None,
    ) -> Record:
        """Train for one epoch, counted from 0."""
        began = time.perf_counter()
        seeds = np.random.SeedSequence((self.seed, epoch)).generate_state(2, np.uint64)
        generator = torch.Generator().manual_seed(int(seeds[0]))
        # Drop-path and dropout draw from here, in each process for its own images.
        torch.manual_seed((int(seeds[1]) + self.world.rank) % 2**64)
        # A set smaller than a batch draws for images it does not have: no harm.
        images = self.steps * self.recipe.batch_size
        draws = self.augmentation.draw(images, self.image_size, generator, self.device)
        tally = Tally(epoch, self.device)
        self.net.train()
        lr = self.recipe.lr
        for index, (raw, labels) in enumerate(
            self.train.batches(self.recipe.batch_size, generator, self.world)
        ):
            if stop is not None and stop():
                raise Interrupted(f"training was stopped at epoch {epoch + 1}, step {index + 1}.")
            step = epoch * self.steps + index
            if self.set_drop_path is not None:
                self.set_drop_path(self.recipe.drop_path_keep, step / self.total)
            start = index * self.recipe.batch_size + self.world.rank * self.share
            augmented = self.augmentation.apply(raw, draws, start, self.train.normalise)
            loss, logits = self._loss(_laid_out(augmented, self.recipe), labels)
            tally.add(loss.detach(), logits.detach(), labels)
            lr = self.recipe.learning_rate(step, self.total, self.steps)
            self._update(loss, lr)
            if bar.update(1):
                bar.set_postfix_str(
                    f"loss {tally.loss:.3f}, error {tally.error:.1%}", refresh=False
                )
        tally.check()
        tally.gather(self.world)
        seconds = time.perf_counter() - began
        return {
            "epoch": epoch + 1,
            "loss": tally.loss,
            "error": tally.error,
            "lr": lr,
            "seconds": seconds,
        }

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
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for parameters in self.clip_groups:
            clip_gradients(parameters, self.recipe.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()


class _Outputs(nn.Module):
    """All logits of a network: its own, and those of an auxiliary head if it has one."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        if getattr(self.net, "auxiliary", None) is None:
            return (self.net(images),)
        both: tuple[Tensor, ...] = cast(Any, self.net).forward_with_auxiliary(images)
        return both


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
