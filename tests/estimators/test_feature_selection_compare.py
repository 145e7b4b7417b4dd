"""The comparison: its measures, its data, its baselines and its command."""

from __future__ import annotations

import argparse
import itertools

import numpy as np
import pytest
from scipy.linalg import hadamard
from sklearn.datasets import load_diabetes
from sklearn.feature_selection import SequentialFeatureSelector
from sklearn.linear_model import LinearRegression, OrthogonalMatchingPursuit

from nni_petridish.errors import ConfigError, DataError, PetridishError
from nni_petridish.estimators.feature_selection import compare, recovery_rates
from nni_petridish.estimators.feature_selection._compare import (
    common_prefix,
    cross_validated_error,
    jaccard,
    kendall_tau,
    path_distance,
)
from nni_petridish.estimators.feature_selection._data import (
    DESIGNS,
    diabetes,
    diabetes_quadratic,
    load,
    read_csv,
    synthetic,
)
from nni_petridish.estimators.feature_selection._methods import METHODS, Method, order_of_entry
from nni_petridish.estimators.feature_selection.cli import add_analogy_options

FAST = {name: METHODS[name] for name in ("LARS", "FSLR -> 0", "OMP")}


def standardized(X, y):
    return (X - X.mean(axis=0)) / X.std(axis=0), (y - y.mean()) / y.std()


def test_measures_of_agreement_match_their_definitions() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = rng.permutation(7).tolist(), rng.permutation(7).tolist()
        concordant = sum(
            (a.index(i) - a.index(j)) * (b.index(i) - b.index(j)) > 0
            for i, j in itertools.combinations(range(7), 2)
        )
        assert kendall_tau(a, b) == pytest.approx((2 * concordant - 21) / 21)
    assert kendall_tau([3, 1, 2], [2, 1, 9]) == -1.0
    assert np.isnan(kendall_tau([1], [1]))
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2, 3], [1, 2]) == 2
    assert jaccard([1, 2, 3], [2, 3, 4]) == 0.5
    assert jaccard([], []) == 1.0


def test_the_distance_of_paths_is_taken_at_equal_norm() -> None:
    diagonal = np.array([[0.0, 1.0], [0.0, 1.0]])
    corner = np.array([[0.0, 1.0, 1.0], [0.0, 0.0, 1.0]])
    assert path_distance(diagonal, diagonal) == (0.0, 0.0)
    # At norm t ≤ 1 the paths are at (t/2, t/2) and (t, 0); after that they close up again.
    largest, mean = path_distance(diagonal, corner)
    assert largest == pytest.approx(0.5, abs=2e-3)
    assert mean == pytest.approx(0.25, abs=2e-3)
    # How fast a path is walked does not matter, nor a detour back to smaller norms.
    slow = np.array([[0.0, 0.1, 0.2, 0.1, 1.0], [0.0, 0.1, 0.2, 0.1, 1.0]])
    assert path_distance(diagonal, slow)[0] == pytest.approx(0.0, abs=1e-12)


def test_order_of_entry_looks_for_the_first_nonzero() -> None:
    coefs = np.array([[0, 0, 1.0], [0, 2.0, 0], [0, 0, 0], [0, -3.0, 1.0]])
    assert order_of_entry(coefs) == [3, 1, 0]


@pytest.fixture(scope="module")
def rows():
    return {row.method: row for row in compare(diabetes(), folds=2)}


def test_the_comparison_on_diabetes_says_who_agrees_with_lars(rows) -> None:
    assert list(rows) == list(METHODS)
    lars = rows["LARS"]
    assert lars.path.order == [2, 8, 3, 6, 1, 9, 4, 7, 5, 0]
    assert (lars.prefix, lars.jaccard, lars.distance_max) == (10, 1.0, 0.0)
    assert lars.kendall == pytest.approx(1.0)
    assert rows["Petridish"].path.order == lars.path.order
    assert rows["lasso (LARS)"].path.order == lars.path.order
    assert rows["lasso (descent)"].path.order == lars.path.order
    assert rows["FSLR -> 0"].prefix == 8
    assert rows["OMP"].path.order == [2, 8, 3, 6, 1, 5, 9, 4, 7, 0]
    assert rows["OMP"].prefix == 5
    assert rows["Petridish, full"].path.order == rows["OMP"].path.order
    assert rows["Petridish"].distance_max < 0.03 < rows["Petridish, full"].distance_max
    for row in rows.values():
        assert 2800 < row.cv_error < 3200
        assert row.seconds > 0
        assert 0 <= row.distance_mean <= row.distance_max


def test_baselines_are_scikit_learns_own(rows) -> None:
    X, y = standardized(*load_diabetes(return_X_y=True))
    for k in (1, 4, 6):
        selector = SequentialFeatureSelector(
            LinearRegression(), n_features_to_select=k, direction="forward", cv=5
        ).fit(X, y)
        selected = np.flatnonzero(selector.get_support())
        assert sorted(rows["forward selection"].path.order[:k]) == selected.tolist()
        pursuit = OrthogonalMatchingPursuit(n_nonzero_coefs=k, fit_intercept=False).fit(X, y)
        np.testing.assert_allclose(rows["OMP"].path.coefs[:, k], pursuit.coef_, atol=1e-10)


def test_forward_selection_agrees_too_where_every_fold_is_orthogonal() -> None:
    block = hadamard(16)[:, 1:9].astype(float)
    y = block @ [2.0, -1.5, 1.1, 0.8, -0.5, 0.3, 0.2, -0.1]
    X, y = np.tile(block, (5, 1)), np.tile(y, 5)
    for name, method in METHODS.items():
        assert method.run(X, y, 8).order == list(range(8)), name


def test_the_cross_validated_error_of_a_known_model_is_known() -> None:
    data = synthetic("toeplitz")
    method = METHODS["OMP"]
    error = cross_validated_error(data, method, folds=5, n_features=20)
    # The noise has variance 1, and about s/n of it more is lost to estimation.
    assert 0.8 < error < 1.5
    single = Method(lambda X, y, k: METHODS["OMP"].run(X, y, 1), refits=True)
    assert cross_validated_error(data, single, folds=5, n_features=1) > 2 * error


@pytest.mark.parametrize("design", DESIGNS)
def test_designs_are_what_their_names_say(design) -> None:
    data = synthetic(design, seed=3)
    again, other = synthetic(design, seed=3), synthetic(design, seed=4)
    np.testing.assert_array_equal(data.X, again.X)
    assert not np.array_equal(data.X, other.X)
    n, p = data.X.shape
    correlations = np.corrcoef(data.X.T)
    above = correlations[np.triu_indices(p, 1)]
    if design == "orthogonal":
        np.testing.assert_allclose(data.X.T @ data.X, n * np.eye(p), atol=1e-9)
    elif design == "equicorrelated":
        assert above.mean() == pytest.approx(0.5, abs=0.15)
        assert above.std() < 0.15
    elif design == "toeplitz":
        assert np.diag(correlations, 1).mean() == pytest.approx(0.7, abs=0.1)
        assert abs(np.diag(correlations, 8).mean()) < 0.2
    elif design == "wide":
        assert p > n
    else:
        for j, twin in enumerate(data.twins):
            np.testing.assert_array_equal(data.X[:, j], data.X[:, twin])
    exact = LinearRegression().fit(data.X[:, data.support], data.y)
    np.testing.assert_allclose(exact.coef_, [2.0, -1.75, 1.5, -1.25, 1.0], atol=0.6)


def test_recovery_is_certain_on_the_orthogonal_design_and_counts_twins_once() -> None:
    rates = recovery_rates(5, designs=["orthogonal", "duplicates"], methods=FAST)
    assert set(rates) == {"orthogonal", "duplicates"}
    for design in rates:
        assert rates[design] == dict.fromkeys(FAST, 1.0)
    never = Method(lambda X, y, k: METHODS["LARS"].run(X[:, :4], y, k))
    assert recovery_rates(2, designs=["wide"], methods={"never": never}) == {"wide": {"never": 0.0}}


def test_every_method_survives_every_design() -> None:
    for design in ("wide", "duplicates"):
        data = synthetic(design, seed=1)
        X, y = standardized(data.X, data.y)
        for name, method in METHODS.items():
            path = method.run(X, y, 3)
            assert np.isfinite(path.coefs).all(), name
            assert np.abs(path.coefs).max() < 10, name
            assert len(set(path.order)) == len(path.order) >= 3, name


def test_the_quadratic_expansion_has_64_different_columns() -> None:
    data = diabetes_quadratic()
    assert data.X.shape == (442, 64)
    assert len(set(data.columns)) == 64
    assert sum(":" in name for name in data.columns) == 45
    assert sum("^2" in name for name in data.columns) == 9
    assert "sex^2" not in data.columns
    main = diabetes().X
    standard = (main - main.mean(axis=0)) / main.std(axis=0)
    at = data.columns.index("bmi:bp")
    np.testing.assert_allclose(data.X[:, at], standard[:, 2] * standard[:, 3])
    assert np.linalg.matrix_rank(data.X - data.X.mean(axis=0)) == 64
    assert METHODS["LARS"].run(*standardized(data.X, data.y), 64).order[:6] == [2, 8, 3, 6, 27, 10]


def test_a_csv_file_is_read_by_its_column_names(tmp_path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("a,price,b\n1,10,0.5\n2,20,1e-1\n\n3,35,-7\n")
    data = read_csv(path)
    assert data.columns == ("a", "price")
    assert data.y.tolist() == [0.5, 0.1, -7.0]
    data = load(str(path), "price")
    assert data.columns == ("a", "b")
    assert data.X.tolist() == [[1.0, 0.5], [2.0, 0.1], [3.0, -7.0]]
    assert data.y.tolist() == [10.0, 20.0, 35.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n3,x\n", r"column 'b', line 3: must be a number but got 'x'"),
        ("a,b\n1,2\n,4\n", r"column 'a', line 3: must be a number but got ''"),
        ("a,b\n1,2\nnan,4\n", r"column 'a', line 3: must be finite but got 'nan'"),
        ("a,b,c\n1,2,3\n1,2\n", r"line 3 has no value for column 'c'"),
        ("a,b\n1,2\n1,2,3\n", r"line 3 has 3 values, one after the last column 'b'"),
        ("a,a\n1,2\n3,4\n", r"two columns are named 'a'"),
        ("a,,c\n1,2,3\n3,4,5\n", r"column 2 has no name"),
        ("a\n1\n2\n", r"at least one more column"),
        ("a,b\n1,2\n", r"at least 2 of numbers"),
        ("a,b\n1,5\n2,5\n", r"column 'b' is the target but has only one value"),
        ("", r"must have a line of names"),
    ],
)
def test_a_bad_csv_file_is_refused_by_naming_the_column(tmp_path, text, message) -> None:
    path = tmp_path / "data.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read_csv(path)


def test_unknown_data_is_refused(tmp_path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("a,b\n1,2\n3,4\n")
    with pytest.raises(DataError, match="target must be one of a, b but got 'c'"):
        read_csv(path, "c")
    with pytest.raises(DataError, match=r"data must be diabetes, .* but got 'nothing'"):
        load("nothing")
    with pytest.raises(DataError, match="cannot be read as CSV"):
        read_csv(tmp_path / "missing.csv")
    with pytest.raises(DataError, match=r"design must be one of orthogonal.* but got 'square'"):
        synthetic("square")


def run(*arguments):
    parser = argparse.ArgumentParser()
    add_analogy_options(parser)
    args = parser.parse_args(arguments)
    return args.command(args)


def test_the_command_prints_the_table_and_draws_the_paths(tmp_path, capsys) -> None:
    assert run("--folds", "0", "--convergence", "--plot", str(tmp_path / "plots")) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "diabetes: 442 samples, 10 features"
    for name in METHODS:
        assert any(line.startswith(name + " ") for line in lines)
    assert "2 8 3 6 1 9 4 7 5 0" in out
    assert "2 8 3 6 1 5 9 4 7 0" in out
    assert "2 bmi" in out
    orders = [float(line.split()[-1]) for line in lines if ": order" in line]
    assert len(orders) == 2
    assert all(0.7 < order < 1.3 for order in orders)
    for name in ("analogy_diabetes.png", "analogy_diabetes_convergence.png"):
        assert (tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG")


def test_the_command_reads_csv_and_refuses_bad_settings(tmp_path, capsys) -> None:
    rng = np.random.default_rng(0)
    table = rng.normal(size=(30, 4))
    path = tmp_path / "table.csv"
    lines = ["height,width,depth,weight", *(",".join(map(str, row)) for row in table)]
    path.write_text("\n".join(lines))
    assert run("--data", str(path), "--target", "width", "--folds", "0") == 0
    out = capsys.readouterr().out
    assert "table.csv: 30 samples, 3 features" in out
    assert "2 weight" in out
    for arguments, message in [
        (["--k", "0"], "k must be at least 1 but got 0"),
        (["--folds", "1"], "folds must be 0 or at least 2 but got 1"),
        (["--draws", "-1"], "draws cannot be negative but got -1"),
        (["--data", str(path), "--folds", "31"], "folds cannot exceed the 30 samples but got 31"),
    ]:
        with pytest.raises(ConfigError, match=message):
            run(*arguments)
    with pytest.raises(PetridishError):
        run("--data", "nowhere.csv")


def test_the_command_reports_recovery_on_the_synthetic_designs(capsys) -> None:
    options = ["--data", "synthetic", "--designs", "orthogonal", "--folds", "0", "--draws", "1"]
    assert run(*options) == 0
    out = capsys.readouterr().out
    assert "synthetic orthogonal: 100 samples, 20 features" in out
    assert "true support: 0 4 8 12 16" in out
    assert "how often the first features are the true support (1 draws)" in out
    with pytest.raises(DataError, match=r"design must be one of .* but got 'square'"):
        run("--data", "synthetic", "--designs", "square")


def test_the_reference_is_cut_where_its_correlations_are_no_longer_tied() -> None:
    data = diabetes_quadratic()
    X, y = standardized(data.X, data.y)
    coefs = METHODS["LARS"].run(X, y, 64).coefs
    assert 20 < coefs.shape[1] < 64
    correlations = np.abs(X.T @ (y[:, None] - X @ coefs))
    for k in range(1, coefs.shape[1]):
        tied = correlations[coefs[:, k] != 0, k]
        np.testing.assert_allclose(tied, correlations[:, k].max(), rtol=1e-6)
