"""Conditions for the fast kernels, and a switch to disable them.

A fast kernel computes the same as the plain ops of PyTorch, up to rounding. It is used in single or
double precision, in training, and in evaluation without gradients. Autocast, `torch.compile` and
`torch.export` use plain ops.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_enabled = True


@contextmanager
def plain_ops() -> Iterator[None]:
    """Use the plain ops of PyTorch in this context, for comparison or debugging."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def fast_kernels_enabled() -> bool:
    """Return whether fast kernels may be used: not in `plain_ops`, a compiler or functorch."""
    return (
        _enabled
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def fast_kernels_apply(x: Tensor) -> bool:
    """Return whether fast kernels support x: images in channels_last, or a tensor not 4-d."""
    return (
        fast_kernels_enabled()
        # The kernels need real memory: no tensors of vmap, no fake tensors.
        and type(x) in (Tensor, nn.Parameter)
        and x.dtype in (torch.float32, torch.float64)
        and (x.ndim != 4 or x.is_contiguous(memory_format=torch.channels_last))
        and not torch.is_autocast_enabled(x.device.type)
    )
