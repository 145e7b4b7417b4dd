"""How a growth is carried out: the length of its phases and their variants."""

from __future__ import annotations

from dataclasses import dataclass

from nni_petridish.errors import ConfigError
from nni_petridish.records import check_number
from nni_petridish.schedules import L1_SCHEDULES

WEAK_LEARNING = ("isolated", "joint")
"""The paper's weak learning, and its ablation without sg and sf (appendix B.4)."""


@dataclass(frozen=True)
class Plan:
    """How long each phase lasts and in which variant; the numbers are the paper's for CIFAR-10.

    Parameters
    ----------
    seed_epochs, weak_epochs, final_epochs
        Epochs of a seed model, of weak learning, and after finalising.
    l1_schedule
        λ over weak learning: ``"constant"``, or a ramp ``"linear"`` or ``"cosine"`` up to λ.
    weak_learning
        ``"isolated"`` or ``"joint"``.
    """

    seed_epochs: int = 200
    weak_epochs: int = 80
    final_epochs: int = 80
    l1_schedule: str = "constant"
    weak_learning: str = "isolated"

    def __post_init__(self) -> None:
        # A model to start from may be taken as it is.
        for name, least in (("seed_epochs", 0), ("weak_epochs", 1), ("final_epochs", 1)):
            check_number(name, getattr(self, name), least, whole=True)
        for name, allowed in (
            ("l1_schedule", L1_SCHEDULES),
            ("weak_learning", WEAK_LEARNING),
        ):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name} must be one of {', '.join(allowed)} but got {getattr(self, name)!r}."
                )
