"""Small networks and batches that several tests share."""

from __future__ import annotations

import copy
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nni_petridish import Genotype, attach_candidates, finalize_candidates
from search_spaces import VisionSpace
from search_spaces.vision.network import VisionNetwork

NUM_CLASSES = 4


def small_space(
    mode: str = "cell", stages: int = 2, size: int = 8, **options: object
) -> VisionSpace:
    return VisionSpace(
        (2, size, size),
        NUM_CLASSES,
        cells_per_stage=1,
        filters=4,
        mode=mode,
        stages=stages,
        **options,
    )


def batch(space: VisionSpace, n: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(n, *space.image_shape, generator=generator)
    return images, torch.randint(space.num_classes, (n,), generator=generator)


def train(net: nn.Module, images: Tensor, labels: Tensor, steps: int = 3, lr: float = 0.1) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()


def grow(net: VisionNetwork, images: Tensor, labels: Tensor, i_max: int = 2) -> Genotype:
    """One whole growth, so short that η and α move away from where they start, no more."""
    attach_candidates(net)
    train(net, images, labels)
    genotype = finalize_candidates(net, i_max)
    train(net, images, labels)
    return genotype


def grown_network(space: VisionSpace, growths: int) -> tuple[VisionNetwork, Tensor, Tensor]:
    """A network after some growths, and the batch it was trained on."""
    return copy.deepcopy(_grown(space, growths)), *batch(space)


@cache
def _grown(space: VisionSpace, growths: int) -> VisionNetwork:
    torch.manual_seed(growths)
    images, labels = batch(space)
    if growths:
        net = copy.deepcopy(_grown(space, growths - 1))
        grow(net, images, labels)
    else:
        net = space.build(space.seed())
        train(net, images, labels)
    return net
