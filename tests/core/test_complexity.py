from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from nni_petridish import attach_candidates, count_multiply_adds, count_parameters
from nni_petridish.errors import ConfigError
from nni_petridish.kernels.switch import plain_ops
from search_spaces import VisionSpace
from search_spaces.vision.ops import make_op
from tests.support.networks import grown_network, small_space


@pytest.mark.parametrize("growths", [0, 2])
@pytest.mark.parametrize("mode", ["cell", "macro"])
def test_multiply_adds_agree_with_torchs_flop_counter(mode: str, growths: int) -> None:
    space = small_space(mode, stages=3, size=11)
    net, *_ = grown_network(space, growths)
    net.eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(torch.zeros(1, *space.image_shape))
    assert count_multiply_adds(net, space.image_shape) == counter.get_total_flops() // 2


def test_multiply_adds_of_a_conv_are_those_of_the_formula() -> None:
    net = nn.Conv2d(6, 12, (3, 5), stride=2, padding=1, groups=3)
    height, width = 5, 4  # of the output for 10x10
    expected = 6 * 12 * 15 * height * width // 3
    assert count_multiply_adds(net, (6, 10, 10)) == expected


def test_counting_ignores_what_is_for_training_only_and_leaves_no_trace() -> None:
    space = small_space()
    net, *_ = grown_network(space, 1)
    size = count_parameters(net), count_multiply_adds(net, space.image_shape)
    attach_candidates(net)
    net.train()
    statistics = net.norm.running_mean.clone()
    assert (count_parameters(net), count_multiply_adds(net, space.image_shape)) == size
    assert net.training
    assert torch.equal(net.norm.running_mean, statistics)
    assert not any(m._forward_hooks for m in net.modules())
    with_auxiliary = space.build(net.genotype, auxiliary=True)
    assert count_parameters(with_auxiliary) == size[0]
    assert sum(p.numel() for p in with_auxiliary.parameters()) > size[0]


def test_counting_leaves_each_module_in_its_own_mode() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    net[1].eval()  # frozen, in a network that is trained
    count_multiply_adds(net, (3, 5, 5))
    assert [module.training for module in net.modules()] == [True, True, False]
    net.eval()
    net[1].train()
    count_multiply_adds(net, (3, 5, 5))
    assert [module.training for module in net.modules()] == [False, False, True]


def test_the_papers_seed_has_0_4_million_parameters() -> None:
    space = VisionSpace((3, 32, 32), 10, cells_per_stage=6, filters=32)
    assert round(count_parameters(space.build(space.seed())) / 1e6, 1) == 0.4


@pytest.mark.parametrize("channels", [4, 7])
def test_parameters_of_ops_are_those_of_the_formulas(channels: int) -> None:
    c = channels
    for k in (3, 5):
        sep = count_parameters(make_op(f"sep_conv_{k}x{k}", c, affine=True))
        dil = count_parameters(make_op(f"dil_conv_{k}x{k}", c, affine=True))
        assert sep == 2 * (k * k * c + c * c) + 4 * c
        assert dil == k * k * c + c * c + 2 * c
    for name in ("max_pool_3x3", "avg_pool_3x3", "identity"):
        assert count_parameters(make_op(name, c)) == 0


@pytest.mark.parametrize("shape", [(1, 3, 8, 8), (4, 8, 8)])
def test_a_shape_that_does_not_fit_is_refused_in_one_line(shape: tuple[int, ...]) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2))
    with pytest.raises(ConfigError, match=r"the shape of one input.* but got \(") as caught:
        count_multiply_adds(net, shape)
    assert "\n" not in str(caught.value)
    assert ("leave the batch dimension out" in str(caught.value)) == (len(shape) == 4)


def test_candidates_count_in_training() -> None:
    space = small_space()
    net, *_ = grown_network(space, 1)
    plain = count_multiply_adds(net, space.image_shape)
    assert count_multiply_adds(net, space.image_shape, candidates=True) == plain
    attach_candidates(net)
    net.eval()
    with FlopCounterMode(display=False) as counter, plain_ops():
        net(torch.zeros(1, *space.image_shape))  # gradients are on, so the candidates run
    counted = count_multiply_adds(net, space.image_shape, candidates=True)
    assert counted == counter.get_total_flops() // 2 > 2 * plain
