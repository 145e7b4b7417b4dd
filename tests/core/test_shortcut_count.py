from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nni_petridish.core import attach_candidates, sites
from nni_petridish.core.candidate_cost import candidate_milliseconds, per_millisecond
from nni_petridish.core.shortcut_count import count_shortcuts
from nni_petridish.errors import GrowthError
from search_spaces import VisionSpace

OPS = ("identity", "max_pool_3x3", "sep_conv_3x3", "sep_conv_5x5")


def grown() -> nn.Module:
    torch.manual_seed(0)
    space = VisionSpace((1, 8, 8), 10, cells_per_stage=1, filters=4, stages=1, ops=OPS)
    net = attach_candidates(space.build(space.seed()))
    for _ in range(30):  # statistics, so that all candidates are normalized
        net(torch.randn(32, 1, 8, 8).contiguous(memory_format=torch.channels_last)).sum().backward()
    net.zero_grad(set_to_none=True)
    return net


class Batches:
    """A loss whose gradient at x_k is a sum of some candidates, with noise of its own per batch."""

    def __init__(self, chosen: list[int], noise: float, count: int = 8) -> None:
        self.chosen, self.noise, self.count = chosen, noise, count

    def __call__(self, net: nn.Module) -> Iterator[Tensor]:
        (site,) = sites(net)
        learner = site.weak_learner
        assert learner is not None
        kept: list[tuple[Tensor, Tensor]] = []

        def keep(module: Any, arguments: Any, x_k: Tensor) -> None:
            with torch.no_grad():
                outputs = [op(z) for op, z in module.ops_with_inputs(arguments[1])]
                target = sum((outputs[i] for i in self.chosen), torch.zeros_like(x_k))
            kept.append((x_k, target + self.noise * torch.randn_like(x_k)))

        for _ in range(self.count):
            handle = learner.register_forward_hook(keep)
            net(torch.randn(8, 1, 8, 8).contiguous(memory_format=torch.channels_last))
            handle.remove()
            x_k, target = kept.pop()
            yield -(x_k * target).sum()


@pytest.mark.parametrize("right", [1, 2, 3])
def test_as_many_shortcuts_are_kept_as_help(right: int) -> None:
    net = grown()
    order = [2.0 - 0.1 * i for i in range(8)]
    losses = Batches(list(range(right)), noise=3.0)
    found = [count_shortcuts(net, losses, 6, {"normal": order}) for _ in range(5)]
    assert sorted(found)[2] == right


def test_one_batch_is_not_enough() -> None:
    with pytest.raises(GrowthError, match="at least two held-out batches"):
        count_shortcuts(grown(), Batches([0], 1.0, count=1), 3)


def test_the_cost_of_a_candidate_is_measured_and_the_network_is_left_alone() -> None:
    net = grown()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    found = candidate_milliseconds(net, Batches([0], 1.0))["normal"]
    assert len(found) == 8
    assert min(found) > 0
    assert found[3] > found[0]  # two 5x5 convolutions against an identity
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert per_millisecond({"a": [1.0]}, {"a": [4.0]}) == {"a": [0.25]}
