"""Faults of the disk at every system call of a search: told in one line, and nothing is lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nni_petridish.gallery.gallery import Gallery
from tests.support.faults import FOREVER, Fault, SearchProcess, faults_at, tiny_config
from tests.support.whole import leftovers, models

CALLS = {"open": 49, "write": 39, "fsync": 61, "rename": 19, "mkdir": 16, "lock": 10, "short": 39}
"""System calls of the smallest search on its gallery; more than there are do no harm."""
PLACEMENTS = [
    fault
    for operation, calls in CALLS.items()
    for fault in faults_at(operation, range(1, calls + 1))
]
EVERY_DAY = PLACEMENTS[4::21]
"""The placements of ``make test``; the others are slow."""


@pytest.fixture(scope="module")
def expected(
    search_process: SearchProcess, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The models of a search without faults."""
    config = tiny_config(tmp_path_factory.mktemp("expected"))
    ended = search_process.run(["search", str(config)], config.parent / "gallery", None)
    assert ended.code == 0, ended.text
    # Raise the numbers if a search calls the system much more often.
    assert {name: n for name, n in ended.counts.items() if n > 1.2 * CALLS[name]} == {}
    return models(config.parent / "gallery")


def check(
    fault: Fault, search_process: SearchProcess, expected: dict[str, str], folder: Path
) -> None:
    config, gallery = tiny_config(folder), folder / "gallery"
    ended = search_process.run(["search", str(config)], gallery, fault)
    assert "Traceback" not in ended.text, ended.text
    lines = [
        line for line in ended.text.splitlines() if re.search("Cannot (write|make|open|lock)", line)
    ]
    if ended.code == 0:
        # Outlasted: every outage is told once, and the search is whole. Without effect are half a
        # write that is completed, and a failure to make a folder that is there.
        assert len(lines) == ended.text.count("The disk is back"), ended.text
        assert lines or fault.operation in ("short", "mkdir") or not ended.hits, ended.text
        assert leftovers(gallery) == []
        assert models(gallery) == expected
    else:
        assert ended.hits
        assert ended.code == 2, ended.text
        assert lines, ended.text
        assert lines[-1] == ended.text.splitlines()[-1]
        assert lines[-1].startswith("nni-petridish: Cannot"), ended.text
    if (gallery / "gallery.json").exists():
        events = Gallery(gallery).journal.read_all()
        assert not [event for event in events if event["event"] in ("fail", "quarantine")]
    again = search_process.run(["search", str(config), "--resume"], gallery, None)
    assert again.code == 0, again.text
    assert "Traceback" not in again.text
    assert models(gallery) == expected
    assert leftovers(gallery) == []


@pytest.mark.parametrize("fault", EVERY_DAY, ids=str)
def test_a_fault_of_the_disk_is_outlasted(
    fault: Fault, search_process: SearchProcess, expected: dict[str, str], tmp_path: Path
) -> None:
    check(fault, search_process, expected, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [f for f in PLACEMENTS if f not in EVERY_DAY], ids=str)
def test_a_fault_of_the_disk_is_outlasted_at_every_call(
    fault: Fault, search_process: SearchProcess, expected: dict[str, str], tmp_path: Path
) -> None:
    check(fault, search_process, expected, tmp_path)


def test_at_least_two_hundred_placements_are_tested() -> None:
    assert len(PLACEMENTS) >= 200


def test_a_clock_that_jumps_changes_nothing(
    search_process: SearchProcess, expected: dict[str, str], tmp_path: Path
) -> None:
    config, gallery = tiny_config(tmp_path), tmp_path / "gallery"
    # Another machine is writing a model, by a clock that is two hours behind or ahead.
    search_process.run(["search", str(config)], gallery, Fault("fsync", 20, "EIO", FOREVER))
    writing = gallery / "models" / ".tmp-g00007-elsewhere-1-aabbccdd"
    writing.mkdir()
    (writing / "weights.safetensors").write_bytes(b"half")
    for clock in (7200, -7200):
        ended = search_process.run(["search", str(config), "--resume"], gallery, None, clock)
        assert ended.code == 0, ended.text
        assert (writing / "weights.safetensors").exists()
    assert models(gallery) == expected
