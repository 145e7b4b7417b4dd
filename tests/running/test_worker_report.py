from __future__ import annotations

import json
from pathlib import Path

import pytest

from nni_petridish.errors import Interrupted
from nni_petridish.running.config import SearchConfig
from nni_petridish.running.runner import run_search
from nni_petridish.running.worker_report import (
    REPORT_FILE,
    WorkerReport,
    read_report,
    reporting,
)
from nni_petridish.tasks.task import Callbacks, Progress, Record
from tests.support.chaos import write_config


def test_a_search_reports_phase_epoch_and_loss_while_it_trains(tmp_path: Path) -> None:
    config = SearchConfig.from_yaml(write_config(tmp_path, models=2))
    seen: list[WorkerReport] = []

    def look() -> bool:
        paths = config.gallery.glob(f"work/*/{REPORT_FILE}")
        seen.extend(report for report in map(read_report, paths) if report is not None)
        return False

    search = run_search(config, callbacks=Callbacks(should_stop=look))
    assert [r.id for r in search.models()] == ["g00000", "g00001"]
    assert {(r.name, r.phase) for r in seen} == {
        ("g00000", "seed"),
        ("g00001", "weak"),
        ("g00001", "final"),
    }
    assert all(
        1 <= r.epoch <= r.epochs == 2 and r.text.startswith(("loss ", "starting")) for r in seen
    )
    grown = [r.share for r in seen if r.name == "g00001"]
    assert grown == sorted(grown)
    assert max(grown) <= 1
    assert not list(config.gallery.rglob(REPORT_FILE))


def test_reports_are_written_at_a_bounded_rate_and_removed(tmp_path: Path) -> None:
    passed: list[tuple[str, float]] = []
    callbacks = Callbacks(
        on_epoch=lambda phase, record: passed.append((phase, record["epoch"])),
        on_progress=lambda phase, progress: passed.append((phase, progress.done)),
    )
    path = tmp_path / REPORT_FILE
    with reporting(tmp_path, "g00001", {"weak": 4, "final": 6}, callbacks) as told:
        assert told.on_progress is not None
        told.on_progress("weak", Progress(4, 0.5, "loss 1.0"))
        first = path.read_bytes()
        told.on_progress("weak", Progress(4, 0.6, "loss 0.9"))
        assert path.read_bytes() == first
        told.on_epoch("final", {"epoch": 1, "validation_loss": 0.5})
        report = read_report(path)
    assert report == WorkerReport("g00001", "final", 2, 6, 0.5, "loss 0.500", None)
    assert passed == [("weak", 0.5), ("weak", 0.6), ("final", 1)]
    assert not path.exists()


def test_a_report_says_what_was_done_before_the_worker_resumed(tmp_path: Path) -> None:
    for call, before in (("epoch", 0.5), ("progress", 0.6)):
        with reporting(tmp_path, "g00001", {"weak": 4, "final": 6}, Callbacks()) as told:
            assert told.on_progress is not None
            if call == "epoch":
                told.on_epoch("final", {"epoch": 2, "loss": 0.5})  # the second one ends
            else:
                told.on_progress("final", Progress(6, 2.5, "loss 0.5"))
            report = read_report(tmp_path / REPORT_FILE)
        assert report is not None
        assert report.before == before


def test_a_report_that_cannot_be_written_harms_nothing(tmp_path: Path) -> None:
    with reporting(tmp_path / "gone", "g00001", {"weak": 4}, Callbacks()) as told:
        told.on_epoch("weak", {"epoch": 1, "loss": 0.5})

    def stop(phase: str, record: Record) -> None:
        assert (tmp_path / REPORT_FILE).exists()
        raise Interrupted("now")

    stopping = reporting(tmp_path, "g00001", {"weak": 4}, Callbacks(stop))
    with pytest.raises(Interrupted), stopping as told:
        told.on_epoch("weak", {"epoch": 1, "loss": 0.5})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b'{"version": 2}', b'{"version": 1}', b'{"version": 1, "name": 3}', b"\xff"],
)
def test_what_is_no_report_is_passed_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / REPORT_FILE).write_bytes(content)
    assert read_report(tmp_path / REPORT_FILE) is None
    values = {"version": 1, "name": "a", "phase": "b", "epoch": "x", "epochs": 2, "share": 0}
    (tmp_path / REPORT_FILE).write_text(json.dumps(values))
    assert read_report(tmp_path / REPORT_FILE) is None
