"""Studies over many searches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nni_petridish._support.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "ablate": ".ablations",
        "compare": ".comparison",
        "tune": ".tuning",
    },
)

if TYPE_CHECKING:
    from nni_petridish.studies.ablations.work import ablate
    from nni_petridish.studies.comparison.work import compare
    from nni_petridish.studies.tuning.study import tune
