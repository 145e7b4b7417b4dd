"""Feature selection: the linear case of Petridish, with scikit-learn as the judge.

The names below load what they need on first use: the path functions do without torch, and the
command line without either torch or scikit-learn until the command runs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from search_spaces.linear import LinearSpace

    from ._boosting import least_squares_boosting_path
    from ._compare import compare, recovery_rates
    from ._convergence import convergence
    from ._estimators import ForwardStagewiseRegressor, ForwardStagewiseRegressorCV
    from ._infinitesimal import infinitesimal_stagewise_path
    from ._petridish import PetridishRegressor
    from ._plots import plot_convergence, plot_paths
    from ._stagewise import forward_stagewise_path

__all__ = [
    "ForwardStagewiseRegressor",
    "ForwardStagewiseRegressorCV",
    "LinearSpace",
    "PetridishRegressor",
    "compare",
    "convergence",
    "forward_stagewise_path",
    "infinitesimal_stagewise_path",
    "least_squares_boosting_path",
    "plot_convergence",
    "plot_paths",
    "recovery_rates",
]

_HOMES = {
    "ForwardStagewiseRegressor": f"{__name__}._estimators",
    "ForwardStagewiseRegressorCV": f"{__name__}._estimators",
    "LinearSpace": "search_spaces.linear",
    "PetridishRegressor": f"{__name__}._petridish",
    "compare": f"{__name__}._compare",
    "convergence": f"{__name__}._convergence",
    "forward_stagewise_path": f"{__name__}._stagewise",
    "infinitesimal_stagewise_path": f"{__name__}._infinitesimal",
    "least_squares_boosting_path": f"{__name__}._boosting",
    "plot_convergence": f"{__name__}._plots",
    "plot_paths": f"{__name__}._plots",
    "recovery_rates": f"{__name__}._compare",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
