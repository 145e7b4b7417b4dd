"""Optuna over λ and I_max: one trial is one whole search."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nni_petridish._support.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__, {"TuningSettings": ".section", "Tuning": ".settings", "tune": ".study"}
)

if TYPE_CHECKING:
    from nni_petridish.studies.tuning.section import TuningSettings
    from nni_petridish.studies.tuning.settings import Tuning
    from nni_petridish.studies.tuning.study import tune
