"""Where the fast kernels of training apply, and how to do without them.

A fast kernel computes what the plain ops of PyTorch compute, up to rounding. It is for training in
single or double precision; evaluation, autocast, `torch.compile` and `torch.export` see plain ops.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_enabled = True


@contextmanager
def plain_ops() -> Iterator[None]:
    """Use the plain ops of PyTorch within this context: for comparisons and for debugging."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def fast_kernels_enabled() -> bool:
    """Return whether fast kernels may be used at all: not while others transform the program."""
    return (
        _enabled
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def fast_kernels_apply(x: Tensor) -> bool:
    """Return whether a fast kernel can take x: images in channels_last, or anything not 4-d."""
    return (
        fast_kernels_enabled()
        # What these take has memory of its own: not the tensors of vmap, nor fake ones.
        and type(x) in (Tensor, nn.Parameter)
        and x.dtype in (torch.float32, torch.float64)
        and (x.ndim != 4 or x.is_contiguous(memory_format=torch.channels_last))
        and not torch.is_autocast_enabled(x.device.type)
    )
