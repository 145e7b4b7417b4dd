"""Candidates that are computed in the backward pass.

sf(x_c) is zero, so the value of a candidate is not needed before g = ∇_{x_k} L is known. The
backward pass of the network then runs forward and backward of each candidate in one go (the
poolings of an input together), while intermediate values are in the cache. Nothing is saved in the
forward pass of the network. The batch norms of the candidates therefore update their running
statistics in the backward pass, by the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nni_petridish.kernels.moments import running_buffers
from nni_petridish.kernels.native.candidates import CandidateCall, Kernel, candidate_gradients

EPS, MOMENTUM = 1e-5, 0.1
"""Settings of the batch norms of all candidates."""


class DeferredCandidate(NamedTuple):
    """A candidate that is computed in the backward pass."""

    x: Tensor
    """The input."""
    kernel: Kernel
    parameters: Sequence[Tensor]
    """The parameters, in the order of the kernel."""
    running: Sequence[Tensor]
    """The `running_statistics` of the norms."""


class DeferredGradients:
    """The gradients of the deferred candidates of one site.

    Parameters
    ----------
    candidates
        The deferred candidates, in the order of the α table.
    inputs
        The index of each candidate's input among the distinct inputs.
    tensors
        The distinct inputs, followed by the parameters of one candidate after the other.
    wanted
        Whether the gradient of each tensor is needed. Those of parameters are always computed.
    """

    def __init__(
        self,
        candidates: Sequence[DeferredCandidate],
        inputs: Sequence[int],
        tensors: Sequence[Tensor],
        wanted: Sequence[bool],
    ) -> None:
        n = 1 + max(inputs)
        self.candidates, self.numbers = candidates, inputs
        # Hooks on saved tensors may have changed their layout.
        self.inputs = [x.contiguous(memory_format=torch.channels_last) for x in tensors[:n]]
        self.parameters = [parameter.contiguous() for parameter in tensors[n:]]
        self.input_grads = [
            torch.empty_like(x) if want else None
            for x, want in zip(self.inputs, wanted, strict=False)
        ]
        self.parameter_grads = [torch.empty_like(parameter) for parameter in self.parameters]

    def compute(self, g: Tensor, alpha: Sequence[float], observe: bool) -> list[float]:
        """Compute the gradients of inputs and parameters for g = ∇_{x_k} L, and return dα.

        If ``observe`` is true, the norms update their running statistics.
        """
        calls: list[CandidateCall] = []
        written, start = set(), 0
        for candidate, i, weight in zip(self.candidates, self.numbers, alpha, strict=True):
            own = slice(start, start + len(candidate.parameters))
            calls.append(
                CandidateCall(
                    kernel=candidate.kernel,
                    alpha=weight,
                    x=self.inputs[i],
                    dx=self.input_grads[i],
                    adds=i in written,
                    parameters=self.parameters[own],
                    gradients=self.parameter_grads[own],
                    running=candidate.running if observe else (),
                )
            )
            written.add(i)
            start = own.stop
        return candidate_gradients(g, calls, EPS, MOMENTUM)

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of all inputs and parameters."""
        return [*self.input_grads, *self.parameter_grads]


def distinct(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Return the distinct tensors, and the index of each given tensor among them."""
    found = list({id(tensor): tensor for tensor in tensors}.values())
    numbers = {id(tensor): i for i, tensor in enumerate(found)}
    return found, [numbers[id(tensor)] for tensor in tensors]


def running_statistics(norms: Iterable[nn.BatchNorm2d], x: Tensor) -> list[Tensor] | None:
    """Return mean, variance and number of batches of each norm, one after the other.

    Returns None if a norm has other settings than `EPS` and `MOMENTUM`, or if its statistics are
    missing, not contiguous, or not of x's channels and type.
    """
    found: list[Tensor] = []
    for norm in norms:
        own = running_buffers(norm, x) if has_default_settings(norm) else None
        if own is None:
            return None
        found += own
    return found


def has_default_settings(norm: nn.BatchNorm2d) -> bool:
    """Return whether a norm has the settings that the kernels assume, `EPS` and `MOMENTUM`."""
    return (norm.momentum, norm.eps) == (MOMENTUM, EPS)
