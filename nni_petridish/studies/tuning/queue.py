"""The choice of the next trial, for any number of processes that work on one study.

A study of N trials is N settings, each tried once. Whoever has nothing to do takes the next one:
first what waits (the default setting, settings that lost their process), then a new one that the
sampler proposes. Processes take turns by a lock in the study's folder, because not every storage
hands out a waiting trial to one of two at the same moment only (SQLite does not).

A process shows that it lives by a heartbeat in its trial's attributes. Optuna's own heartbeat is
experimental, knows no journal files, and never misses a trial that died before its first beat.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import optuna
import psutil
from optuna.exceptions import OptunaError, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from nni_petridish.gallery.locks import file_lock
from nni_petridish.running.heartbeat import Heartbeat
from nni_petridish.search.ranges import quiet
from nni_petridish.studies.tuning.section import TuningSettings, Values
from nni_petridish.studies.tuning.settings import Tuning
from nni_petridish.studies.tuning.storage import LOCK_FILE, distributions_of

BEATS = 6
"""Beats before silence counts as death."""
MAX_LOSSES = 3
"""A trial that took so many processes with it is given up."""
PULSE, OWNER, LOSSES, CONTINUES = "pulse", "owner", "losses", "continues"


class Queue:
    """The trials of a study, for one process.

    Parameters
    ----------
    study
        The study.
    tuning
        Its settings.
    sampler
        The sampler, in place of the one that the settings name.
    """

    def __init__(
        self,
        study: optuna.Study,
        tuning: Tuning,
        sampler: optuna.samplers.BaseSampler | None = None,
    ) -> None:
        self._study, self._tuning, self._sampler = study, tuning, sampler
        self._distributions = distributions_of(tuning.section.space)
        self._lock = tuning.folder / LOCK_FILE
        self._seen: dict[int, tuple[Any, float]] = {}

    def take(self) -> Trial | None:
        """Start the next trial; None if there is none to start now."""
        with file_lock(self._lock), quiet():
            trials = self._revive(self._trials())
            if not trials:
                self._enqueue_first()
                trials = self._trials()
            begun = [t for t in live(trials) if t.state != TrialState.WAITING]
            if len(begun) >= self._tuning.section.trials:
                return None
            waiting = any(t.state == TrialState.WAITING for t in trials)
            if self._tuning.section.sampler == "grid" and not waiting:
                return None
            self._study.sampler = self._sampler or make_sampler(self._tuning.section, len(trials))
            trial = self._study.ask(self._distributions)
            trial.set_user_attr(OWNER, whoami())
            return trial

    def is_done(self) -> bool:
        """Return whether no trial of the study is running, but for those of other code."""
        running = [t for t in self._trials() if t.state == TrialState.RUNNING]
        return not any(OWNER in trial.user_attrs for trial in running)

    def neighbors(self) -> int:
        """Return how many trials of the study run on this machine."""
        owners = [t.user_attrs.get(OWNER) for t in self._trials() if t.state == TrialState.RUNNING]
        here = [owner for owner in owners if owner and owner[0] == _machine()]
        return sum(not is_gone(owner) for owner in here)

    def put_back(self, trial: Trial) -> None:
        """Put back a trial that was stopped, to be continued later."""
        with file_lock(self._lock), quiet():
            self._requeue(self._study.trials[trial.number], lost=False)

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _enqueue_first(self) -> None:
        """Queue the default setting, so that no study ends worse than it; or the whole grid."""
        default, section = self._tuning.default(), self._tuning.section
        settings: list[Values] = [default] if default else []
        if section.sampler == "grid":
            names = list(section.space)
            points = itertools.product(*(section.space[name].grid() for name in names))
            grid = [dict(zip(names, point, strict=True)) for point in points]
            settings = sorted(grid, key=lambda values: values != default)[: section.trials]
        for values in settings:
            self._study.enqueue_trial(values)

    def _revive(self, trials: list[FrozenTrial]) -> list[FrozenTrial]:
        lost = [trial for trial in trials if self._is_lost(trial)]
        for trial in lost:
            self._requeue(trial, lost=True)
        return self._trials() if lost else trials

    def _is_lost(self, trial: FrozenTrial) -> bool:
        if trial.state != TrialState.RUNNING or OWNER not in trial.user_attrs:
            return False  # a trial without an owner is of other code, which will end it
        if is_gone(trial.user_attrs.get(OWNER)):
            return True
        # By the clock of this machine alone: those of others may go wrong.
        now, pulse = time.monotonic(), trial.user_attrs.get(PULSE)
        known, since = self._seen.get(trial.number, (None, now))
        if known != pulse or trial.number not in self._seen:
            self._seen[trial.number] = (pulse, now)
            return False
        return now - since > self._tuning.section.lost_after

    def _requeue(self, trial: FrozenTrial, lost: bool) -> None:
        """End a trial as failed and queue its setting again, to go on in the same galleries."""
        try:
            self._study.tell(trial.number, state=TrialState.FAIL)
        except (OptunaError, ValueError):
            return  # it has ended in the meantime
        attributes = dict(trial.user_attrs)
        losses = attributes.get(LOSSES, 0) + int(lost)
        if losses >= MAX_LOSSES:
            return
        chain = [*attributes.get(CONTINUES, []), trial.number]
        for name in (OWNER, PULSE):
            attributes.pop(name, None)
        self._study.add_trial(
            create_trial(
                state=TrialState.WAITING,
                params=trial.params,
                distributions=trial.distributions,
                user_attrs={**attributes, CONTINUES: chain, LOSSES: losses},
                system_attrs=trial.system_attrs,
            )
        )


def live(trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    """Return the trials without those that another one continues: one for each setting."""
    found = list(trials)
    continued = {number for trial in found for number in trial.user_attrs.get(CONTINUES, [])}
    return [trial for trial in found if trial.number not in continued]


def first_number(trial: Trial | FrozenTrial) -> int:
    """Return the number under which the setting of a trial was first tried."""
    return int([*trial.user_attrs.get(CONTINUES, []), trial.number][0])


def make_sampler(section: TuningSettings, number: int) -> optuna.samplers.BaseSampler:
    """Return the sampler for the trial with this number.

    Each trial has its own random numbers: a process that starts anew, or beside another one,
    does not propose the same settings again.
    """
    samplers = optuna.samplers
    digest = hashlib.sha256(f"tuning:{section.seed}:{number}".encode()).digest()
    seed = int.from_bytes(digest[:4], "big")
    # Whole searches are dear: Optuna's defaults would leave most of a study to chance.
    startup = min(10, max(3, section.trials // 3))
    if section.sampler == "tpe":
        return samplers.TPESampler(seed=seed, n_startup_trials=startup)
    if section.sampler == "gp":
        return samplers.GPSampler(seed=seed, n_startup_trials=startup)
    if section.sampler == "nsgaii":
        population = min(50, max(4, section.trials // 4))
        return samplers.NSGAIISampler(seed=seed, population_size=population)
    return samplers.RandomSampler(seed=seed)


class TrialHeartbeat(Heartbeat):
    """Shows that the process of a trial is alive, and notices when others think it is not.

    Parameters
    ----------
    trial
        The trial.
    seconds
        Time between two beats.
    """

    def __init__(self, trial: Trial, seconds: float) -> None:
        super().__init__(self._show, seconds, at_once=False)
        self._trial, self._beats = trial, itertools.count(1)
        self._given_up = threading.Event()

    def is_given_up(self) -> bool:
        """Return whether another process has taken the trial over."""
        return self._given_up.is_set()

    def _show(self) -> bool:
        try:
            self._trial.set_user_attr(PULSE, next(self._beats))
        except UpdateFinishedTrialError:
            self._given_up.set()
            return False
        except Exception:
            pass  # the storage is out of reach for a moment: the next beat will tell
        return True


def whoami() -> list[Any]:
    """Name this process, so that others on the same machine can tell whether it lives."""
    return [_machine(), os.getpid(), round(psutil.Process().create_time(), 1)]


def is_gone(owner: list[Any] | None) -> bool:
    """Return whether a process is known to have ended; False for other machines."""
    if not owner or owner[0] != _machine():
        return False
    try:
        return abs(psutil.Process(owner[1]).create_time() - owner[2]) > 1.0
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def _machine() -> str:
    """Name the machine since its start; containers count as machines of their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {psutil.boot_time():.0f}"
