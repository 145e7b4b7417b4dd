"""Growing networks as scikit-learn estimators, on the same core, gallery and search."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nni_petridish._support.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {"GrowingClassifier": ".estimators", "GrowingRegressor": ".estimators"},
)

if TYPE_CHECKING:
    from nni_petridish.estimators.estimators import GrowingClassifier, GrowingRegressor
