"""Base of the linear regressors: standardized data, the validation of X and y, and prediction."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from ._arrays import FLOATS, Floats


class Standardization:
    """Center and scale as a linear model needs it, and bring coefficients back.

    Every column gets mean 0 and variance 1, as does y, so that a step ε, a correlation and a
    penalty λ mean the same for all data. A constant column becomes 0 and is never selected.
    """

    def __init__(self, X: Floats, y: Floats, *, fit_intercept: bool, standardize: bool) -> None:
        self.fit_intercept, self.standardize = fit_intercept, standardize
        self.x_mean = _mean(X) if fit_intercept else np.zeros(X.shape[1], X.dtype)
        self.X = X - self.x_mean
        # A constant column is rounding noise after centering, not information.
        rounding = 10 * np.finfo(X.dtype).eps * np.abs(X).max(axis=0)
        self.constant = np.abs(self.X).max(axis=0) <= rounding
        self.X[:, self.constant] = 0.0
        self.x_scale = np.ones(X.shape[1], X.dtype)
        if standardize:
            self.x_scale = _nonzero(np.sqrt(_mean(self.X**2)))
            self.X = self.X / self.x_scale
        self._take_target(y)

    def _take_target(self, y: Floats) -> None:
        self.y_mean = float(y.mean()) if self.fit_intercept else 0.0
        self.y, self.y_scale = y - self.y_mean, 1.0
        if self.standardize:
            self.y_scale = float(_nonzero(np.sqrt(np.mean(self.y**2))))
            self.y = self.y / self.y_scale

    def with_target(self, y: Floats) -> Standardization:
        """Return the same features with another target."""
        other = copy(self)
        other._take_target(y)
        return other

    def gram(self, centered: Floats) -> Floats:
        """Return the Gram matrix of the features as they are here from that of centered ones."""
        factors = np.where(self.constant, 0.0, 1.0 / self.x_scale)
        return centered * np.outer(factors, factors)

    def coefficients(self, coefs: Floats) -> Floats:
        """Return coefficients, of shape (n_features,) or (n_features, n_points), for X as given."""
        return np.asarray((coefs.T * (self.y_scale / self.x_scale)).T)

    def intercept(self, coefficients: Floats) -> Any:
        """Return the intercept that belongs to what :meth:`coefficients` returned."""
        return self.y_mean - self.x_mean @ coefficients


def _mean(X: Floats) -> Floats:
    """Return the means of the columns, added up in doubles, in the precision of X."""
    means: Floats = X.mean(axis=0, dtype=np.float64)
    return means.astype(X.dtype, copy=False)


def _nonzero(scale: Any) -> Any:
    return np.where(scale > 0, scale, np.ones_like(scale))


class LinearPathRegressor(RegressorMixin, BaseEstimator):
    """Base of the regressors of this package: validation of X and y, and prediction."""

    fit_intercept: bool
    standardize: bool
    coef_: Floats
    intercept_: Any

    def _validated(
        self, X: ArrayLike, y: ArrayLike, *, dtype: Any = np.float64, multi_output: bool = False
    ) -> tuple[Floats, Floats]:
        # One sample has no variance: scikit-learn's own error for it is raised here.
        features, target = validate_data(
            self,
            X,
            y,
            dtype=dtype,
            y_numeric=True,
            multi_output=multi_output,
            ensure_min_samples=2,
        )
        return features, target.astype(features.dtype, copy=False)

    def _standardized(self, X: Floats, y: Floats) -> Standardization:
        return Standardization(X, y, fit_intercept=self.fit_intercept, standardize=self.standardize)

    def predict(self, X: ArrayLike) -> Floats:
        """Predict y for X.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Samples.

        Returns
        -------
        y_pred : ndarray of shape (n_samples,) or (n_samples, n_targets)
            Predictions.
        """
        check_is_fitted(self)
        features: Floats = validate_data(self, X, dtype=FLOATS, reset=False)
        return np.asarray(features @ self.coef_.T + self.intercept_)
