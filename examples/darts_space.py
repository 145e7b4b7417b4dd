"""The structure of NNI's DARTS tutorial, with Petridish in place of DARTS.

A model space of NNI's hub, a Classification evaluator, an experiment, the exported architecture,
and its training from scratch. One line is about Petridish: the strategy.

``python examples/darts_space.py`` takes about two minutes, on scikit-learn's digits scaled up;
``--cifar10 FOLDER --width 16 --cells 8`` is the tutorial's own size and needs a GPU.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for small networks more threads are slower

import nni
import torch
import torch.nn.functional as F
from nni.nas.evaluator.pytorch import Classification, DataLoader
from nni.nas.experiment import NasExperiment
from nni.nas.hub.pytorch import DARTS as DartsSpace
from nni.nas.space import model_context

from nni_petridish.strategy import Petridish
from nni_petridish.tasks.vision.data import load_data

SIZE = 16


@nni.trace
class Images(torch.utils.data.Dataset):
    """Color images: digits of 16x16 pixels, or CIFAR-10 if a folder is given."""

    def __init__(self, part: str, cifar10: str | None) -> None:
        data = load_data("cifar10", root=cifar10) if cifar10 else load_data("digits")
        self.images = getattr(data, part)
        self.is_small = cifar10 is None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = self.images[index]
        if self.is_small:
            image = F.interpolate(image[None], size=SIZE, mode="bilinear")[0].expand(3, -1, -1)
        return image, int(label)


def make_evaluator(options: argparse.Namespace, epochs: int) -> Classification:
    """Return an ordinary evaluator of NNI."""
    loaders = {
        part: DataLoader(Images(part, options.cifar10), batch_size=64, shuffle=part == "train")
        for part in ("train", "validation")
    }
    return Classification(
        num_classes=10,
        learning_rate=0.005,
        weight_decay=1e-4,
        train_dataloaders=loaders["train"],
        val_dataloaders=loaders["validation"],
        max_epochs=epochs,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )


def main() -> None:
    """Search, export, train from scratch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cifar10", metavar="FOLDER", help="CIFAR-10 in torchvision's layout")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--cells", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3, help="epochs of every phase")
    parser.add_argument("--retrain-epochs", type=int, default=10)
    parser.add_argument("--models", type=int, default=5)
    parser.add_argument("--gallery", default="gallery-darts-space")
    options = parser.parse_args()
    size = {"width": options.width, "num_cells": options.cells, "dataset": "cifar"}

    model_space = DartsSpace(**size)
    evaluator = make_evaluator(options, options.epochs)
    strategy = Petridish(options.gallery, max_models=options.models)  # was DARTS()
    experiment = NasExperiment(model_space, evaluator, strategy)
    experiment.run()
    (architecture,) = experiment.export_top_models(1, formatter="dict")

    print("  id      multiply-adds  parameters  error")
    for model in strategy.hull():
        print(f"  {model.id}  {model.multiply_adds:13d}  {model.parameters:10d}  {model.error:.3f}")
    for label in sorted(label for label in architecture if "/op_" in label):
        source = architecture[label.replace("op", "input")]
        print(f"  {label:15} {architecture[label]:13} of {source[0]}")

    with model_context(architecture):
        final_model = DartsSpace(**size)
    retraining = make_evaluator(options, options.retrain_epochs)
    retraining.evaluate(final_model)
    accuracy = float(retraining.trainer.callback_metrics["val_acc"])
    print(f"  trained from scratch for {options.retrain_epochs} epochs: error {1 - accuracy:.3f}")
    experiment.stop()


if __name__ == "__main__":
    main()
