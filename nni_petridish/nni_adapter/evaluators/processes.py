"""Lightning evaluators that train in several processes, as ``strategy="ddp_fork"`` does.

Lightning returns the weights, including α, to the process that started the others, but neither the
reports to NNI nor the number of epochs. This module returns both.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import nni
import torch
import torch.distributed
from nni.runtime.trial_command_channel import TrialCommandChannel
from pytorch_lightning import Callback
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher
from torch.multiprocessing.spawn import ProcessException

from nni_petridish.errors import ConfigError, TrainingError
from nni_petridish.nni_adapter.compat.patches import set_trial_channel

_END = "END"


def check_processes(name: str, trainer: Any) -> None:
    """Raise `ConfigError` if the processes of a trainer are not started by this one."""
    if trainer.world_size == 1 or (_starts_processes(trainer) and trainer.num_nodes == 1):
        return
    asked = trainer.trace_kwargs.get("strategy", "auto")
    raise ConfigError(
        f"the {name} evaluator must not train with strategy={asked!r} in {trainer.world_size}"
        " processes, since each of them would run the whole search: use strategy='ddp_fork' (or"
        " 'ddp_spawn') on one machine, or a device for each of NNI's workers (trial_gpu_number)."
    )


@contextmanager
def reports_from_all(trainer: Any) -> Iterator[None]:
    """Report the results of all processes of a trainer from this one, when they are done.

    Every process has its share of the validation set. Numbers that all of them report are averaged,
    as with Lightning's ``sync_dist=True``.
    """
    if not _starts_processes(trainer):
        yield
        return
    if (
        torch.distributed.is_initialized()
    ):  # a forked process would wait for threads that it does not have
        raise TrainingError(
            "this process is part of a process group already, of an evaluator with strategy='ddp'"
            " say: it cannot start processes that train."
        )
    with tempfile.TemporaryDirectory(prefix="petridish-") as folder:
        trainer.callbacks.append(_ReportToFile(folder))
        try:
            yield
        except ProcessException as error:
            raise TrainingError(str(error).strip().splitlines()[-1]) from error
        for report in _merged([_read(path) for path in sorted(Path(folder).iterdir())]):
            trainer.fit_loop.epoch_progress.current.completed = report.epoch
            if report.type == "FINAL":
                nni.report_final_result(report.value)
            elif report.type != _END:
                nni.report_intermediate_result(report.value)


class _Report(NamedTuple):
    type: str
    epoch: int
    value: Any


class _ReportToFile(Callback):
    """Lightning callback that writes the reports of each process to a file of its own."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.channel: _FileChannel | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if trainer.strategy.launcher._start_method == "fork":
            torch.set_num_threads(1)  # OpenMP waits for threads that a fork does not copy
        path = Path(self.folder) / f"{trainer.global_rank:06d}"
        self.channel = _FileChannel(path, trainer)
        set_trial_channel(self.channel)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        assert self.channel is not None
        self.channel.write(_END, None)


class _FileChannel(TrialCommandChannel):
    def __init__(self, path: Path, trainer: Any) -> None:
        self.path, self.trainer = path, trainer

    def receive_parameter(self) -> Any:
        return {"parameter_id": 0, "parameters": {}}

    def send_metric(
        self, type: str, parameter_id: Any, trial_job_id: str, sequence: int, value: Any
    ) -> None:
        self.write(type, value)

    def write(self, type: str, value: Any) -> None:
        line = nni.dump([type, int(self.trainer.current_epoch), value])
        with self.path.open("a", encoding="utf-8") as file:
            print(line, file=file)


def _starts_processes(trainer: Any) -> bool:
    return isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)


def _read(path: Path) -> list[_Report]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [_Report(*nni.load(line)) for line in lines]


def _merged(of_processes: Sequence[Sequence[_Report]]) -> Iterator[_Report]:
    """Yield means over the processes if all report the same epochs, else the first's reports."""
    steps = [[report[:2] for report in reports] for reports in of_processes]
    if all(others == steps[0] for others in steps):
        for reports in zip(*of_processes, strict=True):
            yield reports[0]._replace(value=_mean([report.value for report in reports]))
    else:
        yield from of_processes[0]


def _mean(values: Sequence[Any]) -> Any:
    if all(isinstance(value, int | float) for value in values):
        return sum(values) / len(values)
    if all(isinstance(value, Mapping) and value.keys() == values[0].keys() for value in values):
        return {key: _mean([value[key] for value in values]) for key in values[0]}
    return values[0]
