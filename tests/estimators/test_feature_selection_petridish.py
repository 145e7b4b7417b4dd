"""The place of Petridish among LARS, OMP, matching pursuit and boosting, on the linear network."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LassoLars, lars_path, orthogonal_mp

from nni_petridish import Genotype, attach_candidates, detach_candidates, finalize_candidates
from nni_petridish.errors import ConfigError, GenotypeError
from nni_petridish.estimators.feature_selection import (
    LinearSpace,
    PetridishRegressor,
    least_squares_boosting_path,
)
from nni_petridish.estimators.feature_selection._compare import path_distance
from nni_petridish.estimators.feature_selection._petridish import learn_candidates, train
from search_spaces.linear import LinearGenotype

LARS_ORDER = [2, 8, 3, 6, 1, 9, 4, 7, 5, 0]
OMP_ORDER = [2, 8, 3, 6, 1, 5, 9, 4, 7, 0]
STAGEWISE_ORDER = [2, 8, 3, 6, 1, 9, 4, 7, 0, 5]


@pytest.fixture(scope="module")
def diabetes():
    X, y = load_diabetes(return_X_y=True)
    return (X - X.mean(axis=0)) / X.std(axis=0), (y - y.mean()) / y.std()


def grown(diabetes, **arguments):
    return PetridishRegressor(fit_intercept=False, standardize=False, **arguments).fit(*diabetes)


def tensors(data):
    return tuple(torch.from_numpy(array) for array in data)


def test_the_gradient_of_alpha_is_the_correlation_with_the_residual(diabetes) -> None:
    x, y = tensors(diabetes)
    space = LinearSpace(10)
    net = space.build(LinearGenotype([(("x2", "identity"),), (("x8", "identity"),)]))
    before = net(x)
    attach_candidates(net, l1=0.0)
    torch.testing.assert_close(net(x), before, rtol=0, atol=0)
    (0.5 * (net(x) - y).square().mean()).backward()
    table = net.prediction.weak_learner.table
    X, target = diabetes
    residual = target - X[:, 2] - X[:, 8]
    np.testing.assert_allclose(table.alpha.grad.numpy(), -X.T @ residual / len(target), atol=1e-14)
    detach_candidates(net)


def test_weak_learning_ranks_features_by_correlation_and_holds_those_below_l1(diabetes) -> None:
    X, target = diabetes
    correlations = np.abs(X.T @ target) / len(target)
    for l1 in (0.0, 0.3):
        net = LinearSpace(10).build(LinearGenotype.seed())
        assert learn_candidates(net, *tensors(diabetes), l1) == pytest.approx(correlations.max())
        alpha = net.prediction.weak_learner.table.alpha.detach().abs().numpy()
        survivors = np.flatnonzero(correlations > l1)
        ranked = survivors[np.argsort(-alpha[survivors])]
        assert ranked.tolist() == survivors[np.argsort(-correlations[survivors])].tolist()
        assert int(alpha.argmax()) == 2


def test_petridish_enters_features_in_the_order_of_lars_by_default(diabetes) -> None:
    assert list(lars_path(*diabetes)[1]) == LARS_ORDER
    X, y = load_diabetes(return_X_y=True)
    model = PetridishRegressor().fit(X, y)
    assert model.active_ == LARS_ORDER
    assert model.n_iter_ < 200


@pytest.mark.parametrize("training", [0.02, 0.1])
def test_little_training_of_all_weights_gives_the_order_of_lars(diabetes, training) -> None:
    assert grown(diabetes, training=training).active_ == LARS_ORDER


@pytest.mark.parametrize("training", [0.9, 1.0])
def test_nearly_full_training_of_all_weights_gives_the_order_of_omp(diabetes, training) -> None:
    assert grown(diabetes, training=training).active_ == OMP_ORDER


def test_full_training_is_orthogonal_matching_pursuit(diabetes) -> None:
    model = grown(diabetes, training=1.0, l1=0.0)
    pursuit = orthogonal_mp(*diabetes, n_nonzero_coefs=10, return_path=True)
    assert model.n_iter_ == 10
    np.testing.assert_allclose(model.coef_path_[:, 1:], pursuit, atol=1e-10)


def test_with_less_and_less_training_the_path_converges_to_that_of_lars(diabetes) -> None:
    _, _, reference = lars_path(*diabetes)
    shares = np.array([0.2, 0.1, 0.05, 0.025])
    distances = [
        path_distance(grown(diabetes, training=share, l1=0.01).coef_path_, reference)[0]
        for share in shares
    ]
    slope, _ = np.polyfit(np.log(shares), np.log(distances), 1)
    assert 0.7 < slope < 1.3
    assert distances[-1] < 0.01


def test_a_share_of_training_shrinks_all_tied_correlations_alike(diabetes) -> None:
    x, y = tensors(diabetes)
    net = LinearSpace(10).build(LinearGenotype.seed())
    for _ in range(30):
        learn_candidates(net, x, y, 0.0)
        finalize_candidates(net, 1)
        features = list(net.genotype.features)
        before = x.T @ (y - net(x))
        train(net, x, y, 0.1)
        after = x.T @ (y - net(x))
        torch.testing.assert_close(after[features], 0.9 * before[features])


def test_little_training_of_the_new_learner_alone_is_boosting(diabetes) -> None:
    model = grown(diabetes, training=0.1, trained="new", l1=0.0, max_growths=150)
    boosted = least_squares_boosting_path(*diabetes, learning_rate=0.1, max_steps=150)
    np.testing.assert_allclose(model.coef_path_, boosted[2], atol=1e-10)
    assert model.active_ == boosted[1]
    longer = least_squares_boosting_path(*diabetes, learning_rate=0.1)
    assert longer[1] == STAGEWISE_ORDER


def order_by_gradient_descent(diabetes, steps, growths):
    """Grow with the η trained by plain full-batch gradient descent instead of least squares."""
    x, y = tensors(diabetes)
    net = LinearSpace(10).build(LinearGenotype.seed())
    for _ in range(growths):
        learn_candidates(net, x, y, 0.0)
        finalize_candidates(net, 1)
        net.fold()
        eta = [learner.eta for learner in net.prediction.finished()]
        for _ in range(steps):
            gradients = torch.autograd.grad(0.5 * (net(x) - y).square().mean(), eta)
            for parameter, gradient in zip(eta, gradients, strict=True):
                parameter.data -= 0.25 * gradient
    return list(net.genotype.features)


def test_full_training_gives_the_order_of_omp_by_gradient_descent_too(diabetes) -> None:
    assert order_by_gradient_descent(diabetes, steps=150, growths=8) == OMP_ORDER[:8]


def test_little_gradient_descent_parts_from_lars_at_the_sixth_feature(diabetes) -> None:
    # Gradient descent shrinks correlations at different rates and so loses the ties of LARS.
    order = order_by_gradient_descent(diabetes, steps=1, growths=60)
    assert order[:5] == LARS_ORDER[:5]
    assert order[5] == 4


def test_full_training_of_the_new_learner_alone_is_matching_pursuit(diabetes) -> None:
    X, y = diabetes
    model = grown(diabetes, training=1.0, trained="new", l1=0.0, max_growths=40)
    beta = np.zeros(10)
    for k in range(41):
        np.testing.assert_allclose(model.coef_path_[:, k], beta, atol=1e-10)
        c = X.T @ (y - X @ beta) / len(y)
        beta[np.argmax(np.abs(c))] += c[np.argmax(np.abs(c))]


@pytest.mark.parametrize("l1", [0.2, 0.05, 0.01])
def test_l1_stops_the_path_where_lars_has_that_alpha(diabetes, l1) -> None:
    model = grown(diabetes, l1=l1, training=0.02)
    alphas, active, _ = lars_path(*diabetes)
    expected = [int(j) for j, alpha in zip(active, alphas, strict=False) if alpha > l1]
    assert model.active_ == expected
    assert model.alphas_[-1] <= l1 < model.alphas_[-2]
    lasso = LassoLars(alpha=l1, fit_intercept=False).fit(*diabetes)
    np.testing.assert_allclose(model.coef_, lasso.coef_, atol=0.02)


def test_a_larger_i_max_takes_the_largest_correlations_at_once(diabetes) -> None:
    X, y = diabetes
    largest = np.argsort(-np.abs(X.T @ y))[:4].tolist()
    model = grown(diabetes, i_max=4, training=1.0, max_growths=1)
    assert model.active_ == largest
    refit = np.linalg.lstsq(X[:, largest], y)[0]
    np.testing.assert_allclose(model.coef_[largest], refit, atol=1e-10)
    # One at a time, correlated features that come together here wait for the residual to decide.
    assert model.active_ != OMP_ORDER[:4]
    assert grown(diabetes, i_max=4).active_ != LARS_ORDER


@pytest.mark.parametrize("trained", ["all", "new"])
@pytest.mark.parametrize("training", [0.05, 1.0])
def test_on_an_orthogonal_design_every_regime_agrees(trained, training) -> None:
    X = hadamard(16)[:, 1:9].astype(float)
    exact = np.array([0.3, -1.0, 0.1, 0.6, -0.8, 0.2, 0.5, -0.4])
    order = np.argsort(-np.abs(exact)).tolist()
    for i_max in (1, 2) if trained == "all" else (1,):
        model = grown((X, X @ exact), i_max=i_max, trained=trained, training=training, l1=0.05)
        assert model.active_ == order
        np.testing.assert_allclose(model.coef_, exact, atol=0.05)


def test_n_nonzero_coefs_and_max_growths_bound_the_growth(diabetes) -> None:
    assert grown(diabetes, n_nonzero_coefs=3).active_ == LARS_ORDER[:3]
    model = grown(diabetes, max_growths=4)
    assert model.n_iter_ == 4
    assert model.coef_path_.shape == (10, 5)
    assert grown(diabetes, max_growths=0).active_ == []


def test_folding_leaves_predictions_as_they_are(diabetes) -> None:
    x, y = tensors(diabetes)
    net = LinearSpace.of(x * 3 + 1).build(LinearGenotype.seed())
    for i_max in (2, 3, 1):
        learn_candidates(net, x * 3 + 1, y, 0.0)
        finalize_candidates(net, i_max)
        for learner in net.prediction.finished():
            learner.eta.data += 0.01
    before, coefficients = net(x * 3 + 1), net.coefficients()
    features = net.genotype.features
    genotype = net.fold()
    torch.testing.assert_close(net(x * 3 + 1), before)
    torch.testing.assert_close(net.coefficients(), coefficients)
    torch.testing.assert_close(x @ coefficients, before.detach())
    assert genotype.features == features
    assert genotype.growths == len(features)


def test_a_linear_genotype_survives_json_and_says_what_is_wrong() -> None:
    genotype = LinearGenotype([(("x2", "identity"), ("x8", "identity")), (("x0", "identity"),)])
    assert Genotype.from_json(genotype.to_json()) == genotype
    assert hash(genotype) == hash(Genotype.from_json(genotype.to_json()))
    space = LinearSpace(9)
    assert LinearSpace(**space.describe()) == space
    assert len(space.build(genotype).prediction.learners) == 2
    for learners, message in [
        ("x2", "learners: must be a list"),
        ([[]], r"learners\[0\]: must be a list of at least one"),
        ([[["x2", "sep_conv_3x3"]]], r"learners\[0\]: must be \['x<column>', 'identity'\]"),
        ([[["x02", "identity"]]], r"learners\[0\]: must be"),
    ]:
        with pytest.raises(GenotypeError, match=message):
            LinearGenotype(learners)
    with pytest.raises(GenotypeError, match="the space has 2 features but got 'x2'"):
        LinearSpace(2).build(genotype)
    with pytest.raises(GenotypeError, match="is not a key of a linear genotype"):
        Genotype.from_dict({"version": 1, "space": "linear", "learners": [], "cells": {}})
    with pytest.raises(GenotypeError, match="has no key 'normal'"):
        genotype.grown({"normal": (("x2", "identity"),)})
    for arguments, message in [
        ((0,), "n_features must be a whole number of at least 1 but got 0"),
        ((2, [0.0]), "mean must have 2 entries but got 1"),
        ((1, [0.0], [0.0]), "scale must be positive but got 0.0"),
    ]:
        with pytest.raises(ConfigError, match=message):
            LinearSpace(*arguments)
