"""Evaluators as users write them; trials import them from here."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path

import nni
import torch
from nni.nas.evaluator import Evaluator
from nni.nas.evaluator.pytorch import Classification, DataLoader, Lightning, Regression, Trainer
from nni.nas.evaluator.pytorch.lightning import LightningModule
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from nni_petridish.nni_adapter.evaluators.lengths import TaskEvaluator
from nni_petridish.tasks.task import NO_CALLBACKS, Callbacks, Phase, Record, Task
from nni_petridish.tasks.vision.data import load_data
from nni_petridish.tasks.vision.recipe import Recipe
from nni_petridish.tasks.vision.task import VisionTask
from search_spaces import VisionSpace

QUIET = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "logger": False,
    "accelerator": "cpu",
}


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """Digits in so many channels; ``as_number``, the label is to be predicted as a number."""

    def __init__(self, split: str, as_number: bool = False, channels: int = 1) -> None:
        self.items = list(getattr(load_data("digits", limit=96, validation=100), split))
        self.as_number = as_number
        self.channels = channels

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.items[index]
        number = torch.as_tensor(label)
        image = image.expand(self.channels, -1, -1)
        return image, number.float().reshape(1) / 10 if self.as_number else number


class Diabetes(Dataset[tuple[Tensor, Tensor]]):
    """Scikit-learn's diabetes: ten columns, and the progression in thirties as the target."""

    def __init__(self, split: str) -> None:
        rows, targets = load_diabetes(return_X_y=True)
        part = slice(0, 300) if split == "train" else slice(300, 400)
        self.rows = torch.tensor(rows[part] / 0.0476, dtype=torch.float32)
        self.targets = torch.tensor(targets[part, None] / 30, dtype=torch.float32)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index], self.targets[index]


def loader(split: str, as_number: bool = False, channels: int = 1) -> DataLoader:
    data = nni.trace(Digits)(split=split, as_number=as_number, channels=channels)
    return DataLoader(dataset=data, batch_size=32, shuffle=split == "train")


def accuracy(net: nn.Module) -> float:
    net.eval()
    with torch.no_grad():
        hits = [
            (net(images).argmax(1) == labels).float() for images, labels in loader("validation")
        ]
    return float(torch.cat(hits).mean())


def train_by_hand(net: nn.Module, lr: float = 0.05, epochs: int = 1) -> None:
    """A user's function: its own optimizer and loop."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    for _ in range(epochs):
        net.train()
        for images, labels in loader("train"):
            optimizer.zero_grad()
            F.cross_entropy(net(images), labels).backward()
            optimizer.step()
        nni.report_intermediate_result(accuracy(net))
    nni.report_final_result({"default": accuracy(net), "threads": torch.get_num_threads()})


def train_weighted(net: nn.Module, calls: str) -> None:
    """A user's function for `WeightedVectors`, which writes down that it was called."""
    with open(calls, "a") as file:
        file.write("called\n")
    images, labels = next(iter(loader("train")))
    F.cross_entropy(net(images, torch.ones(len(images))), labels).backward()
    nni.report_final_result(0.5)


def train_once(net: nn.Module, lr: float = 0.05) -> None:
    """A user's function without an argument for the number of epochs."""
    train_by_hand(net, lr, epochs=1)


def fail_at_times(net: nn.Module, folder: str, times: int) -> None:
    """Train seeds; of other networks, fail at the first ``times``."""
    tries = _tries(net, folder)
    if tries < times:
        raise RuntimeError(f"trouble number {tries}\nand more about it")
    train_by_hand(net)


def die_at_times(net: nn.Module, folder: str, times: int) -> None:
    """Train seeds; of other networks, die without a word at the first ``times``."""
    if _tries(net, folder) < times:
        os.kill(os.getpid(), signal.SIGKILL)
    train_by_hand(net)


def _tries(net: nn.Module, folder: str) -> float:
    """Return how many networks other than seeds came before this one; infinity for a seed."""
    if not net.genotype.growths and all(m.weak_learner is None for m in net.cells):
        return math.inf
    tries = len(os.listdir(folder))
    (Path(folder) / str(tries)).touch()
    return tries


class UsersModule(LightningModule):
    """A user's Lightning module: own loss, optimizer, schedule and reports."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.hits: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self(images), labels, label_smoothing=0.1)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, labels = batch
        self.hits.append((self(images).argmax(1) == labels).float())

    def on_validation_epoch_end(self) -> None:
        self.accuracy = float(torch.cat(self.hits).mean())
        self.hits.clear()
        if not self.trainer.sanity_checking:
            nni.report_intermediate_result(self.accuracy)

    def on_fit_end(self) -> None:
        nni.report_final_result(self.accuracy)

    def configure_optimizers(self) -> object:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def users_lightning(epochs: int = 1, channels: int = 1, **options: object) -> Lightning:
    module = nni.trace(UsersModule)(lr=0.01)
    trainer = Trainer(max_epochs=epochs, **{**QUIET, **options})
    train, validation = (loader(split, channels=channels) for split in ("train", "validation"))
    return Lightning(module, trainer, train, validation)


def classification(epochs: int = 1, channels: int = 1, **options: object) -> Classification:
    return Classification(
        num_classes=10,
        learning_rate=0.01,
        train_dataloaders=loader("train", channels=channels),
        val_dataloaders=loader("validation", channels=channels),
        max_epochs=epochs,
        **{**QUIET, **options},
    )


def regression(epochs: int = 1) -> Regression:
    return Regression(
        train_dataloaders=loader("train", as_number=True),
        val_dataloaders=loader("validation", as_number=True),
        max_epochs=epochs,
        **QUIET,
    )


def diabetes(epochs: int = 1, batch_size: int = 20, **options: object) -> Regression:
    train, validation = (
        DataLoader(dataset=nni.trace(Diabetes)(split=split), batch_size=batch_size)
        for split in ("train", "validation")
    )
    return Regression(
        learning_rate=0.01,
        train_dataloaders=train,
        val_dataloaders=validation,
        max_epochs=epochs,
        **{**QUIET, **options},
    )


def tell(net: nn.Module, told: float) -> None:
    """Report a number that identifies the evaluator; train nothing."""
    nni.report_final_result({"default": 0.5, "told": told})


def train_by_lbfgs(net: nn.Module) -> None:
    """A user's function with an optimizer that flattens the gradients."""
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    images, labels = next(iter(loader("train")))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(images), labels)
        loss.backward()
        return loss

    before = float(closure().detach())
    optimizer.step(closure)
    nni.report_final_result({"default": accuracy(net), "gain": before - float(closure().detach())})


def two_inputs(net: nn.Module, width: int) -> None:
    """Train a network of two inputs for two steps."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(2):
        output = net(torch.randn(4, width), torch.randn(4, 8))
        optimizer.zero_grad()
        (output[1] if isinstance(output, tuple) else output).square().mean().backward()
        optimizer.step()
    nni.report_final_result(0.5)


def tell_all(net: nn.Module, folder: str, numbers: list[float]) -> None:
    """Report the numbers, each in one training after the other; train nothing.

    Weak learning reports the number of the growth's final training.
    """
    done = len(list(Path(folder).glob("told-*")))
    if not any("weak_learner" in name for name, _ in net.named_parameters()):
        (Path(folder) / f"told-{done}").touch()
    nni.report_intermediate_result(numbers[min(done, len(numbers) - 1)])
    nni.report_final_result(numbers[min(done, len(numbers) - 1)])


def count_nodes(net: nn.Module) -> None:
    """Prefer recurrent cells of many nodes; train nothing."""
    nni.report_final_result(float(len(net.genotype.nodes)))


class Tasked(Evaluator):
    """A user's evaluator with an attribute named ``task``."""

    task = "digits"

    def evaluate(self, model: nn.Module) -> None:
        train_by_hand(model)


@nni.trace
class Silent(TaskEvaluator):
    """An evaluator whose task reports no metric."""

    @property
    def epochs(self) -> int:
        return 1

    def task(self, space: VisionSpace) -> Task:
        return SilentTask(space, load_data("digits", limit=32, validation=32), Recipe())


class SilentTask(VisionTask):
    def train(
        self, net: nn.Module, phase: Phase, callbacks: Callbacks = NO_CALLBACKS
    ) -> list[Record]:
        record = {"epoch": 1.0, "loss": 0.5}
        callbacks.on_epoch(phase.name, record)
        return [record]


def look_at_work(net: nn.Module, folder: str) -> None:
    """Report which files show that a worker is at its growth; train nothing."""
    (work,) = (Path(folder) / "work").iterdir()
    deadline = time.monotonic() + 10
    while not (work / "pulse").exists() and time.monotonic() < deadline:
        time.sleep(0.01)  # the heartbeat is a thread
    present = {name: float((work / name).exists()) for name in ("pulse", "lock")}
    nni.report_final_result({"default": 0.5, **present})


def interrupt(net: nn.Module) -> None:
    """Train until the user presses Ctrl-C."""
    raise KeyboardInterrupt


def terminate(net: nn.Module) -> None:
    """Train forever in a process that is asked to end."""
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        time.sleep(0.1)
