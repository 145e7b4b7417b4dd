"""The gradient of a batch norm, left to what comes before it.

With y the input of a batch norm, ∇_y L = of_g·g + of_y·y + constant where g is the gradient of the
norm's output and the vectors of coefficients follow from a few sums. To write that out is a pass
over memory for the norm, and one more for the conv before it that reads it. So the norm can hand
back g itself as its gradient, with the coefficients beside it in a `LateGradient`; the conv, which
made the `LateGradient` and is the only one to see that gradient, does the rest on the way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nni_petridish.kernels.native.calls import Combination


class LateGradient:
    """What a norm leaves to be done to its gradient."""

    def __init__(self) -> None:
        self._left: tuple[Tensor, int, Combination] | None = None

    def leave(self, g: Tensor, combination: Combination) -> None:
        """Say that the gradient is this combination of g, which is handed back, and y."""
        self._left = g, g._version, combination

    def nothing(self) -> None:
        """Say that what is handed back is the gradient."""
        self._left = None  # of a backward pass that ended before the conv

    def take(self, g: Tensor) -> Combination:
        """Return what was left to do, once: by itself, a gradient is what it is."""
        left, self._left = self._left, None
        if left is None:
            return Combination(torch.ones(g.shape[1], dtype=g.dtype), None, None)
        same, version, combination = left
        # Not the tensor itself: with create_graph another stands for it.
        if g.data_ptr() != same.data_ptr() or g._version != version:
            # Autograd added another gradient to it: what was left is for one of them.
            raise RuntimeError("a value that leaves its gradient to a conv has one batch norm only")
        return combination


class BeforeNorm(NamedTuple):
    """The input of a batch norm."""

    value: Tensor
    moments: tuple[Tensor, Tensor] | None = None
    """Mean and biased variance of its channels, if they are known."""
    late: LateGradient | None = None
    """Where the norm may leave its gradient, if it may."""
