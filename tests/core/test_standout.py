from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nni_petridish import attach_candidates, finalize_candidates, sites
from nni_petridish.core.held_out import Losses
from nni_petridish.core.select import score_named
from nni_petridish.core.standout import PACK, RATIO, ratios_to_pack
from search_spaces.vision.network import VisionNetwork
from tests.support.networks import batch, small_space, train


def attached(mode: str = "cell") -> tuple[VisionNetwork, Losses]:
    torch.manual_seed(0)
    space = small_space(mode, stages=2, ops=("identity", "sep_conv_3x3", "max_pool_3x3"))
    net = attach_candidates(space.build(space.seed()))
    images, labels = batch(space, 8)
    train(net, images, labels, steps=2)

    def losses(net: nn.Module) -> Iterator[Tensor]:
        yield F.cross_entropy(net(images), labels, reduction="sum")

    return net, losses


def set_alpha(net: nn.Module, sizes: dict[str, list[float]]) -> None:
    for site in sites(net):
        table = site.weak_learner.table
        values = torch.tensor(sizes.get(site.key, [0.1] * len(table.shortcuts)))
        with torch.no_grad():
            table.alpha.copy_(values * torch.tensor([-1.0, 1.0]).repeat(3))


def test_without_a_candidate_that_stands_out_it_is_the_consensus() -> None:
    net, losses = attached()
    set_alpha(net, {"normal": [0.2, 0.29, 0.25, 0.2, 0.1, 0.05]})
    assert score_named("standout")(net, losses) == score_named("consensus")(net, losses)


@pytest.mark.parametrize("mode", ["cell", "macro"])
def test_candidates_that_stand_out_come_first_in_the_order_of_their_magnitude(mode: str) -> None:
    net, losses = attached(mode)
    key = sites(net)[-1].key
    set_alpha(net, {key: [0.1, 0.3, 0.1, 0.05, 0.16, 0.0]})
    found, others = score_named("standout")(net, losses), score_named("consensus")(net, losses)
    first, second = found[key][1], found[key][4]
    assert first > second > max(score for table in others.values() for score in table)
    for other, table in found.items():
        kept = [i for i in range(6) if (other, i) not in ((key, 1), (key, 4))]
        assert [table[i] for i in kept] == [others[other][i] for i in kept]
    learners = finalize_candidates(net, i_max=2, scores=found).learners_by_key()
    shortcuts = sites(attached(mode)[0])[-1].weak_learner.table.shortcuts
    assert set(learners[key][0]) == {shortcuts[1], shortcuts[4]}


@pytest.mark.parametrize("sizes", [[0.0] * 4, [1.0, 0.0, 0.0], [2.0, 1.0], [1.0], []])
def test_nothing_stands_out_of_no_pack(sizes: list[float]) -> None:
    assert all(ratio < RATIO for ratio in ratios_to_pack(sizes))


def test_at_most_two_stand_out() -> None:
    ratios = ratios_to_pack([9.0, 8.0, 1.0, 1.0])
    assert sum(ratio >= RATIO for ratio in ratios) == PACK - 1
