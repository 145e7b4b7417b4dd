"""Feature selection: the linear case of Petridish, with scikit-learn as the judge.

The names below load what they need on first use: the path functions do without torch, and the
command line without either torch or scikit-learn until the command runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nni_petridish._support.lazy import attach

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

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "ForwardStagewiseRegressor": "._estimators",
        "ForwardStagewiseRegressorCV": "._estimators",
        "LinearSpace": "search_spaces.linear",
        "PetridishRegressor": "._petridish",
        "compare": "._compare",
        "convergence": "._convergence",
        "forward_stagewise_path": "._stagewise",
        "infinitesimal_stagewise_path": "._infinitesimal",
        "least_squares_boosting_path": "._boosting",
        "plot_convergence": "._plots",
        "plot_paths": "._plots",
        "recovery_rates": "._compare",
    },
)
