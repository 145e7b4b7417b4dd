"""The estimators as scikit-learn sees them."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_diabetes
from sklearn.linear_model import Lars, LinearRegression
from sklearn.model_selection import KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from nni_petridish.baselines.feature_selection import (
    ForwardStagewiseRegressor,
    ForwardStagewiseRegressorCV,
    PetridishRegressor,
    forward_stagewise_path,
)

ESTIMATORS = [
    ForwardStagewiseRegressor(),
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
    X = X[:, :5]
    scale = np.array([1.0, 10.0, 1e-3, 5.0, 1e4])
    one, other = clone(estimator).fit(X, y), clone(estimator).fit(X * scale + 3.0, -2.0 * y)
    assert one.active_ == other.active_
    np.testing.assert_allclose(other.coef_ * scale, -2.0 * one.coef_, rtol=1e-6, atol=1e-8)


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


def test_an_estimator_works_in_a_pipeline(diabetes) -> None:
    X, y = diabetes
    pipeline = make_pipeline(StandardScaler(), PetridishRegressor())
    assert cross_val_score(pipeline, X, y, cv=3).min() > 0.4


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import nni_petridish.baselines.feature_selection.cli", "torch sklearn matplotlib nni"),
        (
            "from nni_petridish.baselines.feature_selection import forward_stagewise_path",
            "torch matplotlib nni",
        ),
    ],
)
def test_imports_bring_only_what_is_needed(statement, unwanted) -> None:
    code = f"import sys; {statement}; sys.exit(any(m in sys.modules for m in {unwanted.split()}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
