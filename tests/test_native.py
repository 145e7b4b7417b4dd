"""The kernels in C, against the plain ops, and what happens where there are none."""

from __future__ import annotations

import copy
import itertools
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nni_petridish import native
from nni_petridish.hidden_sum import SharedInput
from nni_petridish.kernels import plain_ops
from search_spaces.ops import SeparableConvs, make_op
from tests.test_kernels import assert_same_as_plain, forward_and_backward, images

pytestmark = pytest.mark.skipif(
    native._library(torch.float64) is None, reason="the native kernels need a C compiler"
)
CONVS = ("sep_conv_3x3", "sep_conv_5x5", "dil_conv_3x3", "dil_conv_5x5")
LANES = 8  # channels of double precision that make a block


def is_native(module: nn.Module, x: Tensor) -> bool:
    return module.before_norm(SharedInput(x)).late is not None


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
    native._library(torch.float64)
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert any("native-double" in path for path in mapped)
    ours = subprocess.run(
        ["ldd", next(path for path in mapped if "native-double" in path)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "omp" not in ours


def test_other_kernels_and_one_value_per_channel_are_left_to_torch() -> None:
    assert not is_native(SeparableConvs(3, 7, (1,), 1, True).double(), images(2, 3, 8, 8))
    op = make_op("sep_conv_3x3", 3, 2).double()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        op(images(1, 3, 2, 2))


def test_a_compiler_that_fails_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert native._library.__wrapped__(torch.float32) is None
    assert "could not be compiled" in caplog.text
    assert os.listdir(tmp_path / "nni_petridish") == []  # nothing half-made stays behind
    compiler.unlink()
    assert native._library.__wrapped__(torch.float32) is None


def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native._library.__wrapped__(torch.float64) is not None
    (made,) = (tmp_path / "nni_petridish").iterdir()
    before = made.stat().st_mtime_ns
    assert native._library.__wrapped__(torch.float64) is not None
    assert made.stat().st_mtime_ns == before


def test_it_can_be_switched_off() -> None:
    code = "import torch; from nni_petridish import native; print(native._library(torch.float32))"
    environment = os.environ | {"NNI_PETRIDISH_NATIVE": "0"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "None"
