from __future__ import annotations

import torch

from nni_petridish.core.genotype import Genotype
from nni_petridish.tasks.vision import teacher
from nni_petridish.tasks.vision.data import describe, load_data
from nni_petridish.tasks.vision.recipe import Recipe


def test_the_teachers_set_is_the_same_every_time_and_balanced() -> None:
    torch.manual_seed(3)
    data, again = load_data("teacher"), load_data("teacher")
    assert torch.equal(data.train.images, again.train.images)  # type: ignore[attr-defined]
    assert torch.equal(data.train.labels, again.train.labels)  # type: ignore[attr-defined]
    assert (len(data.train), len(data.validation), len(data.test)) == (20_000, 2_000, 4_000)
    assert describe("teacher").image_shape == data.image_shape == (1, 8, 8)
    share = data.train.labels.float().mean()  # type: ignore[attr-defined]
    assert 0.4 < float(share) < 0.6
    assert Recipe.named("teacher").crop_padding == 0
    assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(3))


def test_the_seed_orders_training_images_only() -> None:
    one, other = load_data("teacher"), load_data("teacher", seed=1)
    assert torch.equal(one.test.images, other.test.images)  # type: ignore[attr-defined]
    assert not torch.equal(one.train.images, other.train.images)  # type: ignore[attr-defined]


def test_labels_are_a_function_of_the_pixels() -> None:
    images = teacher._make_images()
    flipped = teacher._label(images)
    assert torch.equal(flipped, teacher._label(images))
    plain = {"version": 1, "space": "vision", "mode": "cell", "cells": teacher.CELLS}
    assert Genotype.from_dict(plain).growths == 2
