from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nni_petridish.core.genotype import Genotype
from nni_petridish.core.momentum import start_with
from nni_petridish.core.selection import architecture
from nni_petridish.core.weak_learner import WeakLearner
from nni_petridish.core.widen import find_places, widen_into
from nni_petridish.errors import GenotypeError, GrowthError
from nni_petridish.tasks.optim import make_optimizer
from search_spaces import VisionSpace
from search_spaces.vision.genotype import VisionGenotype

CELLS = {
    "normal": (
        (("prev_prev", "sep_conv_5x5"), ("prev", "max_pool_3x3"), ("prev", "identity")),
        (("h0", "dil_conv_3x3"), ("prev", "avg_pool_3x3")),
    ),
    "reduce": ((("prev", "identity"), ("prev_prev", "dil_conv_5x5")),),
}


def trained(space: VisionSpace, genotype: Genotype) -> nn.Module:
    """Return a network with statistics, and with weak learners that matter."""
    net = space.build(genotype)
    for learner in net.modules():
        if isinstance(learner, WeakLearner):
            nn.init.constant_(learner.eta, 0.3)
    for _ in range(3):
        net(images())
    return net


def images() -> Tensor:
    return torch.randn(16, 1, 12, 12).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("merge", ["concat_project", "weighted_sum"])
@pytest.mark.parametrize(("filters", "factor"), [(5, 1.4), (4, 2.0), (3, 1.0)])
def test_a_widened_network_predicts_the_same(merge: str, filters: int, factor: float) -> None:
    torch.manual_seed(0)
    space = VisionSpace((1, 12, 12), 7, cells_per_stage=2, filters=filters, merge=merge)
    genotype = VisionGenotype("cell", CELLS, merge)
    net, x = trained(space, genotype), images()
    wider = space.widened(genotype, factor)
    wide = space.build(wider)
    widen_into(wide, net, find_places(net, wide, space.place_channels))
    assert space.filters_of(wider) == max(filters + 1, round(factor * filters))
    for mode in (False, True):  # in training the statistics of the old channels stay the same, too
        net.train(mode)
        wide.train(mode)
        torch.testing.assert_close(wide(x), net(x), rtol=1e-5, atol=1e-5)


def test_every_new_weight_learns_within_two_steps() -> None:
    torch.manual_seed(0)
    space = VisionSpace((1, 12, 12), 7, cells_per_stage=1, filters=4)
    net = trained(space, VisionGenotype("cell", CELLS))
    wide = space.build(space.widened(VisionGenotype("cell", CELLS), 2.0))
    places = find_places(net, wide, space.place_channels)
    widen_into(wide, net, places)
    optimizer = make_optimizer(wide, lr=0.05, weight_decay=0.0, momentum=0.9)
    start = {name: parameter.detach().clone() for name, parameter in wide.named_parameters()}
    labels = torch.arange(16) % 7
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(wide(images()), labels).backward()
        optimizer.step()
    changed = dict(wide.named_parameters())
    for name, place in places.items():
        if name in changed and changed[name].ndim == 4:
            new = torch.ones(len(start[name]), dtype=torch.bool)
            assert place.outputs is not None
            new[place.outputs] = False
            if new.any():
                assert not torch.equal(changed[name][new], start[name][new]), name
            if place.inputs is not None:  # what the old outputs read of new inputs was 0
                read = changed[name][place.outputs].detach().clone()
                read[:, place.inputs] = 0
                assert not start[name].shape[1] > len(place.inputs) or read.abs().sum() > 0, name


def test_old_parameters_keep_their_momenta_and_new_ones_start_at_rest() -> None:
    space = VisionSpace((1, 12, 12), 7, cells_per_stage=1, filters=4)
    net, wide = space.build(space.seed()), space.build(space.widened(space.seed(), 2.0))
    start_with(net, {name: torch.ones_like(p) for name, p in net.named_parameters()})
    widen_into(wide, net, find_places(net, wide, space.place_channels))
    optimizer = make_optimizer(wide, lr=0.1, weight_decay=0.0, momentum=0.9)
    momentum = optimizer.state[wide.get_parameter("classifier.weight")]["momentum_buffer"]
    assert momentum.sum() == net.get_parameter("classifier.weight").numel() < momentum.numel()
    again = make_optimizer(wide, lr=0.1, weight_decay=0.0, momentum=0.9)
    assert not again.state[wide.get_parameter("classifier.weight")]["momentum_buffer"].any()


def test_the_width_is_part_of_an_architecture_and_old_files_stay_as_they_are() -> None:
    space = VisionSpace((1, 12, 12), 7, cells_per_stage=1, filters=4)
    seed, wider = space.seed(), space.widened(space.seed(), 1.5)
    assert "width" not in seed.to_dict()
    assert wider.to_dict()["width"] == 1.5
    assert Genotype.from_json(wider.to_json()) == wider
    assert architecture(seed) != architecture(wider)
    assert wider.grown({"normal": (("prev", "identity"),)}).width == 1.5
    for width in (0.5, True, "2", float("nan")):
        with pytest.raises(GenotypeError, match="width: must be a number from 1 to 1000"):
            VisionGenotype("cell", seed.cells, width=width)  # type: ignore[arg-type]


def test_a_module_that_cannot_be_widened_is_named() -> None:
    class Own(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(channels))

    with pytest.raises(GrowthError, match=r"0\.scale of Own cannot be widened"):
        find_places(nn.Sequential(Own(2)), nn.Sequential(Own(3)), lambda *_: torch.arange(2))
