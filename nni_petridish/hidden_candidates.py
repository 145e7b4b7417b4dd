"""Candidates that are computed in the backward pass.

sf hides the value of a candidate, so nothing needs it before g = ∇_{x_k} L is known. Then its
forward and its backward pass are done in one go, one candidate after the other, while what is
between the two is in the cache; nothing of it is kept in memory from the forward pass of the
network to the backward pass. Its batch norms update their running statistics in the backward pass,
therefore, by the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nni_petridish.moments import update_running_statistics
from nni_petridish.native import BackwardPass, Branch, Pooling


class HiddenCandidate(NamedTuple):
    """A candidate that is computed in the backward pass."""

    x: Tensor
    """Its input."""
    parameters: Sequence[Tensor]
    """In the order of its kernel."""
    norms: Sequence[nn.BatchNorm2d]
    """All its batch norms, the last one at the end."""
    kernel: Branch | Pooling


class HiddenGradients:
    """The gradients of a site's hidden candidates, computed one after the other.

    Parameters
    ----------
    candidates
        They.
    inputs
        Which of the inputs each of them takes.
    tensors
        The inputs, then the parameters of one candidate after the other.
    wanted
        Whether the gradient of each of these is wanted.
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
        self.rest = iter(tensors[n:])
        self.input_grads = [
            torch.empty_like(x) if want else None
            for x, want in zip(self.inputs, wanted, strict=False)
        ]
        self.parameter_grads: list[Tensor] = []
        self.moments: list[Tensor] = []

    def compute(self, g: Tensor, alpha: Sequence[float]) -> list[float]:
        """Compute all of it, x_k having the gradient g; return dα."""
        found, written = [], set()
        for candidate, i, weight in zip(self.candidates, self.numbers, alpha, strict=True):
            parameters = [next(self.rest).contiguous() for _ in candidate.parameters]
            gradients = candidate.kernel.gradients(
                BackwardPass(
                    g, weight, self.inputs[i], parameters, self.input_grads[i], adds=i in written
                )
            )
            written.add(i)
            found.append(gradients.alpha)
            self.moments.append(gradients.moments)
            self.parameter_grads += gradients.parameters
        return found

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of all inputs and parameters."""
        return [*self.input_grads, *self.parameter_grads]

    def show_norms(self, count: int) -> None:
        """Show the norms what they would have seen in the forward pass: so many numbers each."""
        mean, variance = torch.cat(self.moments).unbind(1)
        norms = [norm for candidate in self.candidates for norm in candidate.norms]
        update_running_statistics(norms, mean, variance, count)


def distinct(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Return each tensor once, and which of them each one is."""
    found = list({id(tensor): tensor for tensor in tensors}.values())
    numbers = {id(tensor): i for i, tensor in enumerate(found)}
    return found, [numbers[id(tensor)] for tensor in tensors]


def has_default_settings(norm: nn.BatchNorm2d) -> bool:
    """Return whether its statistics can be updated together with those of all others."""
    return (norm.momentum, norm.eps) == (0.1, 1e-5)
