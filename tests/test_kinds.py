"""Kinds of problems are told apart in the registry and in the packages that implement them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import nni_petridish
from nni_petridish.registry import _PROBLEMS

ROOT = Path(nni_petridish.__file__).parent
IMPLEMENT = ("tasks", "registry.py")
"""The room that implements kinds, and the registry."""
KNOW_IMAGES = {
    "__init__.py",  # public names
    "nni_adapter/evaluators/recipe.py",  # the paper's recipe for images as an evaluator
    "nni_adapter/darts.py",  # the vision space and its images for NNI's DARTS
    "nni_adapter/switches.py",  # the vision space for NNI's one-shot strategies
    "studies/judge/training.py",  # the tables of trained architectures are about CIFAR-10
}
"""Modules that are about one kind by their purpose; they decide nothing for others."""
HOMES = (
    "nni_petridish.tasks.vision",
    "nni_petridish.tasks.language",
    "search_spaces.vision",
    "search_spaces.recurrent",
)
MODULES = [
    path.relative_to(ROOT).as_posix()
    for path in sorted(ROOT.rglob("*.py"))
    if path.relative_to(ROOT).parts[0] not in IMPLEMENT
]


def findings(source: str) -> list[str]:
    """Return what a module takes from the home of one kind, and the kinds that it names."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = {
        id(statement.value)
        for node in ast.walk(tree)
        if isinstance(node, documented)
        for statement in node.body
        if isinstance(statement, ast.Expr)
    }
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in names if name.startswith(HOMES) or _is_of_a_kind(name)]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith(HOMES)]
        elif isinstance(node, ast.Constant) and id(node) not in texts:
            found += [repr(node.value)] if node.value in ("vision", "recurrent") else []
    return found


def _is_of_a_kind(name: str) -> bool:
    package, _, last = name.rpartition(".")
    return package == "search_spaces" and last.startswith(("Vision", "Recurrent"))


@pytest.mark.parametrize("module", [name for name in MODULES if name not in KNOW_IMAGES])
def test_no_other_module_knows_images_from_text(module: str) -> None:
    assert findings((ROOT / module).read_text(encoding="utf-8")) == []


def test_the_search_for_kinds_finds_them() -> None:
    assert {"vision", "recurrent"} <= _PROBLEMS.keys()
    assert set(MODULES) >= KNOW_IMAGES
    assert findings('"""vision"""\nx = 1') == []
    assert findings('if space == "recurrent": pass') == ["'recurrent'"]
    assert findings("from search_spaces import VisionSpace, linear") == [
        "search_spaces.VisionSpace"
    ]
    assert findings("def f():\n    from nni_petridish.tasks.language import task") == [
        "nni_petridish.tasks.language.task"
    ]
