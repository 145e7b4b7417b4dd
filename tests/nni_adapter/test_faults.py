"""Faults of the disk under tuner, trials and strategy: told in one line, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faults import Fault, SearchProcess, faults_at, tiny_config
from tests.support.whole import check_journal, leftovers, models

CALLS = {
    "tuner": {"open": 12, "write": 8, "fsync": 10, "rename": 3, "mkdir": 4, "lock": 8, "short": 8},
    "trial": {
        "open": 36,
        "write": 30,
        "fsync": 48,
        "rename": 15,
        "mkdir": 12,
        "lock": 6,
        "short": 30,
    },
    "strategy": {
        "open": 48,
        "write": 38,
        "fsync": 60,
        "rename": 18,
        "mkdir": 14,
        "lock": 10,
        "short": 38,
    },
}
"""System calls on the gallery of each process; more than there are do no harm."""
PLACEMENTS = [
    (role, fault)
    for role, operations in CALLS.items()
    for operation, calls in operations.items()
    for fault in faults_at(operation, range(1, calls + 1, 1 + calls // 5))
]
EVERY_DAY = PLACEMENTS[3::12]
"""The placements of ``make test``; the others are slow."""


@pytest.fixture(scope="module")
def expected(
    search_process: SearchProcess, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The models of a search without faults."""
    config = tiny_config(tmp_path_factory.mktemp("expected"))
    ended = search_process.run(["search", str(config)], config.parent / "gallery", None)
    assert ended.code == 0, ended.text
    return models(config.parent / "gallery")


def check(
    role: str, fault: Fault, process: SearchProcess, expected: dict[str, str], folder: Path
) -> None:
    config, gallery = tiny_config(folder), folder / "gallery"
    front, counted = ("strategy", "main") if role == "strategy" else ("tuner", role)
    ended = process.run([front, str(config)], gallery, fault, counted=counted)
    assert "Traceback" not in ended.text, ended.text
    told = [line for line in ended.text.splitlines() if "Cannot " in line]
    # Without effect are half a write that is completed, and a folder that is there already.
    assert told or not ended.hits or fault.operation in ("short", "mkdir"), ended.text
    assert ended.code == 0 or told, ended.text
    if ended.code:
        again = process.run([front, str(config)], gallery, None)
        assert again.code == 0, again.text
        assert "Traceback" not in again.text
    assert models(gallery) == expected
    assert leftovers(gallery) == []
    check_journal(gallery)


@pytest.mark.parametrize(("role", "fault"), EVERY_DAY, ids=str)
def test_a_fault_of_the_disk_is_outlasted(
    role: str,
    fault: Fault,
    search_process: SearchProcess,
    expected: dict[str, str],
    tmp_path: Path,
) -> None:
    check(role, fault, search_process, expected, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "fault"), [case for case in PLACEMENTS if case not in EVERY_DAY], ids=str
)
def test_a_fault_of_the_disk_is_outlasted_at_many_calls(
    role: str,
    fault: Fault,
    search_process: SearchProcess,
    expected: dict[str, str],
    tmp_path: Path,
) -> None:
    check(role, fault, search_process, expected, tmp_path)
