"""Successive halving: candidates that are out of the race leave, and cost nothing from then on."""

from __future__ import annotations

import contextlib
import copy
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nni_petridish import attach_candidates, finalize_candidates
from nni_petridish.core import alpha_tables, sites
from nni_petridish.core.halving import Halving, ranked_last
from nni_petridish.core.held_out import alpha_tables_of
from nni_petridish.core.weak_learner import halve_candidates, train_every
from nni_petridish.errors import ConfigError, Interrupted
from nni_petridish.kernels.switch import plain_ops
from nni_petridish.results.report.diary import alpha_chart
from nni_petridish.running.growth import run_growth
from nni_petridish.search.settings import PRESETS, GrowthSettings
from nni_petridish.tasks.language.task import RecurrentTask
from nni_petridish.tasks.task import Callbacks, Phase
from search_spaces import RecurrentSpace
from tests.running.test_growth import CHILD, SEED, digits_task, new_gallery, same_models
from tests.support.networks import batch, small_space, train
from tests.tasks.test_language import RECIPE, WORDS, corpus

PLAN = GrowthSettings(seed_epochs=2, weak_epochs=3, final_epochs=1, weak_halving=0.25)


def halving_of(net: nn.Module, key: str = "normal") -> Halving:
    halving = alpha_tables_of(net)[key].halving
    assert halving is not None
    return halving


def weak_network(period: int | None, least: int = 2) -> tuple[nn.Module, Tensor, Tensor]:
    space = small_space()
    torch.manual_seed(0)
    net = attach_candidates(space.build(space.seed()))
    if period is not None:
        halve_candidates(net, period, least)
    return net, *batch(space)


# The rule.


def test_the_worse_half_leaves_at_every_period_until_few_are_left() -> None:
    halving = Halving(9, period=2, least=2)
    alpha = torch.tensor([0.9, -0.8, 0.1, 0.2, -0.3, 0.4, 0.5, -0.6, 0.7])
    assert halving.present(alpha, 0) is None
    assert halving.present(alpha, 1) is None
    assert halving.present(alpha, 2) == [0, 1, 6, 7, 8]
    assert halving.present(alpha, 2) == [0, 1, 6, 7, 8]  # asked by another site
    alpha[6] = 2.0
    assert halving.present(alpha, 3) == [0, 1, 6, 7, 8]
    assert halving.present(alpha, 4) == [0, 1, 6]
    assert halving.present(alpha, 6) == [0, 6]
    assert halving.present(alpha, 8) == [0, 6]
    assert halving.left_after.tolist() == [-1, 6, 2, 2, 2, 2, -1, 4, 4]
    assert halving.left_alpha[7] == alpha[7]


def test_few_candidates_all_stay() -> None:
    assert Halving(3, period=1, least=4).present(torch.ones(3), 5) is None


def test_those_that_left_rank_last_and_the_later_the_better() -> None:
    halving = Halving(5, period=1, least=1)
    halving.left_after.copy_(torch.tensor([1, -1, 1, 2, -1]))
    halving.left_alpha.copy_(torch.tensor([0.1, 0.0, 0.4, 0.01, 0.0]))
    found = halving.last(torch.tensor([9.0, 0.1, 8.0, 7.0, 0.2]))
    assert found.argsort(descending=True).tolist() == [4, 1, 3, 2, 0]
    # No sum with one that left exceeds one without.
    assert 4 * found[4] + found[3] < 5 * found[1]
    scores = {"a": [1.0] * 5, "b": [3.0]}
    assert ranked_last(scores, {"a": None, "b": None}) == scores


# Training.


PATHS = {"fast": contextlib.nullcontext, "plain": plain_ops}


@pytest.mark.parametrize("path", PATHS)
def test_those_that_left_are_not_computed_and_do_not_change(path: str) -> None:
    context: AbstractContextManager[object] = PATHS[path]()
    with context:
        net, images, labels = weak_network(2)
        train(net, images, labels, steps=2)
        before = copy.deepcopy(net)
        train(net, images, labels, steps=1)
    gone = [i for i, after in enumerate(halving_of(net).left_after.tolist()) if after == 2]
    assert len(gone) == len(halving_of(net).left_after) // 2
    for site, old in zip(sites(net), sites(before), strict=True):
        assert site.weak_learner is not None
        assert old.weak_learner is not None
        for i, (op, its) in enumerate(
            zip(site.weak_learner.ops, old.weak_learner.ops, strict=True)
        ):
            if site.key == "normal":
                pairs = zip(op.state_dict().values(), its.state_dict().values(), strict=True)
                equal = [torch.equal(a, b) for a, b in pairs]
                assert all(equal) == (i in gone)
                assert all(p.grad is None for p in op.parameters()) or i not in gone


def test_the_network_and_those_that_stay_learn_as_if_all_had_stayed() -> None:
    nets = []
    for period in (None, 2):
        net, images, labels = weak_network(period)
        train(net.double(), images.double(), labels, steps=5)
        nets.append(net)
    tables = [alpha_tables_of(net)["normal"] for net in nets]
    # Candidates of prev_prev share an adapter, which those that left no longer train.
    stay = [
        i
        for i, after in enumerate(halving_of(nets[1]).left_after.tolist())
        if after < 0 and tables[0].shortcuts[i][0] == "prev"
    ]
    assert stay
    assert torch.equal(*(table.alpha.detach()[stay] for table in tables))
    for pair in zip(*map(sites, nets), strict=True):
        learners = [site.weak_learner for site in pair if site.weak_learner is not None]
        for i in stay if pair[0].key == "normal" else []:
            parameters = [list(learner.ops[i].parameters()) for learner in learners]
            assert all(map(torch.equal, *parameters))
    own = [[p for name, p in net.named_parameters() if "weak_learner" not in name] for net in nets]
    assert all(map(torch.equal, *own))


def test_both_paths_halve_alike() -> None:
    tables = []
    for context in PATHS.values():
        with context():
            net, images, labels = weak_network(2)
            train(net.double(), images.double(), labels, steps=5)
            tables.append(alpha_tables(net))
    for key, rows in tables[0].items():
        for row, other in zip(rows, tables[1][key], strict=True):
            assert (row["source"], row["op"], row.get("left")) == (
                other["source"],
                other["op"],
                other.get("left"),
            )
            assert row["alpha"] == pytest.approx(other["alpha"])


def test_before_the_first_halving_nothing_is_different() -> None:
    nets = []
    for period in (None, 4):
        net, images, labels = weak_network(period)
        train(net, images, labels, steps=4)
        nets.append(net)
    pairs = zip(nets[0].parameters(), nets[1].parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_only_steps_in_which_candidates_learn_count() -> None:
    net, images, labels = weak_network(2)
    train_every(net, 3)
    train(net, images, labels, steps=6)  # they learn in the first and the fourth
    assert bool((halving_of(net).left_after < 0).all())
    train(net, images, labels, steps=1)
    assert bool((halving_of(net).left_after == 2).any())


def test_in_evaluation_all_candidates_are_there() -> None:
    net, images, labels = weak_network(1)
    train(net, images, labels, steps=3)
    net.eval()
    learner = sites(net)[0].weak_learner
    assert learner is not None
    assert learner.present() is None
    assert len(learner.table.present() or []) == 2


@pytest.mark.parametrize("path", PATHS)
def test_a_recurrent_cell_halves_its_candidates_too(path: str) -> None:
    context: AbstractContextManager[object] = PATHS[path]()
    task = RecurrentTask(RecurrentSpace(WORDS, 8), corpus(), replace(RECIPE, clip=1e9))
    nets = []
    with context:
        for halves in (False, True):
            torch.manual_seed(0)
            net = attach_candidates(task.build(task.seed()))
            if halves:
                halve_candidates(net, 3, 2)
            task.train(net, Phase("weak", 1))
            nets.append(net)
    whole, halved = (next(iter(alpha_tables_of(net).values())) for net in nets)
    assert halved.halving is not None
    left = halved.halving.left_after
    assert int((left < 0).sum()) == 2
    stay = left < 0
    torch.testing.assert_close(halved.alpha.detach()[stay], whole.alpha.detach()[stay])
    assert halved.top(2) == [i for i in halved.top(8) if stay[i]]


# Selection.


def test_those_that_left_are_selected_only_if_nothing_else_is_left() -> None:
    net, images, labels = weak_network(1, least=2)
    train(net, images, labels, steps=6)
    rows = alpha_tables(net)["normal"]
    assert ["left" in row for row in rows] == [False] * 2 + [True] * (len(rows) - 2)
    stayed = {(row["source"], row["op"]) for row in rows[:2]}
    first, second = (copy.deepcopy(net) for _ in range(2))
    genotype = finalize_candidates(first, 2)
    assert set(genotype.learners_by_key()["normal"][0]) == stayed
    other = finalize_candidates(second, 2, taken=[genotype])
    assert other != genotype


# Growths.


def test_a_growth_halves_its_candidates_and_writes_when_they_left(tmp_path: Path) -> None:
    gallery, task = new_gallery(tmp_path), digits_task()
    for growth in (SEED, CHILD):
        run_growth(growth, task, PLAN, gallery)
    period, steps = round(0.25 * task.steps(3)), task.steps(3)
    documents = gallery.load_documents(CHILD.id)
    for key, rows in documents["alphas"]["tables"].items():
        left = [row["left"] for row in rows if "left" in row]
        assert len(rows) - len(left) >= 2 * CHILD.i_max
        assert set(left) <= set(range(period, steps, period))
        assert period in left
        assert not any("left" in row for row in rows[: CHILD.i_max])
        assert f", left after {period}<" in alpha_chart(key, rows, CHILD.i_max)
    assert documents["settings"]["weak_halving"] == 0.25


@pytest.mark.parametrize("score", ["alpha", "gain"])
def test_an_interrupted_growth_goes_on_to_the_same_model(tmp_path: Path, score: str) -> None:
    plan = replace(PLAN, score=score)
    whole, broken = new_gallery(tmp_path / "a"), new_gallery(tmp_path / "b")
    for gallery in (whole, broken):
        run_growth(SEED, digits_task(), plan, gallery)
    run_growth(CHILD, digits_task(), plan, whole)
    for last in (1, 2):

        def stop(phase: str, record: dict[str, Any], last: int = last) -> None:
            if phase == "weak" and record["epoch"] == last:
                raise Interrupted("stop")

        with pytest.raises(Interrupted):
            run_growth(CHILD, digits_task(), plan, broken, Callbacks(stop))
    run_growth(CHILD, digits_task(), plan, broken)
    assert same_models(whole, broken, CHILD.id)
    diaries = [gallery.load_documents(CHILD.id)["alphas"] for gallery in (whole, broken)]
    assert diaries[0] == diaries[1]


def test_settings_are_checked_and_the_papers_growth_halves_nothing() -> None:
    with pytest.raises(ConfigError, match="weak_halving must be 0 in joint"):
        GrowthSettings(weak_halving=0.2, weak_learning="joint")
    with pytest.raises(ConfigError, match="weak_halving"):
        GrowthSettings(weak_halving=1.0)
    assert PRESETS["paper"]["weak_halving"] == GrowthSettings().weak_halving == 0
    assert "weak_halving" not in GrowthSettings().to_dict()
