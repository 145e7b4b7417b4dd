"""``nni-petridish schema``: the JSON schema of configuration files, as it is shipped."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("petridish.schema.json")


def add_schema_command(subparsers: Any) -> None:
    """Add ``schema`` to the commands."""
    schema = subparsers.add_parser(
        "schema", help="print the JSON schema of configuration files, for editors"
    )
    schema.set_defaults(command=_schema)


def _schema(options: argparse.Namespace) -> int:
    print(FILE.read_text(encoding="utf-8"), end="")
    return 0
