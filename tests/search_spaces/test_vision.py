from __future__ import annotations

import contextlib
import itertools
import json

import pytest
import torch
import torch.nn.functional as F

from nni_petridish import Genotype, attach_candidates
from nni_petridish.errors import ConfigError, GenotypeError, GrowthError
from nni_petridish.kernels.switch import plain_ops
from search_spaces import VisionSpace
from search_spaces.vision.genotype import VisionGenotype
from search_spaces.vision.ops import DropPath, FactorizedReduce
from tests.support.networks import NUM_CLASSES, batch, grow, grown_network, small_space, train


@pytest.mark.parametrize(
    ("mode", "growths", "merge"),
    list(itertools.product(["cell", "macro"], [0, 1, 2, 3], ["concat_project", "weighted_sum"])),
)
def test_build_with_the_state_dict_reproduces_predictions(
    mode: str, growths: int, merge: str
) -> None:
    space = small_space(mode, stages=3, merge=merge)
    net, images, _ = grown_network(space, growths)
    genotype = Genotype.from_json(net.genotype.to_json())
    twin = space.build(genotype)
    twin.load_state_dict(net.state_dict())
    assert torch.equal(twin.eval()(images), net.eval()(images))


@pytest.mark.parametrize("size", [(8, 8), (9, 11), (13, 8), (32, 32), (28, 28), (17, 31)])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_any_image_grows(size: tuple[int, int], channels: int) -> None:
    space = VisionSpace((channels, *size), NUM_CLASSES, cells_per_stage=1, filters=3)
    torch.manual_seed(0)
    net = space.build(space.seed())
    images, labels = batch(space, 3)
    for _ in range(2):
        grow(net, images, labels)
    assert net(images).shape == (3, NUM_CLASSES)


@pytest.mark.parametrize("mode", ["cell", "macro"])
def test_a_signal_grows_with_the_numbers_of_plain_modules(mode: str) -> None:
    space = VisionSpace((2, 1, 40), NUM_CLASSES, cells_per_stage=2, filters=4, stages=1, mode=mode)
    torch.manual_seed(0)
    net = space.build(space.seed())
    images, labels = batch(space, 6)
    for _ in range(2):
        grow(net, images, labels)
    attach_candidates(net)
    gradients = []
    for kernels in (contextlib.nullcontext(), plain_ops()):
        with kernels:
            net.zero_grad()
            F.cross_entropy(net(images), labels).backward()
        gradients.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 40
    for fast, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("mode", ["cell", "macro"])
@pytest.mark.parametrize("growths", [0, 2])
def test_every_parameter_receives_a_gradient(mode: str, growths: int) -> None:
    space = small_space(mode, stages=3)
    net, images, labels = grown_network(space, growths)
    for network in (net, space.build(net.genotype, auxiliary=True)):
        network.train()
        network.zero_grad()
        if network.auxiliary is None:
            loss = F.cross_entropy(network(images), labels)
        else:
            logits, auxiliary = network.forward_with_auxiliary(images)
            loss = F.cross_entropy(logits, labels) + F.cross_entropy(auxiliary, labels)
        loss.backward()
        for name, parameter in network.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name


def test_every_candidate_parameter_receives_a_gradient() -> None:
    space = small_space(stages=3, size=16)
    net, images, labels = grown_network(space, 1)
    attach_candidates(net)
    train(net, images, labels, steps=1)
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_projections_exist_only_where_something_consumes_them() -> None:
    space = small_space()
    seed = space.build(space.seed())
    assert [sorted(cell.adapters) for cell in seed.cells] == [["prev"], ["prev"], []]
    uses_both = VisionGenotype(
        "cell", {"normal": [[("prev_prev", "identity")]], "reduce": [[("prev", "identity")]]}
    )
    net = space.build(uses_both)
    assert [sorted(cell.adapters) for cell in net.cells] == [
        ["prev", "prev_prev"],
        ["prev"],
        ["prev_prev"],
    ]


def test_factorized_reduce_reads_every_pixel() -> None:
    for size in (6, 7):
        op = FactorizedReduce(2, 4).eval()
        x = torch.rand(1, 2, size, size, requires_grad=True)
        op(x).sum().backward()
        touched = x.grad.abs().sum(1)[0] > 0
        even = torch.zeros(size, size, dtype=torch.bool)
        even[::2, ::2] = True
        even[1::2, 1::2] = True
        assert torch.equal(touched, even)


def test_drop_path_keeps_the_expectation_and_is_linear_in_depth_and_progress() -> None:
    space = small_space(stages=3)
    net = space.build(space.seed())
    net.set_drop_path(0.6, 0.5)
    keeps = [m.keep for m in net.modules() if isinstance(m, DropPath)]
    n = len(net.cells)
    assert keeps == pytest.approx([1 - 0.4 * (i + 1) / n * 0.5 for i in range(n)])
    torch.manual_seed(0)
    drop = DropPath()
    drop.keep = 0.6
    out = drop.train()(torch.ones(20000, 1, 2, 2))
    assert out.unique().tolist() == pytest.approx([0.0, 1 / 0.6])
    assert out.mean().item() == pytest.approx(1.0, abs=0.02)
    assert (out.flatten(1).std(1) == 0).all()
    assert torch.equal(drop.eval()(out), out)


def test_networks_compute_in_channels_last_even_from_one_channel() -> None:
    space = VisionSpace((1, 8, 8), NUM_CLASSES, cells_per_stage=1, filters=4)
    net = space.build(space.seed())
    seen = []
    for cell in net.cells:
        cell.register_forward_hook(
            lambda m, i, o: seen.append(o.is_contiguous(memory_format=torch.channels_last))
        )
    net(torch.randn(2, 1, 8, 8))
    assert all(seen)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"image_shape": (1, 7, 8)}, "image_shape must be"),
        ({"image_shape": (1, 8, 1)}, "image_shape must be"),
        ({"image_shape": (1, 1, 7)}, "or (1, 1, 8) for a signal, but got (1, 1, 7)"),
        ({"image_shape": (1, 1, 40)}, "stages must halve a 1x40 image at most 0 times"),
        ({"image_shape": (8, 8)}, "image_shape must be"),
        ({"image_shape": (0, 8, 8)}, "image_shape must be"),
        ({"image_shape": (1, 8.5, 8)}, "image_shape must be"),
        ({"num_classes": 0}, "num_classes must be a whole number in [1, 100000] but got 0"),
        ({"filters": 1.5}, "filters must be"),
        ({"cells_per_stage": -1}, "cells_per_stage must be"),
        ({"stages": 5}, "stages must halve a 8x8 image at most 3 times but got 5 stages"),
        ({"mode": "meso"}, "mode must be one of cell, macro but got 'meso'"),
        ({"merge": "max"}, "merge must be one of"),
        ({"ops": []}, "ops must be a list"),
        ({"ops": ["conv"]}, "ops must be a list"),
    ],
)
def test_impossible_spaces_are_refused(arguments: dict, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        VisionSpace(**{"image_shape": (1, 8, 8), "num_classes": 4, **arguments})
    assert problem in str(caught.value)


def test_genotypes_of_another_space_are_refused() -> None:
    cell, macro = small_space("cell"), small_space("macro")
    with pytest.raises(GenotypeError, match="mode: the space's is 'cell' but got 'macro'"):
        cell.build(macro.seed())
    with pytest.raises(GenotypeError, match="the space has 3 cells but got 5"):
        macro.build(small_space("macro", stages=3).seed())
    with pytest.raises(GenotypeError, match="space: must be vision"):
        cell.build("normal")  # type: ignore[arg-type]


def test_a_space_is_made_again_from_its_description() -> None:
    space = small_space("macro", merge="weighted_sum")
    assert VisionSpace(**json.loads(json.dumps(space.describe()))) == space


def test_a_factorized_reduce_of_width_one_is_refused_in_one_line() -> None:
    with pytest.raises(GrowthError, match="needs at least 2 filters but got 1"):
        FactorizedReduce(1, 1)
