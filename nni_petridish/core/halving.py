"""Successive halving of candidates: the worse half by |α| leaves, again and again.

Candidates that are out of the race need not be trained to its end. Those that have left stay
attached, with the weights they had, but take no part in training steps and cost nothing there. The
others learn as before, but for an adapter that several candidates of one input share: those that
left no longer train it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


class Halving(nn.Module):
    """The candidates of one α table that still learn.

    Parameters
    ----------
    count
        Number of candidates.
    period
        The worse half leaves after every so many backward passes of the table.
    least
        The number of candidates that stay.
    """

    left_after: Tensor
    """The backward passes after which each candidate left; −1 while it learns."""
    left_alpha: Tensor
    """α of each candidate that has left, at that moment: momentum may still move the weight."""

    def __init__(self, count: int, period: int, least: int) -> None:
        super().__init__()
        self.period, self.least = period, least
        # Buffers, so that a training that is continued goes on with the same candidates.
        self.register_buffer("left_after", torch.full((count,), -1))
        self.register_buffer("left_alpha", torch.zeros(count))

    def present(self, alpha: Tensor, passes: int) -> list[int] | None:
        """Return the indices of the candidates that take part in the next step; None for all.

        If it is time, the worse half leaves first. All sites of a table ask before each step, and
        get the same answer.
        """
        if passes and passes % self.period == 0:
            self._halve(alpha.detach(), passes)
        left = self.left_after.tolist()
        present = [i for i, after in enumerate(left) if after < 0]
        return None if len(present) == len(left) else present

    def last(self, scores: Tensor) -> Tensor:
        """Return scores by which candidates that have left come after all others.

        Those that left later come first, then those of larger |α|.
        """
        gone = self.left_after >= 0
        if not bool(gone.any()):
            return scores
        rank = self.left_after.double() + self.left_alpha.double().abs().clamp(max=0.5)
        there = scores[~gone].double()
        # So low that no sum of scores with one of these exceeds a sum without any.
        lowest = there.min() - len(scores) * (1 + there.max() - there.min())
        return torch.where(gone, lowest + rank / (rank.max() + 1), scores.double())

    def _halve(self, alpha: Tensor, passes: int) -> None:
        there = torch.nonzero(self.left_after < 0).flatten()
        if passes in self.left_after or len(there) <= self.least:
            return
        stay = max(self.least, (len(there) + 1) // 2)
        order = torch.sort(alpha[there].abs(), descending=True, stable=True).indices
        gone = there[order[stay:]]
        self.left_after[gone] = passes
        self.left_alpha[gone] = alpha[gone].to(self.left_alpha)

    def extra_repr(self) -> str:
        """Show the schedule."""
        return f"period={self.period}, least={self.least}"


def halving_period(share: float, steps: int, every: int = 1) -> int:
    """Return the backward passes between two halvings.

    Parameters
    ----------
    share
        The share of weak learning between them.
    steps
        Steps of weak learning.
    every
        The candidates take part in every so many of these steps.

    Examples
    --------
    >>> halving_period(0.2, steps=100), halving_period(0.2, steps=100, every=4)
    (20, 5)
    """
    return max(1, round(share * steps / every))


def ranked_last(
    scores: Mapping[str, Sequence[float]], halvings: Mapping[str, Halving | None]
) -> dict[str, list[float]]:
    """Return scores by key of the α table, by which candidates that have left come last."""
    return {
        key: list(values)
        if (halving := halvings[key]) is None
        else halving.last(torch.tensor(values, dtype=torch.float64)).tolist()
        for key, values in scores.items()
    }
