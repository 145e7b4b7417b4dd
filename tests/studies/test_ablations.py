from __future__ import annotations

import csv
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from nni_petridish import ablate, load_model
from nni_petridish.__main__ import main
from nni_petridish.errors import ConfigError, TrainingError
from nni_petridish.gallery.select import most_accurate, open_search
from nni_petridish.running.config import SearchConfig
from nni_petridish.running.watch import Watch
from nni_petridish.search.records import Growth, ModelRecord, Outcome
from nni_petridish.studies.ablations.cli import PICTURE_FILE, RUNS_FILE, TABLES_FILE
from nni_petridish.studies.ablations.paper import PAPER
from nni_petridish.studies.ablations.settings import AblationRun, Ablations
from nni_petridish.studies.ablations.tables import findings, table_rows
from nni_petridish.studies.ablations.work import WORK_FOLDERS
from nni_petridish.tasks.task import RETRAINING, Phase
from nni_petridish.tasks.vision.data import _SOURCES
from nni_petridish.tasks.vision.task import VisionTask
from search_spaces.vision.genotype import VisionGenotype
from tests.support.chaos import write_config

ROOT = Path(__file__).parents[2]
CONFIGS = ("ablations.yml", "ablations_fashion_mnist.yml", "ablations_cifar10.yml")
MERGE = {
    "variants": {
        "WS": {"searchSpace.merge": "weighted_sum"},
        "CP-end": {"searchSpace.merge": "weighted_sum", "final.merge": "concat_project"},
        "concat-project": {},
    }
}
I_MAX = {"variants": {"I_max = 2": {"i_max": 2}, "I_max = 3": {}, "I_max = 4": {"i_max": 4}}}

FINAL = {"filters": 2, "epochs": 1}


def write(where: Path, **ablations: Any) -> Path:
    """Write ablations of searches that are as small as possible."""
    path = write_config(where, models=2)
    document = yaml.safe_load(path.read_text())
    arguments = document["tuner"]["classArgs"]
    arguments |= {"seed_epochs": 1, "weak_epochs": 1, "final_epochs": 1}
    arguments["data"]["limit"] = 64
    arguments["ablations"] = {"folder": "out", "repeats": 2, "tables": {"i_max": I_MAX}}
    arguments["ablations"] |= ablations
    path.write_text(yaml.safe_dump(document, allow_unicode=True, sort_keys=False))
    return path


def copy_config(name: str, where: Path) -> Path:
    """Copy a configuration beside empty files in place of its data."""
    shutil.copytree(ROOT / "configs", where / "configs")
    for source in _SOURCES.values():
        (where / "data" / source.folder).mkdir(parents=True, exist_ok=True)
        for file in source.files:
            (where / "data" / source.folder / file).touch()
    return where / "configs" / name


def without_times(result: dict[str, Any] | None) -> dict[str, Any]:
    assert result is not None
    final = {k: v for k, v in (result["final"] or {}).items() if k != "seconds"}
    return {k: v for k, v in result.items() if k != "seconds"} | {"final": final}


# Bad input.

BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"seeds": 3}, "ablations.seeds is not a known key"),
    "no table": ({"tables": {}}, "ablations.tables must name at least one comparison"),
    "one variant": (
        {"tables": {"x": {"variants": {"a": {}}}}},
        "ablations.tables.x.variants must have at least 2 but got 1",
    ),
    "unknown setting": (
        {"tables": {"x": {"variants": {"a": {"lambda": 1}, "b": {}}}}},
        "tables.x.variants.a: tuner.classArgs.lambda is not a known key",
    ),
    "a number as a name": (
        {"tables": {"x": {"variants": {"a": {0: 0}, "b": {}}}}},
        "tables.x.variants.a must have names of settings but got 0",
    ),
    "a number as a common name": (
        {"tables": {"x": {"set": {0: 0}, "variants": {"a": {}, "b": {}}}}},
        "tables.x.set must have names of settings but got 0",
    ),
    "bad value": (
        {"tables": {"x": {"variants": {"a": {"searchSpace.mode": "cells"}, "b": {}}}}},
        "tables.x.variants.a: searchSpace.mode must be one of cell, macro but got 'cells'",
    ),
    "the random seed": (
        {"tables": {"x": {"variants": {"a": {"seed": 1}, "b": {}}}}},
        "tables.x.variants.a: seed cannot be changed by a variant",
    ),
    "no mapping": (
        {"tables": {"x": {"variants": {"a": {"l1.low": 1}, "b": {}}}}},
        "tables.x.variants.a: l1.low: l1 is not a mapping",
    ),
    "no final training": (
        {"tables": {"merge": MERGE}},
        "CP-end: final.merge changes nothing: tuner.classArgs.ablations.final is not given",
    ),
    "macro": (
        {
            "final": {"cells_per_stage": 3},
            "tables": {
                "mode": {
                    "variants": {
                        "cell": {},
                        "macro": {"searchSpace.mode": "macro", "searchSpace.cells_per_stage": 2},
                    }
                }
            },
        },
        "final.cells_per_stage must be a multiple of 2, the search's, in macro mode but got 3",
    ),
    "repeats": ({"repeats": 0}, "ablations.repeats must be a whole number of at least 1 but got 0"),
    "final": ({"final": {"epoch": 1}}, "ablations.final.epoch is not a known key"),
    "filters twice": (
        {"final": {"filters": 1, "max_multiply_adds": 9}},
        "ablations.final.filters cannot be given beside max_multiply_adds",
    ),
    "final merge": (
        {"final": {"merge": "sum"}},
        "final.merge must be one of concat_project, weighted_sum but got 'sum'",
    ),
    "final recipe": ({"final": {"recipe": {"lr": -1}}}, "final.recipe.lr must be a number above 0"),
}


@pytest.mark.parametrize(("changes", "message"), BROKEN.values(), ids=list(BROKEN))
def test_what_is_wrong_is_said_in_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    message: str,
) -> None:
    path = write(tmp_path, **changes)
    assert main(["ablate", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_variants_are_checked_under_optimized_python(tmp_path: Path) -> None:
    changes, message = BROKEN["bad value"]
    code = "import sys; from nni_petridish.__main__ import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["ablate", str(write(tmp_path, **changes)), "--show"]
    command = [sys.executable, "-O", "-c", code, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert message in ended.stderr


def test_unknown_tables_a_small_limit_and_another_search_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, max_multiply_adds=10)
    assert main(["ablate", str(path), "--only", "i_max,lambda"]) == 2
    assert "There is no table 'lambda'; there are i_max." in capsys.readouterr().err
    assert main(["ablate", str(path)]) == 2
    assert "ablations.max_multiply_adds must be at least" in capsys.readouterr().err
    run = Ablations.from_yaml(path).runs[0]
    run.config.open_gallery()
    document = yaml.safe_load(path.read_text())
    document["tuner"]["classArgs"]["recipe"]["lr"] = 0.01
    path.write_text(yaml.safe_dump(document))
    assert main(["ablate", str(path)]) == 2
    assert "lr" in capsys.readouterr().err


def test_a_configuration_without_ablations_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ablations is missing in .*config\.yml"):
        Ablations.from_yaml(write_config(tmp_path, models=2))


# The configurations.


@pytest.mark.parametrize("name", CONFIGS)
def test_the_variants_are_the_papers(tmp_path: Path, name: str) -> None:
    path = copy_config(name, tmp_path)
    SearchConfig.from_yaml(path)  # good for a search, too
    ablations = Ablations.from_yaml(path)
    assert set(ablations.section.tables) == set(PAPER)
    runs = {
        (table.name, variant): ablations.run(table, variant, 0)
        for table in ablations.tables
        for variant in table.variants
    }
    for table in ablations.tables:
        assert set(table.variants) == set(PAPER[table.name].rows)
        for variant in table.variants:
            config = runs[table.name, variant].config
            # What no variant says is the paper's choice.
            l1 = float(variant.split("=")[1]) if table.name == "l1" else 0.001
            i_max = int(variant.split("=")[1]) if table.name == "i_max" else 3
            assert (config.settings.l1, config.settings.i_max) == (l1, i_max)
            weak_learning = variant if table.name == "weak_learning" else "isolated"
            assert config.plan.weak_learning == weak_learning
            macro = table.name == "merge_macro" or variant == "macro"
            assert config.space["mode"] == ("macro" if macro else "cell")
            searched_ws = variant in ("WS", "CP-end")
            assert config.space["merge"] == ("weighted_sum" if searched_ws else "concat_project")
            final = runs[table.name, variant].retraining
            assert final is not None
            assert final.merge == ("concat_project" if variant == "CP-end" else None)
    direct, proxy = (runs["space", v].config.space for v in ("direct", "proxy"))
    for size in ("cells_per_stage", "filters"):
        assert direct[size] > proxy[size]
    # CP-end differs from WS in the end alone.
    for merge in ("merge", "merge_macro"):
        assert runs[merge, "WS"].config == runs[merge, "CP-end"].config
        assert runs[merge, "WS"].file != runs[merge, "CP-end"].file


def test_equal_searches_are_run_once_and_only_does_not_rename(tmp_path: Path) -> None:
    tables = {
        # The same search by another name, and first: the folder is called after it.
        "x": {"variants": {"a": {"l1": 0.001, "i_max": 3}, "b": {"l1": 0.1}}},
        "i_max": I_MAX,
        "merge": MERGE,
    }
    ablations = Ablations.from_yaml(write(tmp_path, tables=tables, repeats=2, final=FINAL))
    assert len({run.config.gallery for run in ablations.runs}) == 2 * 5
    assert [run.seed for run in ablations.runs] == [0] * 6 + [1] * 6  # CP-end ends on its own
    chosen = ablations.change(only=["i_max"])
    assert {run.file for run in chosen.runs} <= {run.file for run in ablations.runs}
    assert len(chosen.runs) == 6


def test_a_result_is_another_one_if_anything_it_depends_on_changes(tmp_path: Path) -> None:
    first = write(tmp_path, final=FINAL)
    files = {Ablations.from_yaml(first).runs[0].file.name}
    for changes in (
        {"final": {"filters": 3, "epochs": 1}},
        {"final": {"filters": 2, "epochs": 1, "recipe": {"lr": 0.1}}},
        {"final": None},
        {"final": FINAL, "max_multiply_adds": 10**6},
    ):
        files.add(Ablations.from_yaml(write(tmp_path, **changes)).runs[0].file.name)
    path = write(tmp_path, final=FINAL)
    path.write_text(path.read_text().replace("max_models: 2", "max_models: 3"))
    files.add(Ablations.from_yaml(path).runs[0].file.name)
    assert len(files) == 6


# The tables.


def fill(ablations: Ablations, error: Callable[[AblationRun], tuple[float, float] | None]) -> None:
    """Write results as `carry_out` does, with errors from a function."""
    for run in ablations.runs:
        errors = error(run)
        if errors is None:
            continue
        run.file.parent.mkdir(parents=True, exist_ok=True)
        sizes = {"multiply_adds": 1000 * run.config.settings.i_max, "parameters": 50}
        final = {"test_error": errors[1], "cells_per_stage": 2, "filters": 4, "seconds": 1.0}
        result = {"validation_error": errors[0], "seed": run.seed, "model": "g00001", "models": 2}
        result |= {"seconds": 3.0, **sizes, "final": {**final, **sizes} if run.retraining else None}
        run.file.write_text(json.dumps(result))


def test_tables_are_means_standard_deviations_and_paired_differences(tmp_path: Path) -> None:
    path = write(tmp_path, tables={"i_max": I_MAX}, repeats=4, final=FINAL)
    ablations = Ablations.from_yaml(path)
    rng = np.random.default_rng(0)
    drawn = {(i, seed): rng.uniform(0.1, 0.2, 2) for i in (2, 3, 4) for seed in range(4)}
    # The last search with I_max = 4 is not finished.
    fill(
        ablations,
        lambda run: (
            None
            if (run.config.settings.i_max, run.seed) == (4, 3)
            else tuple(drawn[run.config.settings.i_max, run.seed])
        ),
    )
    (table,) = ablations.tables
    rows = {row["variant"]: row for row in table_rows(table, findings(ablations, table))}
    for i_max, searches in ((2, 4), (3, 4), (4, 3)):
        row = rows[f"I_max = {i_max}"]
        values = 100 * np.array([drawn[i_max, seed] for seed in range(searches)])
        assert row["searches"] == str(searches)
        for column, name in enumerate(("validation error", "test error")):
            mean, spread = values[:, column].mean(), values[:, column].std(ddof=1)
            assert row[name] == f"{mean:.2f} ± {spread:.2f}"
        assert row["multiply-adds"] == f"{i_max}k"
        assert row["paper: error"] == {2: "3.08", 3: "2.88", 4: "2.93"}[i_max]
        default = 100 * np.array([drawn[3, seed] for seed in range(searches)])
        pairs = (values - default)[:, 1]
        error = pairs.std(ddof=1) / math.sqrt(searches)
        assert row["− default"] == ("-" if i_max == 3 else f"{pairs.mean():+.2f} ± {error:.2f}")
    assert "paper: search (GPU-days)" not in rows["I_max = 3"]  # the paper gives none here


def test_the_command_shows_what_is_finished_and_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, tables={"merge": MERGE, "own": I_MAX}, final=FINAL)
    assert main(["ablate", str(path), "--show"]) == 1
    assert "Nothing is finished yet" in capsys.readouterr().out
    fill(Ablations.from_yaml(path), lambda run: (0.5, 0.25) if run.seed == 0 else None)
    assert main(["ablate", str(path), "--show"]) == 1  # half of it is missing
    printed = capsys.readouterr().out
    assert "5 runs are not finished" in printed
    fill(Ablations.from_yaml(path), lambda run: (0.5, 0.25))
    assert main(["ablate", str(path), "--show"]) == 0
    printed = capsys.readouterr().out
    out = tmp_path / "out"
    page = (out / TABLES_FILE).read_text()
    for text in (printed, page):
        assert "appendix B.3, tab:imagenet_ws_vs_cp" in text
        assert "25.00 ± 0.00" in text
        assert "26.9" in text  # the paper's
    lines = list(csv.DictReader((out / RUNS_FILE).read_text().splitlines()))
    assert len(lines) == 2 * (3 + 3)  # a line for each variant, shared runs or not
    assert {line["final.test_error"] for line in lines} == {"0.25"}
    picture = (out / PICTURE_FILE).read_text()
    assert picture.count("<circle") == len(lines)


def test_perplexity_is_called_so_and_shown_as_a_plain_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    l1 = {"variants": {"weak": {"l1": 0.001}, "usual": {}}}
    path = write(tmp_path, tables={"l1": l1}, repeats=1)
    document = yaml.safe_load(path.read_text())
    arguments = document["tuner"]["classArgs"]
    arguments |= {"data": {"name": "pydoc"}, "recipe": {}}
    for key in ("l1", "i_max"):
        arguments.pop(key, None)
    document["searchSpace"] = {"space": "recurrent", "embedding": 8}
    path.write_text(yaml.safe_dump(document))
    fill(Ablations.from_yaml(path), lambda run: (123.45, math.nan))
    assert main(["ablate", str(path), "--show"]) == 0
    picture = (tmp_path / "out" / PICTURE_FILE).read_text()
    assert "validation perplexity; dots" in picture
    assert "seed 0: 123.45" in picture
    page = (tmp_path / "out" / TABLES_FILE).read_text()
    for text in (capsys.readouterr().out, page):
        assert "validation perplexity" in text
        assert "123.45" in text
    for text in (picture, page):
        assert "%" not in text.replace("100%", "")
        assert "percent" not in text


# Real searches.


def test_a_model_within_the_limit_counts_even_if_the_hull_passes_below_it() -> None:
    def record(id: str, error: float, size: int) -> ModelRecord:
        return ModelRecord(Growth(id, None, 0, 0.001, 3), Outcome(id, error, size, 1))

    seed, child = record("g00000", 0.5, 10), record("g00001", 0.4, 20)
    large, broken = record("g00002", 0.1, 30), record("g00003", math.nan, 10)
    assert most_accurate([seed, child, large, broken], 20) == child
    assert most_accurate([seed, child, large, broken], None) == large
    assert most_accurate([large, broken], 20) is None


def test_ablations_run_resume_and_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    final = {"cells_per_stage": 1, "max_multiply_adds": 20_000, "epochs": 1, "limit": 64}
    merges: dict[str, Any] = {"repeats": 1, "final": final, "tables": {"merge": MERGE}}
    path = write(tmp_path / "a", **merges)
    ended: list[str] = []
    seen: set[str] = set()
    ablations = Ablations.from_yaml(path)
    watch = Watch(ablations.folder, WORK_FOLDERS)

    def look() -> bool:
        seen.update(worker.report.phase for worker in watch.workers())
        return False

    whole = ablate(ablations, on_run=lambda run, result: ended.append(run.name), stop=look)
    assert seen == {"seed", "weak", "final", RETRAINING}
    assert ended == ["merge=weighted_sum", "merge=weighted_sum", "default"]
    ws, cp_end, default = (without_times(run.result()) for run in whole.runs)
    # One search, two endings, with the same limit of multiply-adds.
    assert ws["model"] == cp_end["model"]
    assert ws["validation_error"] == cp_end["validation_error"]
    trained = sorted((whole.runs[0].config.gallery / "final").glob("*/run-0/model.safetensors"))
    merges_in_the_end = [load_model(file).genotype.merge for file in trained]
    assert sorted(merges_in_the_end) == ["concat_project", "weighted_sum"]
    for result in (ws, cp_end, default):
        assert 0 < result["final"]["multiply_adds"] <= 20_000
    run = whole.runs[0]
    gallery, search = open_search(run.config.gallery)
    assert ws["validation_error"] == min(record.error for record in search.models())
    assert len(search.models()) == 2
    grown = VisionGenotype.from_dict(gallery.load_documents("g00001")["genotype"])
    assert isinstance(grown, VisionGenotype)
    assert grown.merge == "weighted_sum"

    # The same in pieces: stopped again and again, wherever it happens to be.
    (tmp_path / "b").mkdir()
    again = Path(shutil.copy(path, tmp_path / "b"))
    pauses = range(5, 400, 9)
    for steps in pauses:
        left = iter(range(steps))
        pieces = ablate(again, stop=lambda left=left: next(left, None) is None)
        if all(run.file.exists() for run in pieces.runs):
            break
    else:
        pytest.fail("it does not come to an end")
    assert steps > pauses[0]  # it was stopped indeed
    assert [without_times(run.result()) for run in pieces.runs] == [ws, cp_end, default]

    # Nothing is left to do.
    monkeypatch.setattr("nni_petridish.studies.ablations.work.carry_out", None)
    assert main(["ablate", str(path)]) == 0
    assert "3 runs of 2 searches, 3 finished" in capsys.readouterr().out


def test_a_search_that_finds_nothing_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = VisionTask.train

    def broken(self: VisionTask, net: Any, phase: Phase, callbacks: Any) -> Any:
        if "i_max=2" in str(phase.checkpoint):
            raise TrainingError("the loss is not finite.")
        return real(self, net, phase, callbacks)

    monkeypatch.setattr(VisionTask, "train", broken)
    told: dict[str, Any] = {}
    ablate(write(tmp_path, repeats=1), on_run=lambda run, result: told.update({run.name: result}))
    assert told["i_max=2"].endswith("found nothing: the loss is not finite.")
    assert told["default"]["model"]


def test_ctrl_c_leaves_no_result_of_half_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = VisionTask.train, []

    def interrupted(self: VisionTask, net: Any, phase: Phase, callbacks: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:  # the seed is there
            raise KeyboardInterrupt
        return real(self, net, phase, callbacks)

    path = write(tmp_path, repeats=1)
    monkeypatch.setattr(VisionTask, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ablate(path)
    ablations = Ablations.from_yaml(path)
    _, search = open_search(ablations.runs[0].config.gallery)
    assert [record.id for record in search.models()] == ["g00000"]
    assert not any(run.file.exists() for run in ablations.runs)


@pytest.mark.slow
def test_two_processes_share_the_work(tmp_path: Path) -> None:
    ablations = ablate(write(tmp_path / "a", repeats=2), jobs=2)
    alone = ablate(write(tmp_path / "b", repeats=2))
    for run, same in zip(ablations.runs, alone.runs, strict=True):
        assert without_times(run.result()) == without_times(same.result())
