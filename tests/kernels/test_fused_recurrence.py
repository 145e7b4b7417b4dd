"""Recurrent cells in C compared with the plain unrolled cell."""

from __future__ import annotations

import copy
import math
import random

import pytest
import torch
from torch import Tensor

from nni_petridish import attach_candidates
from nni_petridish.kernels import products
from nni_petridish.kernels.fused_recurrence import recurrence_applies
from nni_petridish.kernels.products import product
from nni_petridish.kernels.switch import plain_ops
from search_spaces import RecurrentSpace
from search_spaces.recurrent.genotype import ACTIVATIONS, RecurrentGenotype
from search_spaces.recurrent.network import RecurrentNetwork
from tests.kernels.test_native import pytestmark  # noqa: F401


def drawn_net(seed: int, dtype: torch.dtype) -> tuple[RecurrentNetwork, Tensor]:
    """A cell of random shape with candidates, and a text."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    nodes = [(draw.choice(ACTIVATIONS), draw.randrange(i + 1)) for i in range(draw.randint(1, 5))]
    nodes[0] = (nodes[0][0], 0)
    sizes = {"embedding": draw.randint(1, 40), "hidden": draw.randint(1, 40)}
    net = RecurrentSpace(11, **sizes).build(RecurrentGenotype(nodes)).to(dtype)
    if draw.random() < 0.5:
        net.set_dropout(hidden=0.3)
    attach_candidates(net)
    with torch.no_grad():  # larger than ±0.04, so that nonlinearities matter
        for parameter in net.parameters():
            parameter.normal_(0, 0.3)
    text = torch.randint(11, (draw.randint(2, 7), draw.randint(2, 19)))
    return net, text


def run(net: RecurrentNetwork, text: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(1)
    net.zero_grad()
    outputs, dropped = net.features(text)
    net.loss(dropped, text).backward()
    found = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    return {"outputs": outputs.detach(), **found, **dict(net.named_buffers())}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(12))
def test_cells_and_candidates_of_any_shape_equal_the_plain_ones(
    seed: int, dtype: torch.dtype
) -> None:
    net, text = drawn_net(seed, dtype)
    plain = copy.deepcopy(net)
    assert recurrence_applies(net.embedding)
    found = run(net, text)
    with plain_ops():
        expected = run(plain, text)
    assert found.keys() == expected.keys()
    # Single gradients differ by more in single precision, where rounding decides at a ReLU's kink.
    tolerance = 1e-3 if dtype is torch.float32 else 1e-10
    for name, value in expected.items():
        off = (found[name] - value).double().norm()
        assert off <= tolerance * (value.double().norm() + 1e-6), name


def test_the_number_of_threads_changes_no_bit_of_a_cell() -> None:
    net, text = drawn_net(3, torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(net.features(text)[0].detach())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["tanh", "sigmoid"])
def test_activations_are_exact_for_small_and_large_numbers(name: str, dtype: torch.dtype) -> None:
    net = RecurrentSpace(2, 1, 1).build(RecurrentGenotype([(name, 0)])).to(dtype)
    cell, values = net.cell, [0.0, 1e-6, -1e-3, 0.3, -0.7, 5.0, -9.0, 30.0, -80.0, 1e4, -1e4]
    with torch.no_grad():
        cell.weight.copy_(torch.tensor([[100.0, 1.0], [0.0, 0.0]]))  # s_0 = tanh(x)
        cell.first.weight.copy_(torch.tensor([[1e9, 1.0]]))  # s_1 = f(s_0) if s_0 > 0
    x = torch.tensor(values, dtype=dtype).view(1, -1, 1)
    found = cell(x, torch.zeros(len(values), 1, dtype=dtype)).flatten()
    with plain_ops():
        expected = cell(x, torch.zeros(len(values), 1, dtype=dtype)).flatten()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)
    assert not found.isnan().any()


def test_what_is_not_a_number_stays_so() -> None:
    net, text = drawn_net(0, torch.float32)
    with torch.no_grad():
        net.cell.first.weight[0, 0] = math.nan
    assert net.features(text)[0].isnan().any()


@pytest.mark.parametrize("is_fast", [True, False])
def test_products_are_matrix_products(is_fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_has_faster_products", lambda: is_fast)
    torch.manual_seed(0)
    a, b = torch.randn(7, 19), torch.randn(19, 5)
    expected = (a.double() @ b.double()).float()
    for left, right in ((a, b), (a.t().contiguous().t(), b), (a, b.t().contiguous().t())):
        torch.testing.assert_close(product(left, right), expected)
    wide = torch.randn(7, 40)[:, 3:22]
    torch.testing.assert_close(product(wide, b), wide @ b)
    assert product(a.double(), b.double()).dtype is torch.float64
