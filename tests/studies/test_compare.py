from __future__ import annotations

import csv
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats

from nni_petridish.__main__ import main
from nni_petridish.errors import ConfigError, Interrupted
from nni_petridish.gallery.saved_model import read_model
from nni_petridish.running.watch import Watch
from nni_petridish.studies.comparison import measures
from nni_petridish.studies.comparison.cli import PICTURE_FILE, RUNS_FILE, TABLES_FILE
from nni_petridish.studies.comparison.findings import Findings
from nni_petridish.studies.comparison.section import PILOT_OFFSET
from nni_petridish.studies.comparison.settings import CompareRun, Comparison
from nni_petridish.studies.comparison.statistics import detectable, holm, paired
from nni_petridish.studies.comparison.tables import power_rows, to_markdown
from nni_petridish.studies.comparison.trace import Trace
from nni_petridish.studies.comparison.work import WORK_FOLDERS, carry_out, compare, prepare
from nni_petridish.tasks.task import RETRAINING
from tests.studies.test_ablations import copy_config
from tests.support.chaos import write_config

METHODS: dict[str, Any] = {
    "petridish": {},
    "at once": {"set": {"score": "random", "weak_epochs": 0}},
    "trained on": {"kind": "train_on"},
    "widened": {"kind": "widen"},
    "random": {"kind": "random"},
}


def write(where: Path, **section: Any) -> Path:
    """Write a comparison that is as small as possible; its budget makes it reproducible."""
    path = write_config(where, models=2)
    document = yaml.safe_load(path.read_text())
    arguments = document["tuner"]["classArgs"]
    arguments |= {"seed_epochs": 2, "weak_epochs": 1, "final_epochs": 1}
    arguments["data"]["limit"] = 64
    arguments["compare"] = {
        "folder": "out",
        "repeats": 1,
        "pilot": 2,
        "budget": "multiply_adds",
        "max_multiply_adds": 100_000,
        "final": {"epochs": 1, "limit": 64},
        "methods": METHODS,
        **section,
    }
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


# Bad input.

BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"seeds": 3}, "compare.seeds is not a known key"),
    "one method": ({"methods": {"a": {}}}, "compare.methods must name at least 2 but got 1"),
    "no reference": (
        {"methods": {"a": {"kind": "random"}, "b": {}}},
        "methods must begin with one of kind growth, which sets the budget, but a is of kind",
    ),
    "unknown kind": (
        {"methods": {"a": {}, "b": {"kind": "grid"}}},
        "methods.b.kind must be one of growth, train_on, widen, random, evolution, tpe, darts but",
    ),
    "unknown setting": (
        {"methods": {"a": {}, "b": {"set": {"lambda": 1}}}},
        "methods.b: tuner.classArgs.lambda is not a known key",
    ),
    "a number as a name": (
        {"methods": {"a": {}, "b": {"set": {0: 0}}}},
        "methods.b.set must have names of settings but got 0",
    ),
    "a number as an option": (
        {"methods": {"a": {}, "b": {"kind": "tpe", "options": {0: 0}}}},
        "methods.b.options must have names of settings but got 0",
    ),
    "the seed": (
        {"methods": {"a": {}, "b": {"set": {"seed": 1}}}},
        "methods.b: seed cannot be changed by a method",
    ),
    "options": (
        {"methods": {"a": {}, "b": {"options": {"x": 1}}}},
        "methods.b.options are for strategies of NNI but the kind is growth",
    ),
    "baseline": ({"baseline": "tpe"}, "compare.baseline must be one of petridish, at once,"),
    "budget": ({"budget": "epochs"}, "compare.budget must be one of processor_time, multiply_adds"),
    "final": ({"final": {"epoch": 1}}, "final.epoch is not a known key"),
    "final without epochs": ({"final": {}}, "final.epochs"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_bad_settings_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    section, message = BROKEN[case]
    with pytest.raises(ConfigError) as caught:
        Comparison.from_yaml(write(tmp_path, **section))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_limit_below_the_seed_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"compare\.max_multiply_adds must be at least"):
        compare(write(tmp_path, max_multiply_adds=10))


def test_an_unknown_method_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(write(tmp_path)), "--only", "grid"]) == 2
    assert "There is no method 'grid'; there are petridish, at once" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        "compare_digits.yml",
        "compare_fashion_mnist.yml",
        "compare_fashion_mnist_full.yml",
        "compare_cifar10.yml",
        "compare_cifar10_full.yml",
        "flagship_cifar10.yml",
    ],
)
def test_the_shipped_comparisons_are_valid(name: str, tmp_path: Path) -> None:
    comparison = Comparison.from_yaml(copy_config(name, tmp_path))
    assert comparison.methods[0] == "petridish"
    assert {"widened", "trained on"} <= set(comparison.methods)
    assert not set(comparison.seeds) & set(comparison.change(pilot=True).seeds)


def test_the_shipped_comparison_of_switches_changes_one_at_a_time(tmp_path: Path) -> None:
    comparison = Comparison.from_yaml(copy_config("growth_switches.yml", tmp_path))
    plans = {name: comparison.run(name, 100).config for name in comparison.methods}
    paper = plans["paper"].plan.to_dict()
    changed = {
        name: set(config.plan.to_dict().items()) - set(paper.items())
        for name, config in plans.items()
    }
    assert changed["halving"] == {("weak_halving", 0.2)}
    assert changed["fade"] - changed["eta"] == {("eta_fade", 0.33)}
    assert changed["paper"] == changed["average"] == set()
    assert plans["average"].recipe.average == plans["trained on and averaged"].recipe.average > 0


# Statistics, each against an independent computation.


def test_paired_tests_agree_with_scipy() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=9), rng.normal(0.4, size=9)
    result = paired(dict(enumerate(a)), dict(enumerate(b)))
    assert result is not None
    assert result.t_test == pytest.approx(stats.ttest_rel(a, b).pvalue)
    assert result.wilcoxon == pytest.approx(stats.wilcoxon(a, b).pvalue)
    exact = stats.permutation_test((a - b,), np.mean, permutation_type="samples", n_resamples=10**4)
    assert result.permutation == pytest.approx(exact.pvalue)
    assert (result.n, result.mean) == (9, pytest.approx(np.mean(a - b)))


def test_only_common_seeds_are_paired() -> None:
    result = paired({1: 1.0, 2: 5.0}, {2: 3.0, 4: 0.0})
    assert result is not None
    assert (result.n, result.mean) == (1, 2.0)
    assert math.isnan(result.t_test)
    assert paired({1: 1.0}, {2: 1.0}) is None


def test_holm_counts_every_comparison() -> None:
    assert holm([0.04, math.nan, 0.01])[::2] == pytest.approx([0.08, 0.03])
    assert math.isnan(holm([0.04, math.nan])[1])


@pytest.mark.parametrize("alpha", [0.05, 0.005])
def test_the_detectable_difference_is_found_with_the_power_that_is_claimed(alpha: float) -> None:
    n, deviation = 8, 2.0
    effect = detectable(deviation, n, alpha)
    draws = np.random.default_rng(1).normal(effect, deviation, size=(20_000, n))
    found = (stats.ttest_1samp(draws, 0.0, axis=1).pvalue < alpha).mean()
    assert found == pytest.approx(0.8, abs=0.015)


def _result(*models: tuple[float, int, float | None]) -> dict[str, Any]:
    return {
        "untrained_error": 0.9,
        "models": [
            {"seconds": s, "operations": 10 * s, "multiply_adds": m, "error": e}
            for s, m, e in models
        ],
    }


def test_the_hypervolume_is_the_share_of_points_that_are_dominated() -> None:
    rng = np.random.default_rng(0)
    sizes, errors = rng.integers(1, 120, 8), rng.random(8) * 0.9
    models = [
        (float(i), int(s), float(e)) for i, (s, e) in enumerate(zip(sizes, errors, strict=True))
    ]
    grid = rng.random((100_000, 2)) * (100, 0.9)
    dominated = np.zeros(len(grid), dtype=bool)
    for size, error in zip(sizes, errors, strict=True):
        if size <= 100:
            dominated |= (grid[:, 0] >= size) & (grid[:, 1] >= error)
    share = measures.hypervolume(_result(*models), 100)
    assert share == pytest.approx(dominated.mean(), abs=0.01)


def test_the_curve_ignores_models_that_do_not_count() -> None:
    result = _result((1, 50, 0.6), (2, 200, 0.1), (3, 50, None), (4, 50, 0.7), (5, 50, 0.3))
    points = measures.curve(result, "operations", 100)
    assert points == [(0.0, 0.9), (10.0, 0.6), (40.0, 0.6), (50.0, 0.3)]
    assert measures.compute_to(points, 0.3) == 50
    assert measures.compute_to(points, 0.2) == math.inf
    assert measures.area(points, 60) == pytest.approx((10 * 0.9 + 40 * 0.6 + 10 * 0.3) / 60)


# The trace.


def test_a_trace_goes_on_where_it_was_left(tmp_path: Path) -> None:
    clock = iter([0.0, 2.0, 5.0, 5.0, 100.0, 101.0, 103.0, 103.0]).__next__
    trace = Trace(tmp_path, "processor_time", clock)
    trace.spend("seed", 7)
    trace.find("a", 0.5, 10)
    assert trace.spent() == (5.0, 7.0)
    again = Trace(tmp_path, "processor_time", clock)  # hours later: only its own time counts
    assert again.models == trace.models
    assert again.spent() == (6.0, 7.0)
    again.spend("seed", 1)
    assert again.spent() == (8.0, 8.0)


def test_planning_a_training_is_no_part_of_it(tmp_path: Path) -> None:
    clock = iter([0.0, 2.0, 30.0, 33.0, 33.0]).__next__
    trace = Trace(tmp_path, "processor_time", clock)
    trace.spend("building", 0)
    trace.skip()
    trace.spend("final", 7)
    assert trace.spent() == (5.0, 7.0)


@pytest.mark.parametrize(("budget", "room"), [(24.0, False), (26.0, True)])
def test_a_model_begins_if_half_of_it_fits(tmp_path: Path, budget: float, room: bool) -> None:
    trace = Trace(tmp_path, "multiply_adds", lambda: 0.0)
    assert trace.has_room(1.0)
    for operations in (10, 4, 6):  # a seed, and two growths of 5 each on average
        trace.spend("x", operations)
        trace.find("m", 0.5, 10)
    trace.spend("x", 3)
    assert trace.has_room(budget) == room


# Whole comparisons.


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, set[tuple[str, str]]]:
    """Return a finished comparison, and the names and phases of the workers that were seen."""
    failures: list[str] = []
    seen: set[tuple[str, str]] = set()
    path = write(tmp_path_factory.mktemp("compare"))
    comparison = Comparison.from_yaml(path)
    names = {run.folder: run.name for run in comparison.runs}
    watch = Watch(comparison.folder, WORK_FOLDERS, names)

    def look() -> bool:
        seen.update((worker.report.name, worker.report.phase) for worker in watch.workers())
        return False

    def tell(run: CompareRun, result: dict[str, Any] | str) -> None:
        if isinstance(result, str):
            failures.append(result)

    compare(comparison, on_run=tell, stop=look)
    assert failures == []
    return comparison, seen


@pytest.fixture
def done(watched: tuple[Comparison, set[tuple[str, str]]]) -> Comparison:
    """Return a finished comparison."""
    return watched[0]


def _by_method(comparison: Comparison) -> dict[str, dict[str, Any]]:
    results = {run.name: run.result() for run in comparison.runs}
    return {name: result for name, result in results.items() if result is not None}


def test_every_method_gets_the_compute_of_the_first_to_half_a_model(done: Comparison) -> None:
    results = _by_method(done)
    assert list(results) == list(METHODS)
    budget = results["petridish"]["operations"]
    for name, result in results.items():
        ends = [0.0, *(model["operations"] for model in result["models"])]
        largest = max(b - a for a, b in itertools.pairwise(ends))
        assert abs(result["operations"] - budget) <= largest, name
        assert result["budget"] in (None, budget)
        assert result["seconds"] > 0


def test_the_training_of_every_method_can_be_watched(
    watched: tuple[Comparison, set[tuple[str, str]]],
) -> None:
    _, seen = watched
    assert {
        ("petridish: g00001", "weak"),
        ("at once: g00001", "final"),
        ("trained on: training", "final"),
        ("widened: training", "final"),
        ("random: trial 0", "seed"),
    } <= seen
    trained = {name.partition(":")[0] for name, phase in seen if phase == RETRAINING}
    assert trained == set(METHODS)


def test_the_operations_are_those_of_all_training(done: Comparison) -> None:
    result = _by_method(done)["petridish"]
    run = done.runs[0]
    task: Any = run.config.load_task()
    images = task.steps(1) * task.recipe.batch_size
    seed, child = result["models"]
    assert seed["operations"] == 2 * images * seed["multiply_adds"]
    weak = child["operations"] - seed["operations"] - images * child["multiply_adds"]
    assert weak > 2 * images * seed["multiply_adds"]  # the parent and all candidates


def test_the_widened_seed_has_at_most_the_size_of_the_model_it_is_compared_with(
    done: Comparison,
) -> None:
    results = _by_method(done)
    seed, best = results["petridish"]["models"][0], results["petridish"]["best"]
    wide = results["widened"]["best"]["multiply_adds"]
    assert seed["multiply_adds"] <= wide <= best["multiply_adds"]
    assert results["widened"]["genotype"]["cells"] == {"normal": [], "reduce": []}
    assert results["trained on"]["best"]["multiply_adds"] == seed["multiply_adds"]


def test_the_network_as_found_is_kept_and_its_test_error_is_the_one_reported(
    done: Comparison,
) -> None:
    for name in ("trained on", "widened", "random"):
        run = done.run(name, 0)
        result = run.result()
        assert result is not None
        net = read_model(run.folder / "best.safetensors").build()
        task: Any = run.config.load_task()
        assert task.test(net)["error"] == result["test_error"]
        assert task.evaluate(net)["error"] == pytest.approx(result["best"]["error"])
        assert result["final"]["multiply_adds"] == result["best"]["multiply_adds"]
        assert 0 <= result["final"]["test_error"] <= 1


def test_finished_runs_are_not_repeated(done: Comparison) -> None:
    before = {run.file: run.file.stat().st_mtime_ns for run in done.runs}
    compare(done)
    assert {run.file: run.file.stat().st_mtime_ns for run in done.runs} == before


def test_an_interrupted_strategy_ends_as_if_it_had_not_been(
    done: Comparison, tmp_path: Path
) -> None:
    other = done.change(folder=str(tmp_path / "out"))
    prepare(other)
    reference, run = other.run("petridish", 0), other.run("random", 0)
    reference.file.write_bytes(done.run("petridish", 0).file.read_bytes())
    steps = 0

    def soon() -> bool:
        nonlocal steps
        steps += 1
        return steps > 6

    with pytest.raises(Interrupted):
        carry_out(run, soon)
    assert not run.file.exists()
    ended, whole = carry_out(run, lambda: False), done.run("random", 0).result()
    assert ended is not None
    assert whole is not None
    for key in ("genotype", "test_error", "operations", "final"):
        assert ended[key] == whole[key]


def test_the_command_shows_what_is_finished(
    done: Comparison, capsys: pytest.CaptureFixture[str]
) -> None:
    path = done.base / "config.yml"
    assert main(["compare", str(path), "--show"]) == 0
    printed = capsys.readouterr().out
    assert "test error after final training: primary, 4 comparisons" in printed
    for name in (TABLES_FILE, RUNS_FILE, PICTURE_FILE):
        assert (done.folder / name).stat().st_size > 100
    with open(done.folder / RUNS_FILE, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == list(METHODS)
    result = _by_method(done)["widened"]
    widened = next(row for row in rows if row["method"] == "widened")
    assert float(widened["final"]) == pytest.approx(100 * result["final"]["test_error"])


def _copy_with_noise(done: Comparison, seeds: list[int]) -> None:
    """Write results of more seeds, so that there is something to test."""
    for seed in seeds:
        for name in done.methods:
            result = dict(done.run(name, 0).result() or {})
            final = {**result["final"], "test_error": 0.01 * seed % 0.1 + 0.01 * len(name)}
            final["test_error"] += 0.001 * (seed * len(name) % 7)
            file = done.run(name, seed).file
            file.write_text(json.dumps({**result, "seed": seed, "final": final}))


def test_pilot_seeds_do_not_count_but_say_what_can_be_seen(
    done: Comparison, tmp_path: Path
) -> None:
    other = done.change(folder=str(tmp_path), repeats=3)
    pilot = other.change(pilot=True)
    assert not set(pilot.seeds) & set(other.seeds)
    assert pilot.seeds == [PILOT_OFFSET, PILOT_OFFSET + 1]
    (tmp_path / "results").mkdir()
    for run in done.runs:
        (tmp_path / "results" / run.file.name).write_bytes(run.file.read_bytes())
    _copy_with_noise(other, [1, 2, *pilot.seeds])
    found, tried = Findings.of(other), Findings.of(pilot)
    a, b = (tried.values(name, "final") for name in ("random", "petridish"))
    spread = np.std([a[seed] - b[seed] for seed in pilot.seeds], ddof=1)
    rows = {row["method"]: row for row in power_rows(tried, 3)}
    assert rows["random"]["standard deviation of the difference"] == f"{spread:.2f}"
    assert rows["random"]["detectable, p < 0.05"] == f"{detectable(spread, 3):.2f}"
    page = to_markdown(found, tried)
    assert "What 3 seeds can show" in page
    assert "From the spread of the pilot's seeds" in page
    assert "| petridish | 3 |" in page
    without = Findings.of(other.change(folder=str(tmp_path / "none"), pilot=True))
    own = to_markdown(found, without)
    differences = [found.values(name, "final") for name in ("random", "petridish")]
    spread = np.std([differences[0][seed] - differences[1][seed] for seed in (0, 1, 2)], ddof=1)
    assert "since no pilot was run" in own
    assert f"| random | 3 | {spread:.2f} | {detectable(spread, 3):.2f} |" in own


def test_a_failed_reference_ends_the_comparison(tmp_path: Path) -> None:
    broken = {"petridish": {"set": {"recipe.lr": 1e12}}, "random": {"kind": "random"}}
    path = write(tmp_path, methods=broken)
    told: list[dict[str, Any] | str] = []
    compare(path, on_run=lambda run, result: told.append(result))
    (reason,) = told
    assert isinstance(reason, str)
    assert "found nothing" in reason


@pytest.mark.parametrize("kind", ["evolution", "tpe"])
def test_other_strategies_of_nni_find_models(done: Comparison, kind: str, tmp_path: Path) -> None:
    result = _with(done, tmp_path, {"kind": kind})
    assert len(result["models"]) >= 1
    assert result["best"]["multiply_adds"] <= 100_000


def test_darts_trains_the_architecture_that_it_exports(done: Comparison, tmp_path: Path) -> None:
    result = _with(done, tmp_path, {"kind": "darts"})
    (model,) = result["models"]
    assert model["multiply_adds"] == result["best"]["multiply_adds"] <= 100_000
    assert any(result["genotype"]["cells"].values())
    assert "merge" not in result["genotype"]  # as all others: the paper's


def test_options_that_a_strategy_does_not_have_are_refused(
    done: Comparison, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="options of NNI's RegularizedEvolution"):
        _with(done, tmp_path, {"kind": "evolution", "options": {"population_size": 0}})


def _with(done: Comparison, where: Path, method: dict[str, Any]) -> dict[str, Any]:
    """Carry out one more method with the budget of a finished comparison."""
    path = write(where, methods={**METHODS, "more": method})
    comparison = Comparison.from_yaml(path)
    prepare(comparison)
    first = done.run("petridish", 0)
    comparison.run("petridish", 0).file.write_bytes(first.file.read_bytes())
    result = carry_out(comparison.run("more", 0), lambda: False)
    assert result is not None
    return result
