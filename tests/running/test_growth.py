from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nni_petridish import Genotype
from nni_petridish.core import attach_candidates, l1, select, sites
from nni_petridish.core.alpha_table import largest_first
from nni_petridish.errors import (
    ConfigError,
    DamagedModelError,
    Interrupted,
    RejectedError,
    TrainingError,
)
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.running.coordinator import Coordinator
from nni_petridish.running.growth import load_network, run_growth
from nni_petridish.running.weak_learning import CHECK_STEPS, StableSelection
from nni_petridish.running.worker import work_on
from nni_petridish.search.records import Growth
from nni_petridish.search.settings import PRESETS, GrowthSettings, Limits, SearchSettings
from nni_petridish.tasks.task import NO_CALLBACKS, Callbacks
from nni_petridish.tasks.vision.data import load_data
from nni_petridish.tasks.vision.recipe import Recipe
from nni_petridish.tasks.vision.task import VisionTask
from search_spaces import VisionSpace

PLAN = GrowthSettings(seed_epochs=3, weak_epochs=2, final_epochs=2)


def digits_task(limit: int = 128, mode: str = "cell") -> VisionTask:
    data = load_data("digits", limit=limit)
    space = VisionSpace(
        data.image_shape, data.num_classes, cells_per_stage=1, filters=4, stages=2, mode=mode
    )
    return VisionTask(space, data, Recipe.named("digits", device="cpu"))


def new_gallery(folder: Path) -> Gallery:
    return Gallery.create(folder, {"space": "vision"}, {})


SEED = Growth("g00000", None, seed=11, l1=0.001, i_max=3)
CHILD = Growth("g00001", "g00000", seed=12, l1=0.001, i_max=3)


def same_models(a: Gallery, b: Gallery, id: str) -> bool:
    (weights, documents), (others, other_documents) = a.load_model(id), b.load_model(id)
    return documents["genotype"] == other_documents["genotype"] and all(
        torch.equal(weights[name], others[name]) for name in weights
    )


def test_a_growth_leaves_a_complete_model(tmp_path: Path) -> None:
    task, gallery = digits_task(), new_gallery(tmp_path / "a")
    seen: list[tuple[str, int]] = []
    callbacks = Callbacks(on_epoch=lambda phase, record: seen.append((phase, int(record["epoch"]))))
    for growth in (SEED, CHILD):
        outcome = run_growth(growth, task, PLAN, gallery, callbacks)
        net = load_network(task, gallery, growth.id)
        assert task.evaluate(net)["error"] == pytest.approx(outcome.error)
        assert task.size(net) == (outcome.multiply_adds, outcome.parameters)
    assert seen == [("seed", 1), ("seed", 2), ("seed", 3)] + [
        (phase, epoch) for phase in ("weak", "final") for epoch in (1, 2)
    ]
    documents = gallery.load_documents(CHILD.id)
    learner = Genotype.from_dict(documents["genotype"]).cells["normal"][0]
    table = documents["alphas"]["tables"]["normal"]
    assert [[row["source"], row["op"]] for row in table[:3]] == [list(s) for s in learner]
    assert documents["lineage"]["parent"] == "g00000"
    assert outcome.epochs == 4
    assert not list((tmp_path / "a" / "work").iterdir())
    assert run_growth(CHILD, task, PLAN, gallery) == outcome  # done already: nothing is trained


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_an_interrupted_growth_ends_as_if_it_had_not_been(tmp_path: Path, stop_after: int) -> None:
    task = digits_task()
    straight, halting = new_gallery(tmp_path / "a"), new_gallery(tmp_path / "b")
    epochs = 0

    def count(phase: str, record: object) -> None:
        nonlocal epochs
        epochs += 1

    for gallery in (straight, halting):
        run_growth(SEED, task, PLAN, gallery)
    run_growth(CHILD, task, PLAN, straight)
    with pytest.raises(Interrupted):
        run_growth(CHILD, task, PLAN, halting, Callbacks(count, lambda: epochs >= stop_after))
    assert not halting.has_model(CHILD.id)
    epochs = 0
    run_growth(CHILD, task, PLAN, halting, Callbacks(count))
    assert epochs == 4 - stop_after
    assert same_models(straight, halting, CHILD.id)


def test_growths_depend_on_their_seed_alone(tmp_path: Path) -> None:
    task = digits_task()
    galleries = [new_gallery(tmp_path / name) for name in "abc"]
    for i, gallery in enumerate(galleries):
        torch.manual_seed(i)
        run_growth(SEED, task, PLAN, gallery)
    run_growth(CHILD, task, PLAN, galleries[0])
    run_growth(CHILD, task, PLAN, galleries[1])
    other = Growth("g00001", "g00000", seed=99, l1=0.001, i_max=3)
    run_growth(other, task, PLAN, galleries[2])
    assert same_models(galleries[0], galleries[1], "g00001")
    assert same_models(galleries[0], galleries[2], "g00000")
    assert not same_models(galleries[0], galleries[2], "g00001")


def test_failures_leave_no_model(tmp_path: Path) -> None:
    task, gallery = digits_task(), new_gallery(tmp_path)
    wild = VisionTask(task.space, task.data, Recipe.named("digits", lr=1e12, device="cpu"))
    with pytest.raises(TrainingError, match="not finite"):
        run_growth(SEED, wild, PLAN, gallery)
    assert gallery.model_ids() == []
    run_growth(SEED, task, PLAN, gallery)
    weights = tmp_path / "models" / "g00000" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7] + b"garbage")
    with pytest.raises(DamagedModelError):
        run_growth(CHILD, task, PLAN, gallery)
    assert gallery.model_ids() == ["g00000"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["cell", "macro"])
def test_three_growths_on_digits_improve_the_seed_and_use_earlier_learners(
    tmp_path: Path, mode: str
) -> None:
    data = load_data("digits")
    space = VisionSpace(data.image_shape, 10, cells_per_stage=1, filters=4, mode=mode)
    task = VisionTask(space, data, Recipe.named("digits", device="cpu"))
    plan = GrowthSettings(seed_epochs=4, weak_epochs=2, final_epochs=4)
    gallery = new_gallery(tmp_path)
    run_growth(Growth("g00000", None, 1, 0.001, 3), task, plan, gallery)
    for n in (1, 2, 3):
        growth = Growth(f"g{n:05d}", f"g{n - 1:05d}", n + 1, 0.001, 3)
        run_growth(growth, task, plan, gallery)
    metrics = [gallery.load_documents(id)["metrics"] for id in gallery.model_ids()]
    assert metrics[-1]["error"] < metrics[0]["error"]
    sizes = [m["multiply_adds"] for m in metrics]
    assert sizes == sorted(set(sizes))
    genotype = Genotype.from_dict(gallery.load_documents("g00003")["genotype"])
    assert genotype.growths == 3
    later = [s for key in genotype.cells for learner in genotype.cells[key][1:] for s, _ in learner]
    assert any(source.startswith("h") for source in later)


def test_a_whole_search_runs_through_the_coordinator(tmp_path: Path) -> None:
    task = digits_task()
    settings = SearchSettings(
        seed=3, limits=Limits(max_models=4), seed_epochs=3, weak_epochs=2, final_epochs=2
    )
    gallery = Gallery.create(tmp_path / "g", {"space": "vision"}, settings.identity())
    with Coordinator(gallery, settings) as coordinator:
        while isinstance(growth := coordinator.ask(), Growth):
            run_growth(growth, task, PLAN, gallery)
        assert len(coordinator.search.models()) == 4
        assert coordinator.search.hull()[0].id == "g00000"


class SilentTask(VisionTask):
    """A task that cannot tell its validation loss."""

    def validation_losses(self, net: torch.nn.Module) -> tuple[()]:
        return ()


def test_candidates_promise_nothing_where_the_task_cannot_tell(tmp_path: Path) -> None:
    task, plan = digits_task(), GrowthSettings(seed_epochs=1, weak_epochs=1, final_epochs=1)
    diaries = []
    for name, one in (("told", task), ("silent", SilentTask(task.space, task.data, task.recipe))):
        gallery = new_gallery(tmp_path / name)
        for growth in (SEED, CHILD):
            run_growth(growth, one, plan, gallery)
        diaries.append(gallery.load_documents(CHILD.id)["alphas"])
    told, silent = diaries
    assert "step" in told
    assert "step" not in silent
    assert [row.keys() - {"slope"} for row in told["tables"]["normal"]] == [
        row.keys() for row in silent["tables"]["normal"]
    ]


def test_random_growth_needs_no_weak_learning_and_repeats_itself(tmp_path: Path) -> None:
    task = digits_task()
    plan = GrowthSettings(seed_epochs=1, weak_epochs=0, final_epochs=1, score="random")
    galleries = [new_gallery(tmp_path / name) for name in "ab"]
    for gallery in galleries:
        for growth in (SEED, CHILD):
            run_growth(growth, task, plan, gallery)
    assert same_models(*galleries, CHILD.id)
    documents = galleries[0].load_documents(CHILD.id)
    assert list(documents["history"]) == ["final"]
    tables = documents["alphas"]["tables"]
    drawn = [[(row["source"], row["op"]) for row in tables[key][:3]] for key in tables]
    cells = Genotype.from_dict(documents["genotype"]).cells
    assert [list(learners[0]) for learners in cells.values()] == drawn
    assert documents["alphas"]["score"] == documents["settings"]["score"] == "random"
    first = run_growth(replace(CHILD, id="g00002", seed=99), task, plan, galleries[0])
    other = galleries[0].load_documents(first.id)["genotype"]
    assert other != documents["genotype"]


def test_growths_by_what_children_promise(tmp_path: Path) -> None:
    task = digits_task()
    plan = GrowthSettings(seed_epochs=1, weak_epochs=0, final_epochs=1, score="prior")
    gallery = new_gallery(tmp_path)
    for growth in (SEED, CHILD):
        run_growth(growth, task, plan, gallery)
    documents = gallery.load_documents(CHILD.id)
    assert list(documents["history"]) == ["final"]
    parent = attach_candidates(load_network(task, gallery, SEED.id))
    expected = select.score_named("prior")(parent, task.validation_losses)
    for key, learners in Genotype.from_dict(documents["genotype"]).cells.items():
        (table,) = {site.weak_learner.table for site in sites(parent) if site.key == key}
        best = largest_first(torch.tensor(expected[key]))[: CHILD.i_max]
        assert list(learners[0]) == [table.shortcuts[i] for i in best]
    both = replace(plan, weak_epochs=1, score="consensus")
    outcome = run_growth(replace(CHILD, id="g00002"), task, both, gallery)
    assert list(gallery.load_documents(outcome.id)["history"]) == ["weak", "final"]


def test_the_score_alpha_is_the_default_and_changes_nothing_on_disk() -> None:
    assert GrowthSettings().score == "alpha" == GrowthSettings(score="alpha").score
    assert "score" not in GrowthSettings().to_dict()
    assert GrowthSettings(score="gain").to_dict()["score"] == "gain"
    assert tuple(select.SCORES) == l1.SCORES
    with pytest.raises(ConfigError, match="weak_epochs must be at least 1 unless score is"):
        GrowthSettings(weak_epochs=0)
    with pytest.raises(ConfigError, match="weak_learning must be isolated for score gain"):
        GrowthSettings(score="gain", weak_learning="joint")


# Switches of a growth.

SHORT = GrowthSettings(seed_epochs=1, weak_epochs=1, final_epochs=1)


def test_the_preset_of_the_paper_is_the_default_and_changes_nothing_on_disk() -> None:
    assert GrowthSettings(**PRESETS["paper"]) == GrowthSettings()
    known = {"seed_epochs", "weak_epochs", "final_epochs", "l1_schedule", "weak_learning"}
    assert GrowthSettings().to_dict().keys() == known
    changed = GrowthSettings(eta="line", reject=True, weak_patience=3, lr_after_growth=0.5)
    assert changed.to_dict().keys() - known == {"eta", "reject", "weak_patience", "lr_after_growth"}
    assert GrowthSettings(**changed.to_dict()) == changed


def test_the_deep_preset_grows_the_second_growth_on_top_of_the_first(tmp_path: Path) -> None:
    plan = GrowthSettings(**PRESETS["deep"], seed_epochs=1, final_epochs=1)
    gallery, task = new_gallery(tmp_path), digits_task()
    child = replace(CHILD, i_max=2)
    for growth in (SEED, child, replace(child, id="g00002", parent=child.id)):
        run_growth(growth, task, plan, gallery)
    documents = gallery.load_documents("g00002")
    assert list(documents["history"]) == ["final"]
    for first, second in Genotype.from_dict(documents["genotype"]).cells.values():
        ops = {op.rpartition("_")[0] for _, op in (*first, *second)}
        assert ops == {"sep_conv"}
        assert {source for source, _ in second} == {"h0"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reject": True}, "reject needs eta to be line but eta is 0.0"),
        ({"eta": 0.1, "weak_learning": "joint"}, "eta must be 0 in joint weak learning"),
        ({"eta": "far"}, "eta must be a number in .0, 1. or one of line but got 'far'"),
        ({"lr_after_growth": 0}, "lr_after_growth must be a number in .0, 1. but got 0"),
    ],
)
def test_switches_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GrowthSettings(**settings)


def grown_diary(folder: Path, plan: GrowthSettings, task: VisionTask | None = None) -> Any:
    gallery = new_gallery(folder)
    for growth in (SEED, CHILD):
        run_growth(growth, task or digits_task(), plan, gallery)
    return gallery.load_documents(CHILD.id)["alphas"]


def test_the_diary_tells_the_line_search(tmp_path: Path) -> None:
    diary = grown_diary(tmp_path, replace(SHORT, eta="line"))
    assert diary["line"].keys() == {"size", "change", "error"}
    assert diary["line"]["change"] <= 0
    assert "line" not in grown_diary(tmp_path / "plain", SHORT)


def test_a_fixed_start_of_eta_gives_new_operations_a_gradient_at_once(tmp_path: Path) -> None:
    task = digits_task()
    frozen = VisionTask(task.space, task.data, replace(task.recipe, lr=1e-12))
    for eta in (0.0, 0.25):
        folder = tmp_path / str(eta)
        grown_diary(folder, replace(SHORT, eta=eta), frozen)
        net = load_network(frozen, Gallery(folder), CHILD.id)
        etas = [value for name, value in net.state_dict().items() if name.endswith(".eta")]
        assert [float(value) for value in etas] == pytest.approx([eta] * len(etas))


def test_a_growth_that_would_not_pay_is_not_made_and_the_journal_says_why(tmp_path: Path) -> None:
    task = digits_task()
    settings = SearchSettings(limits=Limits(max_models=5), seed_epochs=1, weak_epochs=0)
    plan = GrowthSettings(
        seed_epochs=1, weak_epochs=0, final_epochs=1, score="random", eta="line", reject=True
    )
    data = replace(task.data, validation=_first(task.data.validation, 30))  # one batch: no proof
    small = VisionTask(task.space, data, task.recipe)
    gallery = Gallery.create(tmp_path / "g", {"space": "vision"}, settings.identity())
    with Coordinator(gallery, settings) as coordinator:
        while isinstance(growth := coordinator.ask(), Growth):
            try:
                work_on(growth, gallery, lambda: small, plan, NO_CALLBACKS)
            except RejectedError:
                coordinator.sync()
        assert [model.id for model in coordinator.search.models()] == ["g00000"]
        assert list(coordinator.search.rejected()) == ["g00001", "g00002"]
        assert "the growth of g00000 would not pay" in coordinator.search.rejected()["g00001"]
        assert "growing would not pay" in growth.reason
    with Coordinator(gallery, settings):
        assert not list((tmp_path / "g" / "work").iterdir())


def _first(split: Any, count: int) -> Any:
    return replace(split, images=split.images[:count], labels=split.labels[:count])


def test_the_learning_rate_after_a_growth_is_a_share_of_the_recipes(tmp_path: Path) -> None:
    rates: dict[str, list[float]] = {}

    def note(phase: str, record: dict[str, float]) -> None:
        rates.setdefault(phase, []).append(record["lr"])

    task, gallery = digits_task(), new_gallery(tmp_path)
    for growth in (SEED, CHILD):
        run_growth(growth, task, replace(SHORT, lr_after_growth=0.25), gallery, Callbacks(note))
    assert rates["weak"] == rates["final"] == [pytest.approx(0.25 * rates["seed"][0])]


def test_weak_learning_ends_when_the_selection_is_stable(tmp_path: Path) -> None:
    task = digits_task(limit=64)  # 2 steps an epoch
    plan = replace(SHORT, weak_epochs=60, weak_patience=1)
    galleries = [new_gallery(tmp_path / name) for name in "ab"]
    for gallery in galleries:
        run_growth(SEED, task, plan, gallery)
    run_growth(CHILD, task, plan, galleries[0])
    documents = galleries[0].load_documents(CHILD.id)
    steps = documents["alphas"]["weak_steps"]
    assert 2 * CHECK_STEPS <= steps < task.steps(plan.weak_epochs)
    assert len(documents["history"]["weak"]) == steps // 2

    def is_final(phase: str, record: object) -> None:
        if phase == "final":
            raise Interrupted("stop")

    with pytest.raises(Interrupted):
        run_growth(CHILD, task, replace(plan, final_epochs=2), galleries[1], Callbacks(is_final))
    learned: list[str] = []
    run_growth(CHILD, task, plan, galleries[1], Callbacks(lambda phase, _: learned.append(phase)))
    assert learned == ["final"]
    assert len(galleries[1].load_documents(CHILD.id)["history"]["weak"]) == steps // 2
    assert same_models(*galleries, CHILD.id)


def test_a_selection_that_changes_is_not_stable() -> None:
    net = digits_task().build(digits_task().seed())
    attach_candidates(net)
    stable = StableSelection(net, 1, patience=2, stop=lambda: False)
    table = next(site.weak_learner.table for site in sites(net) if site.weak_learner)
    for check in range(5):
        with torch.no_grad():
            table.alpha.zero_()
            table.alpha[check % 2] = 1.0
        assert not any(stable.should_stop() for _ in range(CHECK_STEPS))
    assert [stable.should_stop() for _ in range(2 * CHECK_STEPS + 1)][-1]
    assert stable.is_stable


def test_a_request_to_stop_is_no_end_of_weak_learning(tmp_path: Path) -> None:
    task, gallery = digits_task(), new_gallery(tmp_path)
    run_growth(SEED, task, SHORT, gallery)
    asked = iter([False, False, True])
    with pytest.raises(Interrupted):
        run_growth(
            CHILD,
            task,
            replace(SHORT, weak_patience=50),
            gallery,
            Callbacks(should_stop=lambda: next(asked)),
        )
