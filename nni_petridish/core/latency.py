"""Measured latency of a network on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nni_petridish.core.complexity import count_parameters
from nni_petridish.core.grow import genotype_of
from nni_petridish.core.modes import evaluation_mode

_WARM_RUNS, _RUNS = 3, 31
_LONGEST = 1.0
"""Seconds after which no further run begins, of a slow network."""
_measured: dict[object, float] = {}


def measure_latency(net: nn.Module, inputs: Sequence[Tensor]) -> float:
    """Measure the milliseconds of one forward pass: the median over warm runs.

    A network of the same architecture has the same latency: it is measured once in a process.

    Parameters
    ----------
    net
        A growable network. It runs in eval mode, without gradients, and is not changed.
    inputs
        The inputs of one example.
    """
    device = next(net.parameters()).device
    key = (
        genotype_of(net).to_json(),
        tuple(tuple(one.shape) for one in inputs),
        count_parameters(net),  # tells spaces of other widths apart
        str(device),
        torch.get_num_threads(),
    )
    if key not in _measured:
        _measured[key] = 1000 * _median_seconds(net, [one.to(device) for one in inputs])
    return _measured[key]


def _median_seconds(net: nn.Module, inputs: Sequence[Tensor]) -> float:
    seconds: list[float] = []
    with evaluation_mode(net), torch.no_grad():
        began = time.perf_counter()
        for _ in range(_WARM_RUNS + _RUNS):
            start = _now(inputs)
            net(*inputs)
            seconds.append(_now(inputs) - start)
            if time.perf_counter() - began > _LONGEST and len(seconds) > _WARM_RUNS:
                break
    return statistics.median(seconds[_WARM_RUNS:])


def _now(inputs: Sequence[Tensor]) -> float:
    if inputs[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()
