"""Gradient boosting whose weak learners are least-squares fits on one feature."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from nni_petridish.errors import ConfigError

from ._arrays import Floats, checked_x_y


def least_squares_boosting_path(
    X: ArrayLike,
    y: ArrayLike,
    *,
    learning_rate: float = 0.1,
    max_steps: int = 100_000,
    tol: float = 1e-4,
    max_points: int = 10_000,
) -> tuple[Floats, list[int], Floats]:
    """Compute the path of gradient boosting with one-feature least-squares learners.

    Each step fits every feature alone to the residual r, takes the one that leaves the least
    squared error, and adds `learning_rate` times its fit. With a fixed step instead of a share of
    the fit this is :func:`forward_stagewise_path`; both have the same limit.

    Parameters
    ----------
    X : array-like of shape (n_samples, n_features)
        Input data, usually centered.
    y : array-like of shape (n_samples,)
        Target, usually centered.
    learning_rate : float, default=0.1
        η of gradient boosting, in (0, 1]; 1 is matching pursuit.
    max_steps : int, default=100_000
        The largest number of steps.
    tol : float, default=1e-4
        Stop when every ``|X_jᵀ r| / n_samples`` has come down to this share of the first.
    max_points : int, default=10_000
        Keep at most this many points of the path, evenly spread.

    Returns
    -------
    alphas : ndarray of shape (n_points,)
        Largest absolute correlation with the residual, over n_samples, at each point.
    active : list of int
        Features in the order in which they first moved.
    coefs : ndarray of shape (n_features, n_points)
        Coefficients along the path.

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> least_squares_boosting_path(X, y - y.mean())[1]
    [2, 8, 3, 6, 1, 9, 4, 7, 0, 5]
    """
    features, target = checked_x_y(X, y)
    if not 0 < learning_rate <= 1:
        raise ConfigError(f"learning_rate must be in (0, 1] but got {learning_rate}.")
    gram, c = features.T @ features, features.T @ target
    norms = np.sqrt(np.diag(gram))
    usable = np.where(norms > 0, norms, np.inf)
    alphas, moves, active = [float(np.abs(c).max())], list[tuple[int, float]](), list[int]()
    while alphas[-1] > tol * alphas[0] and len(moves) < max_steps:
        # The fit on j alone removes (c_j/‖X_j‖)² from the squared error.
        j = int(np.argmax(np.abs(c) / usable))
        change = learning_rate * float(c[j]) / float(gram[j, j])
        if j not in active:
            active.append(j)
        c -= change * gram[:, j]
        moves.append((j, change))
        alphas.append(float(np.abs(c).max()))
    kept = np.linspace(0, len(moves), min(len(moves) + 1, max_points)).round().astype(int)
    coefs = np.zeros((features.shape[1], len(kept)))
    for column, (j, change) in zip(
        np.searchsorted(kept, np.arange(1, len(moves) + 1)), moves, strict=True
    ):
        coefs[j, column] += change
    return np.array(alphas)[kept] / len(target), active, np.cumsum(coefs, axis=1)
