from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nni_petridish.core.eta_start import (
    SIZES,
    Line,
    calibrate,
    count_learners,
    line_search,
    new_learners,
    set_eta,
)
from nni_petridish.core.grow import attach_candidates, finalize_candidates
from nni_petridish.core.weak_learner import WeakLearner
from nni_petridish.errors import GrowthError
from search_spaces import VisionSpace


def grown(seed: int = 0) -> tuple[nn.Module, list[WeakLearner]]:
    torch.manual_seed(seed)
    space = VisionSpace((1, 8, 8), 4, cells_per_stage=1, filters=4, stages=1)
    net = space.build(space.seed())
    before = count_learners(net)
    attach_candidates(net)
    finalize_candidates(net, 2)
    return net, new_learners(net, before)


IMAGES = torch.randn(60, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def losses(net: nn.Module) -> Iterator[Tensor]:
    """Yield parts of a loss: that of wrong labels, so that an untrained network can improve."""
    labels = (IMAGES.mean((1, 2, 3)) > 0).long()
    for images, part in zip(IMAGES.split(20), labels.split(20), strict=True):
        yield F.cross_entropy(net(images), part, reduction="sum") / len(IMAGES)


def total(net: nn.Module) -> float:
    with torch.no_grad():
        return sum(float(part) for part in losses(net.eval()))


def test_the_line_search_finds_the_best_of_its_sizes() -> None:
    net, learners = grown()
    with torch.no_grad():  # h lowers the loss: it adds what the classifier wants
        for parameter in learners[0].merge.parameters():
            parameter.add_(0.1)
    found = line_search(net, learners, losses)
    assert {learner.eta.item() for learner in learners} == {found.size}
    at = {}
    for size in (0.0, *SIZES):
        set_eta(learners, size)
        at[size] = total(net)
    rising = next((s for a, s in itertools.pairwise(SIZES) if at[s] >= at[a]), None)
    tried = [size for size in (0.0, *SIZES) if rising is None or size <= rising]
    assert found.size == min(tried, key=lambda size: at[size])
    assert found.change == pytest.approx(at[found.size] - at[0.0], abs=1e-6)


def test_a_step_that_does_not_lower_the_loss_is_not_taken() -> None:
    net, learners = grown()

    def rising(net: nn.Module) -> Iterator[Tensor]:
        yield from (part * 0 + sum(learner.eta for learner in learners) for part in losses(net))

    assert line_search(net, learners, rising) == Line(0.0, 0.0, 0.0)
    assert all(learner.eta == 0 for learner in learners)
    assert not Line(0.0, 0.0, 0.0).pays


def test_a_line_pays_if_the_loss_falls_by_more_than_chance_explains() -> None:
    assert Line(0.5, -0.3, 0.1).pays
    assert not Line(0.5, -0.1, 0.1).pays
    net, learners = grown()

    def falling(net: nn.Module) -> Iterator[Tensor]:
        yield sum((part for part in losses(net)), torch.zeros(())) * 0 - learners[0].eta

    single = line_search(net, learners, falling)
    assert single.size == 1
    assert not single.pays  # one batch says nothing of chance


def test_calibrating_gives_statistics_to_norms_that_have_none_and_changes_nothing_else() -> None:
    net, learners = grown()
    before = copy.deepcopy(net.state_dict())
    calibrate(net, learners, losses)
    changed = {name for name, value in net.state_dict().items() if not value.equal(before[name])}
    assert changed
    assert all(".learners.0." in name for name in changed)
    assert all("running" in name or "num_batches" in name for name in changed)
    norm = learners[0].merge.norm
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.momentum == 0.1
    again = copy.deepcopy(net.state_dict())
    calibrate(net, learners, losses)
    assert all(value.equal(again[name]) for name, value in net.state_dict().items())


def test_a_line_search_without_held_out_batches_is_refused() -> None:
    net, learners = grown()
    with pytest.raises(GrowthError, match="needs held-out batches"):
        line_search(net, learners, lambda net: ())
