"""The estimators as scikit-learn sees them."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from scipy.linalg import hadamard
from sklearn.base import clone
from sklearn.datasets import load_diabetes
from sklearn.linear_model import Lars, LassoLars, LinearRegression
from sklearn.model_selection import KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils._param_validation import InvalidParameterError
from sklearn.utils.estimator_checks import parametrize_with_checks

from nni_petridish.errors import ConfigError
from nni_petridish.estimators.feature_selection import (
    ForwardStagewiseRegressor,
    ForwardStagewiseRegressorCV,
    PetridishRegressor,
    forward_stagewise_path,
)

ESTIMATORS = [
    ForwardStagewiseRegressor(),
    ForwardStagewiseRegressor(positive=True),
    ForwardStagewiseRegressorCV(),
    PetridishRegressor(),
    PetridishRegressor(training=1.0, i_max=2),
]


@parametrize_with_checks(ESTIMATORS)
def test_scikit_learn_accepts_the_estimator(estimator, check, monkeypatch) -> None:
    # Without it scikit-learn skips its check of array API inputs.
    monkeypatch.setenv("SCIPY_ARRAY_API", "1")
    check(estimator)


@pytest.fixture(scope="module")
def diabetes():
    return load_diabetes(return_X_y=True)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda X, y: (np.where(X[3, 2] == X, np.nan, X), y),
        lambda X, y: (X, np.where(y == y[3], np.inf, y)),
        lambda X, y: (X[:, 0], y),
        lambda X, y: (X[:5], y),
        lambda X, y: (X[:, :0], y),
    ],
    ids=["nan", "inf", "one dimension", "lengths", "no features"],
)
def test_bad_input_raises_what_lars_raises(diabetes, estimator, spoil) -> None:
    X, y = spoil(*diabetes)
    with pytest.raises(ValueError) as expected:  # noqa: PT011 - the message is compared below
        Lars().fit(X, y)
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        clone(estimator).fit(X, y)
    name = type(estimator).__name__
    assert str(raised.value).replace(name, "Lars") == str(expected.value)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_one_sample_is_refused_in_scikit_learns_words(estimator) -> None:
    with pytest.raises(ValueError, match=r"Found array with 1 sample\(s\).* minimum of 2"):
        clone(estimator).fit([[1.0, 2.0]], [1.0])


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_constant_columns_are_never_selected_and_change_nothing(diabetes, estimator) -> None:
    X, y = diabetes
    plain = clone(estimator).fit(X[:, :4], y)
    constant = np.full((len(X), 1), 0.1)
    padded = clone(estimator).fit(np.hstack([constant, X[:, :4], 1e6 * constant]), y)
    assert padded.coef_[[0, -1]].tolist() == [0.0, 0.0]
    np.testing.assert_allclose(padded.coef_[1:-1], plain.coef_, rtol=1e-9)
    assert padded.active_ == [j + 1 for j in plain.active_]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_a_constant_target_gives_the_constant(diabetes, estimator) -> None:
    X, _ = diabetes
    model = clone(estimator).fit(X, np.full(len(X), 7.0))
    assert model.active_ == []
    np.testing.assert_allclose(model.predict(X), 7.0)


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)
def test_units_of_the_features_do_not_matter(diabetes, estimator) -> None:
    X, y = diabetes
    sign = 1.0 if estimator.get_params().get("positive") else -1.0
    X = X[:, :5]
    scale = np.array([1.0, 10.0, 1e-3, 5.0, 1e4])
    one, other = clone(estimator).fit(X, y), clone(estimator).fit(X * scale + 3.0, sign * 2.0 * y)
    assert one.active_ == other.active_
    np.testing.assert_allclose(other.coef_ * scale, sign * 2.0 * one.coef_, rtol=1e-6, atol=1e-8)


def test_the_regressor_is_the_path_on_standardized_data(diabetes) -> None:
    X, y = diabetes
    model = ForwardStagewiseRegressor(step=0.01).fit(X, y)
    Xs, ys = (X - X.mean(axis=0)) / X.std(axis=0), (y - y.mean()) / y.std()
    alphas, active, coefs = forward_stagewise_path(Xs, ys, step=0.01)
    np.testing.assert_allclose(model.alphas_, alphas)
    assert model.active_ == active
    np.testing.assert_allclose(model.coef_path_ * X.std(axis=0)[:, None] / y.std(), coefs)
    np.testing.assert_allclose(model.predict(X), y.mean() + y.std() * (Xs @ coefs[:, -1]))


def test_without_standardising_steps_are_in_the_units_of_the_data(diabetes) -> None:
    X, y = diabetes
    model = ForwardStagewiseRegressor(step=1.0, max_steps=50, standardize=False).fit(X, y)
    assert np.abs(model.coef_).sum() == pytest.approx(50.0)
    assert model.n_iter_ == 50


def test_small_steps_to_the_end_are_least_squares(diabetes) -> None:
    X, y = diabetes
    model = ForwardStagewiseRegressor(step=1e-5).fit(X, y)
    exact = LinearRegression().fit(X, y)
    np.testing.assert_allclose(model.predict(X), exact.predict(X), atol=0.5)


def test_the_cv_variant_stops_where_the_error_over_the_folds_is_least(diabetes) -> None:
    X, y = diabetes
    folds = KFold(4, shuffle=True, random_state=1)
    model = ForwardStagewiseRegressorCV(step=0.01, cv=folds, n_points=40).fit(X, y)
    assert model.mse_path_.shape == (len(model.cv_steps_), 4)
    assert 0 < model.n_iter_ < model.cv_steps_[-1]
    errors = model.mse_path_.mean(axis=1)
    assert model.n_iter_ == model.cv_steps_[errors.argmin()]
    for position in (3, 20, int(errors.argmin())):
        single = ForwardStagewiseRegressor(step=0.01, max_steps=int(model.cv_steps_[position]))
        scores = cross_val_score(single, X, y, cv=folds, scoring="neg_mean_squared_error")
        # Points inside a jump are interpolated, to within a step.
        np.testing.assert_allclose(model.mse_path_[position], -scores, rtol=5e-3)
    refitted = ForwardStagewiseRegressor(step=0.01, max_steps=model.n_iter_).fit(X, y)
    np.testing.assert_array_equal(model.coef_, refitted.coef_)


FORMS = [{}, {"precompute": True}, {"positive": True}, {"standardize": False, "step": 1.0}]


@pytest.mark.parametrize("arguments", FORMS, ids=str)
def test_single_precision_stays_and_changes_only_the_rounding(diabetes, arguments) -> None:
    X, y = diabetes
    double = ForwardStagewiseRegressor(**arguments).fit(X, y)
    single = ForwardStagewiseRegressor(**arguments).fit(X.astype(np.float32), y)
    for name in ("coef_", "coef_path_", "alphas_", "intercept_"):
        assert getattr(single, name).dtype == np.float32
    predictions = single.predict(X.astype(np.float32))
    assert predictions.dtype == np.float32
    # Rounding may choose another of two tied features, which costs a step.
    np.testing.assert_allclose(predictions, double.predict(X), atol=0.05 * y.std())
    path = forward_stagewise_path(X.astype(np.float32), y, step=1.0)
    assert path[0].dtype == path[2].dtype == np.float32


@pytest.mark.parametrize("arguments", FORMS, ids=str)
def test_several_targets_are_as_many_fits(diabetes, arguments) -> None:
    X, y = diabetes
    targets = np.stack([y, np.sqrt(y), -y], axis=1)
    model = ForwardStagewiseRegressor(**arguments).fit(X, targets)
    assert model.coef_.shape == (3, 10)
    assert model.predict(X).shape == (len(X), 3)
    for k, target in enumerate(targets.T):
        alone = ForwardStagewiseRegressor(**arguments).fit(X, target)
        np.testing.assert_allclose(model.coef_[k], alone.coef_, rtol=1e-9)
        np.testing.assert_allclose(model.predict(X)[:, k], alone.predict(X), rtol=1e-9)
        np.testing.assert_allclose(model.coef_path_[k], alone.coef_path_, rtol=1e-9)
        assert model.active_[k] == alone.active_
        assert model.n_iter_[k] == alone.n_iter_


@pytest.mark.parametrize("n_targets", [None, 1, 3])
def test_attributes_have_the_shapes_of_lars(diabetes, n_targets) -> None:
    X, y = diabetes
    if n_targets:
        y = np.stack([y * (k + 1) for k in range(n_targets)], axis=1)
    lars, model = Lars().fit(X, y), ForwardStagewiseRegressor().fit(X, y)
    assert model.coef_.shape == lars.coef_.shape
    for name in ("alphas_", "active_", "coef_path_"):
        assert isinstance(getattr(model, name), type(getattr(lars, name)))


def test_small_steps_to_the_end_are_lars_to_the_end_for_every_target() -> None:
    X = hadamard(16)[:, 1:6].astype(float)
    targets = X @ np.random.default_rng(0).normal(size=(5, 2)) + 3.0
    model = ForwardStagewiseRegressor(step=1e-5).fit(X, targets)
    np.testing.assert_allclose(model.coef_, Lars().fit(X, targets).coef_, atol=1e-4)
    np.testing.assert_allclose(model.intercept_, Lars().fit(X, targets).intercept_, atol=1e-4)


def test_positive_paths_are_those_of_lasso_lars_on_orthogonal_features() -> None:
    X = hadamard(16)[:, 1:6].astype(float)
    y = X @ [3.0, -2.0, 1.0, 0.5, -0.1]
    model = ForwardStagewiseRegressor(step=1e-4, positive=True, standardize=False).fit(X, y)
    lars = LassoLars(alpha=0.0, positive=True).fit(X, y)
    assert model.active_ == lars.active_ == [0, 2, 3]
    # With `positive`, scikit-learn promises its path down to its last alpha above 0 only.
    positive = lars.alphas_ > 0
    assert positive.sum() == 3
    for alpha, coefficients in zip(
        lars.alphas_[positive], lars.coef_path_.T[positive], strict=True
    ):
        at_alpha = [np.interp(-alpha, -model.alphas_, row) for row in model.coef_path_]
        np.testing.assert_allclose(at_alpha, coefficients, atol=1e-3)


@pytest.mark.parametrize("standardize", [True, False])
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_a_gram_matrix_is_given_as_lars_takes_it(diabetes, standardize, fit_intercept) -> None:
    X, y = diabetes
    X = np.hstack([X * np.arange(1, 11) + 0.5, np.full((len(X), 1), 2.0)][: 1 + fit_intercept])
    centered = X - X.mean(axis=0) * fit_intercept
    gram = centered.T @ centered
    Lars(precompute=gram, fit_intercept=fit_intercept).fit(X, y)
    settings = {"standardize": standardize, "fit_intercept": fit_intercept, "max_steps": 500}
    fits = [
        ForwardStagewiseRegressor(precompute=precompute, **settings).fit(X, y)
        for precompute in ("auto", True, False, gram, gram.tolist())
    ]
    for fit in fits[1:]:
        assert fit.active_ == fits[0].active_
        np.testing.assert_allclose(fit.coef_, fits[0].coef_, rtol=1e-9, atol=1e-12)


def test_a_gram_matrix_that_does_not_fit_is_refused(diabetes) -> None:
    with pytest.raises(ConfigError, match=r"^precompute: .* \(10, 10\) but got \(3, 3\)\.$"):
        ForwardStagewiseRegressor(precompute=np.eye(3)).fit(*diabetes)
    with pytest.raises(InvalidParameterError, match="'precompute' parameter"):
        ForwardStagewiseRegressorCV(precompute=np.eye(10)).fit(*diabetes)


def test_an_estimator_works_in_a_pipeline(diabetes) -> None:
    X, y = diabetes
    pipeline = make_pipeline(StandardScaler(), PetridishRegressor())
    assert cross_val_score(pipeline, X, y, cv=3).min() > 0.4


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import nni_petridish.estimators.feature_selection.cli", "torch sklearn matplotlib nni"),
        (
            "from nni_petridish.estimators.feature_selection import forward_stagewise_path",
            "torch matplotlib nni",
        ),
    ],
)
def test_imports_bring_only_what_is_needed(statement, unwanted) -> None:
    code = f"import sys; {statement}; sys.exit(any(m in sys.modules for m in {unwanted.split()}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
