"""The C kernels compared with the plain ops, and the behavior without them."""

from __future__ import annotations

import copy
import ctypes
import itertools
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import prune, spectral_norm
from torch.utils.checkpoint import checkpoint

from nni_petridish import attach_candidates
from nni_petridish.core.alpha_table import AlphaTable
from nni_petridish.core.weak_learner import Candidates
from nni_petridish.kernels import waiting
from nni_petridish.kernels.batch_norm import normalize
from nni_petridish.kernels.deferred import add_prepared_sum
from nni_petridish.kernels.native import calls as native
from nni_petridish.kernels.native import library as native_library_module
from nni_petridish.kernels.native.library import native_library
from nni_petridish.kernels.native.structures import SIZES
from nni_petridish.kernels.pointwise import can_project
from nni_petridish.kernels.prepared import SharedInput, Unnormalized, defer
from nni_petridish.kernels.switch import plain_ops
from search_spaces.vision.op_registry import VISION_OPS
from search_spaces.vision.ops import FactorizedReduce, SeparableConvs, make_op, project
from tests.kernels.test_kernels import (
    assert_same_as_plain,
    forward_and_backward,
    images,
    kinds,
    mixed_ops,
)
from tests.support.networks import grown_network, small_space

HAS_COMPILER = sys.platform.startswith("linux") and any(map(shutil.which, ("gcc", "clang", "cc")))
pytestmark = pytest.mark.skipif(
    not HAS_COMPILER and os.environ.get("CI") != "true",  # where nobody would notice a skipped test
    reason="the native kernels need Linux and a C compiler",
)
CONVS = ("sep_conv_3x3", "sep_conv_5x5", "dil_conv_3x3", "dil_conv_5x5")
LANES = 8  # channels per block in double precision


def is_native(module: nn.Module, x: Tensor) -> bool:
    return module.before_norm(SharedInput(x)).late is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_there_are_native_kernels(dtype: torch.dtype) -> None:
    assert native_library(dtype) is not None


@pytest.mark.parametrize("ci", ["true", "false"])
def test_without_a_compiler_these_tests_fail_in_continuous_integration(ci: str) -> None:
    only = f"{__file__}::{test_there_are_native_kernels.__name__}"
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", only],
        env={**os.environ, "PATH": "", "CI": ci},
        capture_output=True,
        text=True,
    )
    assert ("2 failed" if ci == "true" else "2 skipped") in found.stdout


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("name", CONVS)
def test_any_width_and_size_equals_the_plain_ops(name: str, stride: int) -> None:
    torch.manual_seed(0)
    widths = (1, LANES - 1, LANES, 2 * LANES + 3)
    for channels, size in itertools.product(widths, ((1, 3), (4, 4), (9, 17))):
        op = make_op(name, channels, stride, affine=True).double()
        x = images(3, channels, *size)
        assert is_native(op, x)
        assert_same_as_plain(op, x, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", CONVS)
def test_single_precision_is_as_exact_as_the_plain_ops(name: str) -> None:
    torch.manual_seed(0)
    op, x = make_op(name, 24, affine=True), images(8, 24, 16, 16, dtype=torch.float32, mean=1.0)
    assert is_native(op, x)
    found = forward_and_backward(op, x)
    with plain_ops():
        plain = forward_and_backward(op, x)
        exact = forward_and_backward(copy.deepcopy(op).double(), x.double())
    for key, value in exact.items():
        worst = (plain[key].double() - value).abs().max()
        assert (found[key].double() - value).abs().max() <= 4 * worst + 1e-6, key


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("name", CONVS)
def test_units_pass_gradcheck(name: str, stride: int) -> None:
    torch.manual_seed(0)
    op = make_op(name, 3, stride, affine=True).double()
    x = images(2, 3, 4, 3).requires_grad_()
    assert is_native(op, x)
    names = [key for key, _ in op.named_parameters()]

    def run(x: Tensor, *values: Tensor) -> Tensor:
        parameters = dict(zip(names, values, strict=True))
        return torch.func.functional_call(op, parameters, (x,))

    assert torch.autograd.gradcheck(run, (x, *op.parameters()), atol=1e-6)


def _projection(parts: int, c_in: int, c_out: int) -> nn.Module:
    return (project if parts == 1 else FactorizedReduce)(c_in, c_out).double()


@pytest.mark.parametrize("parts", [1, 2])
def test_projections_equal_the_plain_ops(parts: int) -> None:
    torch.manual_seed(0)
    # Halves that are whole blocks, that share a block, and that are smaller than a block.
    widths = (
        (3, 2 * LANES),
        (LANES, 4 * LANES),
        (2 * LANES + 1, LANES),
        (5, 3),
        (2, 2 * LANES + 6),
    )
    for (c_in, c_out), size in itertools.product(widths, ((1, 3), (4, 4), (9, 17))):
        op, x = _projection(parts, c_in, c_out), images(3, c_in, *size)
        assert can_project(x, _convs(op))
        assert_same_as_plain(op, x, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("parts", [1, 2])
def test_projections_pass_gradcheck(parts: int) -> None:
    torch.manual_seed(0)
    op, x = _projection(parts, 3, 5), images(2, 3, 4, 3).requires_grad_()
    names = [key for key, _ in op.named_parameters()]

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(op, dict(zip(names, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *op.parameters()), atol=1e-6)


@pytest.mark.parametrize("parts", [1, 2])
def test_projections_may_be_changed_and_called_in_other_ways(parts: int) -> None:
    torch.manual_seed(0)
    x = images(3, 4, 6, 7)
    for call in (_checkpointed, _with_layout_lost):
        module = Through(_projection(parts, 4, 6), call)
        assert_same_as_plain(module, x, rtol=1e-7, atol=1e-9)
    op = _projection(parts, 4, 6)
    _convs(op)[0].register_forward_hook(lambda module, x, y: 2 * y)
    assert not can_project(x, _convs(op))
    assert_same_as_plain(op, x, rtol=1e-7, atol=1e-9)
    prune.l1_unstructured(_convs(op)[-1], "weight", amount=0.5)
    assert not can_project(x, _convs(op))
    for name, value in (("stride", (2, 2)), ("padding", (1, 1))):
        op = _projection(parts, 4, 6)
        for conv in _convs(op):
            setattr(conv, name, value)
        assert_same_as_plain(op, x, rtol=1e-7, atol=1e-9)
    if parts == 2:
        unequal = FactorizedReduce(4, 6)
        unequal.even, unequal.odd = (nn.Conv2d(4, n, 1, bias=False) for n in (2, 4))
        assert_same_as_plain(unequal.double(), x, rtol=1e-7, atol=1e-9)
    op = _projection(parts, 4, 6)
    with pytest.raises(RuntimeError, match="channels"):
        op(images(3, 5, 6, 7))
    with torch.inference_mode():
        cached = x.clone()
    op(cached).sum().backward()


def test_other_modules_in_a_projection_are_called() -> None:
    torch.manual_seed(0)
    x = images(2, 4, 5, 5)
    op = project(4, 6).double()
    op[0] = nn.SiLU()
    assert_same_as_plain(op, x, rtol=1e-7, atol=1e-9)
    op = project(4, 6).double()
    op.append(nn.SiLU())
    assert_same_as_plain(op, x, rtol=1e-7, atol=1e-9)
    assert torch.equal(op[:1](x), x.relu())


def test_a_graph_of_the_gradients_may_be_asked_for() -> None:
    torch.manual_seed(0)
    x = images(2, 4, 6, 6).requires_grad_()
    for op in (_projection(1, 4, 5), _projection(2, 4, 5), make_op("sep_conv_3x3", 4, 1, True)):
        op.double()

        def gradient(op: nn.Module = op) -> Tensor:
            return torch.autograd.grad(op(x).sin().sum(), x, create_graph=True)[0]

        found = gradient()
        with plain_ops():
            torch.testing.assert_close(found, gradient(), rtol=1e-7, atol=1e-9)


def _convs(op: nn.Module) -> list[nn.Conv2d]:
    return [op.even, op.odd] if isinstance(op, FactorizedReduce) else [op[1]]


def test_the_moments_are_those_of_the_output() -> None:
    torch.manual_seed(0)
    op = make_op("sep_conv_3x3", 5).double()
    value, moments, _ = op.before_norm(SharedInput(images(4, 5, 6, 6, mean=3.0)))
    mean, variance = moments
    torch.testing.assert_close(mean, value.mean((0, 2, 3)))
    torch.testing.assert_close(variance, value.var((0, 2, 3), unbiased=False))


def test_without_a_norm_behind_it_the_gradient_is_what_it_is() -> None:
    torch.manual_seed(0)
    op, x = make_op("sep_conv_5x5", 4).double(), images(2, 4, 6, 6)

    def gradient() -> Tensor:
        value = op.before_norm(SharedInput(x)).value
        return torch.autograd.grad(value.square().sum(), op[1].weight)[0]

    found = gradient()
    with plain_ops():
        torch.testing.assert_close(found, gradient())


def test_frozen_norms_stay_frozen() -> None:
    op = make_op("sep_conv_3x3", 4, affine=True).double()
    for frozen in (3, 7):
        op.train()
        op[frozen].eval()
        assert_same_as_plain(op, images(2, 4, 6, 6), rtol=1e-7, atol=1e-9)


def test_nan_shows() -> None:
    op, x = make_op("dil_conv_3x3", 2, affine=True).double(), images(2, 2, 5, 5)
    x[0, 0, 2, 2] = torch.nan
    assert is_native(op, x)
    assert torch.isnan(op(x)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_threads_that_the_machine_cannot_spare_change_no_bit(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    net, x, _ = grown_network(small_space(), 2)
    net, x = attach_candidates(net).to(dtype), x[:7].to(dtype)
    monkeypatch.setattr(native, "_GRAIN", 0)
    threads, found = torch.get_num_threads(), []
    try:
        torch.set_num_threads(3)
        for missing in (0, 1, 2):
            monkeypatch.setattr(waiting, "_missing", missing)
            found.append(forward_and_backward(net, x))
    finally:
        torch.set_num_threads(threads)
    assert len(found[0]) > 100
    for key, value in found[0].items():
        assert torch.equal(found[1][key], value), key
        assert torch.equal(found[2][key], value), key


def test_a_small_batch_needs_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(waiting, "_missing", 0)
    small, large = (native.batch_of(torch.zeros(n, 16, 16, 16)) for n in (7, 8))
    assert (small.parts, small.threads, large.parts, large.threads) == (4, 1, 4, 4)


def test_threads_change_rounding_at_most() -> None:
    torch.manual_seed(0)
    op, x = make_op("sep_conv_5x5", 16, affine=True), images(7, 16, 9, 9, dtype=torch.float32)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = forward_and_backward(op, x)
        torch.set_num_threads(3)
        many, again = forward_and_backward(op, x), forward_and_backward(op, x)
    finally:
        torch.set_num_threads(threads)
    for key, value in one.items():
        torch.testing.assert_close(many[key], value, rtol=1e-5, atol=1e-5)
        assert torch.equal(many[key], again[key])


def test_the_library_uses_the_threads_of_torch_alone() -> None:
    library = native.loaded(torch.empty(0, dtype=torch.float64))._name
    ours = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
    assert "omp" not in ours


def test_other_kernels_and_one_value_per_channel_are_left_to_torch() -> None:
    assert not is_native(SeparableConvs(3, 7, (1,), 1, True).double(), images(2, 3, 8, 8))
    op = make_op("sep_conv_3x3", 3, 2).double()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        op(images(1, 3, 2, 2))


class Through(nn.Module):
    """An op in a wrapper that calls it in another way."""

    def __init__(self, op: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.op, self.call = op, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.op, x)


def _with_layout_lost(op: nn.Module, x: Tensor) -> Tensor:
    def stored(value: Tensor) -> Tensor:
        return value.detach().clone(memory_format=torch.contiguous_format)

    with saved_tensors_hooks(stored, lambda value: value):
        return op(x)


def _checkpointed(op: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(op, x, use_reentrant=False)


def _twice(op: nn.Module, x: Tensor) -> Tensor:
    first = op(x)
    return op(first) * first


@pytest.mark.parametrize("call", [_checkpointed, _with_layout_lost, _twice])
def test_gradients_are_right_however_the_op_is_called(
    call: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    op, x = make_op("sep_conv_3x3", 5, affine=True).double(), images(3, 5, 6, 7)
    assert is_native(op, x)
    assert_same_as_plain(Through(op, call), x, rtol=1e-7, atol=1e-9)


def _with_bias(op: SeparableConvs) -> None:
    op[2] = nn.Conv2d(4, 4, 1).double()


@pytest.mark.parametrize(
    "change",
    [
        lambda op: prune.l1_unstructured(op[2], "weight", amount=0.5),
        lambda op: spectral_norm(op[1]),
        lambda op: op[3].register_forward_hook(lambda module, x, y: y * 2),
        lambda op: op[7].register_forward_hook(lambda module, x, y: y * 2),
        _with_bias,
    ],
    ids=["pruned", "spectral", "hooked", "hooked at the end", "bias"],
)
def test_what_was_changed_in_a_conv_or_norm_happens(change: Callable[[nn.Module], object]) -> None:
    torch.manual_seed(0)
    op = make_op("sep_conv_3x3", 4, affine=True).double()
    change(op)
    x = images(2, 4, 6, 6).requires_grad_()
    state = copy.deepcopy(op.state_dict())

    def gradients() -> list[Tensor | None]:
        op.load_state_dict(state)
        for _ in range(2):
            op(x).sin().sum().backward()
        found = [p.grad for p in op.parameters()]
        op.zero_grad()
        return found

    found = gradients()
    with plain_ops():
        torch.testing.assert_close(found, gradients(), rtol=1e-7, atol=1e-9)


def test_weights_of_another_shape_are_never_read() -> None:
    op = make_op("sep_conv_3x3", 5).double()
    op[1].weight = nn.Parameter(op[1].weight[:3].detach().clone())
    with pytest.raises(RuntimeError, match="weight"):
        op(images(2, 5, 6, 6))
    learner, z = weak_learner()
    for norm in (learner.ops[0][3], learner.ops[4][1], learner.ops[6]):
        before = norm.running_mean
        norm.running_mean = before[:3].clone()
        with pytest.raises(RuntimeError, match=r"size|elements"):
            learner(z.clone().requires_grad_(), {"z": z}).sum().backward()
        norm.running_mean = before
    op = make_op("sep_conv_3x3", 5).double()
    candidate = Unnormalized.of(op.before_norm(SharedInput(images(2, 5, 6, 6))), op.last_norm())
    alpha = torch.ones(1, dtype=torch.float64, requires_grad=True)
    y = add_prepared_sum(images(2, 5, 3, 3), alpha, [candidate])
    with pytest.raises(ValueError, match="shape"):
        y.sum().backward()


def test_tensors_without_memory_are_left_to_torch() -> None:
    op, x = make_op("sep_conv_3x3", 5, affine=True), images(3, 5, 6, 6, dtype=torch.float32)
    op[7].eval()  # under vmap torch refuses to update statistics, and says so
    with pytest.raises(RuntimeError, match="running_mean"):
        torch.vmap(op)(torch.stack([x, x]))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.empty(3, 5, 6, 6).contiguous(memory_format=torch.channels_last)
        assert not native.native_applies(fake)
    with torch.inference_mode():
        cached = x.clone()
    op(cached).sum().backward()
    assert op[1].weight.grad is not None


def test_a_left_gradient_is_never_mistaken_for_another() -> None:
    torch.manual_seed(0)
    op, x = make_op("sep_conv_3x3", 4, affine=True).double(), images(2, 4, 6, 6)
    before = op.before_norm(SharedInput(x))
    loss = (normalize(before, op[7]).sin() + before.value).sum()
    with pytest.raises(RuntimeError, match="must feed exactly one batch norm"):
        loss.backward()


def test_a_deferred_sum_clears_a_late_gradient_that_was_not_taken() -> None:
    torch.manual_seed(0)
    op, x_k = make_op("sep_conv_3x3", 4).double(), images(2, 4, 6, 6)
    alpha = torch.ones(1, dtype=torch.float64, requires_grad=True)
    candidate = Unnormalized.of(op.before_norm(SharedInput(x_k)), op.last_norm())
    loss = (add_prepared_sum(x_k, alpha, [candidate]) * x_k.sin()).sum()
    (expected,) = torch.autograd.grad(loss, op[1].weight, retain_graph=True)
    torch.autograd.grad(loss, alpha, retain_graph=True)
    with plain_ops():  # now the backward pass stores nothing
        torch.testing.assert_close(torch.autograd.grad(loss, op[1].weight)[0], expected)


def weak_learner(channels: int = 5, stride: int = 1) -> tuple[Candidates, Tensor]:
    torch.manual_seed(0)
    shortcuts = [("z", name) for name in VISION_OPS]
    ops = [make_op(name, channels, stride) for _, name in shortcuts]
    return Candidates(AlphaTable(shortcuts, 0.0), ops, {}).double(), images(3, channels, 6, 6)


@pytest.mark.parametrize("stride", [1, 2])
def test_nothing_of_the_candidates_is_kept_for_the_backward_pass(stride: int) -> None:
    learner, z = weak_learner(stride=stride)
    x_k = images(3, 5, 6 // stride, 6 // stride).requires_grad_()
    own = {p.data_ptr() for p in (*learner.parameters(), *learner.buffers())}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        learner(x_k, {"z": z})
    assert {t.data_ptr() for t in kept} - own == {z.data_ptr()}


def test_without_gradients_the_norms_of_candidates_see_the_forward_pass() -> None:
    learner, z = weak_learner()
    twin = copy.deepcopy(learner)
    with torch.no_grad():
        learner(z, {"z": z})
        with plain_ops():
            twin(z, {"z": z})
    expected = twin.state_dict()
    assert all("num_batches" not in key or value == 1 for key, value in expected.items())
    for key, value in learner.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-7, atol=1e-9, msg=key)


@pytest.mark.parametrize("passes", ["checkpointed", "layout lost", "odd norm", "hook"])
def test_candidates_learn_the_same_however_they_are_called(passes: str) -> None:
    learner, z = weak_learner()
    if passes == "odd norm":
        learner.ops[0][3].momentum = learner.ops[1][3].eps = 0.3
    if passes == "hook":
        learner.ops[0][1].register_forward_hook(lambda module, x, y: 2 * y)
    calls = {"checkpointed": _checkpointed, "layout lost": _with_layout_lost}
    call = calls.get(passes, lambda module, x: module(x))
    twin = copy.deepcopy(learner)
    x_k = images(3, 5, 6, 6).requires_grad_()

    def gradients(learner: Candidates) -> dict[str, Tensor]:
        module = Through(learner, lambda module, x: module(x_k, {"z": x}))
        call(module, z).sin().sum().backward()
        found = {name: p.grad for name, p in learner.named_parameters()}
        return found | ({} if passes == "checkpointed" else dict(learner.named_buffers()))

    found = gradients(learner)
    with plain_ops():
        expected = gradients(twin)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-7, atol=1e-9, msg=key)


@pytest.mark.parametrize("which", ["last norm", "op"])
def test_hooks_on_candidates_fire(which: str) -> None:
    learner, z = weak_learner()
    module = learner.ops[4] if which == "op" else learner.ops[4][1]
    calls: list[int] = []
    module.register_forward_hook(lambda module, x, y: calls.append(1))
    learner(z.clone().requires_grad_(), {"z": z}).sum().backward()
    assert calls == [1]


def test_a_plain_op_leaves_the_other_candidates_deferred() -> None:
    z = images(3, 4, 6, 6)
    found = kinds(mixed_ops((2,), 1), z, z)
    assert found == [
        *["deferred"] * 2,
        "plain",
        *["deferred"] * 3,
        "unnormalized",
        *["deferred"] * 2,
    ]


def test_candidates_that_the_kernels_do_not_know_are_left_to_torch() -> None:
    torch.manual_seed(0)
    shared = SharedInput(images(3, 4, 6, 6))
    assert defer(SeparableConvs(4, 3, (2, 1), 1, False).double(), shared) is not None
    assert defer(SeparableConvs(4, 3, (1, 2), 1, False).double(), shared) is None
    for buffer, dtype in (("num_batches_tracked", torch.int32), ("running_var", torch.float32)):
        op = make_op("max_pool_3x3", 4).double()
        setattr(op[1], buffer, getattr(op[1], buffer).to(dtype))
        assert defer(op, shared) is None
    op, one = make_op("sep_conv_3x3", 4, 2).double(), images(1, 4, 2, 2)
    candidate = defer(op, SharedInput(one))
    alpha = torch.ones(1, dtype=one.dtype, requires_grad=True)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        add_prepared_sum(images(1, 4, 1, 1), alpha, [candidate]).sum().backward()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of x86-64")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "level",
    [
        "x86-64-v2",  # a register holds two doubles only
        pytest.param("x86-64-v3", marks=pytest.mark.slow),
        pytest.param("x86-64-v4", marks=pytest.mark.slow),
    ],
)
def test_every_level_of_the_processor_equals_the_plain_ops(level: str, tmp_path: Path) -> None:
    if level == "x86-64-v4" and "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX-512")
    chosen = "any_width or projections_equal or candidates_learn or same_size_in_c"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    environment = os.environ | {"NNI_PETRIDISH_MARCH": level, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [*command, __file__, "-k", chosen], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert list(tmp_path.rglob("native-*.so"))


def test_a_broken_library_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Path(native.loaded(torch.empty(0, dtype=torch.float64))._name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    broken = tmp_path / "nni-petridish" / whole.name
    broken.parent.mkdir(mode=0o700)
    broken.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    assert native_library.__wrapped__(torch.float64) is not None
    assert broken.stat().st_size == whole.stat().st_size


def test_what_others_may_write_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "nni-petridish"
    folder.mkdir()
    folder.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert native_library.__wrapped__(torch.float64) is None
    assert "others may write" in caplog.text


@pytest.mark.parametrize("what", ["a link", "an open parent"])
def test_a_folder_that_others_could_exchange_is_not_used(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    base, elsewhere = tmp_path / "base", tmp_path / "elsewhere"
    base.mkdir()
    elsewhere.mkdir(mode=0o700)
    if what == "a link":
        (base / "nni-petridish").symlink_to(elsewhere)
    else:
        base.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    with caplog.at_level(logging.WARNING):
        assert native_library.__wrapped__(torch.float64) is None
    assert "others may write to" in caplog.text
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("what", ["a link", "an open file"])
def test_a_library_that_others_could_write_is_made_again(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Path(native.loaded(torch.empty(0, dtype=torch.float64))._name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "nni-petridish" / whole.name
    path.parent.mkdir(mode=0o700)
    if what == "a link":
        path.symlink_to(whole)
    else:
        path.write_bytes(whole.read_bytes())
        path.chmod(0o777)
    assert native_library.__wrapped__(torch.float64) is not None
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o700


def test_without_a_home_the_kernels_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert native_library.__wrapped__(torch.float64) is None


def test_a_compiler_that_fails_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert native_library.__wrapped__(torch.float32) is None
    assert "could not be compiled" in caplog.text
    assert os.listdir(tmp_path / "nni-petridish") == []  # no temporary files remain
    compiler.unlink()
    assert native_library.__wrapped__(torch.float32) is None


def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native_library.__wrapped__(torch.float64) is not None
    (made,) = (tmp_path / "nni-petridish").iterdir()
    before = made.stat().st_mtime_ns
    assert native_library.__wrapped__(torch.float64) is not None
    assert made.stat().st_mtime_ns == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_structures_have_the_same_size_in_c_and_in_python(dtype: torch.dtype) -> None:
    library = native_library(dtype)
    in_c = {name: ctypes.c_long.in_dll(library, f"size_of_{name}").value for name in SIZES}
    assert in_c == SIZES


def test_a_structure_that_changed_in_c_alone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = shutil.copytree(native_library_module._SOURCES, tmp_path / "c")
    header = sources / "images.h"
    header.write_text(header.read_text().replace("long images,", "long depth, images,"))
    monkeypatch.setattr(native_library_module, "_SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(TypeError, match="structure 'batch' has 56 bytes in C but 48 in Python"):
        native_library.__wrapped__(torch.float64)


def test_it_can_be_switched_off() -> None:
    code = (
        "import torch; from nni_petridish.kernels.native.library import native_library;"
        " print(native_library(torch.float32))"
    )
    environment = os.environ | {"NNI_PETRIDISH_NATIVE": "0"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "None"
