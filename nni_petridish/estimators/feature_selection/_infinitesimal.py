"""The limit of forward stagewise regression for ε → 0: least angle regression in a convex cone.

Efron et al. (2004) obtain it from LARS by one change: the coefficients of the features that are
tied for the largest correlation may move only in the direction of their correlation, so the
direction is the *nonnegative* least-squares fit. Hastie et al. (2007) show that the result is the
monotone lasso: split every coefficient in a positive and a negative part, and both only grow.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import nnls

from nni_petridish.errors import ConfigError

from ._arrays import Floats, checked_x_y

# Relative to the slopes and correlations they are compared with.
_TIE = 1e-9


@overload
def infinitesimal_stagewise_path(
    X: ArrayLike,
    y: ArrayLike,
    *,
    alpha_min: float = ...,
    max_iter: int = ...,
    return_path: bool = ...,
    return_arc_length: Literal[False] = ...,
) -> tuple[Floats, list[int], Floats]: ...


@overload
def infinitesimal_stagewise_path(
    X: ArrayLike,
    y: ArrayLike,
    *,
    alpha_min: float = ...,
    max_iter: int = ...,
    return_path: bool = ...,
    return_arc_length: Literal[True],
) -> tuple[Floats, list[int], Floats, Floats]: ...


def infinitesimal_stagewise_path(
    X: ArrayLike,
    y: ArrayLike,
    *,
    alpha_min: float = 0.0,
    max_iter: int = 10_000,
    return_path: bool = True,
    return_arc_length: bool = False,
) -> Any:
    """Compute the exact path of forward stagewise regression with infinitely small steps.

    The path is piecewise linear and is returned at its knots, in the shapes of
    :func:`sklearn.linear_model.lars_path`. Nothing is centered or scaled.

    Parameters
    ----------
    X : array-like of shape (n_samples, n_features)
        Input data, usually centered and of equal column norms.
    y : array-like of shape (n_samples,)
        Target, usually centered.
    alpha_min : float, default=0.0
        Stop when the largest ``|X_jᵀ r| / n_samples`` has come down to this.
    max_iter : int, default=10_000
        The largest number of straight pieces.
    return_path : bool, default=True
        If False, return only the last point of the path.
    return_arc_length : bool, default=False
        If True, also return ∫ ‖dβ‖₁ up to each knot: the limit of ``steps * step`` of
        :func:`forward_stagewise_path`. It exceeds ‖β‖₁ once a coefficient has turned back.

    Returns
    -------
    alphas : ndarray of shape (n_knots,)
        Largest absolute correlation with the residual, over n_samples, at each knot.
    active : list of int
        Features in the order in which they first moved.
    coefs : ndarray of shape (n_features, n_knots)
        Coefficients at the knots.
    arc_length : ndarray of shape (n_knots,)
        Only with ``return_arc_length=True``.

    References
    ----------
    B. Efron, T. Hastie, I. Johnstone, R. Tibshirani. Least angle regression. Annals of
    Statistics 32, 2004. T. Hastie, J. Taylor, R. Tibshirani, G. Walther. Forward stagewise
    regression and the monotone lasso. Electronic Journal of Statistics 1, 2007.

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> alphas, active, coefs = infinitesimal_stagewise_path(X, y - y.mean())
    >>> active
    [2, 8, 3, 6, 1, 9, 4, 7, 0, 5]
    """
    features, target = checked_x_y(X, y)
    if not alpha_min >= 0:
        raise ConfigError(f"alpha_min cannot be negative but got {alpha_min}.")
    if max_iter < 0:
        raise ConfigError(f"max_iter cannot be negative but got {max_iter}.")

    knots, levels, active = _walk(features, target, alpha_min * len(target), max_iter)
    alphas, coefs = np.array(levels) / len(target), np.column_stack(knots)
    # Within a piece no coefficient turns, so its length is the L1 distance of its ends.
    arc_length = np.append(0.0, np.cumsum(np.abs(np.diff(coefs, axis=1)).sum(axis=0)))
    if not return_path:
        alphas, coefs, arc_length = alphas[-1:], coefs[:, -1], arc_length[-1:]
    return (alphas, active, coefs, arc_length) if return_arc_length else (alphas, active, coefs)


def _walk(
    X: Floats, y: Floats, level_min: float, max_iter: int
) -> tuple[list[Floats], list[float], list[int]]:
    """Follow the path from knot to knot; a level is the largest |c|, c = Xᵀ(y − Xβ)."""
    beta, c = np.zeros(X.shape[1]), X.T @ y
    level = float(np.abs(c).max())
    # Closer to the end than the rounding of Xᵀy there are no knots to be told apart.
    rounding = 100 * np.finfo(float).eps * level
    tied = np.flatnonzero(np.abs(c) >= level * (1 - _TIE))
    knots, levels, active = [beta], [level], list[int]()
    while level - level_min > rounding and len(levels) <= max_iter:
        velocity = _direction(X, tied, np.sign(c[tied]))
        fall = X.T @ (X @ velocity)
        # The others fall faster than the level: the piece that begins here leaves them behind.
        slow = np.sign(c[tied]) * fall[tied] <= 1 + _TIE
        staying = tied[(velocity[tied] != 0) | slow]
        length, joining = _next_knot(c, fall, staying, level)
        if length <= rounding and not np.isin(joining, tied).all():
            # More features are tied here than it seemed: none is left behind yet.
            tied = np.union1d(tied, joining)
            continue
        if level - length <= level_min + rounding:
            length = level - level_min
        active += [int(j) for j in np.flatnonzero(velocity) if j not in active]
        beta = beta + length * velocity
        c = X.T @ (y - X @ beta)
        level -= length
        tied = np.union1d(staying, joining)
        knots.append(beta)
        levels.append(level)
    return knots, levels, active


def _direction(X: Floats, tied: NDArray[np.intp], signs: Floats) -> Floats:
    """Change of β per unit by which the level falls.

    LARS would take the combination of the tied features (with the signs of their correlations)
    in which all of them fall alike: the equiangular vector u, Xᵀu = 1. Here u is projected on the
    convex cone that they span.
    """
    signed = X[:, tied] * signs
    equiangular = np.linalg.lstsq(signed.T, np.ones(len(tied)))[0]
    weights, _ = nnls(signed, equiangular)
    velocity = np.zeros(X.shape[1])
    velocity[tied] = signs * weights
    return velocity


def _next_knot(
    c: Floats, fall: Floats, tied: NDArray[np.intp], level: float
) -> tuple[float, NDArray[np.intp]]:
    """By how much the level falls until a feature catches up with it, and which do so."""
    rates = 1 - np.stack([fall, -fall])
    gaps = np.maximum(level - np.stack([c, -c]), 0)
    rates[:, tied] = 0
    when = np.full_like(gaps, np.inf)
    np.divide(gaps, rates, out=when, where=rates > _TIE)
    first = when.min(axis=0)
    length = float(first.min())
    return length, np.flatnonzero(first <= length + _TIE * level)
