"""The contract of an operation on images, on every one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from nni_petridish.kernels.switch import plain_ops
from search_spaces.vision.ops import make_op
from tests.contracts.listed import OPS

CHANNELS = 6

pytestmark = pytest.mark.parametrize("stride", [1, 2])
each = pytest.mark.parametrize("name", OPS)


def made(name: str, stride: int) -> nn.Module:
    torch.manual_seed(0)
    return make_op(name, CHANNELS, stride).to(memory_format=torch.channels_last)


def images(size: int, n: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = 3.0 + 2.0 * torch.randn(n, CHANNELS, size, size, generator=generator)
    return x.to(memory_format=torch.channels_last)


@each
@pytest.mark.parametrize("size", [8, 9])
def test_has_zero_mean_unit_variance_and_the_right_shape(name: str, stride: int, size: int) -> None:
    u = made(name, stride).train()(images(size))
    assert u.shape == (16, CHANNELS, -(-size // stride), -(-size // stride))
    torch.testing.assert_close(u.mean((0, 2, 3)), torch.zeros(CHANNELS), atol=1e-4, rtol=0)
    variance = u.var((0, 2, 3), unbiased=False)
    assert (variance > 0.95).all()
    assert (variance <= 1.0001).all()


@each
def test_leaves_its_input_alone(name: str, stride: int) -> None:
    x = images(8)
    before = x.clone()
    made(name, stride).train()(x)
    assert torch.equal(x, before)


@each
def test_plain_ops_give_the_same_values_gradients_and_statistics(name: str, stride: int) -> None:
    results = []
    for plain in (True, False):
        op, x = made(name, stride).double().train(), images(8, 4).double().requires_grad_()
        if plain:
            with plain_ops():
                u = op(x)
        else:
            u = op(x)
        weights = torch.linspace(-1, 1, u.numel(), dtype=u.dtype).view_as(u)
        (u * weights).sum().backward()
        results.append([u.detach(), x.grad, *(p.grad for p in op.parameters()), *op.buffers()])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


class Together(nn.Module):
    """All ops side by side: to export is slow, so they are exported at once."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.ops = nn.ModuleDict({name: made(name, stride) for name in OPS})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: op(x) for name, op in self.ops.items()}


def test_exports_to_the_same_function(stride: int) -> None:
    net, x = Together(stride), images(8, 4)
    net.train()(x)  # so that the running statistics are not those of the start
    exported = torch.export.export(copy.deepcopy(net).eval(), (x,)).module()
    with torch.no_grad():
        found, expected = exported(x), net.eval()(x)
    assert list(found) == list(OPS)
    for name in OPS:
        torch.testing.assert_close(found[name], expected[name])
