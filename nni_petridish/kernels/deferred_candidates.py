"""Candidates that are computed in the backward pass.

sf hides the value of a candidate, so nothing needs it before g = ∇_{x_k} L is known. Then its
forward and its backward pass are done in one go, one candidate after the other (the poolings of an
input together), while what is between the two is in the cache; nothing of it is kept in memory from
the forward pass of the network to the backward pass. Its batch norms update their running
statistics in the backward pass, therefore, by the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nni_petridish.kernels.native.candidates import Candidate, Kernel, candidate_gradients

EPS, MOMENTUM = 1e-5, 0.1
"""Of the batch norms of all candidates."""
_RUNNING = ("running_mean", "running_var", "num_batches_tracked")


class HiddenCandidate(NamedTuple):
    """A candidate that is computed in the backward pass."""

    x: Tensor
    """Its input."""
    kernel: Kernel
    parameters: Sequence[Tensor]
    """In the order of its kernel."""
    running: Sequence[Tensor]
    """The `running_statistics` of its norms."""


class HiddenGradients:
    """The gradients of a site's hidden candidates.

    Parameters
    ----------
    candidates
        They.
    inputs
        Which of the inputs each of them takes.
    tensors
        The inputs, then the parameters of one candidate after the other.
    wanted
        Whether the gradient of each of these is wanted; those of parameters are computed anyway.
    """

    def __init__(
        self,
        candidates: Sequence[HiddenCandidate],
        inputs: Sequence[int],
        tensors: Sequence[Tensor],
        wanted: Sequence[bool],
    ) -> None:
        n = 1 + max(inputs)
        self.candidates, self.numbers = candidates, inputs
        # What saves tensors elsewhere may have changed their layout.
        self.inputs = [x.contiguous(memory_format=torch.channels_last) for x in tensors[:n]]
        self.parameters = [parameter.contiguous() for parameter in tensors[n:]]
        self.input_grads = [
            torch.empty_like(x) if want else None
            for x, want in zip(self.inputs, wanted, strict=False)
        ]
        self.parameter_grads = [torch.empty_like(parameter) for parameter in self.parameters]

    def compute(self, g: Tensor, alpha: Sequence[float], observe: bool) -> list[float]:
        """Compute all of it, x_k having the gradient g; return dα.

        The norms see what they would have seen in the forward pass, if they are to observe it.
        """
        calls: list[Candidate] = []
        written, start = set(), 0
        for candidate, i, weight in zip(self.candidates, self.numbers, alpha, strict=True):
            own = slice(start, start + len(candidate.parameters))
            calls.append(
                Candidate(
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
    """Return each tensor once, and which of them each one is."""
    found = list({id(tensor): tensor for tensor in tensors}.values())
    numbers = {id(tensor): i for i, tensor in enumerate(found)}
    return found, [numbers[id(tensor)] for tensor in tensors]


def running_statistics(norms: Iterable[nn.BatchNorm2d], x: Tensor) -> list[Tensor] | None:
    """Return mean, variance and number of batches of each; None if any is not as all others.

    They are norms of as many channels as x has, and of its type.
    """
    found: list[Tensor] = []
    channels, dtype = x.shape[1], x.dtype
    for norm in norms:
        # Not by name, which a module looks up in three dictionaries: this is called often.
        mean, variance, batches = map(norm._buffers.get, _RUNNING)
        if mean is None or variance is None or batches is None or not has_default_settings(norm):
            return None
        if not (mean.is_contiguous() and variance.is_contiguous()):
            return None
        if not mean.numel() == variance.numel() == channels:
            return None
        if not (mean.dtype is variance.dtype is dtype and batches.dtype is torch.int64):
            return None
        found += mean, variance, batches
    return found


def has_default_settings(norm: nn.BatchNorm2d) -> bool:
    """Return whether its statistics can be updated together with those of all others."""
    return (norm.momentum, norm.eps) == (MOMENTUM, EPS)
