"""Files of trainings that were stopped, damaged in every way.

A resumed search must end with the models of an undisturbed one, a resumed final training with its
results. Or else a line says what is damaged.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from nni_petridish.errors import Interrupted
from nni_petridish.gallery.saved_model import read_header
from nni_petridish.results.retrain.preparation import prepare_retraining
from nni_petridish.results.retrain.repetitions import run_repetitions
from nni_petridish.running.config import SearchConfig
from nni_petridish.running.runner import run_search
from nni_petridish.tasks.task import Callbacks
from tests.support.damage import WAYS, Told, damage_file, run
from tests.support.faults import tiny_config
from tests.support.whole import leftovers, models

WORK = "gallery/work/g00001-1"
OF_SEARCH = [
    f"{WORK}/weak/checkpoint.safetensors",
    f"{WORK}/final/checkpoint.safetensors",
    f"{WORK}/selected.json",
    f"{WORK}/lock",
    "gallery/.selection.lock",
]
"""Files of a search that was stopped in the last training of a growth."""
OF_PATIENCE = [f"{WORK}/weak/checkpoint.safetensors", f"{WORK}/selected.json"]
"""The same where weak learning ends once the selection is stable."""
FINAL = "final"
OF_RETRAINING = [
    f"{FINAL}/settings.json",
    f"{FINAL}/lock",
    f"{FINAL}/run-0/result.json",
    f"{FINAL}/run-0/model.safetensors",
    f"{FINAL}/run-1/checkpoint/checkpoint.safetensors",
]
"""Files of a final training that was stopped in its second repetition."""
CASES = [
    (kind, file, way)
    for kind, files in (
        ("search", OF_SEARCH),
        ("patience", OF_PATIENCE),
        ("retraining", OF_RETRAINING),
    )
    for file in files
    for way in WAYS
]
EVERY_DAY = CASES[::13]
"""The cases of ``make test``; the others are slow."""
RETRAINING: dict[str, Any] = {"cells_per_stage": 1, "filters": 2, "epochs": 2}
BATCH = 499
SEARCHES: dict[str, dict[str, Any]] = {
    "search": {"weak_epochs": 2},
    "patience": {"weak_epochs": 60, "weak_patience": 1},
}
"""Settings of the searches."""
OTHER = "other"
"""The folder of the same search with another seed: its files change places with the first's."""


def stop_after(folder: Path) -> Callbacks:
    """Stop a training after its first epoch: when a folder has its checkpoint."""
    return Callbacks(should_stop=(folder / "checkpoint.safetensors").exists)


def stopped_search(folder: Path, seed: int, changes: dict[str, Any]) -> None:
    """Run a search until it has grown once and trains on."""
    path = tiny_config(folder, models=2)
    document = yaml.safe_load(path.read_text())
    document["tuner"]["classArgs"] |= {"final_epochs": 2, "seed": seed, **changes}
    path.write_text(yaml.safe_dump(document))
    run_search(SearchConfig.from_yaml(path), callbacks=stop_after(folder / WORK / "final"))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of trainings that were stopped, which are copied for every case."""
    home = tmp_path_factory.mktemp("stopped")
    for kind, changes in SEARCHES.items():
        for seed, name in enumerate((kind, f"{kind}/{OTHER}")):
            stopped_search(home / name, seed, changes)
    config = SearchConfig.from_yaml(tiny_config(home / "retraining"))
    run_search(config)
    for seed, name in enumerate(("retraining", f"retraining/{OTHER}")):
        training = prepare_retraining(
            config.gallery, **RETRAINING, seed=seed, changes={"batch_size": BATCH}
        )
        folder = home / name / FINAL
        with pytest.raises(Interrupted):
            run_repetitions(
                training, folder, 2, callbacks=stop_after(folder / "run-1" / "checkpoint")
            )
    return {name: home / name for name in (*SEARCHES, "retraining")}


def go_on(kind: str, folder: Path) -> Told:
    """Resume what was stopped."""
    if kind != "retraining":
        return run(["search", str(folder / "config.yml"), "--resume", "--quiet"])
    sizes = ["--cells", "1", "--filters", "2", "--epochs", "2", "--repetitions", "2"]
    recipe = ["--set", f"batch_size={BATCH}", "--out", str(folder / FINAL)]
    return run(["train", str(folder / "gallery"), *sizes, *recipe, "--quiet"])


def results(kind: str, folder: Path) -> dict[str, object]:
    """Return all that a finished training has decided."""
    if kind != "retraining":
        assert leftovers(folder / "gallery") == []
        return dict(models(folder / "gallery"))
    found: dict[str, object] = {}
    for home in sorted((folder / FINAL).glob("run-*")):
        result = json.loads((home / "result.json").read_text())
        found[home.name] = {k: v for k, v in result.items() if k.startswith("test")}
        found[f"{home.name} model"] = read_header(home / "model.safetensors")
    return found


@pytest.fixture(scope="module")
def expected(stopped: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answers and files where nothing is damaged."""
    found = {}
    for kind, folder in stopped.items():
        home = tmp_path_factory.mktemp("expected") / kind
        shutil.copytree(folder, home)
        code, out, err = go_on(kind, home)
        assert (code, err) == (0, ""), err
        found[kind] = (out.replace(str(home), ""), results(kind, home))
    return found


def check(
    stopped: dict[str, Path], expected: dict[str, Any], case: tuple[str, str, str], home: Path
) -> None:
    kind, file, way = case
    folder = home / kind
    shutil.copytree(stopped[kind], folder)
    damage_file(folder / file, way, folder / OTHER / file)
    code, out, err = go_on(kind, folder)
    assert "Traceback" not in err, err
    if code:
        assert re.search("^nni-petridish: .*", err, re.MULTILINE), err
        return
    said, found = expected[kind]
    assert out.replace(str(folder), "") == said
    if "model.safetensors is missing or damaged" not in err:
        assert results(kind, folder) == found, err


@pytest.mark.parametrize("case", EVERY_DAY, ids="-".join)
def test_damage_of_a_stopped_training_is_told_or_harmless(
    stopped: dict[str, Path], expected: dict[str, Any], case: tuple[str, str, str], tmp_path: Path
) -> None:
    check(stopped, expected, case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in EVERY_DAY], ids="-".join)
def test_damage_of_every_file_of_a_stopped_training_is_told_or_harmless(
    stopped: dict[str, Path], expected: dict[str, Any], case: tuple[str, str, str], tmp_path: Path
) -> None:
    check(stopped, expected, case, tmp_path)
