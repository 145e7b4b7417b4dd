"""Grow a trained model of torchvision and compare it with further training at the same cost.

``python examples/grow_torchvision.py`` trains a small MobileNetV2 on scikit-learn's digits, then
continues in two ways: it grows the network once, and it trains the unchanged network for the same
processor time. ``--data fashion_mnist --root FOLDER --limit 3000`` selects another data set,
``--model shufflenet`` another network. Validation selects the epoch of each way, and the learning
rate of further training if several are given. The test set is used once, at the end; use
``--no-test`` while looking for settings.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import statistics
import time
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for small networks more threads are slower

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import MobileNetV2, ShuffleNetV2

from nni_petridish import (
    attach_candidates,
    count_multiply_adds,
    count_parameters,
    finalize_candidates,
    load_data,
    make_growable,
)
from nni_petridish.tasks.vision.data import DataSet
from nni_petridish.tasks.vision.splits import Split

#: Sources in the MobileNetV2: each block reads the two layers before it. The last layer, 1280 wide,
#: would cost most and is left out.
SOURCES = {
    "features.1": ["features.0"],
    "features.2": ["features.0", "features.1"],
    "features.3": ["features.1", "features.2"],
}


def small_mobilenet(image_shape: tuple[int, int, int], width: float) -> nn.Module:
    """Return torchvision's MobileNetV2 with three blocks, for small images."""
    channels, size, _ = image_shape
    blocks = [[1, 16, 1, 1], [4, 24, 1, 2], [4, 32, 1, 2]]
    net = MobileNetV2(10, width, inverted_residual_setting=blocks)
    filters, stride = net.features[0][0].out_channels, 1 if size < 16 else 2
    net.features[0][0] = nn.Conv2d(channels, filters, 3, stride, 1, bias=False)
    return net.to(memory_format=torch.channels_last)


def narrow_shufflenet(image_shape: tuple[int, int, int], width: float) -> nn.Module:
    """Return torchvision's ShuffleNetV2 with one block in each stage, for small images."""
    widths = [2 * round(width * filters / 2) for filters in (8, 16, 32, 64, 64)]
    net = ShuffleNetV2([1, 1, 1], widths, num_classes=10)
    net.conv1[0] = nn.Conv2d(image_shape[0], widths[0], 3, 2, 1, bias=False)
    net.maxpool = nn.Identity()
    return net.to(memory_format=torch.channels_last)


MODELS = {"mobilenet": (small_mobilenet, SOURCES), "shufflenet": (narrow_shufflenet, None)}


def error(net: nn.Module, split: Split) -> float:
    """Return the fraction of images that are classified wrongly."""
    net.eval()
    wrong = 0
    with torch.no_grad():
        for images, labels in split.batches(256):
            wrong += int((net(split.normalize(images)).argmax(1) != labels).sum())
    return wrong / len(split)


class Trained(NamedTuple):
    """The best epoch by validation, and the processor time of all epochs."""

    validation_error: float
    seconds: float


def train(
    net: nn.Module,
    data: DataSet,
    epochs: int,
    lr: float,
    seed: int,
    batch: int = 32,
    select: bool = True,
) -> Trained:
    """Train with SGD and a cosine schedule; keep the weights of the best epoch, or of the last."""
    optimizer = torch.optim.SGD(
        net.parameters(), lr, momentum=0.9, weight_decay=2e-4, nesterov=True
    )
    generator = torch.Generator().manual_seed(seed)
    best, weights, seconds = math.inf, None, 0.0
    for epoch in range(epochs):
        net.train()
        began = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 + math.cos(math.pi * epoch / epochs)) / 2
        for images, labels in data.train.batches(batch, generator):
            optimizer.zero_grad()
            F.cross_entropy(net(data.train.normalize(images)), labels).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            optimizer.step()
        seconds += time.process_time() - began
        now = error(net, data.validation)
        if now <= best or not select:
            best, weights = now, copy.deepcopy(net.state_dict())
    if weights is not None:
        net.load_state_dict(weights)
    return Trained(best, seconds)


def compare(options: argparse.Namespace, seed: int) -> dict[str, dict[str, float]]:
    """Train a parent, continue in both ways, and return the figures of all three networks."""
    data = load_data(
        options.data, options.root, limit=options.limit, validation=options.validation, seed=seed
    )
    make, sources = MODELS[options.model]
    torch.manual_seed(seed)
    parent = make(data.image_shape, options.width)
    first = train(parent, data, options.epochs, options.lr, seed, options.batch)
    if options.verbose:
        print("parent", first, f"training {error(parent, data.train):.2%}", flush=True)

    grown, of_growing = grow(copy.deepcopy(parent), data, sources, options, seed)
    epochs = max(1, round(of_growing.seconds / (first.seconds / options.epochs)))
    longer, of_longer = train_on(parent, data, epochs, options, seed)

    def facts(net: nn.Module, trained: Trained) -> dict[str, float]:
        return {
            "training": error(net, data.train),
            "validation": trained.validation_error,
            "test": math.nan if options.no_test else error(net, data.test),
            "multiply-adds": count_multiply_adds(net, data.image_shape),
            "parameters": count_parameters(net),
            "seconds": trained.seconds,
        }

    return {
        "parent": facts(parent, first),
        "trained on": facts(longer, of_longer),
        "grown": facts(grown, of_growing),
    }


def grow(
    net: nn.Module,
    data: DataSet,
    sources: dict[str, list[str]] | None,
    options: argparse.Namespace,
    seed: int,
) -> tuple[nn.Module, Trained]:
    """Grow a network once or several times and train it."""
    make_growable(net, torch.zeros(1, *data.image_shape), sources=sources, ops=options.ops)
    spent = 0.0
    for growth in range(options.growths):
        attach_candidates(net, l1=options.l1)
        seed += 1000
        weak = train(
            net,
            data,
            options.weak_epochs,
            options.weak_lr or options.lr,
            seed,
            options.batch,
            False,
        )
        genotype = finalize_candidates(net, i_max=options.i_max)
        seed += 1000
        final = train(
            net, data, options.final_epochs, options.final_lr or options.lr, seed, options.batch
        )
        spent += weak.seconds + final.seconds
        if options.verbose:
            steps = {n: round(p.item(), 3) for n, p in net.named_parameters() if n.endswith("eta")}
            print(growth, genotype.to_json(), steps, weak, final, flush=True)
    return net, Trained(final.validation_error, spent)


def train_on(
    parent: nn.Module, data: DataSet, epochs: int, options: argparse.Namespace, seed: int
) -> tuple[nn.Module, Trained]:
    """Train copies of the parent, one with each learning rate; return the better one."""
    tried = []
    for lr in options.on_lrs or [options.lr]:
        net = copy.deepcopy(parent)
        tried.append((net, train(net, data, epochs, lr, seed + 1000, options.batch)))
        if options.verbose:
            print("trained on with", lr, epochs, tried[-1][1], flush=True)
    return min(tried, key=lambda one: one[1].validation_error)


def main() -> None:
    """Compare for several seeds and print means."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="digits")
    parser.add_argument("--root", default=None, help="folder of the data set")
    parser.add_argument("--limit", type=int, default=None, help="training images to use")
    parser.add_argument("--validation", type=int, default=None, help="validation images to use")
    parser.add_argument("--model", choices=MODELS, default="mobilenet")
    parser.add_argument("--width", type=float, default=0.25, help="factor of the network's width")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=12, help="epochs of the parent")
    parser.add_argument("--weak-epochs", type=int, default=4)
    parser.add_argument("--final-epochs", type=int, default=8)
    parser.add_argument("--growths", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--weak-lr", type=float, help="of weak learning; default: --lr")
    parser.add_argument("--final-lr", type=float, help="learning rate after growing; default: --lr")
    parser.add_argument("--on-lrs", type=float, nargs="+", help="rates to try for training on")
    parser.add_argument("--l1", type=float, default=0.001)
    parser.add_argument("--i-max", type=int, default=3)
    parser.add_argument("--ops", nargs="+", help="eligible operations; default: all")
    parser.add_argument("--no-test", action="store_true", help="do not use the test set")
    parser.add_argument("--verbose", action="store_true", help="print the growths")
    options = parser.parse_args()

    results = []
    row = "{:>4}  {:<10}  {:>8}  {:>10}  {:>7}  {:>13}  {:>10}  {:>11}"
    names = ("training", "validation", "test", "multiply-adds", "parameters", "cpu seconds")
    print(row.format("seed", "network", *names))
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        results.append(compare(options, seed))
        for name, facts in results[-1].items():
            print(row.format(seed, name, *_texts(facts)), flush=True)
    for name in results[0]:
        of_all = {
            key: statistics.mean(result[name][key] for result in results)
            for key in results[0][name]
        }
        print(row.format("mean", name, *_texts(of_all)))


def _texts(facts: dict[str, float]) -> list[str]:
    return [
        f"{facts['training']:.2%}",
        f"{facts['validation']:.2%}",
        f"{facts['test']:.2%}",
        f"{facts['multiply-adds']:.0f}",
        f"{facts['parameters']:.0f}",
        f"{facts['seconds']:.0f}",
    ]


if __name__ == "__main__":
    main()
