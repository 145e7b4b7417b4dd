from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from nni_petridish.__main__ import main
from nni_petridish.errors import PetridishError
from nni_petridish.running.config import SearchConfig

ROOT = Path(__file__).parents[2]
EXAMPLE = yaml.safe_load((ROOT / "configs" / "petridish.yml").read_text())
GONE = object()


def write(folder: Path, changes: dict[str, Any]) -> Path:
    """Write the example with changes, each named by its path of keys."""
    document = copy.deepcopy(EXAMPLE)
    document["tuner"]["codeDirectory"] = "."
    for path, value in changes.items():
        place = document
        *above, last = path.split(".")
        for key in above:
            place = place.setdefault(key, {})
        if value is GONE:
            del place[last]
        else:
            place[last] = copy.deepcopy(value)
    folder.mkdir(exist_ok=True)
    file = folder / "config.yml"
    file.write_text(yaml.safe_dump(document, allow_unicode=True))
    return file


ARGUMENTS = "tuner.classArgs"
RECURRENT = {
    "searchSpace": {"space": "recurrent", "embedding": 8},
    f"{ARGUMENTS}.data": {"name": "pydoc"},
    f"{ARGUMENTS}.recipe": GONE,
}
# What is changed, and what the one line must say of it.
BROKEN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "negative l1": ({f"{ARGUMENTS}.l1": -0.1}, ["tuner.classArgs.l1", "-0.1", "at least 0"]),
    "text l1": ({f"{ARGUMENTS}.l1": "1e-3"}, ["tuner.classArgs.l1", "'1e-3'", "write 0.001"]),
    "infinite l1": ({f"{ARGUMENTS}.l1": float("inf")}, ["tuner.classArgs.l1", "inf"]),
    "nan l1": ({f"{ARGUMENTS}.l1": float("nan")}, ["tuner.classArgs.l1", "nan"]),
    "list l1": ({f"{ARGUMENTS}.l1": [0.1]}, ["tuner.classArgs.l1", "[0.1]"]),
    "i_max 0": ({f"{ARGUMENTS}.i_max": 0}, ["tuner.classArgs.i_max", "at least 1", "0"]),
    "i_max 1.5": ({f"{ARGUMENTS}.i_max": 1.5}, ["tuner.classArgs.i_max", "whole number", "1.5"]),
    "i_max true": ({f"{ARGUMENTS}.i_max": True}, ["tuner.classArgs.i_max", "True"]),
    "recurrent i_max 3": (RECURRENT, ["tuner.classArgs.i_max must be 1", "3", "one node"]),
    "recurrent i_max range": (
        {**RECURRENT, f"{ARGUMENTS}.i_max": {"low": 1, "high": 2}},
        ["tuner.classArgs.i_max must be 1", "'high': 2"],
    ),
    "recurrent filters": (
        {**RECURRENT, "searchSpace.filters": 3},
        ["searchSpace.filters is not a known key", "allowed are space, embedding"],
    ),
    "recurrent vocabulary is the data's": (
        {**RECURRENT, "searchSpace.vocabulary": 3},
        ["searchSpace.vocabulary is not a known key"],
    ),
    "recurrent ops a text": (
        {**RECURRENT, "searchSpace.ops": "relu"},
        ["searchSpace.ops must be a list", "'relu'"],
    ),
    "recurrent validation": (
        {**RECURRENT, f"{ARGUMENTS}.data.validation": 3},
        ["tuner.classArgs.data.validation is not a known key"],
    ),
    "recurrent limit": (
        {**RECURRENT, f"{ARGUMENTS}.data.limit": 0},
        ["tuner.classArgs.data.limit", "at least 3", "0"],
    ),
    "negative seed": ({f"{ARGUMENTS}.seed": -1}, ["tuner.classArgs.seed", "-1"]),
    "seeds 0": ({f"{ARGUMENTS}.seeds": 0}, ["tuner.classArgs.seeds", "at least 1"]),
    "tolerance": ({f"{ARGUMENTS}.tolerance": 2}, ["tuner.classArgs.tolerance", "2"]),
    "schedule": (
        {f"{ARGUMENTS}.l1_schedule": "steps"},
        ["tuner.classArgs.l1_schedule", "constant, linear, cosine", "'steps'"],
    ),
    "weak learning": (
        {f"{ARGUMENTS}.weak_learning": "alone"},
        ["tuner.classArgs.weak_learning", "isolated, joint", "'alone'"],
    ),
    "no epochs": ({f"{ARGUMENTS}.weak_epochs": 0}, ["tuner.classArgs.weak_epochs", "at least 1"]),
    "half an epoch": ({f"{ARGUMENTS}.seed_epochs": 0.5}, ["tuner.classArgs.seed_epochs", "0.5"]),
    "epochs text": (
        {f"{ARGUMENTS}.final_epochs": "many"},
        ["tuner.classArgs.final_epochs", "many"],
    ),
    "unknown argument": (
        {f"{ARGUMENTS}.lambda": 1},
        ["tuner.classArgs.lambda", "allowed are", "l1"],
    ),
    "arguments a list": ({ARGUMENTS: [1]}, ["tuner.classArgs must be a mapping", "[1]"]),
    "no gallery": ({f"{ARGUMENTS}.gallery": GONE}, ["tuner.classArgs.gallery is missing"]),
    "gallery a number": ({f"{ARGUMENTS}.gallery": 3}, ["tuner.classArgs.gallery", "3"]),
    "gallery empty": ({f"{ARGUMENTS}.gallery": " "}, ["tuner.classArgs.gallery", "folder"]),
    "gallery in a file": (
        {f"{ARGUMENTS}.gallery": "config.yml/gallery"},
        ["config.yml is not a folder"],
    ),
    "limits a number": ({f"{ARGUMENTS}.limits": 3}, ["tuner.classArgs.limits", "mapping", "3"]),
    "unknown limit": (
        {f"{ARGUMENTS}.limits.max_hours": 3},
        ["tuner.classArgs.limits.max_hours", "allowed are", "max_seconds"],
    ),
    "no models": (
        {f"{ARGUMENTS}.limits.max_models": 0},
        ["tuner.classArgs.limits.max_models", "at least 1"],
    ),
    "negative time": (
        {f"{ARGUMENTS}.limits.max_seconds": -5},
        ["tuner.classArgs.limits.max_seconds", "-5"],
    ),
    "unknown data": (
        {f"{ARGUMENTS}.data.name": "svhn"},
        ["tuner.classArgs.data", "digits, mnist", "'svhn'"],
    ),
    "data a text": ({f"{ARGUMENTS}.data": "digits"}, ["tuner.classArgs.data must be a mapping"]),
    "unknown data key": (
        {f"{ARGUMENTS}.data.folder": "x"},
        ["tuner.classArgs.data.folder", "allowed are", "root"],
    ),
    "missing folder": (
        {f"{ARGUMENTS}.data": {"name": "cifar10", "root": "nowhere"}},
        ["tuner.classArgs.data", "nowhere", "get it with"],
    ),
    "missing images": (
        {f"{ARGUMENTS}.data": {"name": "image_folder", "root": "nowhere"}},
        ["tuner.classArgs.data", "nowhere"],
    ),
    "negative limit": ({f"{ARGUMENTS}.data.limit": -3}, ["tuner.classArgs.data.limit", "-3"]),
    "no validation": (
        {f"{ARGUMENTS}.data.validation": 0},
        ["tuner.classArgs.data.validation", "at least 1", "0"],
    ),
    "unknown recipe key": (
        {f"{ARGUMENTS}.recipe.learning_rate": 1},
        ["tuner.classArgs.recipe.learning_rate", "allowed are", "lr"],
    ),
    "epochs in the recipe": (
        {f"{ARGUMENTS}.recipe.epochs": 1},
        ["tuner.classArgs.recipe.epochs", "allowed are"],
    ),
    "negative rate": ({f"{ARGUMENTS}.recipe.lr": -1}, ["tuner.classArgs.recipe.lr", "-1"]),
    "text rate": ({f"{ARGUMENTS}.recipe.lr": "5e-2"}, ["recipe.lr", "'5e-2'", "write 0.05"]),
    "batch 0": ({f"{ARGUMENTS}.recipe.batch_size": 0}, ["tuner.classArgs.recipe.batch_size", "0"]),
    "cutout too large": (
        {f"{ARGUMENTS}.recipe.cutout": 16},
        ["tuner.classArgs.recipe.cutout", "16"],
    ),
    "unknown device": ({f"{ARGUMENTS}.recipe.device": "tpu"}, ["recipe.device", "auto", "'tpu'"]),
    "recipe a text": ({f"{ARGUMENTS}.recipe": "fast"}, ["tuner.classArgs.recipe", "'fast'"]),
    "unknown space": ({"searchSpace.space": "audio"}, ["searchSpace.space", "vision", "'audio'"]),
    "unknown space key": ({"searchSpace.depth": 3}, ["searchSpace.depth", "cells_per_stage"]),
    "unknown op": (
        {"searchSpace.ops": ["conv_7x7"]},
        ["searchSpace.ops", "sep_conv_3x3", "conv_7x7"],
    ),
    "ops a text": ({"searchSpace.ops": "identity"}, ["searchSpace.ops", "list", "'identity'"]),
    "no ops": ({"searchSpace.ops": []}, ["searchSpace.ops"]),
    "unknown mode": ({"searchSpace.mode": "meso"}, ["searchSpace.mode", "cell, macro", "'meso'"]),
    "unknown merge": ({"searchSpace.merge": "max"}, ["searchSpace.merge", "'max'"]),
    "no filters": ({"searchSpace.filters": 0}, ["searchSpace.filters", "[1, 100000]", "0"]),
    "filters text": ({"searchSpace.filters": "many"}, ["searchSpace.filters", "'many'"]),
    "image too small": ({"searchSpace.stages": 6}, ["searchSpace.stages", "8x8", "6"]),
    "image shape is the data's": (
        {"searchSpace.image_shape": [1, 8, 8]},
        ["searchSpace.image_shape", "allowed are"],
    ),
    "space a list": ({"searchSpace": []}, ["searchSpace must be a mapping"]),
    "no space": ({"searchSpace": GONE}, ["searchSpace is missing"]),
    "no tuner": ({"tuner": GONE}, ["tuner is missing"]),
    "tuner a text": ({"tuner": "TPE"}, ["tuner must be a mapping", "'TPE'"]),
    "unknown tuner key": ({"tuner.gallery": "x"}, ["tuner.gallery", "allowed are", "classArgs"]),
    "unknown key": ({"trialConcurency": 2}, ["trialConcurency", "allowed are", "trialConcurrency"]),
    "no workers": ({"trialConcurrency": 0}, ["trialConcurrency", "at least 1", "0"]),
    "workers text": ({"trialConcurrency": "two"}, ["trialConcurrency", "'two'"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_config_gives_one_line_and_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    changes, parts = BROKEN[name]
    file = write(tmp_path, changes)
    for command in ("check", "search", "run"):
        assert main([command, str(file)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        lines = captured.err.splitlines()
        assert len(lines) == 1, captured.err
        for part in parts:
            assert part in lines[0]
    assert [path.name for path in tmp_path.iterdir()] == ["config.yml"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"tuner: [", "is not YAML at line 1"),
        (b"a: b: c", "is not YAML at line 1"),
        (b"\xff\xfe", "cannot be read"),
        (b"", "must be a mapping but got None"),
        (b"- 1", "must be a mapping"),
        (b"!!python/object/apply:os.system ['true']", "is not YAML"),
    ],
)
def test_a_file_that_is_no_config_gives_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, said: str
) -> None:
    file = tmp_path / "config.yml"
    file.write_bytes(content)
    assert main(["check", str(file)]) == 2
    assert said in capsys.readouterr().err
    assert main(["check", str(tmp_path / "none.yml")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_gallery_of_another_search_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SearchConfig.from_yaml(write(tmp_path, {})).open_gallery()
    for change, said in (
        ({"searchSpace.filters": 12}, "space.filters is 8 there but 12 here"),
        ({f"{ARGUMENTS}.l1": 0.5}, "settings.l1 is 0.001 there but 0.5 here"),
        ({f"{ARGUMENTS}.data.limit": 64}, "settings.data.limit is None there but 64 here"),
    ):
        assert main(["check", str(write(tmp_path, change))]) == 2
        assert said in capsys.readouterr().err
    for change in (
        {},
        {f"{ARGUMENTS}.limits.max_models": 99},
        {f"{ARGUMENTS}.recipe.device": "cpu"},
    ):
        assert main(["check", "--quick", str(write(tmp_path, change))]) == 0


def test_a_folder_with_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, {f"{ARGUMENTS}.gallery": "."})
    assert main(["check", str(file)]) == 2
    assert "is not a gallery and not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("petridish*.yml")), ids=lambda p: p.name
)
def test_the_configs_are_valid(path: Path) -> None:
    SearchConfig.from_yaml(path)


def test_a_recurrent_search_has_defaults_of_its_own(tmp_path: Path) -> None:
    changes = {**RECURRENT, f"{ARGUMENTS}.i_max": GONE, f"{ARGUMENTS}.l1": GONE}
    settings = SearchConfig.from_yaml(write(tmp_path, changes)).settings
    assert (settings.l1, settings.i_max) == (0.01, 1)
    # In a range every growth chooses its own λ; the first has the default.
    changes[f"{ARGUMENTS}.l1"] = {"low": 1e-4, "high": 0.1}
    assert SearchConfig.from_yaml(write(tmp_path, changes)).settings.l1 == 0.01


def test_a_config_goes_through_the_gallery_unchanged(tmp_path: Path) -> None:
    config = SearchConfig.from_yaml(write(tmp_path, {}))
    assert SearchConfig.of_gallery(config.open_gallery()) == config


def test_folders_are_relative_to_the_code_directory(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    file = write(tmp_path / "configs", {"tuner.codeDirectory": ".."})
    assert SearchConfig.from_yaml(file).gallery == tmp_path / "galleries" / "digits"


def test_checking_needs_neither_torch_nor_nni(tmp_path: Path) -> None:
    code = (
        "import sys; from nni_petridish.running.config import SearchConfig;"
        f"SearchConfig.from_yaml({str(write(tmp_path, {}))!r}).check_gallery();"
        "print([m for m in ('torch', 'nni', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_errors_are_of_the_packages_family(tmp_path: Path) -> None:
    with pytest.raises(PetridishError):
        SearchConfig.from_yaml(write(tmp_path, {f"{ARGUMENTS}.i_max": 0}))
