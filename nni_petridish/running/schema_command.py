"""``nni-petridish schema``: the JSON schema of configuration files, as it is shipped."""

from __future__ import annotations

import argparse
from pathlib import Path

FILE = Path(__file__).with_name("petridish.schema.json")


def add_schema_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``schema``, which has none."""
    parser.set_defaults(command=_schema)


def _schema(options: argparse.Namespace) -> int:
    print(FILE.read_text(encoding="utf-8"), end="")
    return 0
