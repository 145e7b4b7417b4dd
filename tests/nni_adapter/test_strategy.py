from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nni
import numpy as np
import pytest
import torch
from nni.experiment.config import RemoteConfig, RemoteMachineConfig
from nni.mutable import SampleValidationError
from nni.nas.evaluator import FunctionalEvaluator
from nni.nas.execution import ExecutionEngine, SequentialExecutionEngine
from nni.nas.execution.event import FinalMetricEvent, TrainingEndEvent
from nni.nas.experiment import NasExperiment, NasExperimentConfig
from nni.nas.nn.pytorch import ModelSpace
from nni.nas.space import ModelStatus, RawFormatModelSpace, SimplifiedModelSpace
from nni.nas.strategy import TPE, GridSearch, Random, RegularizedEvolution
from nni.tools.nnictl import config_utils

from nni_petridish import Genotype
from nni_petridish.core.selection import architecture
from nni_petridish.errors import ConfigError, GalleryError, Interrupted, SearchError
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.gallery.select import open_search
from nni_petridish.nni_adapter import strategy as strategy_module
from nni_petridish.nni_adapter.engine import RunningTrials, engine_concurrency, engine_machines
from nni_petridish.nni_adapter.evaluators.growth import GrowthEvaluator
from nni_petridish.nni_adapter.evaluators.recipe import RecipeEvaluator
from nni_petridish.nni_adapter.evaluators.task import EvaluatorTask, Metric
from nni_petridish.nni_adapter.space import growable_space, model_space
from nni_petridish.nni_adapter.strategy import Petridish
from nni_petridish.running import worker
from nni_petridish.running.config import SearchConfig
from nni_petridish.running.coordinator import Coordinator
from nni_petridish.running.growth import run_growth
from nni_petridish.running.runner import run_search
from nni_petridish.search.records import Growth
from nni_petridish.search.settings import GrowthSettings, Limits, SearchSettings
from nni_petridish.tasks.task import Callbacks
from nni_petridish.tasks.vision.data import load_data
from nni_petridish.tasks.vision.recipe import Recipe
from nni_petridish.tasks.vision.task import VisionTask
from search_spaces import RecurrentSpace, VisionSpace
from tests.support import nni_evaluators as users

SPACE = VisionSpace((1, 8, 8), 10, cells_per_stage=1, filters=4, stages=2)
SHORT = {"seed_epochs": 1, "weak_epochs": 1, "final_epochs": 1}
DIGITS = {"limit": 64, "validation": 64}


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep experiments of tests out of the list that NNI has in the user's home."""
    home = str(tmp_path / "home")
    os.makedirs(home)
    monkeypatch.setattr(config_utils.Experiments.__init__, "__defaults__", (home,))


def experiment(
    tmp_path: Path, strategy: Any, evaluator: Any, models: int | None = None, **options: Any
) -> NasExperiment:
    config = NasExperimentConfig(
        execution_engine="sequential", model_format=options.pop("format", "simplified")
    )
    config.max_trial_number = models
    config.experiment_working_directory = tmp_path / "experiments"
    space = options.pop("space", None) or SPACE.model_space()
    return NasExperiment(space, evaluator, strategy, config, **options)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Start experiments that are stopped when the test ends."""
    started: list[NasExperiment] = []

    def run(strategy: Any, evaluator: Any, action: str = "run", **options: Any) -> NasExperiment:
        started.append(experiment(tmp_path, strategy, evaluator, **options))
        getattr(started[-1], action)()
        return started[-1]

    yield run
    for one in started:
        one.stop()


def journal(folder: Path) -> list[dict[str, Any]]:
    return Gallery(folder).journal.read_all()


def by_hand(**arguments: Any) -> FunctionalEvaluator:
    return FunctionalEvaluator(users.train_by_hand, **arguments)


# The space.


def test_samples_and_genotypes_are_two_ways_to_say_the_same() -> None:
    space = SPACE.model_space()
    for i in range(20):
        sample: dict[str, Any] = {}
        net = space.random(sample, np.random.RandomState(i))
        assert space.sample(net.genotype) == sample == json.loads(json.dumps(sample))
        assert space.genotype(sample) == net.genotype
        assert net.genotype.growths <= 3
    assert space.default().genotype == SPACE.seed()


def test_samples_that_are_no_genotypes_are_refused() -> None:
    space = SPACE.model_space()
    grown = {"normal": [[["prev", "identity"]]], "reduce": []}
    assert space.contains(grown)
    for wrong in (
        {"normal": []},
        {**grown, "reduce": 3},
        {**grown, "reduce": [[]]},
        {**grown, "reduce": [[["h0", "identity"]]]},
        {**grown, "reduce": [[["prev", "conv_9x9"]]]},
    ):
        assert not space.contains(wrong)
        with pytest.raises(SampleValidationError):
            space.freeze(wrong)


def test_a_grid_begins_with_the_seed_and_repeats_nothing() -> None:
    space = model_space(SPACE, max_learners=1, max_shortcuts=1)
    choice = space.simplify()["normal"]
    grid = list(choice.grid())
    assert grid[0] == []
    assert len(grid) == 1 + 2 * 7 == len({json.dumps(learners) for learners in grid})
    assert all(value in grid for value in choice.as_legacy_dict()["_value"])
    pairs = list(model_space(SPACE, 2, 2).simplify()["normal"].grid(granularity=2))
    # Two shortcuts: both in one learner, or one each in two, where h0 is a source as well.
    assert len(pairs) == 1 + 14 + 14 * 13 // 2 + 14 * 21


@pytest.mark.parametrize(
    "strategy",
    [
        Random(seed=1),
        RegularizedEvolution(population_size=2, sample_size=2, mutation_prob=0.7, seed=1),
        GridSearch(shuffle=False),
        TPE(seed=1),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_other_strategies_search_the_same_space(start: Any, strategy: Any) -> None:
    recipe = RecipeEvaluator("digits", DIGITS, {"epochs": 1, "device": "cpu"})
    done = start(strategy, recipe, models=4)
    samples = done.export_top_models(4, formatter="dict")
    assert len({json.dumps(sample) for sample in samples}) == 4
    space = SPACE.model_space()
    assert all(space.contains(sample) for sample in samples)


# The strategy, in this process.


@pytest.mark.parametrize("format", ["simplified", "raw"])
def test_a_users_function_searches_and_exports_what_it_trained(
    tmp_path: Path, start: Any, format: str
) -> None:
    folder = tmp_path / "gallery"
    strategy = Petridish(folder, max_models=3, **SHORT)
    done = start(strategy, by_hand(), format=format)
    assert [model.id for model in strategy.models()] == ["g00000", "g00001", "g00002"]
    assert strategy.models()[0].parent is None
    best = min(strategy.models(), key=lambda model: (model.error, model.multiply_adds))

    (sample,) = done.export_top_models(1, formatter="dict")
    (net,) = done.export_top_models(1, formatter="instance")
    (model,) = done.export_top_models(1)
    genotype = Genotype.from_dict(Gallery(folder).load_documents(best.id)["genotype"])
    assert SPACE.model_space().genotype(sample) == genotype == net.genotype
    # The instance has the trained weights: it is as accurate as was reported.
    assert users.accuracy(net) == pytest.approx(1 - best.error) == pytest.approx(model.metric)
    assert len(list(strategy.list_models(sort=False))) == 3
    with pytest.raises(ValueError, match="code"):
        done.export_top_models(1, formatter="code")


def test_what_is_exported_differs_in_more_than_the_order_of_shortcuts(
    tmp_path: Path, start: Any
) -> None:
    space = VisionSpace((1, 8, 8), 10, cells_per_stage=2, filters=4, stages=1, ops=["identity"])
    limits = {"max_growths": 1, "tolerance": 0.99}  # so that every seed is grown
    strategy = Petridish(tmp_path / "gallery", seeds=4, i_max=2, **limits)
    done = start(strategy, by_hand(), space=space.model_space())
    gallery = Gallery(tmp_path / "gallery")
    found = [
        Genotype.from_dict(gallery.load_documents(m.id)["genotype"]) for m in strategy.models()
    ]
    # Every seed was grown into the same architecture, whose shortcuts are in the order of |α|.
    assert len(found) == 8
    assert len({genotype.to_json() for genotype in found}) == 3
    assert len({architecture(genotype) for genotype in found}) == 2
    assert len(done.export_top_models(9, formatter="dict")) == 2
    assert len({model.multiply_adds for model in strategy.hull()}) == len(strategy.hull())


@pytest.mark.parametrize("complexity", ["parameters", "latency"])
def test_a_strategy_goes_by_another_complexity(tmp_path: Path, start: Any, complexity: str) -> None:
    folder = tmp_path / "gallery"
    limits = {f"max_{complexity}": 1e9, "complexity": complexity}
    start(Petridish(folder, max_models=2, **limits, **SHORT), by_hand())
    _, search = open_search(folder)
    assert search.complexity.name == complexity
    sizes = [search.complexity.of(record.outcome) for record in search.hull()]
    assert sizes == sorted(sizes)
    assert all(0 < size < 1e9 for size in sizes)


def test_phases_report_to_nni_with_their_names_and_only_once_finally(tmp_path: Path) -> None:
    gallery = Gallery.create(tmp_path / "gallery", {}, {})
    sent: list[tuple[str, dict[str, Any]]] = []

    class Channel(nni.runtime.trial_command_channel.TrialCommandChannel):
        def send_metric(self, type: str, value: Any, **_: Any) -> None:
            sent.append((type, value))

    before = nni.runtime.trial_command_channel.get_default_trial_command_channel()
    nni.runtime.trial_command_channel.set_default_trial_command_channel(Channel())
    try:
        for growth in (Growth("g00000", None, 1, 0.01, 2), Growth("g00001", "g00000", 2, 0.01, 2)):
            evaluators = dict.fromkeys(("seed", "weak", "final"), users.users_lightning())
            wrapped = GrowthEvaluator(
                growth, SPACE, evaluators, str(gallery.folder), GrowthSettings(2, 1, 2), Metric()
            )
            # Through NNI's serializer and back, as to a trial.
            nni.load(nni.dump(wrapped)).evaluate()
    finally:
        nni.runtime.trial_command_channel.set_default_trial_command_channel(before)
    assert [(type, value.get("phase")) for type, value in sent] == [
        *[("PERIODICAL", "seed")] * 2,
        ("FINAL", None),
        ("PERIODICAL", "weak"),
        *[("PERIODICAL", "final")] * 2,
        ("FINAL", None),
    ]
    final = sent[-1][1]
    outcome = gallery.load_documents("g00001")["metrics"]
    assert final["growth"] == "g00001"
    assert final["default"] == pytest.approx(1 - outcome["error"])
    assert final["multiply_adds"] == outcome["multiply_adds"]
    assert sent[3][1]["epoch"] == 1


@pytest.mark.parametrize("make", [users.classification, users.users_lightning])
def test_lightning_evaluators_learn_weakly_unchanged(
    tmp_path: Path, start: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator = make()
    trainer = evaluator.trainer
    strategy = Petridish(tmp_path / "gallery", max_models=2, final_epochs=2)
    start(strategy, evaluator)
    documents = Gallery(tmp_path / "gallery").load_documents("g00001")
    assert [len(documents["history"][phase]) for phase in ("weak", "final")] == [1, 2]
    alphas = [row["alpha"] for row in documents["alphas"]["tables"]["normal"]]
    assert len({round(alpha, 6) for alpha in alphas}) > 1, "α did not learn"
    assert documents["metrics"]["error"] == pytest.approx(
        1 - documents["history"]["final"][-1]["metric"]
    )
    assert evaluator.trainer is trainer
    assert trainer.current_epoch == 0, "the user's own trainer was used"


def test_what_regression_reports_is_minimized(tmp_path: Path, start: Any) -> None:
    space = VisionSpace((1, 8, 8), 1, cells_per_stage=1, filters=4, stages=2).model_space()
    strategy = Petridish(tmp_path / "gallery", max_models=3)
    done = start(strategy, users.regression(), space=space)
    errors = [model.error for model in strategy.models()]
    assert errors == [model.outcome.metrics["metric"] for model in strategy.models()]
    listed = [model.metric for model in strategy.list_models()]
    assert listed == sorted(errors)
    assert done.export_top_models(1)[0].metric == min(errors)


def test_the_recipe_grows_what_the_other_fronts_grow(tmp_path: Path, start: Any) -> None:
    recipe = {"device": "cpu"}
    start(
        Petridish(tmp_path / "nni", max_models=3, seed=5, **SHORT),
        RecipeEvaluator("digits", DIGITS, recipe),
    )
    task = VisionTask(SPACE, load_data("digits", **DIGITS), Recipe.named("digits", **recipe))
    settings = SearchSettings(seed=5, limits=Limits(max_models=3), **SHORT)
    gallery = Gallery.create(tmp_path / "own", {}, {})
    with Coordinator(gallery, settings) as coordinator:
        while isinstance(growth := coordinator.ask(), Growth):
            run_growth(growth, task, GrowthSettings(**SHORT), gallery)
    for id in gallery.model_ids():
        weights, documents = gallery.load_model(id)
        others, other_documents = Gallery(tmp_path / "nni").load_model(id)
        assert documents["genotype"] == other_documents["genotype"]
        for name in ("metrics", "lineage", "alphas"):
            assert documents[name] == other_documents[name]
        assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_with_ranges_every_growth_chooses_as_the_other_fronts_would(
    tmp_path: Path, start: Any
) -> None:
    given = {"l1": {"low": 1e-5, "high": 0.1}, "i_max": {"low": 1, "high": 2}}
    strategy = Petridish(tmp_path / "nni", max_models=4, **given, **SHORT)
    start(strategy, RecipeEvaluator("digits", DIGITS, {"device": "cpu"}))
    config = SearchConfig.from_parts(
        {"cells_per_stage": 1, "filters": 4, "stages": 2},
        {
            "gallery": "own",
            "data": {"name": "digits", **DIGITS},
            "recipe": {"device": "cpu"},
            "limits": {"max_models": 4},
            **given,
            **SHORT,
        },
        tmp_path,
        {},
    )
    run_search(config)
    asked, others = (
        [event["growth"] for event in journal(tmp_path / name) if event["event"] == "ask"]
        for name in ("nni", "own")
    )
    assert asked == others
    chosen = [growth for growth in asked if growth["parent"] is not None]
    assert (chosen[0]["l1"], chosen[0]["i_max"]) == (0.001, 2)  # the paper's, or the nearest
    assert len({growth["l1"] for growth in chosen}) == 3
    for model in strategy.models()[1:]:
        alphas = Gallery(tmp_path / "nni").load_documents(model.id)["alphas"]
        assert alphas["i_max"] == model.growth.i_max  # the choice was carried out
    other = Petridish(tmp_path / "nni", max_models=5, **{**given, "i_max": 2}, **SHORT)
    with pytest.raises(GalleryError, match="i_max"):
        start(other, RecipeEvaluator("digits", DIGITS, {"device": "cpu"}))


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, (0.01, 1)), ({"l1": 0.5}, (0.5, 1)), ({"l1": {"low": 1e-3, "high": 0.1}}, (0.01, 1))],
    ids=["default", "number", "range"],
)
def test_recurrent_cells_grow_at_their_own_defaults(
    tmp_path: Path, start: Any, given: dict[str, Any], expected: tuple[float, int]
) -> None:
    strategy = Petridish(tmp_path / "gallery", max_models=2, error=lambda nodes: 1 / nodes, **given)
    space = RecurrentSpace(vocabulary=20, embedding=4, max_nodes=4).model_space()
    start(strategy, FunctionalEvaluator(users.count_nodes), space=space)
    growths = [model.growth for model in strategy.models()]
    assert [(growth.l1, growth.i_max) for growth in growths] == [expected] * 2


def test_a_search_may_start_from_a_model_of_another(tmp_path: Path, start: Any) -> None:
    first = Petridish(tmp_path / "first", max_models=2, **SHORT)
    start(first, by_hand())
    second = Petridish(tmp_path / "second", max_models=2, start=tmp_path / "first", **SHORT)
    start(second, by_hand())
    (best, *_) = sorted(first.models(), key=lambda model: (model.error, model.multiply_adds))
    old = Gallery(tmp_path / "first").load_documents(best.id)["genotype"]["cells"]
    seed, grown = (
        Gallery(tmp_path / "second").load_documents(model.id)["genotype"]["cells"]
        for model in second.models()
    )
    assert seed == old
    assert all(grown[key][:-1] == old[key] for key in old)
    wider = VisionSpace((1, 8, 8), 10, cells_per_stage=1, filters=5, stages=2).model_space()
    other = Petridish(tmp_path / "third", max_models=1, start=tmp_path / "first", **SHORT)
    with pytest.raises(ConfigError, match="its filters is 4 but the search's 5"):
        start(other, by_hand(), space=wider)
    assert not (tmp_path / "third").exists()


def test_each_phase_may_have_its_own_evaluator(tmp_path: Path, start: Any) -> None:
    strategy = Petridish(
        tmp_path / "gallery",
        max_models=2,
        weak_evaluator=FunctionalEvaluator(users.train_once),
        final_evaluator=users.classification(2),
    )
    start(strategy, by_hand(epochs=3))
    assert [model.outcome.epochs for model in strategy.models()] == [3, 1 + 2]


def test_the_seed_evaluator_trains_the_model_that_a_search_starts_from(
    tmp_path: Path, start: Any
) -> None:
    start(Petridish(tmp_path / "first", max_models=2, **SHORT), by_hand())
    strategy = Petridish(
        tmp_path / "second",
        max_models=2,
        start=tmp_path / "first",
        start_model="g00001",  # a grown one: not the space's own seed
        seed_evaluator=FunctionalEvaluator(users.tell, told=1.0),
        weak_evaluator=FunctionalEvaluator(users.tell, told=2.0),
    )
    start(strategy, FunctionalEvaluator(users.tell, told=3.0))
    history = [
        Gallery(tmp_path / "second").load_documents(model.id)["history"]
        for model in strategy.models()
    ]
    told = [{phase: records[-1]["told"] for phase, records in one.items()} for one in history]
    assert told == [{"seed": 1.0}, {"weak": 2.0, "final": 3.0}]
    assert [model.outcome.metrics["told"] for model in strategy.models()] == [1.0, 3.0]


def test_a_growth_that_fails_is_tried_again_and_then_dropped(tmp_path: Path, start: Any) -> None:
    for times, lines in ((1, ["fail"]), (2, ["fail", "fail"])):
        folder, tries = tmp_path / f"gallery{times}", tmp_path / f"tries{times}"
        tries.mkdir()
        evaluator = FunctionalEvaluator(users.fail_at_times, folder=str(tries), times=times)
        strategy = Petridish(folder, max_models=2)
        start(strategy, evaluator)
        failures = [event for event in journal(folder) if event["event"] == "fail"]
        assert [event["event"] for event in failures] == lines
        assert failures[0]["reason"] == "RuntimeError: trouble number 0 and more about it"
        # Dropped or not, the search went on until it had its two models.
        expected = "g00001" if times == 1 else "g00002"
        assert [model.id for model in strategy.models()] == ["g00000", expected]


def test_a_search_without_any_model_says_why(tmp_path: Path, start: Any) -> None:
    strategy = Petridish(tmp_path / "gallery", max_models=2, metric="no such metric")
    with pytest.raises(SearchError, match=r"ended without a model: .*'no such metric'"):
        start(strategy, by_hand())


def test_an_attribute_of_a_users_evaluator_is_not_taken_for_ours(
    tmp_path: Path, start: Any
) -> None:
    strategy = Petridish(tmp_path / "gallery", max_models=1)
    start(strategy, users.Tasked())
    assert len(strategy.models()) == 1


def test_an_evaluator_without_any_metric_fails_in_one_line(tmp_path: Path, start: Any) -> None:
    strategy = Petridish(tmp_path / "gallery", max_models=1)
    with pytest.raises(SearchError, match="ended without a model"):
        start(strategy, users.Silent())
    reasons = {e["reason"] for e in journal(tmp_path / "gallery") if e["event"] == "fail"}
    (reason,) = reasons
    assert "must report a metric or a validation_error after every epoch" in reason
    assert reason.endswith("but reported epoch, loss.")


def test_a_trial_of_the_strategy_is_alone_and_visibly_alive(tmp_path: Path, start: Any) -> None:
    folder = tmp_path / "gallery"
    strategy = Petridish(folder, max_models=1)
    start(strategy, FunctionalEvaluator(users.look_at_work, folder=str(folder)))
    (model,) = strategy.models()
    assert (model.outcome.metrics["pulse"], model.outcome.metrics["lock"]) == (1.0, 1.0)


def test_a_growth_that_the_user_interrupts_is_given_back(tmp_path: Path, start: Any) -> None:
    start(Petridish(tmp_path / "gallery"), FunctionalEvaluator(users.interrupt))
    assert [event["event"] for event in journal(tmp_path / "gallery")] == ["ask", "release"]


TERMINATED = """
import sys
from nni.nas.evaluator import FunctionalEvaluator
from nni_petridish.nni_adapter.evaluators.task import Metric
from nni_petridish.nni_adapter.evaluators.growth import GrowthEvaluator
from nni_petridish.search.settings import GrowthSettings
from nni_petridish.search.records import Growth
from tests.support.nni_evaluators import terminate
from tests.nni_adapter.test_strategy import SPACE

growth = Growth("g00000", None, 1, 0.01, 2)
evaluators = {"seed": FunctionalEvaluator(terminate)}
plan = GrowthSettings(1, 1, 1)
GrowthEvaluator(growth, SPACE, evaluators, sys.argv[1], plan, Metric(), 1).evaluate()
"""


def test_a_trial_that_is_stopped_gives_its_growth_back(tmp_path: Path) -> None:
    gallery = Gallery.create(tmp_path / "gallery", {}, {})
    command = [sys.executable, "-W", "ignore", "-c", TERMINATED, str(gallery.folder)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], timeout=120, check=False)
    assert done.returncode != 0
    assert [event["event"] for event in gallery.journal.read_all()] == ["release"]


def test_an_interrupted_experiment_resumes(tmp_path: Path, start: Any) -> None:
    folder = tmp_path / "gallery"
    first = start(Petridish(folder, max_models=4, **SHORT), by_hand(), models=2)
    before = [model.sample for model in first.strategy.list_models(sort=False)]
    first.stop()
    # As if killed on the way: handed out, without a worker.
    settings = SearchSettings(limits=Limits(max_models=4), **SHORT)
    with Coordinator(Gallery(folder), settings) as coordinator:
        assert coordinator.ask().id == "g00002"
    strategy = Petridish(folder, max_models=4, **SHORT)
    again = start(strategy, by_hand(), "resume", id=first.id)
    listed = [model.sample for model in strategy.list_models(sort=False)]
    assert len(listed) == 4
    assert listed[:2] == before
    assert len(again.export_top_models(4, formatter="dict")) == 4
    asked = [event["id"] for event in journal(folder) if event["event"] == "ask"]
    assert sorted(set(asked)) == ["g00000", "g00001", "g00002", "g00003"]
    models = [event["id"] for event in journal(folder) if event["event"] == "model"]
    assert len(models) == len(set(models)) == 4


def test_finished_phases_are_not_trained_again(tmp_path: Path) -> None:
    gallery = Gallery.create(tmp_path / "halting", {}, {})
    task = EvaluatorTask(SPACE, dict.fromkeys(("seed", "weak", "final"), by_hand()))
    plan = GrowthSettings(1, 1, 2)
    run_growth(Growth("g00000", None, 1, 0.01, 2), task, plan, gallery)
    child = Growth("g00001", "g00000", 2, 0.01, 2)
    seen: list[str] = []

    def stop() -> bool:
        return "final" in seen

    with pytest.raises(Interrupted):
        run_growth(
            child, task, plan, gallery, Callbacks(lambda phase, record: seen.append(phase), stop)
        )
    assert seen == ["weak", "final"]
    seen.clear()
    outcome = run_growth(child, task, plan, gallery, Callbacks(lambda p, record: seen.append(p)))
    assert seen == ["final", "final"]
    straight = Gallery.create(tmp_path / "straight", {}, {})
    run_growth(Growth("g00000", None, 1, 0.01, 2), task, plan, straight)
    assert run_growth(child, task, plan, straight) == outcome


# What is refused.


def test_broken_settings_are_refused_in_one_line(tmp_path: Path, start: Any) -> None:
    for wrong, pattern in (
        ({"l1": -1}, "l1 must be a number of at least 0"),
        ({"i_max": 0}, "i_max must be a whole number of at least 1"),
        ({"l1": {"low": 0.1, "high": 0.01}}, "l1.low must be at most l1.high but got 0.1 and 0.01"),
        ({"l1": {"low": 0.0, "high": 0.1}}, "l1.low must be above 0 but got 0.0"),
        ({"l1": (0.01, 0.1)}, "l1 must be a number"),
        ({"i_max": {"low": 0, "high": 2}}, "i_max.low must be at least 1"),
        ({"i_max": {"low": 1}}, "i_max.high is missing"),
        (
            {"l1": {"low": 0.01, "high": 0.1}, "chooser": lambda number: (0.1, 1)},
            "l1 must not be a range where a chooser is given",
        ),
        ({"max_models": "3"}, "max_models must be a whole number"),
        ({"weak_epochs": 0}, "weak_epochs must be at least 1"),
        ({"optimize": "best"}, "optimize must be one of auto, maximize, percent, minimize"),
        ({"l1_schedule": "steep"}, "l1_schedule must be one of"),
        ({"error": 3}, "error must be a function"),
    ):
        with pytest.raises(ConfigError, match=pattern):
            Petridish(tmp_path / "gallery", **wrong)
    with pytest.raises(ConfigError, match="gallery must be a folder"):
        Petridish(3)  # type: ignore[arg-type]
    assert not (tmp_path / "gallery").exists()


def test_spaces_and_evaluators_that_do_not_fit_are_refused(tmp_path: Path, start: Any) -> None:
    class Lone(ModelSpace):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    def petridish(**options: Any) -> Petridish:
        return Petridish(tmp_path / "gallery", max_models=1, **options)

    with pytest.raises(ConfigError, match="nothing to grow in Lone"):
        start(petridish(), by_hand(), space=Lone())
    recurrent = RecurrentSpace(vocabulary=4, embedding=4).model_space()
    with pytest.raises(ConfigError, match="i_max must be 1 but got 3: a recurrent cell"):
        start(petridish(i_max=3), by_hand(), space=recurrent)
    with pytest.raises(ConfigError, match="fixed is for spaces of NNI's cells and choices only"):
        start(petridish(fixed={"normal": []}), by_hand())
    with pytest.raises(ConfigError, match="seed_epochs can be set for"):
        start(petridish(seed_epochs=2), FunctionalEvaluator(users.train_once))
    choice = FunctionalEvaluator(users.train_by_hand, lr=nni.choice("lr", [0.1, 0.2]))
    with pytest.raises(ConfigError, match="must have no choices of its own but has lr"):
        start(petridish(), choice)
    assert not (tmp_path / "gallery").exists()
    start(petridish(), by_hand())
    with pytest.raises(GalleryError, match="is of another search"):
        start(petridish(i_max=2), by_hand())


def test_metrics_become_errors() -> None:
    def error(metric: Metric, value: float) -> float:
        return metric.to_error({"metric": value}, None)["error"]

    assert error(Metric(), 0.9) == pytest.approx(0.1)
    assert error(Metric(), 90.0) == pytest.approx(0.1)
    assert error(Metric(optimize="percent"), 0.5) == pytest.approx(0.995)
    assert error(Metric(optimize="minimize"), 7.0) == 7.0
    assert error(Metric(error=lambda percent: 1 - percent / 100), 90.0) == pytest.approx(0.1)
    with pytest.raises(ConfigError, match="at most 1, but is 90"):
        error(Metric(optimize="maximize"), 90.0)
    with pytest.raises(ConfigError, match="in percent, at most 100, but is 250"):
        error(Metric(), 250.0)


def test_accuracies_in_percent_are_taken_as_such(
    tmp_path: Path, start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    evaluator = FunctionalEvaluator(users.tell_all, folder=str(tmp_path), numbers=[40.0, 0.5])
    strategy = Petridish(tmp_path / "gallery", max_models=2)
    with caplog.at_level("WARNING"):
        start(strategy, evaluator)
    # A child of half a percent is not mistaken for one of 50 %.
    assert [model.error for model in strategy.models()] == pytest.approx([0.6, 0.995])
    assert "g00000 reports 40, which is taken as an accuracy in percent" in caplog.text


def test_a_metric_that_is_refused_stops_at_the_first_report_and_leaves_no_trace(
    tmp_path: Path, start: Any
) -> None:
    evaluator = FunctionalEvaluator(users.tell_all, folder=str(tmp_path), numbers=[250.0, 3.0])
    with pytest.raises(SearchError, match=r"refused: the metric must be .* but is 250; set opt"):
        start(Petridish(tmp_path / "gallery", max_models=2), evaluator)
    assert len(list(tmp_path.glob("told-*"))) == 1  # not tried again
    corrected = Petridish(tmp_path / "gallery", max_models=2, optimize="minimize")
    start(corrected, FunctionalEvaluator(users.tell_all, folder=str(tmp_path), numbers=[9.0] * 9))
    assert [model.error for model in corrected.models()] == [9.0, 9.0]


def test_the_space_is_found_in_what_nni_makes_of_it() -> None:
    for kind in (RawFormatModelSpace, SimplifiedModelSpace):
        assert growable_space(kind.from_model(SPACE.model_space(), None)) == SPACE


# The strategy with NNI's manager.


class EngineWithoutWorkers(ExecutionEngine):
    """An engine without workers: events are dispatched by hand."""

    def list_trial_jobs(self) -> list[Any]:
        return []

    @property
    def nodejs_binding(self) -> Any:
        return self


def test_the_end_of_a_trial_is_believed_only_as_far_as_the_count_goes() -> None:
    engine = EngineWithoutWorkers()
    trials = RunningTrials(engine)
    space = SimplifiedModelSpace.from_model(SPACE.model_space(), None)
    growths = [Growth(f"g0000{i}", None, i, 0.001, 3) for i in range(3)]
    models = [space.freeze({"normal": [], "reduce": []}) for _ in growths]
    for growth, model in zip(growths, models, strict=True):
        trials.add(growth, model)

    def ended(i: int) -> None:
        engine.dispatch_model_event(TrainingEndEvent(models[i], ModelStatus.Failed))
        trials.wait(0)

    a, b, c = growths
    assert trials.without_trial([a, b, c]) == []
    # The model of a is saved and told to NNI, but NNI says that it was the trial of b that ended.
    engine.dispatch_model_event(FinalMetricEvent(models[0], {"default": 0.5, "growth": a.id}))
    ended(1)
    assert trials.count == 2
    assert trials.without_trial([a, b, c]) == []  # the journal may not show a yet
    assert trials.without_trial([b, c]) == []
    # Another one ends, and there are two growths left with one trial.
    ended(2)
    assert trials.without_trial([b, c]) in ([b], [c])
    trials.close()


def test_a_growth_that_was_given_back_is_not_lost_when_it_runs_again() -> None:
    engine = EngineWithoutWorkers()
    space = SimplifiedModelSpace.from_model(SPACE.model_space(), None)
    growth = Growth("g00000", None, 0, 0.001, 3)
    for told_before in (True, False):
        trials = RunningTrials(engine)
        first, second = (space.freeze({"normal": [], "reduce": []}) for _ in range(2))
        end = TrainingEndEvent(first, ModelStatus.Failed)
        trials.add(growth, first)
        if told_before:
            engine.dispatch_model_event(end)
            trials.wait(0)
        assert trials.without_trial([]) == []  # given back: nobody works on it
        trials.add(growth, second)
        if not told_before:
            engine.dispatch_model_event(end)
            trials.wait(0)
        assert trials.without_trial([growth]) == []
        assert trials.count == 1
        engine.dispatch_model_event(TrainingEndEvent(second, ModelStatus.Failed))
        trials.wait(0)
        assert trials.without_trial([growth]) == [growth]
        third, other = (space.freeze({"normal": [], "reduce": []}) for _ in range(2))
        trials.add(growth, third)
        assert trials.without_trial([growth]) == []
        # The next end is not taken for that of the growth which runs again.
        later = Growth("g00001", None, 1, 0.001, 3)
        trials.add(later, other)
        engine.dispatch_model_event(TrainingEndEvent(other, ModelStatus.Failed))
        trials.wait(0)
        assert trials.without_trial([growth, later]) == [later]
        trials.close()


class EngineOfALostWorker(SequentialExecutionEngine):
    """An engine whose workers die in the first growths, without an event.

    Parameters
    ----------
    gallery
        Gallery with the last heartbeat of the worker.
    deaths
        Number of workers that die.
    """

    def __init__(self, gallery: Path, deaths: int) -> None:
        super().__init__()
        self.gallery, self.deaths = gallery, deaths
        self.growths: list[tuple[str, int]] = []

    def submit_models(self, *models: Any) -> None:
        (model,) = models
        growth = model.evaluator.growth
        self.growths.append((growth.id, growth.attempt))
        if len(self.growths) > self.deaths:
            super().submit_models(model)
        else:
            (Gallery(self.gallery).work_folder(growth.id, growth.attempt) / "pulse").touch()


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_worker_that_dies_without_a_word_is_noticed_as_by_the_tuner(
    deaths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "LOST_SECONDS", 0.3)
    monkeypatch.setattr(strategy_module, "_POLL_SECONDS", 0.05)
    folder = tmp_path / "gallery"
    strategy = Petridish(folder, max_models=1, **SHORT)
    engine = EngineOfALostWorker(folder, deaths)
    strategy(SimplifiedModelSpace.from_model(SPACE.model_space(), by_hand()), engine)
    events = [event["event"] for event in journal(folder)]
    if deaths == 1:  # it goes on from its checkpoint, in the same attempt
        assert events == ["ask", "release", "ask", "model"]
        assert engine.growths == [("g00000", 1)] * 2
    else:  # the second loss is a failure
        assert events == ["ask", "release", "ask", "fail", "ask", "model"]
        assert engine.growths == [("g00000", 1)] * 2 + [("g00000", 2)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("machines", [1, 2])
def test_the_machines_of_the_training_service_share_the_trials(machines: int) -> None:
    config = NasExperimentConfig("ts", "simplified", training_service_platform="local")
    config.search_space, config.trial_concurrency = {}, 4
    if machines > 1:
        hosts = [f"127.0.0.{i}" for i in range(1, machines + 1)]
        config.training_service = RemoteConfig(
            machine_list=[RemoteMachineConfig(host=host, user="a", password="b") for host in hosts]
        )
        config.nni_manager_ip = "127.0.0.1"
    engine = SimpleNamespace(nodejs_binding=SimpleNamespace(config=config))
    assert engine_concurrency(engine) == 4
    assert engine_machines(engine) == machines


SERVICE = """
import os, sys
from nni.tools.nnictl import config_utils
config_utils.Experiments.__init__.__defaults__ = (sys.argv[2],)
from nni.nas.evaluator import FunctionalEvaluator
from nni.nas.experiment import NasExperiment, NasExperimentConfig
from nni_petridish.nni_adapter.strategy import Petridish
from search_spaces import VisionSpace
from tests.support import nni_evaluators

folder, home, port, action, models, function, times = sys.argv[1:]
config = NasExperimentConfig("ts", "simplified", "local")
config.trial_concurrency = 2
config.experiment_working_directory = home
space = VisionSpace((1, 8, 8), 10, cells_per_stage=1, filters=4, stages=2).model_space()
# The evaluator of a resumed experiment fails at other times, which is a change.
strategy = Petridish(folder, max_models=int(models), allow_changed_evaluator=action == "resume")
tries = os.path.join(home, action)
os.makedirs(tries)
evaluator = FunctionalEvaluator(getattr(nni_evaluators, function), folder=tries, times=int(times))
experiment = NasExperiment(space, evaluator, strategy, config, "petri")
try:
    getattr(experiment, action)(int(port))
    print("models", len(experiment.export_top_models(int(models), formatter="dict")))
finally:
    experiment.stop()
"""


def serve(
    tmp_path: Path, action: str, models: int, failures: int, function: str = "fail_at_times"
) -> subprocess.Popen[str]:
    # Far too many threads, which each trial must reduce to its share.
    environment = {**os.environ, "OMP_NUM_THREADS": "64", "MKL_NUM_THREADS": "64"}
    folder, home = tmp_path / "gallery", tmp_path / "home"
    arguments = [folder, home, free_port(), action, models, function, failures]
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVICE, *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def descendants(pid: int) -> list[int]:
    listing = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True)
    parents = [tuple(map(int, line.split())) for line in listing.stdout.splitlines()[1:]]
    found, new = [pid], [pid]
    while new:
        new = [child for child, parent in parents if parent in new]
        found += new
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_training_service_runs_two_trials_and_survives_a_kill(tmp_path: Path) -> None:
    # Enough models that some are new after the kill, however late it comes.
    process = serve(tmp_path, "run", 6, failures=0)
    folder = tmp_path / "gallery"
    try:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            time.sleep(0.5)
            if (folder / "work" / "g00002-1").exists():  # its trial is at work
                break
            assert process.poll() is None, process.stdout.read()  # type: ignore[union-attr]
    finally:
        for pid in descendants(process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()
    told = journal(folder)
    before = [event["id"] for event in told if event["event"] == "model"]
    assert before

    process = serve(tmp_path, "resume", 6, failures=1)
    try:
        output, _ = process.communicate(timeout=500)
    finally:
        left = descendants(process.pid)[1:] if process.poll() is None else []
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        process.kill()
    assert process.returncode == 0, output
    assert "models 6" in output
    events = journal(folder)
    models = [event["id"] for event in events if event["event"] == "model"]
    assert models[: len(before)] == before
    assert len(models) == len(set(models)) == 6
    # Trials that were under way ran again as they were; the first new one failed, once.
    failed = [event for event in events if event["event"] == "fail"]
    reason = "RuntimeError: trouble number 0 and more about it"
    assert [event["reason"] for event in failed] == [reason]
    # At once, one may be given back: it was handed out, but NNI had not stored its trial yet.
    released = [i for i, event in enumerate(events[len(told) :]) if event["event"] == "release"]
    assert released in ([], [0])
    # The seed trains alone, then there are two at a time.
    cores = len(os.sched_getaffinity(0))
    for event in events:
        if "outcome" in event:
            share = cores if event["growth"]["parent"] is None else max(1, cores // 2)
            assert event["outcome"]["metrics"]["threads"] == share


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_trial_that_is_killed_gives_its_growth_back(tmp_path: Path) -> None:
    process = serve(tmp_path, "run", 2, failures=1, function="die_at_times")
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        for pid in descendants(process.pid)[1:] if process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        process.kill()
    assert process.returncode == 0, output
    events = [(event["event"], event["id"]) for event in journal(tmp_path / "gallery")]
    assert events.count(("release", "g00001")) == 1
    assert not [id for kind, id in events if kind == "fail"]
    assert ("model", "g00001") in events
