"""Every method of the comparison, brought to one form: standardized data in, a path out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn import config_context
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_selection import SequentialFeatureSelector
from sklearn.linear_model import LinearRegression, lars_path, lasso_path, orthogonal_mp

from ._arrays import Floats
from ._boosting import least_squares_boosting_path
from ._infinitesimal import infinitesimal_stagewise_path
from ._petridish import PetridishRegressor
from ._stagewise import forward_stagewise_path


@dataclass(frozen=True)
class Path:
    """The outcome of one method on one data set.

    Parameters
    ----------
    order
        Features in the order in which they entered.
    coefs
        Coefficients, shape (n_features, n_points), from 0 to the largest model.
    """

    order: list[int]
    coefs: Floats


@dataclass(frozen=True)
class Method:
    """A way to select features.

    Parameters
    ----------
    run
        Function of X and y, both standardized, and of the number of features after which a method
        that adds them one by one may stop.
    refits
        Whether the points of the path are separate fits, with nothing between them.
    """

    run: Callable[[Floats, Floats, int], Path]
    refits: bool = False


def lars(X: Floats, y: Floats, n_features: int) -> Path:
    """Least angle regression."""
    coefs = _lars_path(X, y, "lar")
    return Path(order_of_entry(coefs), coefs)


def lasso_lars(X: Floats, y: Floats, n_features: int) -> Path:
    """The lasso by the LARS modification; features that left and came back count once."""
    coefs = _lars_path(X, y, "lasso")
    return Path(order_of_entry(coefs), coefs)


def _lars_path(X: Floats, y: Floats, method: str) -> Floats:
    """Return the coefficients of `lars_path` as far as they can be trusted.

    Along the path the largest correlation is what its alphas say, and falls. That ends where
    features are dependent; and for "lar", where a coefficient passes through 0 before the last
    feature is in: `lars_path` then flips the sign that it keeps for the feature's correlation.
    """
    with _quiet():
        alphas, _, coefs = lars_path(X, y, method=method)
    largest = np.abs(X.T @ (y[:, None] - X @ coefs)).max(axis=0) / len(y)
    tolerance = 1e-7 * alphas[0]
    wrong = (np.abs(largest - alphas) > tolerance) | (np.diff(alphas, prepend=np.inf) > tolerance)
    return np.asarray(coefs[:, : int(wrong.argmax())] if wrong.any() else coefs)


def lasso_coordinate_descent(X: Floats, y: Floats, n_features: int) -> Path:
    """The lasso on a grid of λ."""
    with _quiet():
        _, coefs, _ = lasso_path(X, y, alphas=500, eps=1e-4)
    return Path(order_of_entry(coefs), coefs)


def stagewise(X: Floats, y: Floats, n_features: int) -> Path:
    """FSLR with ε = 0.001."""
    _, active, coefs = forward_stagewise_path(X, y, step=1e-3, max_points=5000)
    return Path(active, coefs)


def infinitesimal_stagewise(X: Floats, y: Floats, n_features: int) -> Path:
    """FSLR with ε → 0."""
    _, active, coefs = infinitesimal_stagewise_path(X, y)
    return Path(active, coefs)


def boosting(X: Floats, y: Floats, n_features: int) -> Path:
    """Gradient boosting with one-feature least-squares learners."""
    _, active, coefs = least_squares_boosting_path(X, y, max_points=100_000)
    return Path(active, coefs)


def matching_pursuit(X: Floats, y: Floats, n_features: int) -> Path:
    """Orthogonal matching pursuit."""
    size = min(n_features, X.shape[1], len(y) - 1)
    with _quiet():
        coefs = orthogonal_mp(X, y, n_nonzero_coefs=size, return_path=True)
    coefs = np.column_stack([np.zeros(X.shape[1]), coefs.reshape(X.shape[1], -1)])
    return Path(order_of_entry(coefs), coefs)


def forward_selection(X: Floats, y: Floats, n_features: int) -> Path:
    """Scikit-learn's forward selection by cross-validated R²."""
    size = min(n_features, X.shape[1])
    order = _selection_order(X, y, size)
    coefs = np.zeros((X.shape[1], len(order) + 1))
    for k in range(1, len(order) + 1):
        coefs[order[:k], k] = np.linalg.lstsq(X[:, order[:k]], y)[0]
    return Path(order, coefs)


def _selection_order(X: Floats, y: Floats, size: int) -> list[int]:
    """Run `SequentialFeatureSelector` and recover the order, which it does not keep.

    It scores, round after round, every feature that is not yet selected, on every fold: the scores
    in the order of asking tell who won each round.
    """
    folds, scores = 5, list[float]()

    def score(model: Any, X: Floats, y: Floats) -> float:
        scores.append(float(model.score(X, y)))
        return scores[-1]

    p = X.shape[1]
    # The selector wants to leave one out; the last one is then known.
    rounds = min(size, p - 1)
    order: list[int] = []
    if rounds:
        with config_context(assume_finite=True, skip_parameter_validation=True):
            selector = SequentialFeatureSelector(
                LinearRegression(), n_features_to_select=rounds, cv=folds, scoring=score
            ).fit(X, y)
        position = 0
        for _ in range(rounds):
            left = [j for j in range(p) if j not in order]
            block = np.array(scores[position : position + folds * len(left)])
            order.append(left[int(block.reshape(len(left), folds).mean(axis=1).argmax())])
            position += folds * len(left)
        assert sorted(order) == np.flatnonzero(selector.get_support()).tolist()
    if size == p:
        order += [j for j in range(p) if j not in order]
    return order


def petridish(X: Floats, y: Floats, n_features: int) -> Path:
    """Petridish with little training after each growth."""
    return _petridish(X, y, n_features, training=0.05)


def petridish_full(X: Floats, y: Floats, n_features: int) -> Path:
    """Petridish with full training after each growth."""
    return _petridish(X, y, n_features, training=1.0)


def _petridish(X: Floats, y: Floats, n_features: int, training: float) -> Path:
    model = PetridishRegressor(
        training=training,
        n_nonzero_coefs=None if n_features >= X.shape[1] else n_features,
        fit_intercept=False,
        standardize=False,
    ).fit(X, y)
    return Path(model.active_, model.coef_path_)


METHODS = {
    "LARS": Method(lars),
    "lasso (LARS)": Method(lasso_lars),
    "lasso (descent)": Method(lasso_coordinate_descent),
    "FSLR 0.001": Method(stagewise),
    "FSLR -> 0": Method(infinitesimal_stagewise),
    "boosting": Method(boosting),
    "Petridish": Method(petridish),
    "OMP": Method(matching_pursuit, refits=True),
    "Petridish, full": Method(petridish_full, refits=True),
    "forward selection": Method(forward_selection, refits=True),
}


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings about degenerate designs: duplicates and p > n are intended here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def order_of_entry(coefs: Floats) -> list[int]:
    """Return the features in the order of their first nonzero; ties by size there."""
    nonzero = coefs != 0
    entered = [j for j in range(len(coefs)) if nonzero[j].any()]
    first = nonzero.argmax(axis=1)
    return sorted(entered, key=lambda j: (first[j], -abs(coefs[j, first[j]])))
