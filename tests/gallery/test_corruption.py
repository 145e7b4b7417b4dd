"""Every file of a gallery, damaged in every way: detected in one line, or without any effect."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from nni_petridish.__main__ import main
from nni_petridish.gallery.saved_model import read_header
from nni_petridish.running.config import SearchConfig
from nni_petridish.running.runner import run_search
from tests.support.damage import WAYS, Told, damage_file, run
from tests.support.faults import tiny_config

MODELS = ("g00000", "g00001", "g00002")
DOCUMENTS = (
    "alphas",
    "checksums",
    "facts",
    "genotype",
    "history",
    "lineage",
    "metrics",
    "settings",
)
FILES = [
    "gallery.json",
    "config.json",
    "journal.jsonl",
    "journal.lock",
    "coordinator.lock",
    "report.html",
    *(f"models/{id}/{name}.json" for id in MODELS for name in DOCUMENTS),
    *(f"models/{id}/weights.safetensors" for id in MODELS),
]


CASES = [(file, damage) for file in FILES for damage in WAYS]
EVERY_DAY = CASES[::23]
"""The cases of ``make test``; the others are slow."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished search, which is copied for every case."""
    path = tiny_config(tmp_path_factory.mktemp("whole"), models=len(MODELS))
    run_search(SearchConfig.from_yaml(path))
    assert main(["show", str(path.parent / "gallery")]) == 0
    files = {str(p.relative_to(path.parent / "gallery")) for p in path.parent.rglob("*.js*")}
    assert files <= set(FILES), files - set(FILES)
    return path.parent


@pytest.fixture(scope="module")
def expected(whole: Path) -> dict[str, Told]:
    """The answers about the gallery before it is damaged."""
    told = all_that_is_told(whole / "gallery")
    assert all(code == 0 and not err for code, _, err in told.values()), told
    return told


def _counterpart(folder: Path, file: str) -> Path:
    """Return the same file of another model, or of the gallery another one."""
    if file.startswith("models/"):
        _, id, name = file.split("/")
        return folder / "models" / MODELS[MODELS.index(id) - 1] / name
    return folder / ("config.json" if file != "config.json" else "gallery.json")


def all_that_is_told(gallery: Path) -> dict[str, Told]:
    """Return what the commands say about a gallery, and what they export."""
    told = {"show": run(["show", str(gallery)])}
    for id in MODELS:
        target = gallery / f"{id}.exported"
        told[id] = run(["export", str(gallery), id, "--out", str(target)])
        if target.exists():
            code, out, err = told[id]
            told[id] = code, f"{out}{read_header(target)[1]}", err
            target.unlink()
    home = str(gallery)
    return {
        name: (code, out.replace(home, ""), err.replace(home, ""))
        for name, (code, out, err) in told.items()
    }


def check(whole: Path, expected: dict[str, Told], file: str, damage: str, folder: Path) -> None:
    gallery = folder / "gallery"
    shutil.copytree(whole / "gallery", gallery)
    damage_file(gallery / file, damage, _counterpart(gallery, file))
    for name, (code, out, err) in all_that_is_told(gallery).items():
        assert "Traceback" not in err, err
        # Every wrong answer is refused, or said to be one.
        assert err or (code, out) == expected[name][:2], (name, code, out)
        assert code == 0 or "nni-petridish: " in err, (name, err)
    resumes(gallery, whole)


def resumes(gallery: Path, whole: Path) -> None:
    """Check that a resumed search refuses the gallery in a line, or has sound models only."""
    shutil.copy(whole / "config.yml", gallery.parent / "config.yml")
    code, _, err = run(["search", str(gallery.parent / "config.yml"), "--resume"])
    assert "Traceback" not in err
    if code:
        assert re.search("^nni-petridish: .*", err, re.MULTILINE), err
        return
    code, _, err = run(["show", str(gallery)])
    assert code == 0 or "nni-petridish: " in err


@pytest.mark.parametrize(("file", "damage"), EVERY_DAY)
def test_damage_is_told_or_harmless(
    whole: Path, expected: dict[str, Told], file: str, damage: str, tmp_path: Path
) -> None:
    check(whole, expected, file, damage, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("file", "damage"), [case for case in CASES if case not in EVERY_DAY])
def test_damage_of_every_file_is_told_or_harmless(
    whole: Path, expected: dict[str, Told], file: str, damage: str, tmp_path: Path
) -> None:
    check(whole, expected, file, damage, tmp_path)


def test_at_least_three_hundred_cases_are_tested() -> None:
    assert len(CASES) >= 300
