"""Changes to NNI's Python code, and one to torch's, each with its reason."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import nni
import nni.trial
import torch
from nni.runtime.trial_command_channel import (
    TrialCommandChannel,
    get_default_trial_command_channel,
    set_default_trial_command_channel,
)
from nni.runtime.tuner_command_channel import CommandType, TunerCommandChannel

from nni_petridish.nni_adapter.compat.nas import NasExperimentConfig

_log = logging.getLogger("nni.petridish")  # NNI prints and keeps what is logged below its name
_FOR_TUNERS = (CommandType.ImportData, CommandType.AddCustomizedTrialJob)


@functools.cache
def run_in_process_by_default(kind: type) -> None:
    """Make experiments without a configuration run a strategy in this process, for good.

    NNI does so for its one-shot strategies only. A user who replaces one of them keeps an evaluator
    that was never meant to be sent to another process.

    Parameters
    ----------
    kind
        Class of the strategy.
    """
    default = NasExperimentConfig.default

    def default_config(cls: Any, model_space: Any, evaluator: Any, strategy: Any) -> Any:
        if isinstance(strategy, kind):
            return cls(execution_engine="sequential", model_format="simplified")
        return default(model_space, evaluator, strategy)

    NasExperimentConfig.default = classmethod(default_config)


@functools.cache
def skip_commands_for_tuners() -> None:
    """Make the NAS engine skip commands that are meant for tuners, for good.

    NNI's manager sends them when an experiment is resumed. The engine's listener thread dies of
    them, and no trial would ever start.
    """
    receive = TunerCommandChannel._receive

    def receive_for_strategy(channel: Any) -> Any:
        while True:
            command, content = receive(channel)
            if command not in _FOR_TUNERS:
                return command, content
            _log.debug("Skipped %s, which is not for strategies.", command)

    TunerCommandChannel._receive = receive_for_strategy


@contextmanager
def creating(kind: Any, create: Callable[..., Any]) -> Iterator[None]:
    """Make modules of a class by a function of ours while NNI builds a network.

    NNI calls the class method ``create_fixed_module`` under `model_context` and has no hook to put
    another module in the place of a cell or a choice.

    Parameters
    ----------
    kind
        Class of NNI's cells or choices.
    create
        Called in place of ``create_fixed_module``, with the class as its first argument.
    """
    own = kind.__dict__.get("create_fixed_module")

    def created(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return create(cls, *args, **kwargs)

    kind.create_fixed_module = classmethod(created)
    try:
        yield
    finally:
        if own is None:
            del kind.create_fixed_module
        else:
            kind.create_fixed_module = own


def set_trial_channel(channel: TrialCommandChannel) -> None:
    """Send all reports of this process to a channel.

    NNI has the function, but drops reports in a process that has not asked for its parameters, and
    asks the channel for them only once.
    """
    set_default_trial_command_channel(channel)
    if nni.trial._params is None:
        nni.get_next_parameter()


@contextmanager
def trial_channel(channel: TrialCommandChannel) -> Iterator[None]:
    """Send all reports of a block to a channel, then restore channel and parameters."""
    before, parameters = get_default_trial_command_channel(), nni.trial._params
    try:
        set_trial_channel(channel)
        yield
    finally:
        set_default_trial_command_channel(before)
        nni.trial._params = parameters


def trial_parameters() -> Any:
    """Return the parameters that NNI gave to this trial; None outside of a trial.

    NNI has no function that reads them without asking for the next ones.
    """
    return nni.trial._params


@contextmanager
def lbfgs_of_any_layout() -> Iterator[None]:
    """Make LBFGS accept gradients in channels_last in this context.

    It flattens gradients by ``view``, which fails on those of networks that grow: their kernels are
    in channels_last. Contiguous gradients give the same numbers.
    """
    own = torch.optim.LBFGS._gather_flat_grad

    def gather(optimizer: torch.optim.LBFGS) -> torch.Tensor:
        for parameter in optimizer._params:
            if parameter.grad is not None and not parameter.grad.is_sparse:
                parameter.grad = parameter.grad.contiguous()
        return own(optimizer)

    torch.optim.LBFGS._gather_flat_grad = gather  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.optim.LBFGS._gather_flat_grad = own  # type: ignore[method-assign]
