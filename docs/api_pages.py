"""A hook of MkDocs that writes the pages of the API reference: one for each public package."""

from __future__ import annotations

import importlib

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PACKAGES = (
    "nni_petridish",
    "nni_petridish.core",
    "nni_petridish.search",
    "nni_petridish.gallery",
    "nni_petridish.tasks",
    "nni_petridish.running",
    "nni_petridish.results",
    "nni_petridish.nni_adapter",
    "nni_petridish.studies",
    "nni_petridish.estimators",
    "nni_petridish.estimators.feature_selection",
    "search_spaces",
)
MODULES = ("nni_petridish.errors", "nni_petridish.registry")
"""Modules whose public names all belong to the reference."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each package with all of its public names, and one for each module."""
    for name in PACKAGES:
        files.append(File.generated(config, f"{name}.md", content=_package_page(name)))
    for name in MODULES:
        files.append(File.generated(config, f"{name}.md", content=_module_page(name)))
    return files


def _module_page(name: str) -> str:
    return f"# {name}\n\n::: {name}\n    options:\n      show_root_heading: false\n"


def _package_page(name: str) -> str:
    package = importlib.import_module(name)
    options = "    options:\n      members: false\n      show_root_heading: false\n"
    head = f"# {name}\n\n::: {name}\n{options}"
    names = [public for public in package.__all__ if not public.startswith("__")]
    return head + "".join(f"\n::: {name}.{public}\n" for public in names)
