"""Malformed input is told in one line: no traceback, no hang, no file outside of the gallery."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nni_petridish.core.genotype import Genotype
from nni_petridish.errors import PetridishError
from nni_petridish.gallery.gallery import OWN_FOLDERS
from search_spaces import VisionSpace
from tests.support import hostile
from tests.support.chaos import ROOT
from tests.support.hostile import DAMAGES, ODD_NUMBERS, ODD_TEXTS, broken, command
from tests.support.small_gallery import vision_gallery

CONFIGS = ("petridish", "petridish_rnn", "petridish_kubernetes")
STUDIES = {"tune": "tune", "ablations": "ablate", "compare_digits": "compare"}
"""Configurations of studies, and their commands."""
GENOTYPES: list[dict[str, Any]] = [
    {
        "version": 1,
        "space": "vision",
        "mode": "cell",
        "cells": {"normal": [[["prev", "identity"]], [["h0", "identity"]]], "reduce": []},
    },
    {"version": 1, "space": "recurrent", "nodes": [["s0", "relu"], ["s1", "tanh"]]},
]


def generated(examples: int) -> Any:
    """Return settings for tests whose fixtures hold between examples."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,  # the same examples in every run
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, in which nothing may appear."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    yield here
    assert list(here.iterdir()) == []


@pytest.fixture(scope="module")
def whole_gallery(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_gallery(tmp_path_factory.mktemp("whole")).folder


def documents() -> dict[str, Any]:
    return {
        name: yaml.safe_load((ROOT / "configs" / f"{name}.yml").read_text())
        for name in (*CONFIGS, *STUDIES)
    }


def check_config(data: st.DataObject, folder: Path) -> None:
    known = documents()
    name = data.draw(st.sampled_from(list(known)))
    path = folder / "config.yml"
    path.write_text(yaml.safe_dump(data.draw(broken(known[name]))))
    before = hostile.files_of(folder)
    command("check", "--quick", str(path))
    if name in STUDIES:
        command(STUDIES[name], "--show", str(path))
    assert hostile.files_of(folder) == before


@generated(80)
@given(st.data())
def test_a_malformed_configuration_is_told_in_one_line(
    place: Path, tmp_path: Path, data: st.DataObject
) -> None:
    check_config(data, tmp_path)


@pytest.mark.slow
@generated(2000)
@given(st.data())
def test_a_thousand_malformed_configurations(
    place: Path, tmp_path: Path, data: st.DataObject
) -> None:
    check_config(data, tmp_path)


@generated(40)
@given(st.integers(0, 2**32))
def test_a_damaged_text_of_a_configuration_is_told_in_one_line(
    place: Path, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    text = bytearray((ROOT / "configs" / "petridish.yml").read_bytes())
    for _ in range(rng.choice([1, 3, 10])):
        at = rng.randrange(len(text))
        text[at : at + rng.choice([0, 1, 1, 5])] = rng.randbytes(rng.choice([0, 1, 3]))
    path = tmp_path / "config.yml"
    path.write_bytes(bytes(text))
    command("check", "--quick", str(path))


@generated(80)
@given(st.sampled_from(GENOTYPES).flatmap(broken))
def test_a_malformed_genotype_is_told_in_one_line(document: Any) -> None:
    space = VisionSpace((1, 8, 8), num_classes=10, cells_per_stage=1, filters=4)
    told = ""
    try:
        space.build(Genotype.from_json(json.dumps(document, default=repr)))
    except PetridishError as error:
        told = str(error)
    assert told.isprintable()
    assert len(told) < 1000


@generated(40)
@given(
    ODD_TEXTS.filter(bool)
    | st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)
)
def test_an_id_that_is_none_is_told_in_one_line(
    place: Path, whole_gallery: Path, tmp_path: Path, id: str
) -> None:
    out = tmp_path / "model.safetensors"
    for arguments in (["show"], ["export", "--out", str(out)], ["train"]):
        assert command(*arguments, "--", str(whole_gallery), id).code == 2


OPTIONS = {
    "show": ["--near", "--max", "--best"],
    "export": ["--near", "--max", "--best", "--format", "--out", "--pixels"],
    "train": ["--config", "--cells", "--filters", "--fit", "--merge", "--epochs", "--set", "--out"],
    "check": ["--quick", "--estimate"],
    "tune": ["--trials", "--storage", "--study", "--jobs", "--sampler", "--pruner", "--show"],
    "ablate": ["--jobs", "--only", "--show"],
    "compare": ["--jobs", "--only", "--show", "--pilot", "--repeats", "--out"],
    "judge": ["scores", "policies", "--file", "--table", "--out", "--jobs", "--seed"],
    "serve": ["--port", "--host"],
    "search": ["--resume"],
    "run": ["--resume", "--port"],
    "analogy": ["--data", "--out"],
}


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """Draw a command that must fail: its first argument is no gallery and no configuration."""
    name = draw(st.sampled_from([*OPTIONS, "nothing", ""]))
    words = st.one_of(
        st.sampled_from(OPTIONS.get(name, ["--help"])),
        ODD_TEXTS,
        ODD_NUMBERS.map(lambda number: str(number)[:50]),
    )
    return [name, *draw(st.lists(words, max_size=5))]


@generated(80)
@given(command_lines())
def test_an_odd_command_line_is_told_in_one_line(place: Path, arguments: list[str]) -> None:
    assume_harmless = arguments[0] != "analogy" or len(arguments) > 1
    if assume_harmless:
        command(*arguments)


NOWHERE = "/proc/nowhere"
"""A folder that nobody can make."""


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "GALLERY", "--epochs", "1", "--out", NOWHERE],
        ["export", "GALLERY", "--out", f"{NOWHERE}/model"],
        ["ablate", str(ROOT / "configs" / "ablations.yml"), "--out", NOWHERE],
        ["compare", str(ROOT / "configs" / "compare_digits.yml"), "--out", NOWHERE],
        ["analogy", "--out", f"{NOWHERE}/paths.png"],
        ["init", "pydoc", "--out", f"{NOWHERE}/petridish.yml"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_folder_that_cannot_be_made_is_told_in_one_line(
    place: Path, whole_gallery: Path, arguments: list[str]
) -> None:
    told = command(*(str(whole_gallery) if word == "GALLERY" else word for word in arguments))
    assert told.code == 2
    assert NOWHERE in told.errors


def test_a_reader_of_the_output_may_end_early(whole_gallery: Path) -> None:
    shown = f"{sys.executable} -m nni_petridish show {whole_gallery}"
    ended = subprocess.run(
        ["bash", "-c", f"{shown} g00003 | true; {shown} | head -1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.stderr == ""
    assert "model" in ended.stdout


def run_on(gallery: Path, folder: Path, name: str) -> None:
    before = {k: v for k, v in hostile.files_of(folder).items() if not k.startswith("gallery")}
    out = folder / "out.safetensors"
    match name:
        case "show" | "search":
            arguments = [name, str(gallery)]
        case "show one":
            arguments = ["show", str(gallery), "g00001"]
        case _:
            arguments = ["export", str(gallery), "--out", str(out)]
    command(*arguments)
    out.unlink(missing_ok=True)
    after = {k: v for k, v in hostile.files_of(folder).items() if not k.startswith("gallery")}
    assert after == before


COMMANDS = ("show one", "export", "export")
MODEL_FILES = ("weights.safetensors", "genotype.json", "metrics.json", "checksums.json")
TOP_FILES = ("gallery.json", "journal.jsonl", "config.json")
FILES = (*TOP_FILES, *(f"models/g00003/{file}" for file in MODEL_FILES))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_gallery_is_told_in_one_line(
    place: Path, whole_gallery: Path, tmp_path: Path, damage: str
) -> None:
    for file in FILES:
        gallery = hostile.copy_gallery(whole_gallery, tmp_path / "gallery")
        DAMAGES[damage](gallery / file)
        run_on(gallery, tmp_path, "show" if "models" not in file else "export")


def forge_gallery(data: st.DataObject, gallery: Path) -> None:
    file = data.draw(st.sampled_from([*TOP_FILES, *MODEL_FILES[1:]]))
    if file == "journal.jsonl":
        path = gallery / file
        hostile.forge_journal(path, data.draw(broken(hostile.read_journal(path), JSON_VALUES)))
        return
    path = gallery / file if (gallery / file).exists() else gallery / "models" / "g00003" / file
    hostile.forge(path, data.draw(broken(json.loads(path.read_text()), JSON_VALUES)))


@pytest.mark.parametrize("name", OWN_FOLDERS)
def test_a_link_in_the_place_of_a_folder_of_a_gallery_is_refused(
    place: Path, whole_gallery: Path, tmp_path: Path, name: str
) -> None:
    gallery = hostile.copy_gallery(whole_gallery, tmp_path / "gallery")
    outside = tmp_path / "outside"
    if (gallery / name).exists():
        (gallery / name).rename(outside)
    outside.mkdir(exist_ok=True)
    (gallery / name).symlink_to(outside)
    before = hostile.files_of(outside)
    for arguments in (["show"], ["export", "--out", str(tmp_path / "x")], ["train"]):
        told = command(*arguments, str(gallery))
        assert told.code == 2
        assert f"{gallery / name} is a link" in told.errors
    assert hostile.files_of(outside) == before


def test_a_link_in_the_place_of_a_model_is_no_model(
    place: Path, whole_gallery: Path, tmp_path: Path
) -> None:
    gallery = hostile.copy_gallery(whole_gallery, tmp_path / "gallery")
    (gallery / "models" / "g00003").rename(tmp_path / "outside")
    (gallery / "models" / "g00003").symlink_to(tmp_path / "outside")
    told = command("export", str(gallery), "g00003", "--out", str(tmp_path / "x"))
    assert told.code == 2
    assert "its folder is a link" in told.errors


JSON_VALUES = st.one_of(
    st.none(),
    st.sampled_from([0, -1, 1, 1.5, 2**31, 2**63, 10**400, True, False]),
    ODD_TEXTS,
    st.just([]),
    st.just({}),
    st.just([[], {}]),
    st.just("g00003"),
)


@generated(60)
@given(st.data())
def test_a_forged_gallery_is_told_in_one_line(
    place: Path, whole_gallery: Path, tmp_path: Path, data: st.DataObject
) -> None:
    gallery = hostile.copy_gallery(whole_gallery, tmp_path / "gallery")
    forge_gallery(data, gallery)
    run_on(gallery, tmp_path, data.draw(st.sampled_from(COMMANDS)))


@pytest.mark.slow
@generated(1000)
@given(st.data())
def test_a_thousand_forged_galleries(
    place: Path, whole_gallery: Path, tmp_path: Path, data: st.DataObject
) -> None:
    gallery = hostile.copy_gallery(whole_gallery, tmp_path / "gallery")
    forge_gallery(data, gallery)
    run_on(gallery, tmp_path, data.draw(st.sampled_from(COMMANDS)))
