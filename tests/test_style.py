"""Rules of CONTRIBUTING.md that ruff does not know."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = [
    path.relative_to(ROOT).as_posix()
    for package in ("nni_petridish", "search_spaces")
    for path in sorted((ROOT / package).rglob("*.py"))
]
OF_OTHERS = {
    "nni_petridish/core/momentum.py": "parameters of torch",
    "nni_petridish/tasks/tables/inference.py": "arrays and data frames of users",
    "nni_petridish/running/process.py": "os",
    "nni_petridish/search/records.py": "numbers of numpy and torch",
    "nni_petridish/studies/tuning/plots.py": "axes of matplotlib",
    "search_spaces/any_model/growable.py": "modules of users",
    "search_spaces/any_model/outputs.py": "named tuples",
}
"""Modules that ask with `hasattr`, and whose objects they ask: none of them is ours."""


def texts(source: str) -> Iterator[str]:
    """Yield the docstrings of a module, of its classes, functions and constants."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield str(statement.value.value)


def asks_with_hasattr(source: str) -> bool:
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr"
        for node in ast.walk(ast.parse(source))
    )


@pytest.mark.parametrize("module", MODULES)
def test_a_docstring_begins_with_a_noun_or_an_imperative(module: str) -> None:
    found = texts((ROOT / module).read_text(encoding="utf-8"))
    assert [text for text in found if re.match(r"(What|Who|Whose|Which|How|They)\b", text)] == []


def test_our_own_protocols_are_not_asked_with_hasattr() -> None:
    asking = {module for module in MODULES if asks_with_hasattr((ROOT / module).read_text("utf-8"))}
    assert asking == set(OF_OTHERS)


def test_the_checks_find_what_they_look_for() -> None:
    assert asks_with_hasattr("if hasattr(task, 'train'): pass")
    assert list(texts('"""A."""\ndef f():\n    """B."""\nx = 1\n"""C."""')) == ["A.", "C.", "B."]


def test_few_things_lie_in_the_package_itself() -> None:
    there = {path.name for path in (ROOT / "nni_petridish").iterdir()} - {"__pycache__"}
    assert len(there) < 20
