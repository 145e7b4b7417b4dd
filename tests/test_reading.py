"""Bounded reading: what is too large, too deep or no file is refused before it is parsed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from nni_petridish._support.reading import (
    MAX_DEPTH,
    MAX_HEADER_BYTES,
    parse_json,
    parse_yaml,
    read_regular,
    refuse_large_header,
)
from nni_petridish.core.genotype import Genotype
from nni_petridish.errors import GenotypeError

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="ascii")),
    lambda parts: st.lists(parts) | st.dictionaries(st.text("abc"), parts),
    max_leaves=20,
)


def bomb(levels: int, form: str) -> str:
    """Return a YAML document whose size, with aliases written out, is ten to the levels."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, levels):
        aliases = ", ".join([f"*a{level - 1}"] * 10)
        content = f"[{aliases}]" if form == "list" else f"{{<<: [{aliases}], k{level}: 1}}"
        lines.append(f"a{level}: &a{level} {content}")
    return "\n".join(lines)


@settings(max_examples=30, deadline=None)
@given(PLAIN)
def test_what_is_small_is_parsed_as_ever(document: object) -> None:
    assert parse_json(json.dumps(document)) == document
    text = yaml.safe_dump(document)
    assert parse_yaml(text) == yaml.safe_load(text)


def test_an_alias_is_the_same_value_again() -> None:
    assert parse_yaml("a: &a [1]\nb: *a\nc: {<<: &d {e: 2}, f: 3}") == {
        "a": [1],
        "b": [1],
        "c": {"e": 2, "f": 3},
    }


@pytest.mark.parametrize("levels", [6, 9, 50])
def test_a_yaml_bomb_is_refused_at_once(levels: int) -> None:
    began = time.process_time()
    with pytest.raises(yaml.YAMLError, match="with its aliases it has more than 100,000 values"):
        parse_yaml(bomb(levels, "list"))
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: &a {b: *a}", "an alias stands for a part that contains it"),
        ("[" * 500 + "]" * 500, "nested more than 100 deep"),
        ("a: " + "x" * 2**20, "more than 1,048,576 bytes"),
        ("a: " + "9" * 5000, "4300"),
        ("a: 2020-13-45", "month"),
        ("? [1]\n: 2", "unhashable"),
    ],
)
def test_what_yaml_cannot_hold_is_an_error_of_yaml(text: str, problem: str) -> None:
    with pytest.raises(yaml.YAMLError, match=problem):
        parse_yaml(text)


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 100_000])
def test_deep_json_is_refused(opening: str, depth: int) -> None:
    text = opening * depth + "1" + {"[": "]", '{"a":': "}"}[opening] * depth
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        parse_json(text)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 50_000,
        '{"version": 1, "space": "vision", "mode": "cell", "cells": ' + "[" * 90 + "]" * 90 + "}",
        '{"version": 1, "space": "vision", "mode": "cell", "cells": {"normal": ['
        + ",".join(["[]"] * 5000)
        + '], "reduce": []}}',
        '{"version": 1, "space": "vision", "mode": "cell", "cells": {"normal": [['
        + ",".join(['["prev", "identity"]'] * 5000)
        + ']], "reduce": []}}',
        json.dumps({"version": 1, "space": "x" * 10 * 2**20}),
    ],
)
def test_a_deep_or_huge_genotype_is_refused_in_a_short_line(text: str) -> None:
    began = time.process_time()
    with pytest.raises(GenotypeError) as caught:
        Genotype.from_json(text)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)
    assert time.process_time() - began < 2


@pytest.mark.timeout(20)
def test_only_regular_files_are_read(tmp_path: Path) -> None:
    fifo, link = tmp_path / "fifo", tmp_path / "link"
    os.mkfifo(fifo)
    link.symlink_to("/dev/zero")
    for path in (fifo, link, tmp_path):
        with pytest.raises(OSError, match=r"regular file|directory"):
            read_regular(path)
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert read_regular(file, 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_regular(file, 4)


def test_a_large_header_is_refused_by_its_size_alone(tmp_path: Path) -> None:
    start = (MAX_HEADER_BYTES + 1).to_bytes(8, "little")
    with pytest.raises(ValueError, match="its header has"):
        refuse_large_header(start)
    (tmp_path / "model.safetensors").write_bytes(start)
    with pytest.raises(ValueError, match="its header has"):
        refuse_large_header(tmp_path / "model.safetensors")
