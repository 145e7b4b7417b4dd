"""Metrics between an evaluator and NNI.

An evaluator trains more than once in a growth and reports each training as if it were the whole
trial. Its reports go to a listener instead. Intermediate results are passed on to NNI with their
phase, and the only final result of the trial is that of the growth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from nni.runtime.env_vars import trial_env_vars
from nni.runtime.trial_command_channel import (
    TrialCommandChannel,
    get_default_trial_command_channel,
)

from nni_petridish.errors import TrainingError
from nni_petridish.nni_adapter.compat.patches import trial_parameters


def to_record(value: Any, metric: str = "default") -> dict[str, float]:
    """Return the numbers of an evaluator's report, the metric of the search as ``metric``.

    >>> to_record(0.5)
    {'metric': 0.5}
    >>> to_record({"default": 0.5, "loss": 1.5, "note": "so so"})
    {'metric': 0.5, 'loss': 1.5}
    """
    found = value if isinstance(value, Mapping) else {metric: value}
    if metric not in found:
        raise TrainingError(
            f"the evaluator must report the metric {metric!r} but reported {', '.join(found)}."
        )
    record = {"metric": _number(metric, found[metric])}
    for name, other in found.items():
        if name != metric and isinstance(other, int | float) and not isinstance(other, bool):
            record[str(name)] = float(other)
    return record


class Listener(TrialCommandChannel):
    """A channel that receives the reports of an evaluator and sends none of them to NNI.

    Parameters
    ----------
    on_intermediate
        Callback that gets every intermediate result.

    Attributes
    ----------
    last
        The last final result; without one, the last intermediate result; None before any.
    """

    def __init__(self, on_intermediate: Callable[[Any], object]) -> None:
        self.last: Any = None
        self._is_final = False
        self._on_intermediate = on_intermediate

    def receive_parameter(self) -> Any:
        """Return the parameters of the trial; a placeholder outside of NNI."""
        return trial_parameters() or {"parameter_id": 0, "parameters": {}}

    def send_metric(
        self, type: str, parameter_id: Any, trial_job_id: str, sequence: int, value: Any
    ) -> None:
        """Receive a result."""
        if type == "FINAL":
            self.last, self._is_final = value, True
            return
        if not self._is_final:
            self.last = value
        self._on_intermediate(value)


class Reporter:
    """Sender of a growth's results to NNI, also while a `Listener` receives its evaluator's."""

    def __init__(self) -> None:
        self._channel = get_default_trial_command_channel()
        self._count = 0

    def intermediate(self, value: Mapping[str, Any]) -> None:
        """Report progress; the web UI draws ``default``."""
        self._send("PERIODICAL", value, self._count)
        self._count += 1

    def final(self, value: Mapping[str, Any]) -> None:
        """Report the result."""
        self._send("FINAL", value, 0)

    def _send(self, type: str, value: Mapping[str, Any], sequence: int) -> None:
        parameters = trial_parameters()
        self._channel.send_metric(
            type=type,
            parameter_id=parameters["parameter_id"] if parameters else None,
            trial_job_id=trial_env_vars.NNI_TRIAL_JOB_ID,
            sequence=sequence,
            value=dict(value),
        )


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TrainingError(
            f"the evaluator must report numbers but {name!r} is {value!r}."
        ) from None
    if not math.isfinite(number):
        raise TrainingError(f"the evaluator's metric {name!r} is not finite: {number}.")
    return number
