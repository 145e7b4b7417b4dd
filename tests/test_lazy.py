from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

PACKAGES = [
    "nni_petridish",
    "nni_petridish.studies.ablations",
    "nni_petridish.estimators.feature_selection",
    "nni_petridish.studies.tuning",
]


def for_type_checkers(file: Path) -> set[str]:
    """Return the names that a module imports under TYPE_CHECKING."""
    blocks = [
        node
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in imports for alias in node.names}


@pytest.mark.parametrize("name", PACKAGES)
def test_type_checkers_see_the_lazy_names_and_no_others(name: str) -> None:
    package = importlib.import_module(name)
    assert package.__file__ is not None
    assert for_type_checkers(Path(package.__file__)) == {*package.__all__} - {"__version__"}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_lists_its_lazy_names_and_has_each(name: str) -> None:
    package = importlib.import_module(name)
    assert dir(package) == package.__all__ == sorted(package.__all__)
    assert all(getattr(package, public) is not None for public in package.__all__)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_name_that_a_package_lacks_is_an_attribute_error(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'nothing'"):
        _ = importlib.import_module(name).nothing
