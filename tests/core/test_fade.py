"""The fade-in of new weak learners: from Algorithm 1 to Algorithm 2 without a jump."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nni_petridish import attach_candidates, finalize_candidates
from nni_petridish.core import sites
from nni_petridish.core.eta_start import count_learners, new_learners, set_eta
from nni_petridish.core.weak_learner import WeakLearner
from nni_petridish.errors import ConfigError, Interrupted
from nni_petridish.kernels.switch import plain_ops
from nni_petridish.running.fading import FadeIn
from nni_petridish.running.growth import load_network, run_growth
from nni_petridish.search.settings import PRESETS, GrowthSettings
from nni_petridish.tasks.checkpoint import save_checkpoint
from nni_petridish.tasks.language.task import RecurrentTask
from nni_petridish.tasks.task import Callbacks
from search_spaces import RecurrentSpace
from tests.running.test_growth import CHILD, SEED, digits_task, new_gallery, same_models
from tests.support.networks import grown_network, small_space, train
from tests.tasks.test_language import RECIPE, WORDS, corpus

ETA = 0.4
PLAN = GrowthSettings(seed_epochs=2, weak_epochs=1, final_epochs=4, eta=ETA, eta_fade=0.5)


def grown() -> tuple[nn.Module, list[WeakLearner], Tensor, Tensor]:
    """Return a network right after a second growth, in double precision, and a batch."""
    net, images, labels = grown_network(small_space(), 1)
    torch.manual_seed(5)
    attach_candidates(net)
    before = count_learners(net)
    train(net, images, labels)
    finalize_candidates(net, 2)
    return net.double(), new_learners(net, before), images.double(), labels


def set_fade(learners: list[WeakLearner], fade: float) -> None:
    for learner in learners:
        learner.fade = fade


def outputs_and_gradients(
    net: nn.Module, images: Tensor, labels: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    net.train()
    net.zero_grad()
    outputs = net(images)
    F.cross_entropy(outputs, labels).backward()
    named = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    return outputs.detach(), named


def names_of(net: nn.Module, learners: list[WeakLearner]) -> tuple[set[str], set[str]]:
    """Return the names of the new η, and of the other parameters of new weak learners."""
    etas = {id(learner.eta) for learner in learners}
    new = {id(p) for learner in learners for p in learner.parameters()}
    named = dict(net.named_parameters())
    found = {name for name, p in named.items() if id(p) in etas}
    return found, {name for name, p in named.items() if id(p) in new} - found


@pytest.mark.parametrize("training", [True, False])
def test_the_predictions_are_preserved_exactly_at_the_start(training: bool) -> None:
    net, learners, images, _ = grown()
    faded = copy.deepcopy(net)
    before = [len(site.learners) - 1 for site in sites(faded)]
    new = new_learners(faded, before)
    set_eta(learners, 0.0)
    set_eta(new, ETA)
    set_fade(new, 1.0)
    with plain_ops() if training else contextlib.nullcontext():
        found = [one.train(training)(images) for one in (net, faded)]
    assert torch.equal(*found)


def test_the_first_step_is_that_of_a_pair_with_a_frozen_copy() -> None:
    net, learners, images, labels = grown()
    set_eta(learners, ETA)
    pair = copy.deepcopy(net)
    for site in sites(pair):
        if site.learners:
            copied = copy.deepcopy(site.learners[-1])
            assert isinstance(copied, WeakLearner)
            set_eta([copied], -ETA)
            site.learners.append(copied.requires_grad_(False))
    set_fade(learners, 1.0)
    outputs, gradients = outputs_and_gradients(net, images, labels)
    wanted, others = outputs_and_gradients(pair, images, labels)
    torch.testing.assert_close(outputs, wanted)
    assert gradients.keys() == others.keys()
    torch.testing.assert_close(gradients, others)
    etas, weights = names_of(net, learners)
    assert all(gradients[name].abs().max() > 1e-9 for name in etas)
    assert sum(bool(gradients[name].any()) for name in weights) > len(weights) / 2


@pytest.mark.parametrize("fade", [0.25, 0.9])
def test_in_between_only_the_gradients_of_new_weights_are_larger(fade: float) -> None:
    net, learners, images, labels = grown()
    plain = copy.deepcopy(net)
    set_eta(learners, ETA)
    set_fade(learners, fade)
    before = [len(site.learners) - 1 for site in sites(plain)]
    set_eta(new_learners(plain, before), (1 - fade) * ETA)
    outputs, gradients = outputs_and_gradients(net, images, labels)
    wanted, others = outputs_and_gradients(plain, images, labels)
    torch.testing.assert_close(outputs, wanted)
    _, weights = names_of(net, learners)
    for name, gradient in others.items():
        factor = 1 / (1 - fade) if name in weights else 1.0
        torch.testing.assert_close(gradients[name], factor * gradient)


def test_without_a_fade_the_kernels_compute_the_step() -> None:
    net, learners, images, labels = grown()
    set_eta(learners, ETA)
    faded = copy.deepcopy(net)
    set_fade([m for m in faded.modules() if isinstance(m, WeakLearner)], 0.0)
    one, other = (outputs_and_gradients(n, images, labels)[0] for n in (net, faded))
    assert torch.equal(one, other)


# The schedule.


def test_the_fade_falls_step_by_step_and_goes_on_where_it_was(tmp_path: Path) -> None:
    net, learners, _, _ = grown()

    def run(fade: FadeIn, epochs: range) -> list[float]:
        seen, told = [], fade.watch(Callbacks())
        for epoch in epochs:
            for _ in range(4):
                assert not told.should_stop()
                seen.append(learners[0].fade)
            told.on_epoch("final", {"epoch": epoch + 1})
        return seen

    whole = run(FadeIn(learners, 1.5, 4, tmp_path), range(3))
    assert whole == pytest.approx([*(1 - i / 6 for i in range(6)), *[0.0] * 6])
    assert whole[0] == 1.0
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    save_checkpoint(tmp_path, net, optimizer, {"records": [{"epoch": 1}]})
    assert run(FadeIn(learners, 1.5, 4, tmp_path), range(1, 3)) == whole[4:]


def test_a_request_to_stop_is_passed_on() -> None:
    told = FadeIn([], 1.0, 4, Path("none")).watch(Callbacks(should_stop=lambda: True))
    assert told.should_stop()


# Growths.


@pytest.mark.parametrize("anneal", [0.0, 0.5])
def test_an_interrupted_growth_goes_on_to_the_same_model(tmp_path: Path, anneal: float) -> None:
    plan = replace(PLAN, anneal=anneal)
    whole, broken = new_gallery(tmp_path / "a"), new_gallery(tmp_path / "b")
    for gallery in (whole, broken):
        run_growth(SEED, digits_task(), plan, gallery)
    outcome = run_growth(CHILD, digits_task(), plan, whole)
    for last in (1, 2, 3):

        def stop(phase: str, record: dict[str, Any], last: int = last) -> None:
            if phase == "final" and record["epoch"] == last:
                raise Interrupted("stop")

        with pytest.raises(Interrupted):
            run_growth(CHILD, digits_task(), plan, broken, Callbacks(stop))
    run_growth(CHILD, digits_task(), plan, broken)
    assert same_models(whole, broken, CHILD.id)
    # The plain architecture remains.
    net = load_network(digits_task(), whole, CHILD.id)
    assert digits_task().evaluate(net)["error"] == pytest.approx(outcome.error)
    assert all(m.fade == 0 for m in net.modules() if isinstance(m, WeakLearner))


def test_a_fade_in_is_another_growth_than_a_start_at_once(tmp_path: Path) -> None:
    galleries = {share: new_gallery(tmp_path / str(share)) for share in (0.0, 0.5)}
    for share, gallery in galleries.items():
        for growth in (SEED, CHILD):
            run_growth(growth, digits_task(), replace(PLAN, eta_fade=share), gallery)
    assert same_models(*galleries.values(), SEED.id)
    assert not same_models(*galleries.values(), CHILD.id)


def test_a_recurrent_cell_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    task = RecurrentTask(RecurrentSpace(WORDS, 8), corpus(), RECIPE)
    stop = Callbacks(should_stop=lambda: pytest.fail("a step"))
    with pytest.raises(ConfigError, match="eta_fade must be 0: RecurrentCell cannot fade in"):
        run_growth(SEED, task, PLAN, new_gallery(tmp_path), stop)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eta_fade": 0.5}, "eta_fade needs an eta other than 0"),
        ({"eta_fade": 1.0, "eta": 0.5}, "eta_fade must be a number in .0, 1. but got 1"),
        ({"eta_fade": 0.5, "eta": 0.5, "anneal": 0.7}, "at most 1 - anneal .0.3., but got 0.5"),
    ],
)
def test_bad_settings_are_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GrowthSettings(**settings)


def test_the_papers_growth_has_no_fade() -> None:
    assert PRESETS["paper"]["eta_fade"] == GrowthSettings().eta_fade == 0
    assert "eta_fade" not in GrowthSettings().to_dict()
    assert GrowthSettings(eta="line", eta_fade=0.2).to_dict()["eta_fade"] == 0.2
