"""Convergence of small steps to their limit: FSLR its own, Petridish least angle regression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ._arrays import Floats
from ._compare import path_distance
from ._data import Dataset
from ._infinitesimal import infinitesimal_stagewise_path
from ._linear import Standardization
from ._methods import lars
from ._petridish import PetridishRegressor
from ._stagewise import forward_stagewise_path


@dataclass(frozen=True)
class Convergence:
    """Errors of a method for smaller and smaller steps.

    Parameters
    ----------
    method
        Its name, and the limit's.
    sizes
        The step sizes.
    errors
        The largest coefficient difference from the limit, for each of them.
    """

    method: str
    sizes: Floats
    errors: Floats

    @property
    def order(self) -> float:
        """The q for which errors are proportional to sizes^q."""
        return float(np.polyfit(np.log(self.sizes), np.log(self.errors), 1)[0])


def convergence(
    data: Dataset,
    *,
    steps: Sequence[float] = (4e-3, 2e-3, 1e-3, 5e-4, 2e-4, 1e-4),
    shares: Sequence[float] = (0.2, 0.1, 0.05, 0.025),
) -> list[Convergence]:
    """Measure FSLR against its limit, and Petridish with little training against LARS.

    FSLR is compared at equal L1 arc length, Petridish at equal L1 norm.

    Parameters
    ----------
    data
        The data set; it is standardized first.
    steps
        The ε of FSLR.
    shares
        The shares of full training that Petridish trains after each growth.
    """
    whole = Standardization(data.X, data.y, fit_intercept=True, standardize=True)
    return [_stagewise(whole, steps), _petridish(whole, shares)]


def _stagewise(data: Standardization, sizes: Sequence[float]) -> Convergence:
    _, _, limit, arc_length = infinitesimal_stagewise_path(data.X, data.y, return_arc_length=True)
    errors = []
    for size in sizes:
        _, _, coefs, steps = forward_stagewise_path(data.X, data.y, step=size, return_steps=True)
        expected = np.array([np.interp(steps * size, arc_length, row) for row in limit])
        errors.append(np.abs(coefs - expected).max())
    return Convergence("FSLR to its limit", np.array(sizes), np.array(errors))


def _petridish(data: Standardization, sizes: Sequence[float]) -> Convergence:
    reference = lars(data.X, data.y, data.X.shape[1]).coefs
    errors = []
    for size in sizes:
        model = PetridishRegressor(training=size, l1=0.01, fit_intercept=False, standardize=False)
        errors.append(path_distance(model.fit(data.X, data.y).coef_path_, reference)[0])
    return Convergence("Petridish to LARS", np.array(sizes), np.array(errors))
