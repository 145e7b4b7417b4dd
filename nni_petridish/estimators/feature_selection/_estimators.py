"""Forward stagewise regression as scikit-learn estimators: thin wrappers of the path function."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import MultiOutputMixin, _fit_context, clone
from sklearn.model_selection import check_cv
from sklearn.utils import check_array
from sklearn.utils._param_validation import Interval, StrOptions

from nni_petridish.errors import ConfigError

from ._arrays import FLOATS, Floats, Ints
from ._linear import LinearPathRegressor, Standardization
from ._stagewise import forward_stagewise_path


class ForwardStagewiseRegressor(MultiOutputMixin, LinearPathRegressor):
    """Linear regression by forward stagewise steps (FSLR).

    X of single precision gives coefficients and predictions of single precision. As with
    scikit-learn's :class:`~sklearn.linear_model.Lars`, y of several columns gives a path for each:
    then `coef_` and `intercept_` have a row for each target, and the other attributes are lists.

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
    precompute : bool, "auto" or array-like of shape (n_features, n_features), default="auto"
        Whether to compute the whole Gram matrix first, or that matrix, of the centered X (of X
        itself without `fit_intercept`). "auto": for several targets. Otherwise a column is
        computed when its feature enters.
    positive : bool, default=False
        Whether to keep all coefficients at 0 or above.

    Attributes
    ----------
    coef_ : ndarray of shape (n_features,) or (n_targets, n_features)
        Coefficients at the end of the path.
    intercept_ : float or ndarray of shape (n_targets,)
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
        "precompute": ["boolean", StrOptions({"auto"}), "array-like"],
        "positive": ["boolean"],
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
        precompute: bool | str | ArrayLike = "auto",
        positive: bool = False,
    ) -> None:
        self.step = step
        self.max_steps = max_steps
        self.tol = tol
        self.fit_intercept = fit_intercept
        self.standardize = standardize
        self.max_points = max_points
        self.precompute = precompute
        self.positive = positive

    @_fit_context(prefer_skip_nested_validation=True)
    def fit(self, X: ArrayLike, y: ArrayLike) -> ForwardStagewiseRegressor:
        """Walk the path on X and y.

        Parameters
        ----------
        X : array-like of shape (n_samples, n_features)
            Training data.
        y : array-like of shape (n_samples,) or (n_samples, n_targets)
            Target.

        Returns
        -------
        self : ForwardStagewiseRegressor
            The fitted estimator.
        """
        X, y = self._validated(X, y, dtype=FLOATS, multi_output=True)
        targets = y.T if y.ndim == 2 else y[None]
        data = self._standardized(X, targets[0])
        gram = self._gram(data, len(targets))
        if len(targets) == 1:
            return self._fit_standardized(data, self.max_steps, gram)
        fits = [
            clone(self)._fit_standardized(data.with_target(target), self.max_steps, gram)
            for target in targets
        ]
        self.coef_ = np.array([fit.coef_ for fit in fits])
        self.intercept_ = np.array([fit.intercept_ for fit in fits], dtype=X.dtype)
        for name in ("alphas_", "active_", "coef_path_", "steps_", "n_iter_"):
            setattr(self, name, [vars(fit)[name] for fit in fits])
        return self

    def _fit_standardized(
        self, data: Standardization, max_steps: int | None, gram: Floats | None
    ) -> ForwardStagewiseRegressor:
        self.alphas_, self.active_, coefs, self.steps_ = self._path(data, max_steps, gram)
        self.coef_path_ = data.coefficients(coefs)
        self.coef_ = self.coef_path_[:, -1].copy()
        self.intercept_ = data.X.dtype.type(data.intercept(self.coef_))
        self.n_iter_ = int(self.steps_[-1])
        return self

    def _gram(self, data: Standardization, n_targets: int = 1) -> Floats | None:
        """Return the Gram matrix of the standardized features; None to compute single columns."""
        if isinstance(self.precompute, str):
            wanted = n_targets > 1
        elif isinstance(self.precompute, bool | np.bool_):
            wanted = bool(self.precompute)
        else:
            return data.gram(self._checked_gram(data.X))
        return data.X.T @ data.X if wanted else None

    def _checked_gram(self, X: Floats) -> Floats:
        gram: Floats = check_array(self.precompute, dtype=X.dtype, input_name="precompute")
        if gram.shape != (X.shape[1],) * 2:
            raise ConfigError(
                f"precompute: must have shape {(X.shape[1],) * 2} but got {gram.shape}."
            )
        return gram

    def _path(
        self, data: Standardization, max_steps: int | None, gram: Floats | None
    ) -> tuple[Floats, list[int], Floats, Ints]:
        return forward_stagewise_path(
            data.X,
            data.y,
            step=self.step,
            max_steps=max_steps,
            tol=self.tol,
            Gram=gram,
            positive=self.positive,
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
    step, max_steps, tol, fit_intercept, standardize, max_points, precompute, positive
        As in :class:`ForwardStagewiseRegressor`; `max_steps` bounds the choice, and `precompute`
        cannot be an array, because every fold has its own.
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
        "precompute": ["boolean", StrOptions({"auto"})],
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
        precompute: bool | str = "auto",
        positive: bool = False,
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
            precompute=precompute,
            positive=positive,
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
        X, y = self._validated(X, y, dtype=FLOATS)
        splits = list(check_cv(self.cv).split(X, y))
        folds = [self._standardized(X[train], y[train]) for train, _ in splits]
        paths = [self._path(data, self.max_steps, self._gram(data)) for data in folds]
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
        whole = self._standardized(X, y)
        self._fit_standardized(whole, int(best), self._gram(whole))
        return self

    def __sklearn_tags__(self) -> Any:
        """Return scikit-learn's tags: one target only, as for its own ``LarsCV``."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = False
        return tags
