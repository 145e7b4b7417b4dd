"""The types and checks that the path functions share."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils import check_X_y

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def checked_x_y(X: ArrayLike, y: ArrayLike) -> tuple[Floats, Floats]:
    """Return X and y as arrays of doubles; scikit-learn raises its own errors for bad ones."""
    arrays: tuple[Floats, Floats] = check_X_y(X, y, dtype=np.float64, y_numeric=True)
    return arrays
