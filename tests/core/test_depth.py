from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nni_petridish import attach_candidates, finalize_candidates, sites
from nni_petridish.core.depth import network_depth
from nni_petridish.core.held_out import Losses
from nni_petridish.core.select import score_named
from search_spaces.vision.network import VisionNetwork
from tests.support.networks import batch, small_space

OPS = ("identity", "sep_conv_3x3", "dil_conv_3x3", "max_pool_3x3")
LAYERS = {"identity": 0, "max_pool_3x3": 0, "dil_conv_3x3": 2, "sep_conv_3x3": 4}
"""Layers with weights on the way through an operation."""


class Branches(nn.Module):
    """Three convolutions in a row, and a way around two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(2, 2, 1) for _ in range(3))
        self.linear = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        around = self.first(x)
        long = self.third(F.relu(self.second(around)))
        return self.linear((around + long).mean((2, 3)))  # type: ignore[no-any-return]


def test_the_longest_way_counts_and_others_do_not() -> None:
    assert network_depth(Branches(), torch.randn(1, 2, 4, 4)) == 4
    assert network_depth(nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)), torch.randn(1, 2, 4, 4)) == 0
    assert network_depth(nn.Identity(), torch.randn(1, 2)) == 0


def test_many_ways_are_counted_once_each() -> None:
    class Doubling(nn.Module):  # has 2⁶⁴ ways
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(64):
                x = x + torch.relu(x)
            return x

    assert network_depth(Doubling(), torch.randn(1, 2)) == 0


def attached(mode: str = "cell") -> tuple[VisionNetwork, Losses]:
    torch.manual_seed(0)
    space = small_space(mode, stages=1, ops=OPS)
    net = attach_candidates(space.build(space.seed()))
    images, labels = batch(space, 8)

    def losses(net: nn.Module) -> Iterator[Tensor]:
        yield F.cross_entropy(net(images), labels, reduction="sum")

    return net, losses


def test_a_second_growth_goes_on_top_of_the_first() -> None:
    net, losses = attached()
    depths = []
    for growth in range(2):
        before = {name: value.clone() for name, value in net.state_dict().items()}
        scores = score_named("depth")(net, losses)
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
        genotype = finalize_candidates(net, i_max=1, scores=scores)
        ((source, op),) = genotype.cells["normal"][-1]
        assert op == "sep_conv_3x3"
        assert growth == 0 or source == f"h{growth - 1}"
        depths.append(network_depth(net, torch.randn(1, *small_space("cell").image_shape)))
        attach_candidates(net)
    # a separable convolution and the projection of its merge
    assert depths[1] - depths[0] == LAYERS["sep_conv_3x3"] + 1


@pytest.mark.parametrize("mode", ["cell", "macro"])
def test_children_of_one_depth_are_ranked_by_their_prior(mode: str) -> None:
    net, losses = attached(mode)
    depth, prior = score_named("depth")(net, losses), score_named("prior")(net, losses)
    site = sites(net)[0]
    table = site.weak_learner.table
    both = zip(depth[site.key], prior[site.key], strict=True)
    found = dict(zip(table.shortcuts, both, strict=True))
    for (_, op), (score, promised) in found.items():
        for (_, other), (score_of_other, promised_of_other) in found.items():
            if int(score) == int(score_of_other):
                assert (score > score_of_other) == (promised > promised_of_other)
            if LAYERS[op] > LAYERS[other]:
                assert int(score) >= int(score_of_other)
    assert len({int(score) for score, _ in found.values()}) > 1
