from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import nni_petridish

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", nni_petridish.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(nni_petridish, name) is not None
    assert name in dir(nni_petridish)


def test_the_package_has_few_public_names() -> None:
    assert len(nni_petridish.__all__) <= 29


def test_the_package_shows_few_entries() -> None:
    entries = {path.name for path in (ROOT / "nni_petridish").iterdir()} - {"__pycache__"}
    assert len(entries) < 20


ROOMS = ("core", "gallery", "nni_adapter", "results", "running", "search", "studies", "tasks")


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_of_a_room_is_there(room: str) -> None:
    package = importlib.import_module(f"nni_petridish.{room}")
    assert package.__all__
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
        assert name in dir(package)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = nni_petridish.nothing  # type: ignore[attr-defined]


HEAVY = (
    "torch",
    "nni",
    "pytorch_lightning",
    "sklearn",
    "optuna",
    "matplotlib",
    "jinja2",
    "pydantic",
)


def test_a_command_imports_its_own_room_only() -> None:
    code = "from nni_petridish.__main__ import _parser; _parser({called})"
    assert loaded(code.format(called="[]"), COMMAND_ROOMS) == []
    assert loaded(code.format(called="['tune']"), COMMAND_ROOMS) == ["nni_petridish.studies"]
    assert loaded(code.format(called=""), COMMAND_ROOMS) == list(COMMAND_ROOMS)


COMMAND_ROOMS = ("nni_petridish.nni_adapter", "nni_petridish.results", "nni_petridish.studies")


def loaded(code: str, modules: Sequence[str] = HEAVY) -> list[str]:
    """Return which of the modules, the heavy packages by default, some code imports."""
    script = f"{code}\nimport sys; print(*[m for m in {modules!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_imports_are_as_light_as_promised() -> None:
    assert loaded("import nni_petridish, search_spaces") == []
    rooms = ", ".join(f"nni_petridish.{room}" for room in ROOMS)
    assert loaded(f"import {rooms}; nni_petridish.search.Search") == []
    assert loaded("import nni_petridish.__main__; nni_petridish.__main__._parser()") == []
    assert loaded("import nni_petridish.trial") == []  # so that its threads can be set
    assert loaded("import nni_petridish.tuner") == ["nni", "pydantic"]
    core = loaded(
        "from nni_petridish import attach_candidates, run_search; import search_spaces.vision.ops"
    )
    assert core == ["torch", "pydantic"]


@pytest.mark.parametrize(
    ("command", "seconds"),
    [
        (["-c", "import nni_petridish"], 0.2),
        (["-m", "nni_petridish", "--help"], 0.5),
    ],
)
def test_what_is_asked_for_often_comes_at_once(command: list[str], seconds: float) -> None:
    # Processor time: what else the machine does is not counted.
    before = os.times()
    for _ in range(3):
        subprocess.run([sys.executable, *command], capture_output=True, check=True)
    after = os.times()
    spent = after.children_user + after.children_system
    assert spent - before.children_user - before.children_system < 3 * seconds


def test_the_readmes_example_runs() -> None:
    readme = (ROOT / "README.md").read_text()
    code = re.search(r"## In Python\n\n```python\n(.*?)```", readme, re.DOTALL)
    assert code is not None
    small = code[1].replace("cells_per_stage=3, filters=16", "cells_per_stage=1, filters=4")
    scope: dict[str, object] = {}
    exec(small, scope)
    assert scope["genotype"].growths == 1  # type: ignore[attr-defined]
