"""Matrix products on the CPU.

On AMD's processors MKL, behind `torch.mm`, leaves half of the vector units idle: with AVX-512 it
does 57 billion multiply-adds a second on one core where oneDNN, which is part of PyTorch too, does
130. The rule goes by the processor alone, so that results are reproducible.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from nni_petridish.kernels.switch import fast_kernels_enabled


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` of two matrices. It is not differentiable."""
    if (
        a.dtype is b.dtype is torch.float32
        and a.device.type == b.device.type == "cpu"
        and min(a.numel(), b.numel()) > 0
        and fast_kernels_enabled()
        and torch.backends.mkldnn.enabled
        and _has_faster_products()
    ):
        result: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
        return result
    return a @ b


@functools.cache
def _has_faster_products() -> bool:
    """Return whether this is a processor on which oneDNN is faster than MKL, and oneDNN works."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    vendor = next((line for line in lines if line.startswith("vendor_id")), "")
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    if "AuthenticAMD" not in vendor or "avx512f" not in flags:
        return False
    try:
        one = torch.ones(1, 1)
        torch.ops.mkldnn._linear_pointwise(one, one, None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):  # another version of PyTorch
        return False
    return True
