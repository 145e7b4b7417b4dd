"""Images that a random network has labeled: a task where a known kind of capacity is missing.

The teacher is the seed of the vision space, one cell at one resolution, after two growths: a max
pooling of its input, and a max pooling of that one. Its weights are random, and η = 10 makes the
shortcuts decide. Images are noise of two scales. The label is the class with the larger logit, both
standardized over all images. So no label is noise, both classes are equally frequent, and a network
of the teacher's architecture and width can be without error.

The seed lacks depth, whatever its width: known constructions of the maximum of 25 numbers have
⌈log₂ 25⌉ = 5 rectified layers, and the seed has three. A wider seed only comes closer. It is known
which shortcuts a growth should select: the maximum over 5x5 pixels is two growths away.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nni_petridish.tasks.vision.image_files import Arrays

SIZE, CLASSES = 8, 2
TRAINING, TEST = 22_000, 4_000
CELLS = {"normal": [[["prev", "max_pool_3x3"]], [["h0", "max_pool_3x3"]]], "reduce": []}
"""The weak learners of the teacher."""
_FILTERS, _ETA, _SEED, _BATCH = 4, 10.0, 20, 1000


def read_teacher(root: Path, seed: int) -> Arrays:
    """Make the images and labels; ``seed`` orders the training images, ``root`` is not used."""
    import numpy as np

    images = _make_images()
    pixels, labels = images.numpy(), _label(images).numpy()
    order = np.random.default_rng(seed).permutation(TRAINING)
    return pixels[:TRAINING][order], labels[:TRAINING][order], pixels[TRAINING:], labels[TRAINING:]


def _make_images() -> Any:
    """Return noise of two scales, as whole numbers from 0 to 255."""
    import torch
    from torch.nn import functional as F

    generator, count = torch.Generator().manual_seed(_SEED), TRAINING + TEST
    fine = torch.randn(count, 1, SIZE, SIZE, generator=generator)
    coarse = torch.randn(count, 1, SIZE // 2, SIZE // 2, generator=generator)
    noise = fine + F.interpolate(coarse, scale_factor=2.0)
    return (128 + 40 * noise).round().clamp(0, 255).to(torch.uint8)


def _label(images: Any) -> Any:
    """Return the classes that the teacher gives the images."""
    import torch

    from nni_petridish.core.genotype import Genotype
    from nni_petridish.core.weak_learner import WeakLearner
    from search_spaces.vision.space import VisionSpace

    space = VisionSpace((1, SIZE, SIZE), CLASSES, cells_per_stage=1, filters=_FILTERS, stages=1)
    plain = {"version": 1, "space": "vision", "mode": "cell", "cells": CELLS}
    with torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(_SEED)
        net = space.build(Genotype.from_dict(plain)).train()
        for module in net.modules():
            if isinstance(module, WeakLearner):
                module.eta.fill_(_ETA)
        pixels = (images.float() - 128) / 57
        for _ in range(20):  # statistics for the batch norms
            net(pixels[:_BATCH])
        logits = torch.cat([net.eval()(part) for part in pixels.split(_BATCH)])
    return ((logits - logits.mean(0)) / logits.std(0)).argmax(1)
