from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from nni_petridish.errors import Interrupted, Orphaned, TrainingError
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.running import worker
from nni_petridish.running.coordinator import Coordinator
from nni_petridish.running.worker import HeartbeatWatch, beating, work_on
from nni_petridish.search.records import Growth
from nni_petridish.search.settings import GrowthSettings, Limits, SearchSettings
from nni_petridish.tasks.task import Callbacks
from nni_petridish.tasks.vision.recipe import Recipe
from nni_petridish.tasks.vision.task import VisionTask
from tests.running.test_growth import digits_task

PLAN = GrowthSettings(seed_epochs=2, weak_epochs=1, final_epochs=1)
SETTINGS = SearchSettings(limits=Limits(max_models=3), seed_epochs=2, weak_epochs=1, final_epochs=1)


@pytest.fixture
def gallery(tmp_path: Path) -> Gallery:
    return Gallery.create(tmp_path / "gallery", {"space": "vision"}, {})


def ask(coordinator: Coordinator) -> Growth:
    growth = coordinator.ask()
    assert isinstance(growth, Growth)
    return growth


def test_a_growth_that_fails_is_tried_once_more_and_then_dropped(gallery: Gallery) -> None:
    task = digits_task()
    wild = VisionTask(task.space, task.data, Recipe.named("digits", lr=1e12, device="cpu"))
    with Coordinator(gallery, SETTINGS) as coordinator:
        work_on(ask(coordinator), gallery, lambda: task, PLAN, Callbacks())
        first = ask(coordinator)
        with pytest.raises(TrainingError):
            work_on(first, gallery, lambda: wild, PLAN, Callbacks())
        again = ask(coordinator)
        assert (again.id, again.parent, again.attempt) == (first.id, first.parent, 2)
        assert again.seed != first.seed
        with pytest.raises(TrainingError):
            work_on(again, gallery, lambda: wild, PLAN, Callbacks())
        other = ask(coordinator)
        assert other.id != first.id
        assert "not finite" in coordinator.search.dropped()[first.id]
        work_on(other, gallery, lambda: task, PLAN, Callbacks())
        assert gallery.model_ids() == ["g00000", other.id]


def test_out_of_memory_and_any_exception_are_failures_with_their_reason(gallery: Gallery) -> None:
    def out_of_memory() -> VisionTask:
        raise MemoryError

    def broken() -> VisionTask:
        raise RuntimeError("two\nlines")

    with Coordinator(gallery, SETTINGS) as coordinator:
        for make_task in (out_of_memory, broken):
            with pytest.raises((MemoryError, RuntimeError)):
                work_on(ask(coordinator), gallery, make_task, PLAN, Callbacks())
        coordinator.sync()
        assert coordinator.search.dropped() == {"g00000": "RuntimeError: two lines"}
    events = [e for e in gallery.journal.read_all() if e["event"] == "fail"]
    assert [e["reason"] for e in events] == ["MemoryError: MemoryError", "RuntimeError: two lines"]


def test_a_growth_that_is_stopped_is_given_back_and_one_without_a_manager_is_not(
    gallery: Gallery,
) -> None:
    task = digits_task()

    def nobody_there(phase: str, record: object) -> None:
        raise Orphaned("nobody is there.")

    with Coordinator(gallery, SETTINGS) as coordinator:
        growth = ask(coordinator)
        with pytest.raises(Orphaned):
            work_on(growth, gallery, lambda: task, PLAN, Callbacks(on_epoch=nobody_there))
        coordinator.sync()
        assert coordinator.search.running() == [growth]
        with pytest.raises(Interrupted):
            work_on(growth, gallery, lambda: task, PLAN, Callbacks(should_stop=lambda: True))
        assert ask(coordinator) == growth


def test_a_damaged_parent_is_quarantined_and_the_search_goes_on(gallery: Gallery) -> None:
    task = digits_task()
    settings = SearchSettings(seeds=2, limits=Limits(max_models=4))
    with Coordinator(gallery, settings) as coordinator:
        for _ in range(2):
            work_on(ask(coordinator), gallery, lambda: task, PLAN, Callbacks())
        growth = ask(coordinator)
        path = gallery.folder / "models" / str(growth.parent) / "weights.safetensors"
        path.write_bytes(b"x" + path.read_bytes()[1:])
        with pytest.raises(Exception, match=r"checksum|damaged"):
            work_on(growth, gallery, lambda: task, PLAN, Callbacks())
        other = ask(coordinator)
        assert other.parent not in (None, growth.parent)
        work_on(other, gallery, lambda: task, PLAN, Callbacks())
        assert growth.parent not in gallery.model_ids()
        assert other.id in gallery.model_ids()


def test_two_workers_on_one_growth_make_one_model(gallery: Gallery) -> None:
    task = digits_task()
    with Coordinator(gallery, SETTINGS) as coordinator:
        growth = ask(coordinator)
        outcomes = []
        epochs = []

        def work() -> None:
            callbacks = Callbacks(on_epoch=lambda phase, record: epochs.append(phase))
            outcomes.append(work_on(growth, gallery, lambda: task, PLAN, callbacks))

        workers = [threading.Thread(target=work) for _ in range(2)]
        for thread in workers:
            thread.start()
        for thread in workers:
            thread.join()
        assert outcomes[0] == outcomes[1]
        assert len(epochs) == PLAN.seed_epochs
        models = [e for e in gallery.journal.read_all() if e["event"] == "model"]
        assert len(models) == 1


def test_the_watch_notices_a_worker_that_died(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "PULSE_SECONDS", 0.05)
    monkeypatch.setattr(worker, "LOST_SECONDS", 1.0)
    monkeypatch.setattr(worker, "SUSPECT_SECONDS", 0.4)
    alive, dead, queued = (Growth(f"g0000{i}", None, i, 0.0, 1) for i in range(3))
    watch = HeartbeatWatch(gallery)
    (gallery.work_folder(dead.id, 1) / "pulse").touch()
    began = time.monotonic()
    noticed: dict[str, float] = {}
    with beating(gallery.work_folder(alive.id, 1)):
        while time.monotonic() - began < 2.0:
            for growth in watch.silent([alive, dead, queued]):
                noticed.setdefault(growth.id, time.monotonic() - began)
            time.sleep(0.02)
        assert noticed.keys() == {dead.id}
        assert 0.9 < noticed[dead.id] < 1.9
        watch.suspect(queued)
        watch.suspect(alive)
        time.sleep(0.7)
        lost = {growth.id for growth in watch.silent([alive, dead, queued])}
        assert lost == {dead.id, queued.id}
        watch.forget(queued)
        assert queued not in watch.silent([queued])
        # The heartbeat of the worker that died is not that of the next one, which may queue.
        watch.forget(dead)
        watch.silent([alive, dead])
        time.sleep(1.1)
        assert watch.silent([alive, dead]) == []
        (gallery.work_folder(dead.id, 1) / "pulse").touch()
        watch.silent([dead])
        time.sleep(1.1)
        assert watch.silent([dead]) == [dead]


def test_a_heartbeat_is_not_written_through_a_link(gallery: Gallery, tmp_path: Path) -> None:
    folder = gallery.work_folder("g00000", 1)
    (folder / "pulse").symlink_to(tmp_path / "outside")
    with beating(folder):
        time.sleep(0.1)
    assert not (tmp_path / "outside").exists()


def test_a_worker_that_was_lost_before_this_start_is_not_counted(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "SUSPECT_SECONDS", -1.0)
    watch = HeartbeatWatch(gallery)
    with Coordinator(gallery, SETTINGS) as coordinator:
        for of_earlier_run in (True, False, False):
            growth = ask(coordinator)
            watch.suspect(growth, of_earlier_run)
            assert watch.give_back(coordinator) == [growth]
    events = [event["event"] for event in gallery.journal.read_all()]
    assert events == ["ask", "release", "ask", "release", "ask", "fail"]
