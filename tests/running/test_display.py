from __future__ import annotations

import argparse
import io
import json
import logging
import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from nni_petridish.__main__ import _PresentStderr, main
from nni_petridish.registry import PERPLEXITY
from nni_petridish.running.display import Headline, Lines, headline_of, open_display
from nni_petridish.running.live import Live
from nni_petridish.running.pace import Pace, duration
from nni_petridish.running.watch import EpochLines, VerboseLines, Watch
from nni_petridish.running.worker_report import REPORT_FILE
from nni_petridish.search.records import Outcome
from nni_petridish.search.search import Search
from nni_petridish.search.settings import Limits, SearchSettings
from tests.support.chaos import write_config
from tests.support.terminal import run_in_terminal


def write_report(
    folder: Path,
    epoch: int,
    name: str = "g00003",
    left: float | None = 31.0,
    before: float = 0.0,
    unit: str = "epoch",
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    values = {"version": 1, "name": name, "phase": "weak", "epoch": epoch, "epochs": 5}
    values |= {"share": epoch / 10, "text": f"loss 0.{epoch}", "seconds_left": left}
    values |= {"before": before, "unit": unit}
    path = folder / REPORT_FILE
    path.write_text(json.dumps(values))
    os.utime(path, ns=(epoch * 10**9, epoch * 10**9))


def drawn(live: Live, width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(live.render())
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_live_display_has_a_line_for_each_worker(tmp_path: Path) -> None:
    live = Live("digits", Watch(tmp_path, ("work/*",)), console=Console(file=io.StringIO()))
    live.show(Headline(2, 8, "models", "best error 0.0500 (g00001), hull 2"))
    assert drawn(live) == [
        "digits · 2/8 models · best error 0.0500 (g00001), hull 2 · 0 s",
    ]
    write_report(tmp_path / "work" / "g00003-0", 3)
    write_report(tmp_path / "work" / "g00004-1", 1, "g00004", left=None)
    head, first, second = drawn(live)
    assert "left" in head
    assert first.startswith("g00003  weak  ━━━━━━")
    assert first.endswith("epoch 3/5  loss 0.3  31 s left")
    assert second.startswith("g00004  weak")
    assert all(len(line) <= 40 for line in drawn(live, width=40))
    narrow = drawn(live, width=60)
    assert narrow[0].startswith("digits · 2/8 models · ")
    assert narrow[0].endswith(" left")  # the time left is never cut off
    assert narrow[1] == "best error 0.0500 (g00001), hull 2"
    assert narrow[2].endswith("epoch 3/5  loss 0.3  31 s left")
    live.stopping()
    assert drawn(live)[-1].startswith("Stopping;")
    (tmp_path / "work" / "g00003-0" / REPORT_FILE).unlink()
    assert not any("g00003" in line for line in drawn(live))


def test_the_report_of_a_killed_worker_is_not_shown_until_it_changes(tmp_path: Path) -> None:
    write_report(tmp_path / "a", 1)
    watch = Watch(tmp_path, ("*",))
    assert watch.workers() == []
    assert watch.workers() == []
    write_report(tmp_path / "a", 2)
    assert [worker.report.epoch for worker in watch.workers()] == [2]
    write_report(tmp_path / "b", 1, "other")
    assert [worker.report.name for worker in watch.workers()] == ["g00003", "other"]


def test_lines_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    with Lines() as lines:
        for done in (0, 0, 1):
            lines.show(Headline(done, 8, "models", "best error 0.1", is_limit=True))
        lines.show(Headline(1, None, "models", "best error 0.1"))
        lines.show(Headline(8, 8, "runs", ""))
        lines.say("done")
    assert capsys.readouterr().out.splitlines() == [
        "0 of at most 8 models, best error 0.1",
        "1 of at most 8 models, best error 0.1, about 0 s left",
        "1 models, best error 0.1",
        "8 of 8 runs",
        "done",
    ]
    with Lines(is_quiet=True) as lines:
        lines.show(Headline(1, None, "models", ""))
        lines.say("done")
    assert capsys.readouterr().out == ""


def test_epochs_are_told_once(tmp_path: Path) -> None:
    epochs = EpochLines(Watch(tmp_path, ("*",)))
    assert epochs.new() == []
    write_report(tmp_path / "a", 1)
    assert epochs.new() == ["g00003 weak, epoch 1/5, loss 0.1"]
    assert epochs.new() == []
    write_report(tmp_path / "a", 2)
    assert epochs.new() == ["g00003 weak, epoch 2/5, loss 0.2"]
    write_report(tmp_path / "b", 2)
    assert epochs.new() == ["g00003 weak, epoch 2/5, loss 0.2"]  # another run's


def test_steps_are_told_once_for_each_phase(tmp_path: Path) -> None:
    epochs = EpochLines(Watch(tmp_path, ("*",)))
    epochs.new()
    for step in (1, 2):
        write_report(tmp_path / "a", step, unit="step")
        assert epochs.new() == (["g00003 weak, step 1/5, loss 0.1"] if step == 1 else [])


def test_workers_are_named_after_the_run_they_work_on(tmp_path: Path) -> None:
    watch = Watch(tmp_path, ("*/work/*",), {tmp_path / "a": "random, seed 0"})
    watch.workers()
    write_report(tmp_path / "a" / "work" / "x", 1)
    write_report(tmp_path / "b" / "work" / "x", 1)
    names = [worker.report.name for worker in watch.workers()]
    assert names == ["random, seed 0: g00003", "g00003"]


def test_the_time_left_follows_from_the_pace_of_this_run() -> None:
    now = 100.0
    pace = Pace(lambda: now)
    assert pace.seconds_left(1, 5) is None
    pace.begin(1)
    pace.begin(3)  # the first one counts
    now = 110.0
    assert pace.seconds_left(1, 5) is None
    assert pace.seconds_left(2, 5) == 30
    assert pace.seconds_left(5, 5) is None
    assert pace.seconds_left(1.05, 5) is None  # too early to say
    assert Headline(2, 5, "models", "").left(pace) == "about 30 s left"
    # A worker is at 0.9 of its unit, of which it found 0.8: 0.1 + 1 units here, 2.1 are left.
    assert Headline(2, 5, "models", "").left(pace, 0.9, 0.8) == "about 19 s left"
    assert Headline(2, 5, "runs", "", has_parts=False).left(pace, 0.9, 0.8) == "about 30 s left"
    assert Headline(2, None, "models", "").left(pace) == ""


def test_work_that_was_resumed_does_not_count_for_the_pace(tmp_path: Path) -> None:
    live = Live("x", Watch(tmp_path, ("*",)), console=Console(file=io.StringIO()))
    live.show(Headline(0, 1, "repetitions", ""))
    drawn(live)
    write_report(tmp_path / "run-0", 8, before=0.8)
    assert "about" not in drawn(live)[0]
    write_report(tmp_path / "run-0", 9, before=0.8)
    assert "about" in drawn(live)[0]


def test_without_a_terminal_there_are_lines(tmp_path: Path) -> None:
    for quiet, verbose, kind in ((True, False, Lines), (False, True, VerboseLines)):
        options = argparse.Namespace(quiet=quiet, verbose=verbose)
        assert type(open_display(options, "x", tmp_path, ["*"])) is kind


def test_perplexity_is_not_called_error() -> None:
    search = Search(SearchSettings(limits=Limits(max_models=3)))
    assert headline_of(search, PERPLEXITY).text == "training the seed"
    search.ask()
    search.tell(Outcome("g00000", 57.25, 1000, 100, epochs=1))
    assert headline_of(search, PERPLEXITY) == Headline(
        1, 3, "models", "best perplexity 57.2500 (g00000), hull 1", is_limit=True
    )


def test_durations_are_short() -> None:
    assert [duration(s) for s in (0, 59.9, 61, 3600, 360000)] == [
        "0 s",
        "59 s",
        "1:01 min",
        "1:00 h",
        "100:00 h",
    ]


def test_ctrl_c_keeps_what_is_found_and_says_how_to_go_on(tmp_path: Path) -> None:
    config = write_config(tmp_path, models=50)
    code, output = run_in_terminal(["search", str(config)], until="1 of at most 50 models")
    assert code == 130
    assert "gallery · 0/50 models · training the seed" in output
    assert f"nni-petridish search {config} --resume" in output
    assert "Traceback" not in output
    last = output[output.index("Stopped: ") :]
    assert "finished model" in last


def test_a_search_says_one_line_for_each_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, models=1)
    assert main(["search", str(config), "--verbose"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[0] == "0 of at most 1 models, training the seed"
    assert "1 of at most 1 models, best error" in printed
    assert main(["search", str(config), "--quiet", "--resume"]) == 0
    assert "at most" not in capsys.readouterr().out


def test_warnings_go_to_the_present_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = _PresentStderr()
    for _ in range(2):
        present = io.StringIO()
        monkeypatch.setattr(sys, "stderr", present)
        handler.emit(logging.LogRecord("x", logging.WARNING, "", 0, "seen", None, None))
        assert present.getvalue() == "seen\n"
