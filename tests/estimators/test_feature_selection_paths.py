"""Theorems about FSLR, its limit, LARS and the lasso, each against an independent computation."""

from __future__ import annotations

import itertools
import time
import warnings

import numpy as np
import pytest
from scipy.linalg import hadamard
from scipy.optimize import nnls
from sklearn.datasets import load_diabetes
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LinearRegression, lars_path, lasso_path, orthogonal_mp

from nni_petridish.errors import ConfigError
from nni_petridish.estimators.feature_selection import (
    forward_stagewise_path,
    infinitesimal_stagewise_path,
    least_squares_boosting_path,
)


def standardized(X, y):
    X, y = X - X.mean(axis=0), y - y.mean()
    return X / X.std(axis=0), y / y.std()


@pytest.fixture(scope="module")
def diabetes():
    return standardized(*load_diabetes(return_X_y=True))


def random_problem(seed, n, p, correlation=0.0, unequal=False):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, p)) + correlation * rng.normal(size=(n, 1))
    X, _ = standardized(X, rng.normal(size=n))
    if unequal:
        X *= rng.uniform(0.5, 2.0, size=p)
    y = X @ rng.normal(size=p) + rng.normal(size=n)
    return X, y - y.mean()


def naive_stagewise(X, y, step, max_steps, *, positive=False):
    """One ε at a time, every correlation from scratch; β after 0, 1, 2, ... steps."""
    counts = np.zeros(X.shape[1])
    betas = [step * counts]
    for _ in range(max_steps):
        c = X.T @ (y - X @ betas[-1])
        allowed = np.where(counts > 0, np.abs(c), c) if positive else np.abs(c)
        j = np.argmax(allowed)
        if allowed[j] <= step * (X[:, j] @ X[:, j]) / 2:
            break
        counts[j] += np.sign(c[j])
        betas.append(step * counts)
    return np.array(betas).T


def at(positions, knots, coefs):
    return np.array([np.interp(positions, knots, row) for row in coefs])


@pytest.mark.parametrize(
    "problem",
    [
        random_problem(0, 30, 1),
        random_problem(1, 30, 2),
        random_problem(2, 30, 2, correlation=1.0),
        random_problem(3, 30, 2, unequal=True),
        random_problem(4, 40, 3, correlation=0.5),
        random_problem(5, 40, 3, unequal=True),
        random_problem(6, 50, 6, correlation=1.0),
        random_problem(7, 50, 6, unequal=True),
        random_problem(8, 15, 30),
    ],
    ids=lambda problem: "x".join(map(str, problem[0].shape)),
)
@pytest.mark.parametrize("step", [0.1, 0.003])
@pytest.mark.parametrize("positive", [False, True])
def test_jumping_over_repetitions_gives_what_single_steps_give(problem, step, positive) -> None:
    X, y = problem
    limit = 8000
    naive = naive_stagewise(X, y, step, limit, positive=positive)
    alphas, active, coefs, steps = forward_stagewise_path(
        X, y, step=step, max_steps=limit, positive=positive, return_steps=True
    )
    assert steps[-1] == naive.shape[1] - 1
    np.testing.assert_allclose(coefs, naive[:, steps], atol=1e-12)
    first = [int(np.flatnonzero(row)[0]) if row.any() else limit + 1 for row in naive]
    assert active == [j for j in np.argsort(first, kind="stable") if first[j] <= limit]
    correlations = X.T @ (y[:, None] - X @ coefs) / len(y)
    if positive:
        assert coefs.min() == 0.0
        correlations = np.where(coefs > 0, np.abs(correlations), np.maximum(correlations, 0.0))
    np.testing.assert_allclose(alphas, np.abs(correlations).max(axis=0), atol=1e-10)


def test_small_positive_steps_to_the_end_are_least_squares_under_the_constraint() -> None:
    X, y = random_problem(6, 50, 6, correlation=1.0)
    _, _, coefs, steps = forward_stagewise_path(
        X, y, step=1e-5, positive=True, max_steps=10**7, return_steps=True
    )
    assert steps[-1] < 10**7
    np.testing.assert_allclose(coefs[:, -1], nnls(X, y)[0], atol=1e-3)


def test_one_feature_and_a_two_feature_zigzag_are_walked_in_a_few_jumps() -> None:
    X, y = random_problem(2, 30, 2, correlation=1.0)
    _, _, coefs, steps = forward_stagewise_path(X, y, step=1e-6, return_steps=True, max_steps=10**8)
    assert steps[-1] > 10**5
    assert coefs.shape[1] < 30
    exact = LinearRegression(fit_intercept=False).fit(X, y).coef_
    np.testing.assert_allclose(coefs[:, -1], exact, atol=2e-5)


def test_several_features_in_turn_are_walked_in_a_few_jumps() -> None:
    X = hadamard(16)[:, 1:8].astype(float)
    y = X @ [3.0, 3.1, 2.9, 3.05, 2.8, 3.2, 2.7]
    _, _, coefs, steps = forward_stagewise_path(X, y, step=1e-5, return_steps=True, max_steps=10**8)
    assert steps[-1] > 10**6
    assert coefs.shape[1] < 500
    np.testing.assert_allclose(coefs[:, -1], [3.0, 3.1, 2.9, 3.05, 2.8, 3.2, 2.7], atol=1e-4)


def test_diabetes_with_steps_of_1e4th_takes_well_under_a_second(diabetes) -> None:
    seconds = []
    for _ in range(3):
        start = time.process_time()
        forward_stagewise_path(*diabetes, step=1e-4)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.5


def test_a_given_gram_matrix_changes_nothing(diabetes) -> None:
    X, y = diabetes
    without = forward_stagewise_path(X, y, step=0.01)
    given = forward_stagewise_path(X, y, step=0.01, Gram=X.T @ X)
    assert without[1] == given[1]
    np.testing.assert_allclose(without[2], given[2], atol=1e-12)


def test_tol_max_steps_and_return_path_cut_the_same_walk_short(diabetes) -> None:
    whole = forward_stagewise_path(*diabetes, step=0.01, return_steps=True)
    alphas, _, coefs = forward_stagewise_path(*diabetes, step=0.01, tol=0.1)
    assert alphas[-1] <= 0.1 < alphas[-2]
    np.testing.assert_array_equal(coefs, whole[2][:, : coefs.shape[1]])
    _, _, last, steps = forward_stagewise_path(
        *diabetes, step=0.01, max_steps=7, return_path=False, return_steps=True
    )
    assert steps.tolist() == [7]
    assert last.shape == (10,)
    assert np.abs(last).sum() == pytest.approx(0.07)
    thinned = forward_stagewise_path(*diabetes, step=0.01, max_points=11)[2]
    assert thinned.shape == (10, 11)
    np.testing.assert_array_equal(thinned[:, [0, -1]], whole[2][:, [0, -1]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": 0.0}, "step must be positive"),
        ({"step": float("nan")}, "step must be positive"),
        ({"max_steps": -1}, "max_steps cannot be negative but got -1"),
        ({"tol": -1.0}, "tol cannot be negative"),
        ({"max_points": 1}, "max_points must be at least 2 but got 1"),
        ({"Gram": np.eye(3)}, "Gram must have shape"),
        ({"Gram": "full"}, "Gram must be 'auto'"),
    ],
)
def test_bad_arguments_of_a_path_are_refused(diabetes, arguments, message) -> None:
    with pytest.raises(ConfigError, match=message):
        forward_stagewise_path(*diabetes, **arguments)


def test_a_step_far_too_small_warns_instead_of_running_forever(diabetes) -> None:
    X, y = diabetes
    with pytest.warns(ConvergenceWarning, match="increase step"):
        alphas, _, _ = forward_stagewise_path(X, y, step=1e-7, max_points=100)
    assert alphas[-1] > 0.1


def orthogonal_problem():
    X = hadamard(16)[:, 1:9].astype(float)
    rng = np.random.default_rng(0)
    y = X @ np.array([2.0, -1.5, 1.1, 0.8, -0.5, 0.3, 0.2, -0.1])
    noise = rng.normal(size=16)
    noise -= X @ (X.T @ noise) / 16 + noise.mean()
    return X, y + noise


def test_on_an_orthogonal_design_all_methods_agree() -> None:
    X, y = orthogonal_problem()
    n = len(y)
    exact = X.T @ y / n
    order = np.argsort(-np.abs(exact)).tolist()

    def soft(alphas):
        return np.sign(exact)[:, None] * np.maximum(np.abs(exact)[:, None] - alphas, 0)

    for path in (
        lars_path(X, y, method="lar"),
        lars_path(X, y, method="lasso"),
        infinitesimal_stagewise_path(X, y),
    ):
        alphas, active, coefs = path
        assert list(active) == order
        np.testing.assert_allclose(coefs, soft(alphas), atol=1e-12)
    alphas, coefs, _ = lasso_path(X, y, tol=1e-10)
    np.testing.assert_allclose(coefs, soft(alphas), atol=1e-6)
    for step in (0.1, 0.01, 0.001):
        alphas, active, coefs = forward_stagewise_path(X, y, step=step)
        # Features smaller than half a step never move.
        assert active == order[: len(active)]
        assert np.abs(exact[order[len(active) :]]).max(initial=0) <= step / 2 + 1e-12
        assert np.abs(coefs - soft(alphas)).max() <= step + 1e-12
    hard = orthogonal_mp(X, y, n_nonzero_coefs=8, return_path=True)
    for k in range(8):
        kept = np.isin(np.arange(8), order[: k + 1])
        np.testing.assert_allclose(hard[:, k], exact * kept, atol=1e-12)
    assert least_squares_boosting_path(X, y, learning_rate=1.0)[1] == order
    assert least_squares_boosting_path(X, y, learning_rate=0.1)[1] == order


def test_stagewise_converges_to_its_limit_with_order_one(diabetes) -> None:
    _, _, limit, arc_length = infinitesimal_stagewise_path(*diabetes, return_arc_length=True)
    sizes = np.array([4e-3, 2e-3, 1e-3, 5e-4, 2e-4, 1e-4])
    errors = []
    for step in sizes:
        _, _, coefs, steps = forward_stagewise_path(*diabetes, step=step, return_steps=True)
        errors.append(np.abs(coefs - at(steps * step, arc_length, limit)).max())
    slope, _ = np.polyfit(np.log(sizes), np.log(errors), 1)
    assert 0.85 < slope < 1.15
    assert max(errors / sizes) < 5


def test_boosting_converges_to_the_same_limit(diabetes) -> None:
    _, _, limit, arc_length = infinitesimal_stagewise_path(*diabetes, return_arc_length=True)
    errors = []
    for rate in (0.2, 0.1, 0.05):
        _, _, coefs = least_squares_boosting_path(*diabetes, learning_rate=rate, max_points=10**6)
        traveled = np.append(0, np.cumsum(np.abs(np.diff(coefs, axis=1)).sum(axis=0)))
        errors.append(np.abs(coefs - at(traveled, arc_length, limit)).max())
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.02


def in_positive_cone(gram):
    """Whether G_A⁻¹·1 > 0 for every subset A of features and every choice of their signs."""
    p = len(gram)
    for size in range(1, p + 1):
        for subset in itertools.combinations(range(p), size):
            block = gram[np.ix_(subset, subset)]
            for signs in itertools.product([1, -1], repeat=size):
                if np.linalg.solve(block * np.outer(signs, signs), np.ones(size)).min() <= 0:
                    return False
    return True


def designed(gram, seed):
    """X with XᵀX = n·gram, and some y."""
    rng = np.random.default_rng(seed)
    n, p = 40, len(gram)
    q, _ = np.linalg.qr(rng.normal(size=(n, p)))
    X = np.sqrt(n) * q @ np.linalg.cholesky(gram).T
    return X, X @ rng.normal(size=p) + rng.normal(size=n)


@pytest.mark.parametrize("seed", range(5))
def test_in_the_positive_cone_lar_lasso_and_stagewise_coincide(seed) -> None:
    gram = 0.3 ** np.abs(np.subtract.outer(np.arange(6), np.arange(6)))
    assert in_positive_cone(gram)
    X, y = designed(gram, seed)
    reference = lars_path(X, y, method="lar")
    for path in (lars_path(X, y, method="lasso"), infinitesimal_stagewise_path(X, y)):
        np.testing.assert_allclose(path[0], reference[0], atol=1e-10)
        assert list(path[1]) == list(reference[1])
        np.testing.assert_allclose(path[2], reference[2], atol=1e-10)


def test_outside_the_positive_cone_they_part(diabetes) -> None:
    X, y = diabetes
    assert not in_positive_cone(X.T @ X / len(y))
    limit = infinitesimal_stagewise_path(X, y)
    lar, lasso = lars_path(X, y, method="lar"), lars_path(X, y, method="lasso")
    assert limit[2].shape[1] > lasso[2].shape[1] > lar[2].shape[1]
    assert limit[1] == [2, 8, 3, 6, 1, 9, 4, 7, 0, 5]
    assert list(lar[1]) == [2, 8, 3, 6, 1, 9, 4, 7, 5, 0]
    # All end in least squares.
    np.testing.assert_allclose(limit[2][:, -1], lar[2][:, -1], atol=1e-9)
    np.testing.assert_allclose(limit[2][:, -1], lasso[2][:, -1], atol=1e-9)


def monotone_lasso(X, y, length, pieces):
    """Integrate the monotone lasso: least squares over increments of [β⁺, β⁻] of given L1 length.

    Each increment Δ ≥ 0 solves min ‖r − [X, −X]Δ‖² with ΣΔ = δ, the sum enforced by a heavy row.
    """
    q, r = np.linalg.qr(X)
    signed = np.hstack([r, -r])
    delta = length / pieces
    weight = 1e3 * np.abs(signed).max()
    rows = np.vstack([signed, weight * np.ones(signed.shape[1])])
    parts, residual = [np.zeros(signed.shape[1])], q.T @ y
    for _ in range(pieces):
        increment, _ = nnls(rows, np.append(residual, weight * delta))
        residual = residual - signed @ increment
        parts.append(parts[-1] + increment)
    p = X.shape[1]
    path = np.array(parts).T
    return path[:p] - path[p:]


@pytest.mark.parametrize("seed", [None, 12, 16])
def test_the_limit_of_stagewise_is_the_monotone_lasso_and_not_the_lasso(diabetes, seed) -> None:
    X, y = diabetes if seed is None else random_problem(seed, 50, 6, correlation=2.0)
    _, _, limit, arc_length = infinitesimal_stagewise_path(X, y, return_arc_length=True)
    lasso = lars_path(X, y, method="lasso")[2]
    norms = np.abs(limit).sum(axis=0)
    apart = np.abs(limit - at(norms, np.abs(lasso).sum(axis=0), lasso)).max()
    # Close to the end of the path a step of given length would overshoot the minimum.
    length, pieces = 0.95 * arc_length[-1], 400
    integrated = monotone_lasso(X, y, length, pieces)
    positions = np.linspace(0, length, pieces + 1)
    error = np.abs(integrated - at(positions, arc_length, limit)).max()
    assert apart > 0.02
    assert error < 0.1 * apart


@pytest.mark.parametrize("seed", range(4))
def test_along_the_limit_both_parts_of_every_coefficient_only_grow(seed) -> None:
    X, y = random_problem(seed, 40, 8, correlation=2.0)
    alphas, _, coefs = infinitesimal_stagewise_path(X, y)
    correlations = X.T @ (y[:, None] - X @ coefs) / len(y)
    moves = np.diff(coefs, axis=1)
    moving = np.abs(moves) > 1e-12
    # β⁺ grows where the move is positive, β⁻ where it is negative; a move always goes with the
    # correlation, which is among the largest: neither part ever has to shrink.
    assert (np.sign(moves) == np.sign(correlations[:, :-1]))[moving].all()
    largest = np.broadcast_to(alphas[:-1], moves.shape)
    np.testing.assert_allclose(np.abs(correlations[:, :-1])[moving], largest[moving], rtol=1e-7)


@pytest.mark.parametrize("method", ["lar", "lasso"])
def test_correlations_of_active_features_stay_tied_along_lars(diabetes, method) -> None:
    X, y = diabetes
    alphas, _, coefs = lars_path(X, y, method=method)
    middle = (coefs[:, 1:] + coefs[:, :-1]) / 2
    correlations = np.abs(X.T @ (y[:, None] - X @ middle)) / len(y)
    for k in range(middle.shape[1]):
        tied = correlations[middle[:, k] != 0, k]
        np.testing.assert_allclose(tied, (alphas[k] + alphas[k + 1]) / 2, rtol=1e-8, atol=1e-13)


def test_correlations_of_moving_features_stay_tied_within_steps_along_stagewise(diabetes) -> None:
    X, y = diabetes
    _, _, limit, arc_length = infinitesimal_stagewise_path(X, y, return_arc_length=True)
    moves = np.diff(limit, axis=1)
    middle = (arc_length[1:] + arc_length[:-1]) / 2
    for step in (1e-3, 3e-4, 1e-4):
        _, _, coefs, steps = forward_stagewise_path(X, y, step=step, return_steps=True)
        correlations = np.abs(X.T @ (y[:, None] - X @ coefs)) / len(y)
        for k in np.flatnonzero(np.diff(arc_length) > 100 * step):
            point = int(np.argmin(np.abs(steps * step - middle[k])))
            tied = correlations[moves[:, k] != 0, point]
            assert tied.max() - tied.min() <= 4 * step


def test_the_limit_reaches_least_squares_with_duplicates_and_more_features_than_samples() -> None:
    X, y = random_problem(0, 20, 8)
    twice = np.hstack([X, X])
    _, active, coefs = infinitesimal_stagewise_path(twice, y)
    _, _, single = infinitesimal_stagewise_path(X, y)
    together = coefs[:8] + coefs[8:]
    np.testing.assert_allclose(together[:, -1], single[:, -1], atol=1e-8)
    assert len({j % 8 for j in active}) == 8
    X, y = random_problem(1, 20, 50)
    _, _, coefs = infinitesimal_stagewise_path(X, y)
    np.testing.assert_allclose(X @ coefs[:, -1], y, atol=1e-9)


def test_the_limit_stops_at_alpha_min(diabetes) -> None:
    whole = infinitesimal_stagewise_path(*diabetes)
    cut = infinitesimal_stagewise_path(*diabetes, alpha_min=0.1)
    assert cut[0][-1] == pytest.approx(0.1, abs=1e-15)
    expected = at([0.1], whole[0][::-1], whole[2][:, ::-1])[:, 0]
    np.testing.assert_allclose(cut[2][:, -1], expected, atol=1e-12)
    np.testing.assert_array_equal(
        infinitesimal_stagewise_path(*diabetes, alpha_min=0.1, return_path=False)[2], cut[2][:, -1]
    )
    with pytest.raises(ConfigError, match="alpha_min cannot be negative but got -1"):
        infinitesimal_stagewise_path(*diabetes, alpha_min=-1.0)
    with pytest.raises(ConfigError, match="max_iter cannot be negative but got -1"):
        infinitesimal_stagewise_path(*diabetes, max_iter=-1)


def test_a_target_without_signal_gives_the_empty_path(diabetes) -> None:
    X, _ = diabetes
    for path in (forward_stagewise_path, infinitesimal_stagewise_path, least_squares_boosting_path):
        alphas, active, coefs = path(X, np.zeros(len(X)))
        assert (active, alphas.tolist(), coefs.shape) == ([], [0.0], (10, 1))


def test_boosting_takes_the_feature_whose_own_fit_is_best() -> None:
    X, y = random_problem(3, 30, 4, unequal=True)
    _, _, coefs = least_squares_boosting_path(X, y, learning_rate=0.3, max_steps=5)
    beta = np.zeros(4)
    for k in range(5):
        np.testing.assert_allclose(coefs[:, k], beta, atol=1e-12)
        residual = y - X @ beta
        fits = [LinearRegression(fit_intercept=False).fit(X[:, [j]], residual) for j in range(4)]
        best = int(np.argmax([fits[j].score(X[:, [j]], residual) for j in range(4)]))
        beta[best] += 0.3 * fits[best].coef_[0]
    with pytest.raises(ConfigError, match="learning_rate must be in"):
        least_squares_boosting_path(X, y, learning_rate=1.5)


def test_no_path_warns_on_ordinary_data(diabetes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forward_stagewise_path(*diabetes)
        infinitesimal_stagewise_path(*diabetes)
        least_squares_boosting_path(*diabetes)
