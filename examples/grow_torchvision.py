"""Grow a trained model of torchvision, and compare with training it on at the same cost.

``python examples/grow_torchvision.py`` trains a small MobileNetV2 on scikit-learn's digits, then
goes on from there in two ways: it grows the network once, and it trains the network as it is for
the same processor time. ``--data fashion_mnist --root FOLDER --limit 3000`` takes another data set.
Validation selects the epoch of each way; the test set is looked at once, at the end.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import statistics
import time
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small networks: threads cost more than they bring

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import MobileNetV2

from nni_petridish import (
    attach_candidates,
    count_multiply_adds,
    count_parameters,
    finalize_candidates,
    load_data,
    make_growable,
)
from nni_petridish.data import DataSet
from nni_petridish.splits import Split

#: Each block reads the two layers before it. The last layer, 1280 wide, would cost most: left out.
SOURCES = {
    "features.1": ["features.0"],
    "features.2": ["features.0", "features.1"],
    "features.3": ["features.1", "features.2"],
}
BATCH = 32


def small_mobilenet(image_shape: tuple[int, int, int], width: float) -> nn.Module:
    """Torchvision's MobileNetV2 with three blocks, for small images."""
    channels, size, _ = image_shape
    blocks = [[1, 16, 1, 1], [4, 24, 1, 2], [4, 32, 1, 2]]
    net = MobileNetV2(10, width, inverted_residual_setting=blocks)
    filters, stride = net.features[0][0].out_channels, 1 if size < 16 else 2
    net.features[0][0] = nn.Conv2d(channels, filters, 3, stride, 1, bias=False)
    return net.to(memory_format=torch.channels_last)


def error(net: nn.Module, split: Split) -> float:
    """Return the fraction of images that are classified wrongly."""
    net.eval()
    wrong = 0
    with torch.no_grad():
        for images, labels in split.batches(256):
            wrong += int((net(split.normalise(images)).argmax(1) != labels).sum())
    return wrong / len(split)


class Trained(NamedTuple):
    """The best epoch by validation, and the processor time of all epochs."""

    validation_error: float
    seconds: float


def train(
    net: nn.Module, data: DataSet, epochs: int, lr: float, seed: int, select: bool = True
) -> Trained:
    """Train with SGD and a cosine; the network is left as it was after its best epoch, or last."""
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
        for images, labels in data.train.batches(BATCH, generator):
            optimizer.zero_grad()
            F.cross_entropy(net(data.train.normalise(images)), labels).backward()
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
    """Train a parent, then go on in both ways; return what is known of all three."""
    data = load_data(
        options.data, options.root, limit=options.limit, validation=options.validation, seed=seed
    )
    torch.manual_seed(seed)
    parent = small_mobilenet(data.image_shape, options.width)
    first = train(parent, data, options.epochs, options.lr, seed)

    example = torch.zeros(1, *data.image_shape)
    grown = make_growable(copy.deepcopy(parent), example, sources=SOURCES)
    attach_candidates(grown, l1=options.l1)
    weak = train(grown, data, options.weak_epochs, options.lr, seed + 1000, select=False)
    genotype = finalize_candidates(grown, i_max=options.i_max)
    final = train(grown, data, options.final_epochs, options.lr, seed + 2000)
    if options.verbose:
        print(genotype.to_json())

    longer = copy.deepcopy(parent)
    spent = weak.seconds + final.seconds
    epochs = max(1, round(spent / (first.seconds / options.epochs)))
    trained_on = train(longer, data, epochs, options.lr, seed + 1000)

    def facts(net: nn.Module, validation_error: float, seconds: float) -> dict[str, float]:
        return {
            "validation": validation_error,
            "test": error(net, data.test),
            "multiply-adds": count_multiply_adds(net, data.image_shape),
            "parameters": count_parameters(net),
            "seconds": seconds,
        }

    return {
        "parent": facts(parent, first.validation_error, first.seconds),
        "trained on": facts(longer, trained_on.validation_error, trained_on.seconds),
        "grown": facts(grown, final.validation_error, spent),
    }


def main() -> None:
    """Compare for several seeds and print means."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="digits")
    parser.add_argument("--root", default=None, help="folder of the data set")
    parser.add_argument("--limit", type=int, default=None, help="training images to use")
    parser.add_argument("--validation", type=int, default=None, help="validation images to use")
    parser.add_argument("--width", type=float, default=0.25, help="of the network: width_mult")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12, help="of the parent")
    parser.add_argument("--weak-epochs", type=int, default=4)
    parser.add_argument("--final-epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--l1", type=float, default=0.001)
    parser.add_argument("--i-max", type=int, default=3)
    parser.add_argument("--verbose", action="store_true", help="print what has grown")
    options = parser.parse_args()

    results = []
    row = "{:>4}  {:<10}  {:>10}  {:>7}  {:>13}  {:>10}  {:>11}"
    names = ("validation", "test", "multiply-adds", "parameters", "cpu seconds")
    print(row.format("seed", "network", *names))
    for seed in range(options.seeds):
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
        f"{facts['validation']:.2%}",
        f"{facts['test']:.2%}",
        f"{facts['multiply-adds']:.0f}",
        f"{facts['parameters']:.0f}",
        f"{facts['seconds']:.0f}",
    ]


if __name__ == "__main__":
    main()
