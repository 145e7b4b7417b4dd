"""The start of η: a line search along new weak learners on held-out batches.

With η = 0 (the paper) the predictions of the parent are preserved, but the new operations get no
gradient at first: ∂L/∂h = η·g. A search along x_k + η·h finds a start that lowers the loss, or that
there is none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from nni_petridish.core.modes import averaging_statistics, evaluation_mode
from nni_petridish.core.select import Losses
from nni_petridish.core.site import sites
from nni_petridish.core.weak_learner import WeakLearner
from nni_petridish.errors import GrowthError

SIZES = tuple(2.0**power for power in range(-7, 1))
"""The steps that are tried: h is normalized, so that 1 is as large as x_k itself."""


class Line(NamedTuple):
    """The result of a line search: η, the change of the loss, and the standard error of that."""

    size: float
    change: float
    error: float

    @property
    def pays(self) -> bool:
        """Whether the loss falls by more than chance explains: two standard errors."""
        return self.change < -2 * self.error


def count_learners(net: nn.Module) -> list[int]:
    """Return the number of finished weak learners of every site, for `new_learners`."""
    return [len(site.learners) for site in sites(net)]


def new_learners(net: nn.Module, before: Sequence[int]) -> list[WeakLearner]:
    """Return the weak learners that were added since `count_learners` was called."""
    found: list[WeakLearner] = []
    for site, count in zip(sites(net), before, strict=True):
        for learner in list(site.learners)[count:]:
            assert isinstance(learner, WeakLearner)
            found.append(learner)
    return found


def set_eta(learners: Iterable[WeakLearner], size: float) -> None:
    """Give all weak learners the same η."""
    for learner in learners:
        with torch.no_grad():
            learner.eta.fill_(size)


def line_search(
    net: nn.Module,
    learners: Sequence[WeakLearner],
    losses: Losses,
    sizes: Sequence[float] = SIZES,
) -> Line:
    """Set the η of new weak learners to the common value of the lowest loss, 0 included.

    The batch norms of the weak learners are calibrated first, see `calibrate`.

    Parameters
    ----------
    net
        A network after finalizing.
    learners
        The new weak learners.
    losses
        Returns parts of the loss on held-out batches.
    sizes
        The values that are tried, in ascending order.

    Returns
    -------
    Line
        All 0 if no value lowers the loss: the step is not taken against h, which has learned to
        lower the loss.
    """
    calibrate(net, learners, losses)
    start, best = _losses_at(net, learners, losses, 0.0), Line(0.0, 0.0, 0.0)
    for size in sizes:  # growing: the loss falls, and then it rises steeply
        changes = [
            new - old
            for new, old in zip(_losses_at(net, learners, losses, size), start, strict=True)
        ]
        change = math.fsum(changes)
        if not change < best.change:
            break
        best = Line(size, change, _error_of_sum(changes))
    set_eta(learners, best.size)
    return best


def calibrate(net: nn.Module, learners: Iterable[WeakLearner], losses: Losses) -> None:
    """Give the batch norms of new weak learners that have no statistics those of the batches.

    At least op_merge has none. Nothing else changes: all other modules are in evaluation mode.
    """
    norms = {id(m): m for one in learners for m in one.modules() if isinstance(m, _BatchNorm)}
    fresh = [norm for norm in norms.values() if norm.num_batches_tracked == 0]
    with evaluation_mode(net), averaging_statistics(fresh):
        if not _losses(net, losses):
            raise GrowthError("the line search needs held-out batches but the task has none.")


def _losses_at(
    net: nn.Module, learners: Sequence[WeakLearner], losses: Losses, size: float
) -> list[float]:
    set_eta(learners, size)
    with evaluation_mode(net):
        return _losses(net, losses)


@torch.no_grad()
def _losses(net: nn.Module, losses: Losses) -> list[float]:
    return [float(part) for part in losses(net)]


def _error_of_sum(parts: Sequence[float]) -> float:
    """Return the standard error of a sum, by the spread of its parts; infinite for a single one."""
    count = len(parts)
    return statistics.stdev(parts) * math.sqrt(count) if count > 1 else math.inf
