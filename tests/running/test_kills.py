"""Kills at random moments, among stops and clocks that jump: nothing is lost or doubled."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from nni_petridish.gallery.gallery import Gallery
from tests.running.test_faults import leftovers, models
from tests.support.faults import SearchProcess, tiny_config

MODELS = 4
LONGEST = 1.0
"""Seconds until the last moment of the first kill."""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SearchProcess]:
    with SearchProcess(tmp_path_factory.mktemp("process")) as process:
        yield process


@pytest.fixture(scope="module")
def expected(process: SearchProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The models of a search that nothing disturbs."""
    config = tiny_config(tmp_path_factory.mktemp("expected"), MODELS)
    ended = process.run(["search", str(config)], config.parent / "gallery", None)
    assert ended.code == 0, ended.text
    return models(config.parent / "gallery")


def disturb(process: SearchProcess, folder: Path, rng: random.Random) -> int:
    """Run a search to its end while killing it; return the number of kills."""
    config, gallery = tiny_config(folder, MODELS), folder / "gallery"
    kills = 0
    while True:
        # Later and later, so that a busy machine gets to the end too.
        signals = [(rng.uniform(0.0, LONGEST * (1 + kills / 5)), signal.SIGKILL)]
        if rng.random() < 0.3:
            pause = rng.uniform(0.0, 0.2)
            signals = [(pause, signal.SIGSTOP), (0.1, signal.SIGCONT), *signals]
        clock = rng.choice([0, 0, 7200, -7200, 10**8])
        ended = process.run(["search", str(config), "--resume"], gallery, None, clock, signals)
        assert "Traceback" not in ended.text, ended.text
        if ended.code == 0:
            return kills
        assert ended.code == -signal.SIGKILL, ended.text
        kills += 1


def disturbed(process: SearchProcess, expected: dict[str, str], folder: Path, kills: int) -> None:
    """Kill searches until there were so many kills; each of them must end as if undisturbed."""
    rng, done, searches = random.Random(kills), 0, 0
    while done < kills:
        searches += 1
        here = folder / str(searches)
        done += disturb(process, here, rng)
        assert models(here / "gallery") == expected
        assert leftovers(here / "gallery") == []
        events = Gallery(here / "gallery").journal.read_all()
        assert not [event for event in events if event["event"] in ("fail", "quarantine")]
        made = Counter(event["id"] for event in events if event["event"] == "model")
        assert len(made) == MODELS


def test_kills_lose_nothing(
    process: SearchProcess, expected: dict[str, str], tmp_path: Path
) -> None:
    disturbed(process, expected, tmp_path, kills=4)


@pytest.mark.slow
def test_two_hundred_kills_lose_nothing(
    process: SearchProcess, expected: dict[str, str], tmp_path: Path
) -> None:
    disturbed(process, expected, tmp_path, kills=200)
