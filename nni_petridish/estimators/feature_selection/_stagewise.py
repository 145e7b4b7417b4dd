"""Forward stagewise linear regression (FSLR): many steps of size ε, each on one feature.

The paper's starting point: at every step the feature that correlates most with the residual gets
its weight changed by ±ε. The walk is exact and costs O(p) a step, because the correlations are
kept up to date by columns of the Gram matrix; and where it repeats itself (one feature again and
again, two in a zig-zag, several in turn) the whole stretch is jumped over at once.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import ArrayLike
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_array

from nni_petridish.errors import ConfigError

from ._arrays import FLOATS, Floats, Ints, checked_x_y
from ._walk import MAX_POINTS, Walk

Path = tuple[Floats, list[int], Floats]


@overload
def forward_stagewise_path(
    X: ArrayLike,
    y: ArrayLike,
    *,
    step: float = ...,
    max_steps: int | None = ...,
    tol: float = ...,
    Gram: ArrayLike | Literal["auto"] | None = ...,
    positive: bool = ...,
    max_points: int | None = ...,
    return_path: bool = ...,
    return_steps: Literal[False] = ...,
) -> Path: ...


@overload
def forward_stagewise_path(
    X: ArrayLike,
    y: ArrayLike,
    *,
    step: float = ...,
    max_steps: int | None = ...,
    tol: float = ...,
    Gram: ArrayLike | Literal["auto"] | None = ...,
    positive: bool = ...,
    max_points: int | None = ...,
    return_path: bool = ...,
    return_steps: Literal[True],
) -> tuple[Floats, list[int], Floats, Ints]: ...


def forward_stagewise_path(
    X: ArrayLike,
    y: ArrayLike,
    *,
    step: float = 0.01,
    max_steps: int | None = None,
    tol: float = 0.0,
    Gram: ArrayLike | Literal["auto"] | None = "auto",
    positive: bool = False,
    max_points: int | None = None,
    return_path: bool = True,
    return_steps: bool = False,
) -> Any:
    """Compute the path of forward stagewise linear regression.

    From β = 0, repeat: ``j = argmax |X_jᵀ r|``, ``β_j += step · sign(X_jᵀ r)`` with
    ``r = y − Xβ``. It ends when such a step would no longer reduce ‖r‖, when no
    ``|X_jᵀ r| / n_samples`` exceeds `tol`, or after `max_steps`.

    As in :func:`sklearn.linear_model.lars_path` nothing is centered or scaled here, and `step` is
    in the units of the coefficients. X of single precision gives results of single precision.

    Parameters
    ----------
    X : array-like of shape (n_samples, n_features)
        Input data, usually centered and of equal column norms.
    y : array-like of shape (n_samples,)
        Target, usually centered.
    step : float, default=0.01
        ε: by how much one coefficient changes in one step.
    max_steps : int, optional
        The largest number of steps; those jumped over count like any other. By default none, but
        a path of more than 500 000 points ends with a warning.
    tol : float, default=0.0
        Stop when the largest ``|X_jᵀ r| / n_samples`` is at most this.
    Gram : "auto" or array-like of shape (n_features, n_features), default="auto"
        ``XᵀX`` if known already. Otherwise its columns are computed as features enter.
    positive : bool, default=False
        If True, no coefficient becomes negative: β_j decreases only while it is above 0.
    max_points : int, optional
        Keep at most this many points of the path, evenly spread, the first and the last among
        them. All by default.
    return_path : bool, default=True
        If False, return only the last point of the path.
    return_steps : bool, default=False
        If True, also return how many steps lie behind each point.

    Returns
    -------
    alphas : ndarray of shape (n_points,)
        Largest absolute correlation with the residual, over n_samples, at each point; with
        `positive`, the largest one of an allowed step.
    active : list of int
        Features in the order in which they first moved.
    coefs : ndarray of shape (n_features, n_points)
        Coefficients along the path. A stretch that was jumped over has no points inside: there
        the path is straight (one feature) or within `step` of straight (several in turn).
    steps : ndarray of shape (n_points,)
        Only with ``return_steps=True``. ``steps * step`` is the L1 arc length of the path.

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> alphas, active, coefs = forward_stagewise_path(X, y - y.mean(), step=1.0)
    >>> active[:5]
    [2, 8, 3, 6, 1]
    """
    features, target = checked_x_y(X, y, dtype=FLOATS)
    if not step > 0 or not np.isfinite(step):
        raise ConfigError(f"step must be positive and finite but got {step}.")
    if max_steps is not None and max_steps < 0:
        raise ConfigError(f"max_steps cannot be negative but got {max_steps}.")
    if not tol >= 0:
        raise ConfigError(f"tol cannot be negative but got {tol}.")

    if max_points is not None and max_points < 2:
        raise ConfigError(f"max_points must be at least 2 but got {max_points}.")

    gram = _checked_gram(Gram, features.shape[1])
    walk = Walk(features, target, step, tol, gram, positive=positive)
    walk.run(max_steps)
    if max_steps is None and not walk.converged:
        left = walk.alphas[-1] / len(target)
        warnings.warn(
            f"forward stagewise stopped after {MAX_POINTS} points with correlations up to "
            f"{left:.3g} left; increase step (now {step}) or set max_steps.",
            ConvergenceWarning,
            stacklevel=2,
        )
    alphas, coefs, steps = walk.path(max_points if return_path else 2)
    if not return_path:
        alphas, coefs, steps = alphas[-1:], coefs[:, -1], steps[-1:]
    return (alphas, walk.active, coefs, steps) if return_steps else (alphas, walk.active, coefs)


def _checked_gram(gram: ArrayLike | str | None, n_features: int) -> Floats | None:
    if gram is None or isinstance(gram, str):
        if gram not in (None, "auto"):
            raise ConfigError(f"Gram must be 'auto', None or an array but got {gram!r}.")
        return None
    array: Floats = check_array(gram, dtype=FLOATS, input_name="Gram")
    if array.shape != (n_features, n_features):
        raise ConfigError(f"Gram must have shape {(n_features, n_features)} but got {array.shape}.")
    return array
