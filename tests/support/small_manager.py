"""NNI's manager, reduced to what tuner and trials notice of it: a search starts in milliseconds.

Tuner and trials are the real ones, each in a process of its own. They talk to the manager by pipes.
As under NNI, both end if their manager is gone, the tuner at once and a trial at its next report.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import yaml
from nni.runtime import trial_command_channel

from nni_petridish.nni_adapter import trial
from nni_petridish.nni_adapter import tuner as tuner_module
from nni_petridish.running.config import SearchConfig
from tests.support.chaos import finished_models
from tests.support.faults import Blow

SECONDS = 200
TRIAL_BUSY = 0.1
"""Seconds after which a trial is looked for again."""


class SmallManager:
    """A manager of one search.

    Parameters
    ----------
    config
        The configuration file.
    resumes
        Whether the tuner is told that NNI resumes an experiment.
    counted
        Whose system calls are counted: ``tuner``, ``trial`` or neither.
    blows
        Signals to tuner and trials, each after a pause.
    """

    def __init__(self, config: Path, resumes: bool, counted: str, blows: Sequence[Blow]) -> None:
        self._path, self._resumes, self._counted = config, resumes, counted
        self._config = SearchConfig.from_yaml(config)
        self._blows = list(blows)
        self._due = time.monotonic() + (blows[0].pause if blows else 0)
        self._trials: dict[int, tuple[int, int]] = {}  # pid: parameter id and pipe
        self._next = 0

    def run(self) -> int:
        """Run the search to its end; return 0, or the exit code of a tuner that ended before."""
        self._start_tuner()
        for _ in range(self._config.concurrency):
            self._ask()
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            self._hear()
            self._strike()
            code = _ended(self._tuner)
            if code is not None:
                return code if code > 0 else 3
            for pid, (id, pipe) in list(self._trials.items()):
                if (code := _ended(pid)) is not None:
                    del self._trials[pid]
                    os.close(pipe)
                    self._tell("end", id=id, success=code == 0)
                    self._ask()
            if not self._trials and self._is_done():
                os.close(self._to_tuner)
                os.waitpid(self._tuner, 0)
                return 0
        print("the search does not end")
        return 71

    def _is_done(self) -> bool:
        wanted = self._config.settings.limits.max_models
        return wanted is not None and len(finished_models(self._config)) >= wanted

    def _start_tuner(self) -> None:
        (read_commands, self._to_tuner), (self._from_tuner, answer) = os.pipe(), os.pipe()
        self._tuner = os.fork()
        if self._tuner == 0:
            os.close(self._to_tuner)
            os.close(self._from_tuner)
            with _or_traceback():
                if self._counted == "tuner":
                    ctypes.CDLL(None).faults_count_this_process()
                _be_tuner(self._path, self._resumes, read_commands, answer)
        os.close(read_commands)
        os.close(answer)
        self._answers = _Lines(self._from_tuner)

    def _start_trial(self, id: int, parameters: dict[str, Any]) -> None:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            # A copy of a pipe would keep the others alive after the manager.
            for descriptor in (read, self._to_tuner, self._from_tuner):
                os.close(descriptor)
            for _, pipe in self._trials.values():
                os.close(pipe)
            with _or_traceback():
                if self._counted == "trial":
                    ctypes.CDLL(None).faults_count_this_thread()
                trial_command_channel.set_default_trial_command_channel(
                    PipeChannel(id, parameters, write)
                )
                trial.run()
        os.close(write)
        self._trials[pid] = (id, read)

    def _ask(self) -> None:
        self._tell("ask", id=self._next)
        self._next += 1

    def _tell(self, command: str, **arguments: Any) -> None:
        with suppress(BrokenPipeError):  # it is noticed that the tuner has ended
            os.write(self._to_tuner, json.dumps({"command": command, **arguments}).encode() + b"\n")

    def _hear(self) -> None:
        """Read what tuner and trials say, for some milliseconds, and start new trials."""
        pipes = {pipe: id for id, pipe in self._trials.values()}
        ready, _, _ = select.select([self._from_tuner, *pipes], [], [], 0.02)
        for pipe in ready:
            if pipe != self._from_tuner:
                if b"FINAL" in os.read(pipe, 1 << 16):
                    self._tell("result", id=pipes[pipe])
                continue
            for answer in self._answers.read():
                self._start_trial(answer["id"], answer["parameters"])

    def _strike(self) -> None:
        """Send the next signal if its time has come."""
        if not self._blows or time.monotonic() < self._due:
            return
        blow = self._blows[0]
        victims = [self._tuner] if blow.victim == "tuner" else list(self._trials)
        if not victims:
            self._due = time.monotonic() + TRIAL_BUSY
            return
        os.kill(victims[-1], blow.number)
        print(f"struck: {blow.victim} by {signal.Signals(blow.number).name}", flush=True)
        del self._blows[0]
        if self._blows:
            self._due = time.monotonic() + self._blows[0].pause


class PipeChannel(trial_command_channel.TrialCommandChannel):
    """The side of a trial: its parameters, and a pipe for its reports."""

    def __init__(self, id: int, parameters: dict[str, Any], pipe: int) -> None:
        self._record = {"parameter_id": id, "parameters": parameters}
        self._pipe = pipe

    def receive_parameter(self) -> Any:
        """Return the parameters."""
        return self._record

    def send_metric(self, type: str, *arguments: Any, **named: Any) -> None:
        """Report; raises an error if the manager is gone."""
        os.write(self._pipe, f"{type}\n".encode())


class _Lines:
    """Reader of whole lines of JSON from a pipe."""

    def __init__(self, pipe: int) -> None:
        self._pipe, self._rest = pipe, b""

    def read(self) -> list[Any]:
        data = os.read(self._pipe, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]


def _be_tuner(config: Path, resumes: bool, commands: int, answers: int) -> NoReturn:
    tuner_module.CHECK_SECONDS = 0.05
    logging.getLogger("nni_petridish").setLevel(logging.WARNING)
    document = yaml.safe_load(config.read_text())
    os.chdir(config.parent)
    tuner = tuner_module.PetridishTuner(**document["tuner"]["classArgs"])
    if resumes:
        tuner.load_checkpoint()

    def send(id: int, parameters: dict[str, Any]) -> None:
        os.write(answers, json.dumps({"id": id, "parameters": parameters}).encode() + b"\n")

    tuner.update_search_space(document["searchSpace"])
    handlers: dict[str, Callable[..., Any]] = {
        "ask": lambda id: _hand_out(tuner, id, send),
        "end": lambda id, success: tuner.trial_end(id, success),
        "result": lambda id: tuner.receive_trial_result(id, {}, {}),
    }
    for line in os.fdopen(commands):
        command = json.loads(line)
        handlers[command.pop("command")](**command)
    os._exit(0)


def _hand_out(
    tuner: tuner_module.PetridishTuner, id: int, send: Callable[[int, dict[str, Any]], None]
) -> None:
    for parameters in tuner.generate_multiple_parameters([id], st_callback=send):
        send(id, parameters)


def _ended(pid: int) -> int | None:
    """Return the exit code of a child; None if it lives."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


@contextmanager
def _or_traceback() -> Iterator[None]:
    """Run the body of a forked child, which never returns to its caller's."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(70)
