from __future__ import annotations

import argparse
import io
import json
import logging
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from nni_petridish.cli import _PresentStderr, main
from nni_petridish.registry import PERPLEXITY
from nni_petridish.running.display import Headline, Lines, headline_of, open_display
from nni_petridish.running.live import Live, duration
from nni_petridish.running.watch import EpochLines, VerboseLines, Watch
from nni_petridish.running.worker_report import REPORT_FILE
from nni_petridish.search.records import Outcome
from nni_petridish.search.search import Search
from nni_petridish.search.settings import Limits, SearchSettings
from tests.support.chaos import write_config


def write_report(folder: Path, epoch: int, name: str = "g00003", left: float | None = 31.0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    values = {"version": 1, "name": name, "phase": "weak", "epoch": epoch, "epochs": 5}
    values |= {"share": epoch / 10, "text": f"loss 0.{epoch}", "seconds_left": left}
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
        "digits · 2/8 models · best error 0.0500 (g00001), hull 2 · 0:00",
    ]
    write_report(tmp_path / "work" / "g00003-0", 3)
    write_report(tmp_path / "work" / "g00004-1", 1, "g00004", left=None)
    head, first, second = drawn(live)
    assert "left" in head
    assert first.startswith("g00003  weak  ━━━━━━")
    assert first.endswith("epoch 3/5  loss 0.3  0:31 left")
    assert second.startswith("g00004  weak")
    assert all(len(line) <= 40 for line in drawn(live, width=40))
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
    assert [report.epoch for report, _ in watch.workers()] == [2]
    write_report(tmp_path / "b", 1, "other")
    assert [report.name for report, _ in watch.workers()] == ["g00003", "other"]


def test_lines_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    with Lines() as lines:
        for done in (0, 0, 1):
            lines.show(Headline(done, 8, "models", "best error 0.1"))
        lines.show(Headline(1, None, "models", "best error 0.1"))
        lines.say("done")
    assert capsys.readouterr().out.splitlines() == [
        "0 of at most 8 models, best error 0.1",
        "1 of at most 8 models, best error 0.1",
        "1 models, best error 0.1",
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
        1, 3, "models", "best perplexity 57.2500 (g00000), hull 1"
    )


def test_durations_are_short() -> None:
    assert [duration(s) for s in (0, 59.9, 61, 3600, 360000)] == [
        "0:00",
        "0:59",
        "1:01",
        "1 h 00",
        "100 h 00",
    ]


def run_in_terminal(arguments: list[str], until: str, seconds: float = 60) -> tuple[int, str]:
    """Run the command on a terminal; press Ctrl-C when a text appears. Return code and output."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(
        [sys.executable, "-m", "nni_petridish.cli", *arguments],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment,
        start_new_session=True,
    )
    os.close(follower)
    output, asked, end = "", False, time.monotonic() + seconds
    while time.monotonic() < end:
        if select.select([leader], [], [], 0.2)[0]:
            try:
                output += os.read(leader, 65536).decode(errors="replace")
            except OSError:  # the process has closed the terminal
                break
        if until in output and not asked:
            asked = True
            process.send_signal(signal.SIGINT)
    os.close(leader)
    return process.wait(10), re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", output)


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
