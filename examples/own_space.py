"""A user's own model space and Lightning module, searched by Petridish.

The space chooses layers and a depth, outside of any cell. The module has a loss, an optimizer and a
schedule of its own. Neither knows about Petridish. ``python examples/own_space.py`` takes about a
minute, on scikit-learn's digits.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for small networks more threads are slower

import nni
import torch
import torch.nn.functional as F
from nni.nas.evaluator.pytorch import DataLoader, Lightning, Trainer
from nni.nas.evaluator.pytorch.lightning import LightningModule
from nni.nas.experiment import NasExperiment
from nni.nas.nn.pytorch import InputChoice, LayerChoice, ModelSpace, Repeat
from torch import Tensor, nn

from nni_petridish.strategy import Petridish
from nni_petridish.tasks.vision.data import load_data


def conv(channels: int, kernel: int) -> nn.Module:
    """Return a conv, a batch norm and a ReLU."""
    return nn.Sequential(
        nn.Conv2d(channels, channels, kernel, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
    )


class OwnSpace(ModelSpace):
    """Three layers to choose, a skip connection, and one to three blocks at the end."""

    def __init__(self, channels: int = 12) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.layers = nn.ModuleList(
            LayerChoice(
                {
                    "skip": nn.Identity(),
                    "conv3": conv(channels, 3),
                    "conv5": conv(channels, 5),
                    "pool": nn.AvgPool2d(3, 1, 1),
                },
                label=f"layer{i}",
            )
            for i in range(3)
        )
        self.skip = InputChoice(n_candidates=3, n_chosen=None, label="skip")
        self.blocks = Repeat(lambda i: conv(channels, 3), (0, 2), label="blocks")
        self.head = nn.Linear(channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        values = [self.stem(images)]
        for layer in self.layers:
            values.append(layer(values[-1]))
        x = self.blocks(self.skip(values[:0:-1]))
        return self.head(F.relu(x).mean(dim=(2, 3)))


@nni.trace
class OwnModule(LightningModule):
    """A Lightning module with its own loss, optimizer and schedule."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.hits: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        return self.model(images)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """Return the loss."""
        images, labels = batch
        return F.cross_entropy(self(images), labels, label_smoothing=0.1)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        """Collect the hits of a batch."""
        images, labels = batch
        self.hits.append((self(images).argmax(1) == labels).float())

    def on_validation_epoch_end(self) -> None:
        """Report to NNI, as its documentation requires."""
        self.accuracy = float(torch.cat(self.hits).mean())
        self.hits.clear()
        if not self.trainer.sanity_checking:
            nni.report_intermediate_result(self.accuracy)

    def on_fit_end(self) -> None:
        """Report the result."""
        nni.report_final_result(self.accuracy)

    def configure_optimizers(self) -> object:
        """Return AdamW with a one-cycle schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@nni.trace
def digits(part: str) -> object:
    """Return a part of scikit-learn's digits."""
    return getattr(load_data("digits"), part)


def main() -> None:
    """Search and print the models in the order of their growth."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=4, help="epochs of every phase")
    parser.add_argument("--gallery", default="gallery-own-space")
    options = parser.parse_args()

    evaluator = Lightning(
        OwnModule(lr=0.02),
        Trainer(
            max_epochs=options.epochs,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            logger=False,
        ),
        DataLoader(digits("train"), batch_size=32, shuffle=True),
        DataLoader(digits("validation"), batch_size=100),
    )
    strategy = Petridish(options.gallery, i_max=2, max_models=options.models)
    experiment = NasExperiment(OwnSpace(), evaluator, strategy)
    experiment.run()

    for model in strategy.list_models(sort=False):
        print(f"  accuracy {model.metric:.3f}  {model.sample}")
    experiment.stop()


if __name__ == "__main__":
    main()
