"""Methods side by side: order of entry, agreement with LARS, paths, error, time, recovery."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import kendalltau
from sklearn.model_selection import KFold

from ._arrays import Floats
from ._data import DESIGNS, Dataset, synthetic
from ._linear import Standardization
from ._methods import METHODS, Method, Path

REFERENCE = "LARS"


@dataclass(frozen=True)
class Row:
    """Result of the comparison for one method.

    Parameters
    ----------
    method
        Its name.
    refits
        Whether the points of its path are separate fits.
    path
        Its order of entry and coefficients, for standardized data.
    prefix
        The number of features that enter as in LARS before the first that does not.
    kendall
        Kendall's τ between its order and LARS's, over the features that both have.
    jaccard
        Overlap of the first k features with LARS's first k.
    distance_max, distance_mean
        Largest coefficient difference from LARS at equal L1 norm: the worst along the path, and
        the mean.
    cv_error
        Mean squared error at the best point of the path, cross-validated, in y's units; NaN if not
        asked for.
    seconds
        Time for the path.
    """

    method: str
    refits: bool
    path: Path
    prefix: int
    kendall: float
    jaccard: float
    distance_max: float
    distance_mean: float
    cv_error: float
    seconds: float


def compare(
    data: Dataset,
    *,
    methods: Mapping[str, Method] = METHODS,
    k: int = 5,
    folds: int = 5,
    n_refits: int | None = None,
) -> list[Row]:
    """Run every method on a data set, and compare each with LARS.

    Parameters
    ----------
    data
        The data set.
    methods
        The methods by name; LARS must be among them.
    k
        The first k features are compared as sets.
    folds
        The number of folds of the cross-validated error; 0 for none.
    n_refits
        After how many features methods stop that refit for each; by default all, or 10 of many.
    """
    limits = {name: _limit(method, data, n_refits) for name, method in methods.items()}
    whole = _standardized(data.X, data.y)
    timed = {name: _timed(method, whole, limits[name]) for name, method in methods.items()}
    reference = timed[REFERENCE][0]
    rows = []
    for name, (path, seconds) in timed.items():
        method, limit = methods[name], limits[name]
        row = Row(
            name,
            method.refits,
            path,
            common_prefix(path.order, reference.order),
            kendall_tau(path.order, reference.order),
            jaccard(path.order[:k], reference.order[:k]),
            *path_distance(path.coefs, reference.coefs),
            cross_validated_error(data, method, folds, limit) if folds else float("nan"),
            seconds,
        )
        rows.append(row)
    return rows


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many entries agree before the first that does not."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def kendall_tau(a: Sequence[int], b: Sequence[int]) -> float:
    """Return Kendall's τ of two orders over the features in both; NaN below two of them."""
    common = [j for j in a if j in b]
    if len(common) < 2:
        return float("nan")
    return float(kendalltau(range(len(common)), [b.index(j) for j in common]).statistic)


def jaccard(a: Collection[int], b: Collection[int]) -> float:
    """Return the overlap of two sets: common over all."""
    union = set(a) | set(b)
    return len(set(a) & set(b)) / len(union) if union else 1.0


def path_distance(a: Floats, b: Floats, n_points: int = 400) -> tuple[float, float]:
    """Return max and mean, over L1 norms that both reach, of the largest coefficient difference."""
    by_norm_a, by_norm_b = _by_norm(a), _by_norm(b)
    grid = np.linspace(0, min(by_norm_a[0][-1], by_norm_b[0][-1]), n_points)
    difference = np.abs(_at(grid, *by_norm_a) - _at(grid, *by_norm_b)).max(axis=0)
    return float(difference.max()), float(difference.mean())


def _by_norm(coefs: Floats, pieces: int = 20) -> tuple[Floats, Floats]:
    """Return the path as a function of its L1 norm, where that reaches a new largest value.

    Within a piece the norm bends where a coefficient changes sign, so pieces are cut up first.
    """
    if coefs.shape[1] < 1000:
        knots = np.arange(coefs.shape[1])
        fine = np.linspace(0, knots[-1], pieces * knots[-1] + 1)
        coefs = _at(fine, knots, coefs)
    norms = np.abs(coefs).sum(axis=0)
    before = np.append(-1.0, np.maximum.accumulate(norms)[:-1])
    rising = norms > before
    return norms[rising], coefs[:, rising]


def _at(grid: Any, positions: Any, coefs: Floats) -> Floats:
    return np.array([np.interp(grid, positions, row) for row in coefs])


def cross_validated_error(data: Dataset, method: Method, folds: int, n_features: int) -> float:
    """Return the mean squared error at the best point of the path, by K folds.

    Points correspond between folds by their share of the path's L1 arc length; for methods that
    refit, by the number of features.
    """
    errors = []
    for train, test in KFold(folds, shuffle=True, random_state=0).split(data.X):
        part = _standardized(data.X[train], data.y[train])
        path = method.run(part.X, part.y, n_features)
        points = _by_size(path, n_features) if method.refits else _by_share(path)
        coefficients = part.coefficients(points)
        predictions = data.X[test] @ coefficients + part.intercept(coefficients)
        errors.append(np.mean((data.y[test, None] - predictions) ** 2, axis=0))
    return float(np.mean(errors, axis=0).min())


def _by_size(path: Path, n_features: int) -> Floats:
    # A fold may end earlier than others; its last model then stands for the larger ones.
    return path.coefs[:, np.minimum(np.arange(n_features + 1), path.coefs.shape[1] - 1)]


def _by_share(path: Path, n_points: int = 201) -> Floats:
    length = np.append(0.0, np.cumsum(np.abs(np.diff(path.coefs, axis=1)).sum(axis=0)))
    # Dense at the start: where features are many the best point comes early.
    shares = np.linspace(0, 1, n_points) ** 3
    return _at(shares * length[-1], length, path.coefs)


def recovery_rates(
    draws: int,
    *,
    designs: Iterable[str] = tuple(DESIGNS),
    methods: Mapping[str, Method] = METHODS,
) -> dict[str, dict[str, float]]:
    """Return, for each design and method, how often the first features are the true support.

    As many features are looked at as the support has; one of two equal features stands for both.
    """
    rates: dict[str, dict[str, float]] = {}
    for design in designs:
        hits = dict.fromkeys(methods, 0)
        for seed in range(draws):
            data = synthetic(design, seed)
            whole = _standardized(data.X, data.y)
            assert data.support is not None
            for name, method in methods.items():
                order = method.run(whole.X, whole.y, len(data.support)).order
                hits[name] += set(_first(order, data)) == set(data.support)
        rates[design] = {name: count / draws for name, count in hits.items()}
    return rates


def _first(order: Sequence[int], data: Dataset) -> list[int]:
    """Return the first distinct features, as many as the support has."""
    assert data.support is not None
    distinct = dict.fromkeys(data.twins[j] if data.twins else j for j in order)
    return list(distinct)[: len(data.support)]


def _standardized(X: Floats, y: Floats) -> Standardization:
    return Standardization(X, y, fit_intercept=True, standardize=True)


def _limit(method: Method, data: Dataset, n_refits: int | None) -> int:
    n_features = data.X.shape[1]
    if not method.refits:
        return n_features
    return min(n_features, n_refits or (n_features if n_features <= 20 else 10))


def _timed(method: Method, data: Standardization, n_features: int) -> tuple[Path, float]:
    start = time.perf_counter()
    path = method.run(data.X, data.y, n_features)
    return path, time.perf_counter() - start
