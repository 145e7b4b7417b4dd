"""Growths with one decay of the learning rate at the end of a lineage, and growths of the width."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nni_petridish.errors import ConfigError, ExhaustedError, Interrupted
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.running.growth import load_network, run_growth
from nni_petridish.running.trunk import TRUNKS, held_epochs, load_trunk
from nni_petridish.search.records import Growth
from nni_petridish.search.settings import GrowthSettings
from nni_petridish.tasks.optim import make_optimizer
from nni_petridish.tasks.task import Callbacks
from nni_petridish.tasks.vision.recipe import Recipe
from tests.running.test_growth import CHILD, SEED, digits_task, new_gallery, same_models

PLAN = GrowthSettings(seed_epochs=4, weak_epochs=2, final_epochs=4, anneal=0.5)
WIDE = replace(PLAN, weak_epochs=0, grow="width", widen_by=2.0)


def test_the_learning_rate_decays_in_the_last_epochs_only() -> None:
    rates = [Recipe(hold_epochs=2).learning_rate(step, 40, 10) for step in range(40)]
    assert rates[:21] == [0.025] * 21
    assert rates[21:] == sorted(rates[21:], reverse=True)
    assert rates[30] == pytest.approx(0.0125)
    assert [held_epochs(epochs, 0.3) for epochs in (1, 2, 10)] == [0, 1, 7]


def test_children_grow_from_the_state_before_the_decay(tmp_path: Path) -> None:
    rates: dict[str, list[float]] = {}

    def note(phase: str, record: dict[str, float]) -> None:
        rates.setdefault(phase, []).append(record["lr"])

    task, gallery = digits_task(), new_gallery(tmp_path)
    for growth in (SEED, CHILD):
        run_growth(growth, task, PLAN, gallery, Callbacks(note))
    lr = task.recipe.lr
    assert rates["weak"] == [lr, lr]  # as large as before: the parent has not converged
    for phase in ("seed", "final"):
        assert rates[phase][:2] == [lr, lr]
        assert rates[phase][3] < rates[phase][2] < lr
    trunk, end = (load_network(task, gallery, SEED.id) for _ in range(2))
    assert load_trunk(gallery, SEED.id, trunk)
    name = "classifier.weight"
    assert not torch.equal(trunk.state_dict()[name], end.state_dict()[name])
    optimizer = make_optimizer(trunk, lr=0.1, weight_decay=0, momentum=0.9)
    assert optimizer.state[trunk.get_parameter(name)]["momentum_buffer"].any()


def test_all_of_a_last_training_is_decay(tmp_path: Path) -> None:
    rates: list[float] = []
    task, gallery = digits_task(), new_gallery(tmp_path)
    run_growth(SEED, task, PLAN, gallery)
    note = Callbacks(lambda phase, record: rates.append(record["lr"]))
    run_growth(replace(CHILD, last=True), task, PLAN, gallery, note)
    assert rates[:2] == [task.recipe.lr] * 2  # weak learning
    assert task.recipe.lr > rates[2] > rates[3] > rates[4] > rates[5]
    assert not (gallery.folder / TRUNKS / CHILD.id).exists()


def test_an_interrupted_growth_with_a_trunk_goes_on_to_the_same_models(tmp_path: Path) -> None:
    whole, broken = new_gallery(tmp_path / "a"), new_gallery(tmp_path / "b")
    for growth in (SEED, CHILD):
        run_growth(growth, digits_task(), PLAN, whole)
        for last in (1, 2, 3):  # 2 is the epoch of the trunk

            def stop(phase: str, record: dict[str, Any], last: int = last) -> None:
                if phase != "weak" and record["epoch"] == last:
                    raise Interrupted("stop")

            with pytest.raises(Interrupted):
                run_growth(growth, digits_task(), PLAN, broken, Callbacks(stop))
        run_growth(growth, digits_task(), PLAN, broken)
        assert same_models(whole, broken, growth.id)
        files = [g.folder / TRUNKS / growth.id / "checkpoint.safetensors" for g in (whole, broken)]
        assert files[1].exists()
        nets = [load_network(digits_task(), g, growth.id) for g in (whole, broken)]
        for net, own in zip(nets, (whole, broken), strict=True):
            assert load_trunk(own, growth.id, net)
        assert all(
            torch.equal(a, b)
            for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True)
        )


def test_a_parent_without_a_trunk_is_grown_from_its_end(tmp_path: Path) -> None:
    task, gallery = digits_task(), new_gallery(tmp_path)
    run_growth(SEED, task, replace(PLAN, anneal=0.0), gallery)
    assert not (gallery.folder / TRUNKS).exists()
    assert not load_trunk(gallery, SEED.id, load_network(task, gallery, SEED.id))
    assert run_growth(CHILD, task, PLAN, gallery).error <= 1


@pytest.mark.parametrize("anneal", [0.0, 0.5])
def test_a_growth_of_the_width_adds_filters_and_no_shortcuts(tmp_path: Path, anneal: float) -> None:
    task, gallery = digits_task(), new_gallery(tmp_path)
    plan = replace(WIDE, anneal=anneal)
    frozen = replace(task, recipe=replace(task.recipe, lr=1e-12))
    before = run_growth(SEED, task, plan, gallery)
    after = run_growth(CHILD, frozen, replace(plan, anneal=0.0), gallery)
    documents = gallery.load_documents(CHILD.id)
    assert documents["genotype"]["width"] == 2.0
    assert documents["alphas"] == {"width": {"before": 1.0, "after": 2.0}}
    assert after.multiply_adds > 2 * before.multiply_adds
    if not anneal:  # nothing was trained: the predictions are those of the parent
        assert after.metrics["loss"] == pytest.approx(before.metrics["loss"], rel=0.05)
    again = Growth("g00002", "g00000", seed=13, l1=0.001, i_max=3)
    run_growth(again, frozen, plan, gallery)
    assert gallery.load_documents(again.id)["genotype"]["width"] == 1.75  # 2 is taken


def test_a_growth_of_the_width_stays_within_limits(tmp_path: Path) -> None:
    task, gallery = digits_task(), new_gallery(tmp_path)
    size = run_growth(SEED, task, WIDE, gallery).multiply_adds
    within = {"multiply_adds": 2.0 * size}
    outcome = run_growth(replace(CHILD, within=within), task, WIDE, gallery)
    assert size < outcome.multiply_adds <= 2 * size
    tiny = replace(CHILD, id="g00002", within={"multiply_adds": size + 1.0})
    with pytest.raises(ExhaustedError, match="every wider network is too large"):
        run_growth(tiny, task, WIDE, gallery)


def test_candidates_are_trained_on_every_few_batches(tmp_path: Path) -> None:
    steps: dict[int, float] = {}
    for every in (1, 4):
        gallery = new_gallery(tmp_path / str(every))
        plan = replace(PLAN, anneal=0.0, weak_every=every)
        for growth in (SEED, CHILD):
            run_growth(growth, digits_task(), plan, gallery)
        rows = gallery.load_documents(CHILD.id)["alphas"]["tables"]["normal"]
        steps[every] = max(abs(row["alpha"]) for row in rows)
    assert 0 < steps[4] < steps[1]
    parents = [Gallery(tmp_path / name).load_model(SEED.id)[0] for name in "14"]
    assert all(torch.equal(parents[0][name], parents[1][name]) for name in parents[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"grow": "width"}, "weak_epochs must be 0 if grow is width but got 80"),
        ({"anneal": 1}, "anneal must be a number in .0, 1. but got 1"),
        ({"weak_every": 2, "weak_learning": "joint"}, "weak_every must be 1 in joint"),
        ({"fewer_shortcuts": True, "weak_learning": "joint"}, "fewer_shortcuts must be False in"),
        ({"grow": "depth"}, "grow must be one of shortcuts, width but got 'depth'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GrowthSettings(**settings)


def test_a_growth_may_keep_fewer_shortcuts_and_ask_for_their_cost(tmp_path: Path) -> None:
    plan = replace(PLAN, anneal=0.0, fewer_shortcuts=True, score_per="millisecond")
    gallery = new_gallery(tmp_path)
    for growth in (SEED, CHILD):
        run_growth(growth, digits_task(), plan, gallery)
    documents = gallery.load_documents(CHILD.id)
    (learner,) = documents["genotype"]["cells"]["normal"]
    assert len(learner) == documents["alphas"]["i_max"] <= CHILD.i_max
    assert documents["alphas"]["score"] == "alpha"
