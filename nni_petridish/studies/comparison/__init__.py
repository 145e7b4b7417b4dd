"""Comparison of methods at equal compute, over random seeds, with paired tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nni_petridish._support.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, {"Comparison": ".settings", "compare": ".work"})

if TYPE_CHECKING:
    from nni_petridish.studies.comparison.settings import Comparison
    from nni_petridish.studies.comparison.work import compare
