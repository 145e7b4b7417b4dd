"""Kills of every front, among stops and clocks that jump: nothing is lost or doubled."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support import chaos
from tests.support.faults import Blow, SearchProcess, compile_library, tiny_config
from tests.support.whole import check_journal, leftovers, models

MODELS = 4
LONGEST = {"search": 1.0, "strategy": 1.5, "tuner": 2.0, "workers": 2.0}
"""Seconds until the last moment of the first kill."""
KILLS = {
    "search": 70,
    "strategy": 40,
    "tuner": 45,
    "workers": 25,
    "nnictl": 16,
    "strategy and trials": 4,
}
"""Kills of the slow tests."""


@pytest.fixture(scope="module")
def expected(
    search_process: SearchProcess, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The models of a search that nothing disturbs."""
    config = tiny_config(tmp_path_factory.mktemp("expected"), MODELS)
    ended = search_process.run(["search", str(config)], config.parent / "gallery", None)
    assert ended.code == 0, ended.text
    return models(config.parent / "gallery")


def stop(rng: random.Random, victim: str) -> list[Blow]:
    """Return a stop and its end, most often none."""
    if rng.random() > 0.3:
        return []
    begin, length = rng.uniform(0.0, 0.3), rng.choice([0.1, 0.1, 1.2])
    return [Blow(begin, signal.SIGSTOP, victim), Blow(length, signal.SIGCONT, victim)]


def blows_to_one(rng: random.Random, seconds: float) -> list[Blow]:
    """Return what happens to a search in one process."""
    return [*stop(rng, "all"), Blow(rng.uniform(0.0, seconds), signal.SIGKILL, "all")]


def blows_to_many(rng: random.Random, seconds: float) -> list[Blow]:
    """Return what happens to a search with a manager, a tuner and trials."""
    victim = rng.choice(["all", "main", "tuner", "trial", "trial"])
    kill = Blow(rng.uniform(0.0, seconds), signal.SIGKILL, victim)
    if victim == "main":
        return [kill]  # nobody would be left to end a stop
    return [*stop(rng, rng.choice(["tuner", "trial"])), kill]


FRONTS: dict[str, tuple[str, int, Callable[[random.Random, float], list[Blow]]]] = {
    "search": ("search", 1, blows_to_one),
    "strategy": ("strategy", 1, blows_to_one),
    "tuner": ("tuner", 1, blows_to_many),
    "workers": ("tuner", 2, blows_to_many),
}
"""The front, its number of workers, and what happens to it."""


def disturb(process: SearchProcess, name: str, folder: Path, rng: random.Random) -> int:
    """Run a search to its end while killing it; return the number of kills."""
    front, concurrency, blows = FRONTS[name]
    config, gallery = tiny_config(folder, MODELS, concurrency), folder / "gallery"
    kills = 0
    while True:
        # Later and later, so that a busy machine gets to the end too.
        struck = blows(rng, LONGEST[name] * (1 + kills / 5))
        resume = ["--resume"] if front == "search" or rng.random() < 0.5 else []
        clock, jumps = rng.choice([0, 0, 7200, -7200, 10**8]), rng.choice([0, 5])
        ended = process.run(
            [front, str(config), *resume], gallery, None, clock, struck, jumps=jumps
        )
        assert "Traceback" not in ended.text, ended.text
        kills += ended.blows == len(struck)  # the last one is the kill
        if ended.code == 0:
            return kills
        assert ended.code == -signal.SIGKILL or struck[-1].victim == "tuner", ended.text


def disturbed(
    process: SearchProcess, name: str, expected: dict[str, str], folder: Path, kills: int
) -> None:
    """Kill searches until there were so many kills; each of them must end as if undisturbed."""
    rng, done, searches = random.Random(kills), 0, 0
    while done < kills:
        searches += 1
        here = folder / str(searches)
        done += disturb(process, name, here, rng)
        # Which of two workers is first decides about the parents of the next growths.
        check_whole(here / "gallery", expected, FRONTS[name][1] == 1)


def check_whole(gallery: Path, expected: dict[str, str], is_same: bool = True) -> None:
    found = models(gallery)
    assert found == expected if is_same else len(found) == len(expected)
    assert leftovers(gallery) == []
    check_journal(gallery)


@pytest.mark.parametrize("name", FRONTS)
def test_kills_lose_nothing(
    name: str, search_process: SearchProcess, expected: dict[str, str], tmp_path: Path
) -> None:
    disturbed(search_process, name, expected, tmp_path, kills=2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FRONTS)
def test_many_kills_lose_nothing(
    name: str, search_process: SearchProcess, expected: dict[str, str], tmp_path: Path
) -> None:
    disturbed(search_process, name, expected, tmp_path, kills=KILLS[name])


@pytest.fixture
def _wrong_clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give processes that are started clocks hours before, behind, or right."""
    monkeypatch.setenv("LD_PRELOAD", str(compile_library(tmp_path)))
    monkeypatch.setenv("FAULTS_CLOCK", "7200")


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_kills_under_the_manager_of_nni_lose_nothing(
    expected: dict[str, str], tmp_path: Path
) -> None:
    done = seed = 0
    while done < KILLS["nnictl"]:
        path = tiny_config(tmp_path / str(seed), MODELS)
        done += sum(chaos.chaos(path, KILLS["nnictl"] - done, seed, 1200).values())
        check_whole(path.parent / "gallery", expected)
        seed += 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("_wrong_clocks")
def test_kills_of_a_strategy_with_trials_lose_nothing(
    expected: dict[str, str], tmp_path: Path
) -> None:
    path, rng = tiny_config(tmp_path, MODELS), random.Random(0)
    config = chaos.SearchConfig.from_yaml(path)
    command = [sys.executable, "-m", "tests.support.fronts", "ts", str(path)]
    for kills_left in reversed(range(KILLS["strategy and trials"] + 1)):
        with (tmp_path / "output.txt").open("w") as output:
            process = subprocess.Popen(command, cwd=chaos.ROOT, stdout=output, stderr=output)
        try:
            if not kills_left:
                assert process.wait(600) == 0, (tmp_path / "output.txt").read_text()
            else:
                chaos.wait_for_progress(config, 100)
                time.sleep(rng.uniform(0, 3))
                assert process.poll() is None, "it was faster than the kill"
        finally:
            kill_all(process)
    check_whole(tmp_path / "gallery", expected)


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that was started here, and all that it has started."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=10)


def test_at_least_two_hundred_kills_are_tested() -> None:
    assert sum(KILLS.values()) >= 200
