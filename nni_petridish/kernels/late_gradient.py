"""The input gradient of a batch norm, computed by the conv before the norm.

With y the input of a batch norm, ∇_y L = of_g·g + of_y·y + constant, where g is the gradient of the
norm's output and the coefficients, vectors over channels, follow from a few sums. Computing it in
the norm would take one pass over memory to write it and another one, in the conv, to read it. So
the norm returns g itself as its gradient and stores the coefficients in a `LateGradient`. The conv,
which created the `LateGradient` and is the only consumer of that gradient, applies them as it
reads g.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nni_petridish.kernels.native.calls import Combination


class LateGradient:
    """The coefficients that turn g into the input gradient of a norm."""

    def __init__(self) -> None:
        self._stored: tuple[Tensor, int, Combination] | None = None

    def store(self, g: Tensor, combination: Combination) -> None:
        """Store that the gradient is this combination of y and g, which the norm returns."""
        self._stored = g, g._version, combination

    def clear(self) -> None:
        """Store that the norm returns the gradient itself."""
        self._stored = None  # drop those of a backward pass that ended before the conv

    def take(self, g: Tensor) -> Combination:
        """Return the stored combination and clear it; without one, the gradient is g."""
        stored, self._stored = self._stored, None
        if stored is None:
            return Combination(torch.ones(g.shape[1], dtype=g.dtype), None, None)
        same, version, combination = stored
        # Compare memory, not identity: with create_graph the tensor is another object.
        if g.data_ptr() != same.data_ptr() or g._version != version:
            # Autograd added another gradient, to which the coefficients do not apply.
            raise RuntimeError(
                "the output of a fused convolution must feed exactly one batch norm; use"
                " plain_ops() to lift this."
            )
        return combination


class BeforeNorm(NamedTuple):
    """The input of a batch norm."""

    value: Tensor
    moments: tuple[Tensor, Tensor] | None = None
    """Mean and biased variance of the channels, if known."""
    late: LateGradient | None = None
    """Holder of the coefficients of the gradient, if a fused conv computed the value."""
