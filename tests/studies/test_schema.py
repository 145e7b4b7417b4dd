from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from nni_petridish.studies.schema import FILE
from search_spaces.vision.op_registry import VISION_OPS

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yml"))
HEADER = "# yaml-language-server: $schema="


def test_the_shipped_schema_is_up_to_date() -> None:
    # In a process of its own: a test beside this one may have registered a kind.
    code = "import sys; from nni_petridish.studies.schema import to_text;" + (
        "sys.stdout.buffer.write(to_text().encode())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == FILE.read_bytes(), "run python -m nni_petridish.studies.schema"


def test_every_reference_in_the_schema_leads_somewhere() -> None:
    schema = json.loads(FILE.read_text(encoding="utf-8"))

    def follow(node: Any) -> int:
        if isinstance(node, list):
            return sum(map(follow, node))
        if not isinstance(node, dict):
            return 0
        found = 0
        if isinstance(node.get("$ref"), str):
            target = schema
            for key in node["$ref"].removeprefix("#/").split("/"):
                target = target[key]
            found = 1
        return found + sum(map(follow, node.values()))

    assert follow(schema) > 10


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_schema_names_every_key_of_the_configs(path: Path) -> None:
    first, *_ = path.read_text(encoding="utf-8").splitlines()
    assert first.startswith(HEADER)
    assert (path.parent / first.removeprefix(HEADER)).resolve() == FILE
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    schema = json.loads(FILE.read_text(encoding="utf-8"))["$defs"]
    name = document["searchSpace"].get("space", "vision") if "tuner" in document else "retraining"
    parts = schema[name]
    assert set(document) <= set(parts["properties"])
    if "tuner" in document:
        arguments = parts["$defs"]["Arguments"]["properties"]
        assert set(document["tuner"]["classArgs"]) <= set(arguments)


def test_the_schema_offers_the_known_ops_and_takes_those_of_others() -> None:
    parts = json.loads(FILE.read_text(encoding="utf-8"))["$defs"]["vision"]["$defs"]
    (items,) = [p["properties"]["ops"]["items"] for p in parts.values() if "ops" in p["properties"]]
    offered, other = items["anyOf"]
    assert offered["enum"] == list(VISION_OPS)
    assert other == {"type": "string"}
