"""The types and checks that the path functions share."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils import check_X_y

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FLOATS = (np.float64, np.float32)
"""The types that are kept as they are; all others become doubles."""


def checked_x_y(X: ArrayLike, y: ArrayLike, dtype: Any = np.float64) -> tuple[Floats, Floats]:
    """Return X and y as arrays, X of `dtype`; scikit-learn raises its own errors for bad ones."""
    arrays: tuple[Floats, Floats] = check_X_y(X, y, dtype=dtype, y_numeric=True)
    return arrays
