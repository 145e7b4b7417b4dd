from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from nni_petridish.errors import GalleryError, SearchError
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.running import coordinator as coordinator_module
from nni_petridish.running.coordinator import Coordinator
from nni_petridish.search.search import Done, Growth, Limits, Outcome, Search, SearchSettings, Wait

FORK = multiprocessing.get_context("fork")
SETTINGS = SearchSettings(limits=Limits(max_models=30), seed_epochs=1, weak_epochs=1)


@pytest.fixture
def gallery(tmp_path: Path) -> Gallery:
    return Gallery.create(tmp_path / "gallery", {"name": "cells"}, SETTINGS.identity())


def carry_out(gallery: Gallery, growth: Growth) -> bool:
    """Do as a worker does: load the parent, make a child of it, save the child."""
    size = 100.0
    if growth.parent is not None:
        size = float(gallery.load_model(growth.parent)[0]["size"]) + growth.seed % 50 + 1
    error = random.Random(growth.seed).uniform(0.5, 1) * 100 / size
    documents = {
        "lineage": growth.to_dict(),
        "metrics": Outcome(growth.id, error, int(size), 10, 2).to_dict(),
    }
    return gallery.save_model(growth.id, {"size": torch.tensor(size)}, documents)


def ask_growth(coordinator: Coordinator) -> Growth:
    growth = coordinator.ask()
    assert isinstance(growth, Growth), growth
    return growth


def assert_replays(coordinator: Coordinator) -> None:
    coordinator.sync()
    events = coordinator.gallery.journal.read_all()
    replayed = Search.replay(coordinator.search.settings, events)
    assert replayed.state() == coordinator.search.state()


def test_a_growth_is_in_the_journal_before_it_is_handed_out(gallery: Gallery) -> None:
    with Coordinator(gallery, SETTINGS) as coordinator:
        growth = ask_growth(coordinator)
        (event,) = gallery.journal.read_all()
        assert event["event"] == "ask"
        assert Growth.from_dict(event["growth"]) == growth
        assert_replays(coordinator)


def test_a_growth_that_cannot_be_journaled_is_not_handed_out(gallery: Gallery) -> None:
    with Coordinator(gallery, SETTINGS) as coordinator:
        gallery.journal.path.mkdir()
        with pytest.raises(GalleryError, match="Is a directory"):
            coordinator.ask()
        assert coordinator.search.running() == []
        gallery.journal.path.rmdir()
        assert ask_growth(coordinator).id == "g00000"


def test_models_of_workers_are_noticed_without_being_told(gallery: Gallery) -> None:
    with Coordinator(gallery, SETTINGS) as coordinator:
        seed = ask_growth(coordinator)
        assert isinstance(coordinator.ask(), Wait)
        carry_out(Gallery(gallery.folder), seed)
        assert ask_growth(coordinator).parent == seed.id
        assert coordinator.sync() == []
        child = ask_growth(coordinator)
        carry_out(gallery, child)
        assert not coordinator.fail(child.id, "ended without a result")
        carry_out(gallery, child := ask_growth(coordinator))
        assert not coordinator.release(child.id)
        carry_out(gallery, child := ask_growth(coordinator))
        assert coordinator.sync() == [child.id]
        assert_replays(coordinator)


def test_a_failure_that_races_with_the_model_does_no_harm(gallery: Gallery) -> None:
    with Coordinator(gallery, SETTINGS) as coordinator:
        seed = ask_growth(coordinator)
        assert coordinator.fail(seed.id, "ended without a result", seed.attempt)
        carry_out(gallery, seed)
        assert ask_growth(coordinator).parent == seed.id
        assert coordinator.search.dropped() == {}
        assert_replays(coordinator)


def test_a_whole_search_ends_as_configured_and_replays(gallery: Gallery) -> None:
    with Coordinator(gallery, SETTINGS) as coordinator:
        while isinstance(growth := coordinator.ask(), Growth):
            carry_out(gallery, growth)
        assert growth == Done("max_models=30 is reached")
        assert gallery.model_ids() == [model.id for model in coordinator.search.models()]
        assert len(gallery.model_ids()) == 30
        assert len(coordinator.search.hull()) > 2
        assert_replays(coordinator)


def test_threads_that_ask_at_once_get_different_growths(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_module, "FIRST_PAUSE", 0.0)
    settings = SearchSettings(seeds=100)
    with Coordinator(gallery, settings) as coordinator:
        got: list[str] = []

        def ask() -> None:
            for _ in range(20):
                growth = ask_growth(coordinator)
                got.append(growth.id)
                if random.random() < 0.3:
                    coordinator.fail(growth.id, "bad luck", 1)

        threads = [threading.Thread(target=ask) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 100
        # Only a failed growth may come a second time.
        failed = {e["id"] for e in gallery.journal.read_all() if e["event"] == "fail"}
        assert {id for id, times in Counter(got).items() if times > 1} <= failed
        assert_replays(coordinator)


def test_one_gallery_has_one_coordinator_until_it_is_closed(gallery: Gallery) -> None:
    with Coordinator(gallery, SETTINGS), pytest.raises(GalleryError, match="at work already"):
        Coordinator(Gallery(gallery.folder), SETTINGS)
    Coordinator(gallery, SETTINGS).close()


def test_resuming_hands_out_what_was_running_again_and_nothing_else(gallery: Gallery) -> None:
    with Coordinator(gallery, SETTINGS) as coordinator:
        carry_out(gallery, ask_growth(coordinator))
        running = [ask_growth(coordinator) for _ in range(3)]
        carry_out(gallery, running[1])
        coordinator.fail(running[2].id, "died")
    with Coordinator(Gallery(gallery.folder), SETTINGS) as coordinator:
        assert coordinator.resume() == [running[0].id]
        assert coordinator.resume() == []
        assert ask_growth(coordinator) == running[0]
        retry = ask_growth(coordinator)
        assert (retry.id, retry.attempt) == (running[2].id, 2)
        assert ask_growth(coordinator).id == "g00004"
        assert_replays(coordinator)


def test_time_before_an_interruption_counts(gallery: Gallery) -> None:
    now = [1000.0]
    settings = SearchSettings(limits=Limits(max_seconds=100), seeds=5)
    with Coordinator(gallery, settings, clock=lambda: now[0]) as coordinator:
        now[0] += 60
        carry_out(gallery, ask_growth(coordinator))
    now[0] = 7.0
    with Coordinator(gallery, settings, clock=lambda: now[0]) as coordinator:
        assert coordinator.elapsed == 60
        now[0] += 39
        carry_out(gallery, ask_growth(coordinator))
        now[0] += 2
        assert coordinator.ask() == Done("max_seconds=100 is reached")


def test_the_search_goes_on_without_a_damaged_parent(gallery: Gallery) -> None:
    settings = SearchSettings(seeds=2)
    with Coordinator(gallery, settings) as coordinator:
        for growth in [ask_growth(coordinator), ask_growth(coordinator)]:
            carry_out(gallery, growth)
        growth = ask_growth(coordinator)
        assert growth.parent is not None
        weights = gallery.folder / "models" / growth.parent / "weights.safetensors"
        os.truncate(weights, 10)
        with pytest.raises(GalleryError, match="damaged"):
            carry_out(gallery, growth)
        assert coordinator.quarantine(growth.parent, "its weights are damaged")
        assert coordinator.fail(growth.id, "its parent is damaged")
        other = ask_growth(coordinator)
        assert other.parent not in (None, growth.parent)
        assert other.id != growth.id
        assert carry_out(gallery, other)
        assert_replays(coordinator)


def test_a_failure_of_an_unknown_growth_is_refused(gallery: Gallery) -> None:
    with Coordinator(gallery, SETTINGS) as coordinator, pytest.raises(SearchError, match="never"):
        coordinator.fail("g00005", "?")


# Everything dies, again and again.


def run_search(folder: Path, settings: SearchSettings, workers: int) -> None:
    """Run a search with forked workers until it is done."""
    gallery = Gallery(folder)
    coordinator = Coordinator(gallery, settings)
    coordinator.resume()

    def work(growth: Growth) -> None:
        time.sleep(random.Random(growth.seed).uniform(0, 0.02))
        carry_out(gallery, growth)

    at_work: dict[str, tuple[Growth, multiprocessing.process.BaseProcess]] = {}
    while True:
        for id, (growth, process) in list(at_work.items()):
            if not process.is_alive():
                del at_work[id]
                coordinator.fail(id, "ended without a result", growth.attempt)
        answer = coordinator.ask() if len(at_work) < workers else Wait("busy")
        if isinstance(answer, Done):
            return
        if isinstance(answer, Growth):
            process = FORK.Process(target=work, args=(answer,))
            process.start()
            at_work[answer.id] = (answer, process)
        else:
            time.sleep(0.002)


def killed_search(gallery: Gallery, kills: int, models: int) -> None:
    torch.set_num_threads(1)
    settings = SearchSettings(limits=Limits(max_models=models))
    rng = random.Random(9)

    def lead_a_group() -> None:
        os.setpgid(0, 0)
        run_search(gallery.folder, settings, workers=3)

    finished: set[str] = set()
    survivor = None
    for kill in range(kills + 1):
        process = FORK.Process(target=lead_a_group)
        process.start()
        assert process.pid is not None
        if kill < kills:
            time.sleep(rng.uniform(0.05, 0.3))
            # Half of the time the workers survive their coordinator and go on beside the next one.
            alone = kill % 2 == 0
            (os.kill if alone else kill_group)(process.pid, signal.SIGKILL)
        process.join(120)
        survivor = process.exitcode
        known = {e["id"] for e in gallery.journal.read_all() if e["event"] == "model"}
        assert finished <= known
        finished = known
    assert survivor == 0
    time.sleep(0.2)
    with Coordinator(gallery, settings) as coordinator:
        assert isinstance(coordinator.ask(), Done)
        ids = [model.id for model in coordinator.search.models()]
        assert ids == gallery.model_ids()
        assert finished <= set(ids)
        # A worker that outlived its coordinator may deliver a growth that was given up meanwhile.
        dropped = [e for e in gallery.journal.read_all() if e["event"] == "fail"]
        assert models <= len(ids) <= models + len(dropped)
        for id in ids:
            gallery.load_model(id)
        assert_replays(coordinator)


def kill_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        os.kill(pid, number)


def test_a_search_killed_8_times_loses_no_model_and_ends_as_configured(gallery: Gallery) -> None:
    killed_search(gallery, kills=8, models=60)


@pytest.mark.slow
def test_a_search_killed_150_times_loses_no_model_and_ends_as_configured(gallery: Gallery) -> None:
    killed_search(gallery, kills=150, models=900)
