"""Batch norms in C, and what is added by their pass, compared with the plain ops."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from nni_petridish.kernels.batch_norm import normalize
from nni_petridish.kernels.native.norms import Norm, Running
from nni_petridish.kernels.prepared import SharedInput, plus
from nni_petridish.kernels.switch import plain_ops
from search_spaces.vision.ops import make_op, project
from tests.kernels.test_kernels import assert_same_as_plain, images
from tests.kernels.test_native import pytestmark  # noqa: F401 - these need the kernels, too
from tests.support.networks import small_space


class Sum(nn.Module):
    """op(x) + sin(x), or op(x) + x."""

    def __init__(self, op: nn.Module, is_identity: bool = False) -> None:
        super().__init__()
        self.op, self.is_identity = op, is_identity

    def forward(self, x: Tensor) -> Tensor:
        return plus(self.op, x, x if self.is_identity else x.sin())


# The widths are one lane, parts of a block of lanes, whole blocks, and both.
@pytest.mark.parametrize("channels", [1, 3, 7, 8, 9, 12, 16, 19])
@pytest.mark.parametrize("op", ["sep_conv_3x3", "dil_conv_5x5", "max_pool_3x3"])
def test_an_op_plus_images_equals_the_plain_sum(op: str, channels: int) -> None:
    torch.manual_seed(0)
    for affine in (True, False):
        made = make_op(op, channels, affine=affine).double()
        for is_identity in (True, False):
            assert_same_as_plain(Sum(made, is_identity), images(3, channels, 5, 4))


def test_images_are_added_by_the_pass_of_the_norm() -> None:
    x = images(2, 4, 6, 6).requires_grad_()
    y = plus(make_op("sep_conv_3x3", 4).double(), x, x)
    assert y.grad_fn is not None
    assert "Normalize" in y.grad_fn.name()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_have_settings_of_their_own(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for eps, momentum in ((1e-5, 0.1), (0.5, 0.1), (1e-5, 1.0), (1e-3, 0.01)):
        for op in (make_op("sep_conv_3x3", 5, affine=True), project(5, 3)):
            for norm in op.modules():
                if isinstance(norm, nn.BatchNorm2d):
                    norm.eps, norm.momentum = eps, momentum
            x = images(4, 5, 6, 6, dtype=dtype, mean=2.0)
            assert_same_as_plain(op.to(dtype), x, rtol=1e-5, atol=1e-4)


def test_statistics_that_are_averages_over_all_batches_are_left_to_torch() -> None:
    op = project(5, 3).double()
    op[2].momentum = None
    for _ in range(2):
        assert_same_as_plain(op, images(4, 5, 6, 6))


def test_statistics_of_another_type_are_left_to_torch() -> None:
    op = make_op("sep_conv_3x3", 4, affine=True).double()
    op[3].running_mean = op[3].running_mean.float()
    with pytest.raises(RuntimeError, match="type"):
        op(images(2, 4, 6, 6))
    with plain_ops(), pytest.raises(RuntimeError, match="type"):
        op(images(2, 4, 6, 6))


def test_a_norm_whose_vectors_do_not_fit_the_images_is_refused() -> None:
    x, vector = images(2, 4, 3, 3), torch.ones(4, dtype=torch.float64)
    running = Running((vector.clone(), vector.clone(), torch.tensor(0)), 0.1)
    with pytest.raises(ValueError, match="3 channels"):
        Norm(None, None, vector, vector, 1e-5).forward(x[:, :3], running, None)
    with pytest.raises(ValueError, match="one shape"):
        Norm(None, None, vector, vector, 1e-5).forward(x, running, x[:1])
    with pytest.raises(TypeError, match="one type"):
        Norm(None, None, vector, vector, 1e-5).forward(x, running, x.float())


def test_hooks_on_a_norm_and_on_an_op_are_called() -> None:
    called: list[str] = []
    op = make_op("sep_conv_3x3", 4).double()
    x = images(2, 4, 6, 6)
    expected = plus(copy.deepcopy(op), x, x)
    op[7].register_forward_hook(lambda *_: called.append("norm"))
    torch.testing.assert_close(plus(copy.deepcopy(op), x, x), expected)
    op.register_forward_hook(lambda *_: called.append("op"))
    torch.testing.assert_close(plus(op, x, x), expected)
    assert called == ["norm", "norm", "op"]


def test_one_value_per_channel_has_no_variance() -> None:
    op = project(4, 3).double()
    before = op(images(2, 4, 3, 3))  # of more values it has
    assert before.shape == (2, 3, 3, 3)
    with pytest.raises(ValueError, match="more than 1 value"):
        normalize(
            make_op("sep_conv_3x3", 4).before_norm(SharedInput(torch.ones(1, 4, 1, 1))), op[2]
        )


def test_dropped_branches_are_not_added_in_one_pass() -> None:
    torch.manual_seed(0)
    space = small_space()
    net = space.build(space.seed())
    net.set_drop_path(0.5, 1.0)
    x = torch.randn(8, *space.image_shape)
    torch.manual_seed(1)
    found = net(x)
    with plain_ops():
        torch.manual_seed(1)
        torch.testing.assert_close(found, net(x), rtol=1e-4, atol=1e-5)
    net.set_drop_path(1.0, 1.0)
    assert not torch.allclose(found, net(x))
