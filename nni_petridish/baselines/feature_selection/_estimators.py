"""Forward stagewise regression as scikit-learn estimators: thin wrappers of the path function."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, RegressorMixin, _fit_context
from sklearn.model_selection import check_cv
from sklearn.utils._param_validation import Interval
from sklearn.utils.validation import check_is_fitted, validate_data

from ._arrays import Floats, Ints
from ._stagewise import forward_stagewise_path


class Standardization:
    """Center and scale as a linear model needs it, and bring coefficients back.

    Every column gets mean 0 and variance 1, as does y, so that a step ε, a correlation and a
    penalty λ mean the same for all data. A constant column becomes 0 and is never selected.
    """

    def __init__(self, X: Floats, y: Floats, *, fit_intercept: bool, standardize: bool) -> None:
        self.x_mean = X.mean(axis=0) if fit_intercept else np.zeros(X.shape[1])
        self.y_mean = float(y.mean()) if fit_intercept else 0.0
        self.X, self.y = X - self.x_mean, y - self.y_mean
        self.x_scale, self.y_scale = np.ones(X.shape[1]), 1.0
        # A constant column is rounding noise after centering, not information.
        rounding = 10 * np.finfo(float).eps * np.abs(X).max(axis=0)
        self.X[:, np.abs(self.X).max(axis=0) <= rounding] = 0.0
        if standardize:
            self.x_scale = _nonzero(np.sqrt(np.mean(self.X**2, axis=0)))
            self.y_scale = float(_nonzero(np.sqrt(np.mean(self.y**2))))
            self.X, self.y = self.X / self.x_scale, self.y / self.y_scale

    def coefficients(self, coefs: Floats) -> Floats:
        """Return coefficients, of shape (n_features,) or (n_features, n_points), for X as given."""
        return np.asarray((coefs.T * (self.y_scale / self.x_scale)).T)

    def intercept(self, coefficients: Floats) -> Any:
        """Return the intercept that belongs to what :meth:`coefficients` returned."""
        return self.y_mean - self.x_mean @ coefficients


def _nonzero(scale: Any) -> Any:
    return np.where(scale > 0, scale, 1.0)


class LinearPathRegressor(RegressorMixin, BaseEstimator):
    """Base of the regressors of this package: validation of X and y, and prediction."""

    fit_intercept: bool
    standardize: bool
    coef_: Floats
    intercept_: float

    def _validated(self, X: ArrayLike, y: ArrayLike) -> tuple[Floats, Floats]:
        # One sample has no variance: scikit-learn's own error for it is raised here.
        checked: tuple[Floats, Floats] = validate_data(
            self, X, y, dtype=np.float64, y_numeric=True, ensure_min_samples=2
        )
        return checked

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
        y_pred : ndarray of shape (n_samples,)
            Predictions.
        """
        check_is_fitted(self)
        features: Floats = validate_data(self, X, dtype=np.float64, reset=False)
        return np.asarray(features @ self.coef_ + self.intercept_)


class ForwardStagewiseRegressor(LinearPathRegressor):
    """Linear regression by forward stagewise steps (FSLR).

    Parameters
    ----------
    step : float, default=0.01
        ε: the change of one coefficient in one step; in standard deviations of y per standard
        deviation of the feature if `standardize`.
    max_steps : int, optional
        Stop after this many steps: the fewer, the stronger the regularization. By default when no
        step reduces the residual, or with a warning when the path has 500 000 points.
    tol : float, default=0.0
        Stop when no feature's ``|X_jᵀ r| / n_samples`` exceeds this.
    fit_intercept : bool, default=True
        Whether to center X and y.
    standardize : bool, default=True
        Whether to bring the features and y to variance 1 first. `coef_` is always for X as given.
    max_points : int or None, default=10_000
        The largest number of points of the path to keep in `coef_path_`.

    Attributes
    ----------
    coef_ : ndarray of shape (n_features,)
        Coefficients at the end of the path.
    intercept_ : float
        Intercept at the end of the path.
    alphas_ : ndarray of shape (n_points,)
        Largest absolute correlation with the residual along the path.
    active_ : list of int
        Features in the order in which they entered.
    coef_path_ : ndarray of shape (n_features, n_points)
        Coefficients along the path.
    steps_ : ndarray of shape (n_points,)
        Number of steps behind each point of the path.
    n_iter_ : int
        Number of steps made.
    n_features_in_ : int
        Number of features seen during `fit`.

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> model = ForwardStagewiseRegressor(step=1e-3).fit(X, y)
    >>> model.active_[:5]
    [2, 8, 3, 6, 1]
    >>> round(model.score(X, y), 3)
    0.518
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "step": [Interval(Real, 0, None, closed="neither")],
        "max_steps": [Interval(Integral, 0, None, closed="left"), None],
        "tol": [Interval(Real, 0, None, closed="left")],
        "fit_intercept": ["boolean"],
        "standardize": ["boolean"],
        "max_points": [Interval(Integral, 2, None, closed="left"), None],
    }

    def __init__(
        self,
        *,
        step: float = 0.01,
        max_steps: int | None = None,
        tol: float = 0.0,
        fit_intercept: bool = True,
        standardize: bool = True,
        max_points: int | None = 10_000,
    ) -> None:
        self.step = step
        self.max_steps = max_steps
        self.tol = tol
        self.fit_intercept = fit_intercept
        self.standardize = standardize
        self.max_points = max_points

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: ArrayLike, y: ArrayLike) -> ForwardStagewiseRegressor:
        """Walk the path on X and y.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Training data.
        y : array-like of shape (n_samples,)
            Target.

        Returns
        -------
        self : ForwardStagewiseRegressor
            The fitted estimator.
        """
        return self._fit_standardized(self._standardized(*self._validated(X, y)), self.max_steps)

    def _fit_standardized(
        self, data: Standardization, max_steps: int | None
    ) -> ForwardStagewiseRegressor:
        self.alphas_, self.active_, coefs, self.steps_ = self._path(data, max_steps)
        self.coef_path_ = data.coefficients(coefs)
        self.coef_ = self.coef_path_[:, -1].copy()
        self.intercept_ = float(data.intercept(self.coef_))
        self.n_iter_ = int(self.steps_[-1])
        return self

    def _path(
        self, data: Standardization, max_steps: int | None
    ) -> tuple[Floats, list[int], Floats, Ints]:
        return forward_stagewise_path(
            data.X,
            data.y,
            step=self.step,
            max_steps=max_steps,
            tol=self.tol,
            max_points=self.max_points,
            return_steps=True,
        )


class ForwardStagewiseRegressorCV(ForwardStagewiseRegressor):
    """Forward stagewise regression that stops where cross-validation says.

    The stopping point is the number of steps (times ε it is the path's L1 arc length, the limit
    of which exists as ε shrinks): for each of `n_points` numbers the error is averaged over the
    folds, and the path on all data is walked up to the best one.

    Parameters
    ----------
    step, max_steps, tol, fit_intercept, standardize, max_points
        As in :class:`ForwardStagewiseRegressor`; `max_steps` bounds the choice.
    n_points : int, default=200
        The number of stopping points to compare, evenly spaced.
    cv : int, cross-validation generator or iterable, default=None
        As in scikit-learn; None means 5 folds.

    Attributes
    ----------
    n_iter_ : int
        The chosen number of steps.
    cv_steps_ : ndarray of shape (n_points,)
        The numbers of steps compared.
    mse_path_ : ndarray of shape (n_points, n_folds)
        Mean squared error of each fold at each of them.
    coef_, intercept_, alphas_, active_, coef_path_, steps_, n_features_in_
        As in :class:`ForwardStagewiseRegressor`, up to the chosen point.

    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> X, y = load_diabetes(return_X_y=True)
    >>> ForwardStagewiseRegressorCV(step=1e-3).fit(X, y).active_[:5]
    [2, 8, 3, 6, 1]
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **ForwardStagewiseRegressor._parameter_constraints,
        "n_points": [Interval(Integral, 2, None, closed="left")],
        "cv": ["cv_object"],
    }

    def __init__(
        self,
        *,
        step: float = 0.01,
        max_steps: int | None = None,
        tol: float = 0.0,
        fit_intercept: bool = True,
        standardize: bool = True,
        max_points: int | None = 10_000,
        n_points: int = 200,
        cv: Any = None,
    ) -> None:
        super().__init__(
            step=step,
            max_steps=max_steps,
            tol=tol,
            fit_intercept=fit_intercept,
            standardize=standardize,
            max_points=max_points,
        )
        self.n_points = n_points
        self.cv = cv

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: ArrayLike, y: ArrayLike) -> ForwardStagewiseRegressorCV:
        """Choose the number of steps by cross-validation, then walk as far on all data.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Training data.
        y : array-like of shape (n_samples,)
            Target.

        Returns
        -------
        self : ForwardStagewiseRegressorCV
            The fitted estimator.
        """
        X, y = self._validated(X, y)
        splits = list(check_cv(self.cv).split(X, y))
        folds = [self._standardized(X[train], y[train]) for train, _ in splits]
        paths = [self._path(data, self.max_steps) for data in folds]
        longest = max(steps[-1] for *_, steps in paths)
        self.cv_steps_ = np.unique(np.linspace(0, longest, self.n_points).round().astype(np.int64))
        self.mse_path_ = np.empty((len(self.cv_steps_), len(splits)))
        for fold, (data, (_, _, coefs, steps), (_, test)) in enumerate(
            zip(folds, paths, splits, strict=True)
        ):
            at_steps = np.array([np.interp(self.cv_steps_, steps, row) for row in coefs])
            coefficients = data.coefficients(at_steps)
            predictions = X[test] @ coefficients + data.intercept(coefficients)
            self.mse_path_[:, fold] = np.mean((y[test, None] - predictions) ** 2, axis=0)
        best = self.cv_steps_[self.mse_path_.mean(axis=1).argmin()]
        self._fit_standardized(self._standardized(X, y), int(best))
        return self
