from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, lars_path, orthogonal_mp
from torch import Tensor

from nni_petridish.core.pursuit import METHODS, explained, held_out_decreases, selection_order
from nni_petridish.errors import ConfigError


def problem(seed: int, rows: int = 60, features: int = 8) -> tuple[Tensor, Tensor]:
    """Correlated features on very different scales, and a target of three of them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=generator, dtype=torch.float64)
    x = x + 0.7 * x.roll(1, dims=1)
    y = 3 * x[:, 1] - 2 * x[:, 4] + x[:, 6] + torch.randn(rows, generator=generator).double()
    return x * torch.logspace(-2, 2, features, dtype=torch.float64), y


def products(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.T @ x, x.T @ y


@pytest.mark.parametrize("seed", range(5))
def test_omp_is_that_of_scikit_learn(seed: int) -> None:
    x, y = problem(seed)
    order = selection_order(*products(x, y), "omp")
    unit = (x / x.norm(dim=0)).numpy()
    for count in range(1, 8):
        found = np.flatnonzero(orthogonal_mp(unit, y.numpy(), n_nonzero_coefs=count))
        assert set(order[:count]) == set(found)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("method", "name"), [("lars", "lar"), ("lasso", "lasso")])
def test_paths_are_those_of_scikit_learn_on_the_data(method: str, name: str, seed: int) -> None:
    x, y = problem(seed)
    _, _, path = lars_path((x / x.norm(dim=0)).numpy(), y.numpy(), method=name)
    entered = [int((row != 0).argmax()) for row in path]
    assert selection_order(*products(x, y), method) == sorted(range(8), key=lambda i: entered[i])


@pytest.mark.parametrize("seed", range(5))
def test_forward_takes_the_feature_that_lowers_the_residual_most(seed: int) -> None:
    x, y = problem(seed)
    order = selection_order(*products(x, y), "forward")

    def residual(chosen: list[int]) -> float:
        part = x[:, chosen].numpy()
        fitted = LinearRegression(fit_intercept=False).fit(part, y.numpy()).predict(part)
        return float(((y.numpy() - fitted) ** 2).sum())

    for count in range(1, 6):
        others = [i for i in range(8) if i not in order[: count - 1]]
        best = min(others, key=lambda i: residual([*order[: count - 1], i]))
        assert order[count - 1] == best
        decrease = explained(*products(x, y), order[:count])
        assert decrease == pytest.approx(float(y @ y) - residual(order[:count]))


@pytest.mark.parametrize("method", METHODS)
def test_a_repeated_candidate_and_one_that_is_zero_come_last(method: str) -> None:
    x, y = problem(0)
    x = torch.cat([x, 5 * x[:, 1:2], torch.zeros(60, 1, dtype=torch.float64)], dim=1)
    order = selection_order(*products(x, y), method)
    assert sorted(order) == list(range(10))
    if method in ("forward", "omp"):  # a path may let equal features in together
        assert set(order[-2:]) & {1, 8}
        assert 9 in order[-2:]


@pytest.mark.parametrize("method", METHODS)
def test_the_scale_of_a_candidate_does_not_matter(method: str) -> None:
    x, y = problem(3)
    scales = torch.tensor([1e-3, 1, 1e3, 7, 0.1, 50, 2, 1e-2], dtype=torch.float64)
    scaled = selection_order(*products(x * scales, y), method)
    assert scaled == selection_order(*products(x, y), method)


def test_held_out_decreases_are_those_of_a_regression() -> None:
    x, y = problem(0, rows=80)
    fitted, held_out = products(x[:40], y[:40]), products(x[40:], y[40:])
    order = selection_order(*fitted, "forward")
    found = held_out_decreases(fitted, held_out, order)
    for count, decrease in enumerate(found, 1):
        part = x[:, order[:count]].numpy()
        model = LinearRegression(fit_intercept=False).fit(part[:40], y[:40].numpy())
        left = ((y[40:].numpy() - model.predict(part[40:])) ** 2).sum()
        assert decrease == pytest.approx(float(y[40:] @ y[40:]) - left)


def test_where_nothing_helps_the_held_out_decrease_is_negative_more_often_than_not() -> None:
    largest = []
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(40, 6, generator=generator, dtype=torch.float64)
        y = torch.randn(40, generator=generator, dtype=torch.float64)
        fitted, held_out = products(x[:20], y[:20]), products(x[20:], y[20:])
        order = selection_order(*fitted, "forward")
        largest.append(held_out_decreases(fitted, held_out, order)[-1])
    assert sum(decrease < 0 for decrease in largest) > 30


def test_all_orders_explain_the_same_in_the_end() -> None:
    x, y = problem(1)
    everything = [
        explained(*products(x, y), selection_order(*products(x, y), name)) for name in METHODS
    ]
    for one, other in itertools.pairwise(everything):
        assert one == pytest.approx(other)


def test_an_unknown_method_is_told_in_one_line() -> None:
    with pytest.raises(ConfigError, match="method must be one of forward, omp, lars, lasso but"):
        selection_order(torch.eye(2), torch.ones(2), "best")
