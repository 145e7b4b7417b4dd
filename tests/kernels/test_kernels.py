from __future__ import annotations

import copy
import itertools
import platform
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nni_petridish import attach_candidates, finalize_candidates
from nni_petridish.errors import GrowthError
from nni_petridish.kernels.deferred import add_deferred_sum
from nni_petridish.kernels.depthwise import DepthwiseConv2d
from nni_petridish.kernels.moments import channel_moments, pixel_rows, row_moments
from nni_petridish.kernels.native import calls as native
from nni_petridish.kernels.pooling import AvgPool3x3, MaxPool3x3
from nni_petridish.kernels.switch import fast_kernels_apply, plain_ops
from nni_petridish.running.process import keep_freed_memory
from search_spaces.vision.op_registry import VISION_OPS
from search_spaces.vision.ops import FactorizedReduce, SeparableConvs, make_op
from tests.support.networks import grown_network, small_space, train

CHANNELS_LAST = torch.channels_last
GEOMETRIES = [
    (3, 1, 1),
    (5, 1, 1),
    (7, 1, 1),
    (3, 1, 2),
    (5, 1, 2),
    (3, 2, 2),
    (5, 2, 2),
    (5, 2, 1),
]
SIZES = [(1, 1), (1, 4), (2, 3), (5, 8), (8, 7), (9, 9)]


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test twice, the second time as if there were no C compiler."""
    if request.param == "torch":
        monkeypatch.setattr(native, "native_library", lambda dtype: None)


def images(*shape: int, dtype: torch.dtype = torch.float64, mean: float = 0.0) -> Tensor:
    x = mean + torch.randn(shape, dtype=dtype)
    return x.contiguous(memory_format=CHANNELS_LAST)


def forward_and_backward(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the output, the gradients and the statistics of one training step's forward."""
    module = copy.deepcopy(module)
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = module(x)
    generator = torch.Generator().manual_seed(1)
    y.backward(torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype))
    found = {"y": y.detach(), "x": x.grad, **dict(module.named_buffers())}
    return found | {name: p.grad for name, p in module.named_parameters()}


def assert_same_as_plain(module: nn.Module, x: Tensor, **tolerance: float) -> None:
    found = forward_and_backward(module, x)
    with plain_ops():
        expected = forward_and_backward(module, x)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


@pytest.mark.parametrize(("kernel", "stride", "dilation"), GEOMETRIES)
def test_depthwise_conv_equals_the_plain_one(kernel: int, stride: int, dilation: int) -> None:
    torch.manual_seed(0)
    for channels, size, n in itertools.product((1, 3, 8), SIZES, (1, 3)):
        conv = DepthwiseConv2d(channels, kernel, stride, dilation).double()
        x = images(n, channels, *size)
        assert_same_as_plain(conv, x)
        assert_same_as_plain(conv, x.contiguous())
        conv.float()
        with plain_ops():
            exact = forward_and_backward(copy.deepcopy(conv).double(), x)
        found = {k: v.double() for k, v in forward_and_backward(conv, x.float()).items()}
        torch.testing.assert_close(found["weight"], exact["weight"], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found["x"], exact["x"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kernel", "stride", "dilation"), GEOMETRIES)
def test_depthwise_conv_passes_gradcheck(kernel: int, stride: int, dilation: int) -> None:
    torch.manual_seed(0)
    conv = DepthwiseConv2d(2, kernel, stride, dilation).double()
    x = images(2, 2, 5, 4).requires_grad_()

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(conv, {"weight": weight}, (x,))

    assert torch.autograd.gradcheck(run, (x, conv.weight))


@pytest.mark.usefixtures("kernels")
def test_moments_are_those_of_each_channel_even_far_from_zero() -> None:
    torch.manual_seed(0)
    values = [images(4, 16, 8, 8, dtype=torch.float32, mean=m) for m in (0.0, 100.0)]
    mean, variance = channel_moments([row_moments(value) for value in values], 16)
    for i, value in enumerate(values):
        exact = value.double()
        torch.testing.assert_close(mean[i].double(), exact.mean((0, 2, 3)), rtol=1e-6, atol=1e-6)
        expected = exact.var((0, 2, 3), unbiased=False)
        torch.testing.assert_close(variance[i].double(), expected, rtol=1e-4, atol=0)


def test_pixel_rows_share_the_memory_of_the_images() -> None:
    x = images(4, 16, 8, 8)
    assert pixel_rows(x).shape == (16, 256)
    assert pixel_rows(x).data_ptr() == x.data_ptr()
    assert pixel_rows(images(3, 5, 3, 3)).shape == (27, 5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stride", [1, 2])
def test_pooling_equals_the_plain_one(size: tuple[int, int], stride: int) -> None:
    torch.manual_seed(0)
    x = images(2, 3, *size)
    for pool in (MaxPool3x3(stride), AvgPool3x3(stride)):
        assert_same_as_plain(pool, x)
        found = pool(x)
        assert found.shape == pool.eval()(x).shape
        torch.testing.assert_close(found, pool(x))  # without a backward pass, the other path


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("layout", [CHANNELS_LAST, torch.contiguous_format])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("name", VISION_OPS)
def test_every_op_equals_its_plain_form(
    name: str, stride: int, layout: torch.memory_format
) -> None:
    torch.manual_seed(0)
    for affine, size in itertools.product((True, False), ((8, 8), (9, 7), (5, 6))):
        op = make_op(name, 6, stride, affine).double().to(memory_format=layout)
        x = images(4, 6, *size).contiguous(memory_format=layout)
        assert_same_as_plain(op, x, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("size", [(8, 8), (7, 9)])
def test_factorized_reduce_passes_gradcheck(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    op = FactorizedReduce(2, 3).double()
    assert torch.autograd.gradcheck(op, (images(2, 2, *size).requires_grad_(),))


def kinds(ops: nn.ModuleList, z: Tensor, x_k: Tensor) -> list[str]:
    """Return the kind of each candidate of a sum: plain, unnormalized or deferred."""
    alpha = torch.ones(len(ops), dtype=z.dtype, requires_grad=True)
    by_kind = add_deferred_sum(x_k, alpha, [(op, z) for op in copy.deepcopy(ops)]).grad_fn.kinds
    fast = ["unnormalized"] * len(by_kind.late) + ["deferred"] * len(by_kind.deferred)
    found = ["plain"] * (len(ops) - len(fast)) + fast
    return [kind for _, kind in sorted(zip(by_kind.order, found, strict=True))]


def deferred_sum_gradients(
    ops: nn.ModuleList, z: Tensor, x_k: Tensor, alpha: Tensor, backward_passes: int = 1
) -> dict:
    """Return the gradients of a deferred sum over ops of one input, and the running statistics."""
    ops = copy.deepcopy(ops)
    z, x_k, alpha = (t.detach().requires_grad_(t.requires_grad) for t in (z, x_k, alpha))
    y = add_deferred_sum(x_k, alpha, [(op, z) for op in ops])
    assert torch.equal(y, x_k)
    g = torch.linspace(-1.0, 2.0, y.numel(), dtype=y.dtype).view(y.shape).sin()
    for i in range(backward_passes):
        y.backward(g, retain_graph=i + 1 < backward_passes)
    found = {"z": z.grad, "x_k": x_k.grad, "alpha": alpha.grad, **dict(ops.named_buffers())}
    return found | {name: p.grad for name, p in ops.named_parameters()}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("wants_z", [True, False])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [8, 7])
@pytest.mark.parametrize("channels", [4, 19])
def test_hiding_norms_changes_no_gradient_and_no_statistic(
    channels: int, stride: int, size: int, wants_z: bool
) -> None:
    torch.manual_seed(0)
    ops = nn.ModuleList([make_op(name, channels, stride) for name in VISION_OPS]).double()
    z = images(3, channels, size, size, mean=0.5)
    x_k, alpha = torch.randn_like(ops[0](z)), torch.randn(len(ops), dtype=z.dtype)
    tensors = z.requires_grad_(wants_z), x_k.requires_grad_(), alpha.requires_grad_()
    assert "plain" not in kinds(ops, z, x_k)
    for passes in (1, 2):  # statistics are those of one forward pass, however many follow
        found = deferred_sum_gradients(ops, *tensors, passes)
        with plain_ops():
            assert set(kinds(ops, z, x_k)) == {"plain"}
            expected = deferred_sum_gradients(ops, *tensors, passes)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-7, atol=1e-9, msg=name)


def plain_op(channels: int, stride: int) -> nn.Module:
    """A third-party op, unknown to the kernels."""
    conv = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(channels, affine=False))


def mixed_ops(places: tuple[int, ...], stride: int) -> nn.ModuleList:
    """Return ops of all kinds: deferred ones, an unnormalized one, and plain ones at ``places``."""
    ops = [make_op(name, 4, stride) for name in VISION_OPS]
    ops.insert(5, SeparableConvs(4, 7, (stride, 1), 1, False))  # a kernel that C does not have
    for place in places:
        ops.insert(place, plain_op(4, stride))
    return nn.ModuleList(ops).double()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("places", [(0,), (3,), (8,), (0, 4, 9)])
def test_a_plain_op_changes_neither_the_speed_of_the_others_nor_any_gradient(
    places: tuple[int, ...], stride: int
) -> None:
    torch.manual_seed(0)
    z = images(3, 4, 6, 6, mean=0.5).requires_grad_()
    ops = mixed_ops(places, stride)
    x_k = torch.randn_like(ops[0](z)).requires_grad_()
    alpha = torch.randn(len(ops), dtype=z.dtype, requires_grad=True)
    expected_kinds = kinds(mixed_ops((), stride), z, x_k)
    assert "plain" not in expected_kinds
    for place in places:
        expected_kinds.insert(place, "plain")
    assert kinds(ops, z, x_k) == expected_kinds
    for passes in (1, 2):
        found = deferred_sum_gradients(ops, z, x_k, alpha, passes)
        with plain_ops():
            expected = deferred_sum_gradients(ops, z, x_k, alpha, passes)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-7, atol=1e-9, msg=name)


def test_a_candidate_of_another_shape_is_named() -> None:
    z = images(2, 3, 6, 6)
    with pytest.raises(GrowthError, match=r"shape of x_k, \(2, 3, 6, 6\), but AvgPool2d returned"):
        add_deferred_sum(z, torch.ones(1, dtype=z.dtype), [(nn.AvgPool2d(2), z)])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("mode", ["cell", "macro"])
def test_a_step_of_weak_learning_equals_its_plain_form(mode: str) -> None:
    net, x, labels = grown_network(small_space(mode, stages=3, size=9), 1)
    attach_candidates(net)
    twin = copy.deepcopy(net)
    train(net, x, labels, steps=1, lr=0.01)
    with plain_ops():
        train(twin, x, labels, steps=1, lr=0.01)
    expected = twin.state_dict()
    assert any("weak_learner" in name for name in expected)
    for name, found in net.state_dict().items():
        torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_fast_kernels_keep_out_of_autocast_and_other_precisions_and_layouts() -> None:
    x = images(2, 3, 4, 4, dtype=torch.float32)
    assert fast_kernels_apply(x)
    assert not fast_kernels_apply(x.contiguous())
    assert not fast_kernels_apply(x.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not fast_kernels_apply(x)
    with plain_ops():
        assert not fast_kernels_apply(x)
    assert fast_kernels_apply(x)


@pytest.mark.usefixtures("kernels")
def test_weak_learning_works_under_autocast_and_in_both_layouts() -> None:
    net, x, labels = grown_network(small_space(stages=2), 1)
    attach_candidates(net)
    net.train()
    for layout in (CHANNELS_LAST, torch.contiguous_format):
        net.memory_format = layout
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(x).float(), labels)
        loss.backward()
        F.cross_entropy(net(x), labels).backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())


def test_a_batch_of_one_pixel_is_refused_as_by_the_plain_norm() -> None:
    op = make_op("identity", 3)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        op(images(1, 3, 1, 1, dtype=torch.float32))


def test_a_finished_network_can_be_exported() -> None:
    net, x, _ = grown_network(small_space(stages=2), 1)
    attach_candidates(net)
    finalize_candidates(net)
    net.eval()
    exported = torch.export.export(net, (x,)).module()
    torch.testing.assert_close(exported(x), net(x))


def test_freed_memory_is_kept_where_the_allocator_can() -> None:
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


def test_huge_pages_are_asked_for_where_the_heap_will_grow() -> None:
    code = (
        "from nni_petridish.running.process import keep_freed_memory\n"
        "print(keep_freed_memory(), open('/proc/self/smaps').read())\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    if not found.startswith("True") or "VmFlags" not in found:
        pytest.skip("no glibc, or a system that does not tell")
    asked = re.findall(r"^Size: +(\d+) kB(?:\n\w+: .*)*\nVmFlags:.* hg\b", found, re.MULTILINE)
    assert max(map(int, asked), default=0) > 2**19  # of the 2**20 kB
