"""The weights α of the candidates, and their L1 term (Eq. 6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nni_petridish.core.genotype import Shortcut
from nni_petridish.core.halving import Halving

Schedule = Callable[[int], float]
"""λ as a function of the number of backward passes since the candidates were attached."""


class _L1(torch.autograd.Function):
    """λ‖α‖₁ (Eq. 6), which notifies its table in the backward pass."""

    @staticmethod
    def forward(ctx: Any, alpha: Tensor, l1: float, table: AlphaTable) -> Tensor:
        ctx.save_for_backward(alpha)
        ctx.l1, ctx.table = l1, table
        return l1 * alpha.abs().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (alpha,) = ctx.saved_tensors
        ctx.table.l1_came_with_loss = True
        return grads[0] * ctx.l1 * alpha.sign(), None, None


class AlphaTable(nn.Module):
    """The weights α_ij of all candidate shortcuts, shared by every site of one key.

    The L1 term does not need to be part of the loss: a hook adds its subgradient λ·sign(α) once
    per step of the optimizer, however many sites share the table and however many backward passes
    are accumulated: not to a gradient that has the term already, while α is unchanged. A training
    loop that scales its loss can add `extra_loss` to it instead. The hook then adds nothing, so the
    term counts exactly once.

    Parameters
    ----------
    shortcuts
        The ``(source, op)`` pair of each candidate.
    l1
        λ, or a schedule: a function from the number of backward passes to λ.
    competitors
        The number of candidates of this table and of all tables it competes with. By default, its
        own.
    """

    backward_passes: Tensor
    halving: Halving | None
    """The candidates that still learn, if the worse ones leave early; see `halve`."""
    no_weight_decay = ("alpha",)  # L1 alone decides on α

    def __init__(
        self, shortcuts: Sequence[Shortcut], l1: float | Schedule, competitors: int | None = None
    ) -> None:
        super().__init__()
        self.shortcuts = tuple(shortcuts)
        self.l1 = l1
        self.l1_came_with_loss = False
        self._l1_version: int | None = None
        # 1/(I·J): x_c starts as the mean of the candidates.
        start = 1.0 / (competitors or len(shortcuts))
        self.alpha = nn.Parameter(torch.full((len(shortcuts),), start))
        self.register_buffer("backward_passes", torch.zeros((), dtype=torch.int64))
        self.halving = None
        self._watch_alpha()

    def halve(self, period: int, least: int) -> None:
        """Let the worse half of the candidates leave every so many backward passes; see `Halving`.

        At least so many stay.
        """
        self.halving = Halving(len(self.shortcuts), period, least).to(self.alpha.device)

    def present(self) -> list[int] | None:
        """Return the indices of the candidates that take part in the next step; None for all."""
        if self.halving is None:
            return None
        return self.halving.present(self.alpha, int(self.backward_passes))

    def current_l1(self) -> float:
        """Return λ after the backward passes so far."""
        return self.l1(int(self.backward_passes)) if callable(self.l1) else self.l1

    def extra_loss(self) -> Tensor:
        """Return λ Σ|α_ij| (Eq. 6), differentiable."""
        result: Tensor = _L1.apply(self.alpha, self.current_l1(), self)
        return result

    def top(self, i_max: int) -> list[int]:
        """Return the indices of the i_max largest |α|, largest first, ties in table order."""
        return largest_first(self.magnitudes())[:i_max]

    def magnitudes(self) -> Tensor:
        """Return |α|, or numbers by which candidates that have left come after all others."""
        sizes = self.alpha.detach().abs()
        return sizes if self.halving is None else self.halving.last(sizes)

    def extra_repr(self) -> str:
        """Show the size and λ."""
        return f"shortcuts={len(self.shortcuts)}, l1={self.l1}"

    def _watch_alpha(self) -> None:
        self.alpha.register_hook(self._add_l1)

    def _add_l1(self, gradient: Tensor) -> Tensor:
        l1 = self.current_l1()
        came_with_loss, self.l1_came_with_loss = self.l1_came_with_loss, False
        self.backward_passes += 1
        if came_with_loss or self._has_l1():
            return gradient
        self._l1_version = self.alpha._version
        signs = self.alpha.detach().sign()
        if self.halving is not None:
            signs[self.halving.left_after >= 0] = 0
        return gradient + l1 * signs

    def _has_l1(self) -> bool:
        """Return whether α.grad, to which a gradient is being added, has the L1 term already."""
        accumulated = self.alpha.grad
        is_first = accumulated is None or self.alpha._version != self._l1_version
        # Zeros are those of zero_grad(set_to_none=False).
        return not is_first and accumulated is not None and bool(accumulated.any())

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copied or unpickled table has a new α tensor, without the hook.
        super().__setstate__(state)
        self._l1_version = None
        self._watch_alpha()


def largest_first(scores: Tensor) -> list[int]:
    """Return the indices of scores in descending order, ties in the order of the table."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return [int(i) for i in order]
