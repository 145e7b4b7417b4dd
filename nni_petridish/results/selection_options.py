"""The options of a command that selects a model of a gallery."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nni_petridish.search.records import ModelRecord
    from nni_petridish.search.search import Search


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, --near, --max and --best to a command."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="the id of a model")
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--near",
        metavar="N",
        help="the hull model nearest to N multiply-adds (parameters, ms), as 60M",
    )
    group.add_argument(
        "--max", metavar="N", help="the most accurate hull model of at most N of them"
    )
    group.add_argument("--best", action="store_true", help="the most accurate model (default)")


def selected(search: Search, options: argparse.Namespace) -> ModelRecord:
    """Return the model selected by the arguments of a command."""
    from nni_petridish.gallery.select import parse_size, select_model  # keeps --help fast

    return select_model(
        search,
        options.model,
        near=None if options.near is None else parse_size(options.near),
        max=None if options.max is None else parse_size(options.max),
        best=options.best,
    )


def is_selected(options: argparse.Namespace) -> bool:
    """Return whether the arguments of a command select a model."""
    return bool(options.model or options.near or options.max or options.best)
