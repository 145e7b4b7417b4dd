"""Variants of weak learning: isolated or joint, with constant λ (the paper) or a ramp (B.6)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nni_petridish.errors import ConfigError

WEAK_LEARNING = ("isolated", "joint")
"""The paper's weak learning, and its ablation without sg and sf (appendix B.4)."""
SCORES = (
    "alpha",
    "gain",
    "random",
    "line",
    "prior",
    "depth",
    "consensus",
    "standout",
    "residual_gain",
    "mixture_gain",
    "residual_mixture_gain",
    "forward",
    "omp",
    "lars",
    "lasso",
)
"""Names of the scores in `nni_petridish.core.select`, for modules that do not import torch."""
WITHOUT_WEAK_LEARNING = ("random", "prior", "depth")
"""Scores that need no weak learning."""
OF_CHILDREN = ("prior", "depth", "consensus", "standout")
"""Scores of the architectures of children, see `nni_petridish.core.untrained`."""
L1_SCHEDULES = ("constant", "linear", "cosine")
"""Schedules of λ over weak learning: the paper's, and two ramps (its future work, B.6)."""

LINE = "line"
"""The start of η that a line search finds, see `nni_petridish.core.eta_start`."""


@dataclass(frozen=True)
class L1Schedule:
    """A schedule of λ that ramps up from 0 to ``l1`` over ``steps`` backward passes.

    Parameters
    ----------
    name
        ``"constant"``, ``"linear"`` or ``"cosine"`` (slow at both ends).
    l1
        λ at the end of the ramp.
    steps
        The length of the ramp in backward passes.

    Examples
    --------
    >>> ramp = L1Schedule("linear", l1=0.001, steps=100)
    >>> ramp(0), ramp(50), ramp(1000)
    (0.0, 0.0005, 0.001)
    """

    name: str
    l1: float
    steps: int

    def __post_init__(self) -> None:
        if self.name not in L1_SCHEDULES:
            allowed = ", ".join(L1_SCHEDULES)
            raise ConfigError(f"l1 schedule must be one of {allowed} but got {self.name!r}.")
        check_l1(self.l1)
        if self.steps < 1:
            raise ConfigError(f"l1 schedule's steps must be at least 1 but got {self.steps}.")

    def __call__(self, step: int) -> float:
        """Return λ after ``step`` backward passes."""
        progress = min(step / self.steps, 1.0)
        if self.name == "linear":
            return self.l1 * progress
        if self.name == "cosine":
            return self.l1 * (1 - math.cos(math.pi * progress)) / 2
        return self.l1


def check_l1(l1: float) -> None:
    """Raise `ConfigError` unless λ is a finite, non-negative number."""
    if isinstance(l1, bool) or not isinstance(l1, (int, float)) or not 0 <= l1 < math.inf:
        raise ConfigError(f"l1 must be a number that is not negative but got {l1!r}.")
