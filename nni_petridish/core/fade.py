"""The fade-in of new weak learners: preserved predictions, and a gradient from the first step.

With η = 0 (Algorithm 2) the predictions of the parent are preserved, but the new operations get no
gradient: ∂L/∂h = η·g. With η > 0 they get one, and the predictions change. A pair of branches that
cancel has both. Of a learner c = η·h(z; θ) it adds

    x_k + c − f·c⁰,    f = 1 → 0.

The usual partner c⁰ = η⁰·h(z; θ⁰) is a frozen copy. Here it is the learner's own output without a
gradient, and the gradient of its inputs is scaled:

    x_k + c − f·sg(c),    c = η·h((1 − f)·z + f·sg(z); θ).

- At f = 1 both add 0 exactly, and have the same gradients: η·g·∂h/∂θ for the new weights, ⟨g, h⟩
  for η, nothing for z. This form then is x_k + sf(η·h(sg(z))), Algorithm 1.
- In between it adds (1 − f)·η·h. The gradient of everything before it is exact, that of θ and η is
  exact but for the factor 1/(1 − f), as if all of c were added.
- At f = 0 it is x_k + η·h: the plain architecture remains, with the weights that were trained.

So it leads from Algorithm 1 to Algorithm 2 without a jump. A frozen copy would be computed and
differentiated a second time, would need the same drop-path, statistics of its own and a place in
checkpoints, and leaves the same architecture.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _ScaleGradient(torch.autograd.Function):
    """The identity, with a factor on its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.factor * grads[0], None


def faded_input(z: Tensor, fade: float) -> Tensor:
    """Return ``(1 − f)·z + f·sg(z)``: z itself, with a share of its gradient."""
    result: Tensor = _ScaleGradient.apply(z, 1 - fade)
    return result


def faded_step(c: Tensor, fade: float) -> Tensor:
    """Return ``c − f·sg(c)``: a share of c, with all of its gradient."""
    return c - fade * c.detach()
