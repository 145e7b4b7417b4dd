"""Depthwise convolution whose backward pass stays on the fast path of the CPU.

On the CPU, oneDNN has a fast forward pass for depthwise convs in channels_last. Its backward pass
is fast only if the kernel is not dilated and, for the weight gradient, at most three columns wide;
otherwise it is 5 to 50 times slower. These identities lead back to the fast path:

- the input gradient of a stride-1 conv is the conv of g with the flipped kernel;
- a conv of dilation d and stride 1 is a conv of dilation 1 on the d² phases of the image, each
  taken as an image;
- a conv of dilation d and stride d is a conv of dilation 1 and stride 1 on the first phase;
- the weight gradient of five columns is two gradients of three columns on shifted inputs.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nni_petridish.kernels.native.calls import Geometry
from nni_petridish.kernels.once import once_differentiable
from nni_petridish.kernels.switch import fast_kernels_apply

FAST_COLUMNS = 3
"""The maximum number of kernel columns for oneDNN's fast weight gradient."""


class _DepthwiseConv(torch.autograd.Function):
    """A depthwise conv of stride 1, or of stride equal to its dilation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry
        return _conv(x, weight, geometry)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        g = grads[0].contiguous(memory_format=torch.channels_last)
        want_x, want_weight = ctx.needs_input_grad[:2]
        geometry: Geometry = ctx.geometry
        if geometry.stride > 1:
            image, x, geometry = x, _first_phase(x, geometry.stride), _undilated(geometry)
        dx = _conv(g, weight.flip(2, 3), geometry) if want_x else None
        if dx is not None and ctx.geometry.stride > 1:
            stride = ctx.geometry.stride
            whole = torch.zeros_like(image, memory_format=torch.channels_last)
            whole[:, :, ::stride, ::stride] = dx
            dx = whole
        return dx, _weight_gradient(x, g, weight, geometry) if want_weight else None, None


class DepthwiseConv2d(nn.Conv2d):
    """A depthwise `torch.nn.Conv2d` without bias, with "same" padding, and faster in training.

    Parameters
    ----------
    channels
        Number of channels.
    kernel
        Height and width of the kernel, an odd number.
    stride, dilation
        As in `torch.nn.Conv2d`.
    """

    def __init__(self, channels: int, kernel: int, stride: int = 1, dilation: int = 1) -> None:
        self.geometry = Geometry(kernel, stride, dilation)
        super().__init__(
            channels,
            channels,
            kernel,
            stride,
            self.geometry.padding,
            dilation,
            groups=channels,
            bias=False,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the conv of x."""
        kernel, stride, dilation = self.geometry
        slow_backward = stride in (1, dilation) and (kernel > FAST_COLUMNS or dilation > 1)
        if not (slow_backward and self.training and x.device.type == "cpu"):
            return super().forward(x)
        if not fast_kernels_apply(x):
            return super().forward(x)
        result: Tensor = _DepthwiseConv.apply(x, self.weight, self.geometry)
        return result


def _undilated(geometry: Geometry) -> Geometry:
    return Geometry(geometry.kernel, 1, 1)


def _conv(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    _, stride, dilation = geometry
    return F.conv2d(x, weight, None, stride, geometry.padding, dilation, groups=x.shape[1])


def _weight_gradient(x: Tensor, g: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Return the weight gradient of a conv of stride 1."""
    kernel, _, period = geometry
    if kernel <= FAST_COLUMNS and period == 1 and x.shape[2] >= kernel:
        return _plain_weight_gradient(x, g, weight)
    # For three columns of the kernel at a time, g is shifted so that they become the middle ones.
    # The margins of zeros are as wide as the largest shift, so that a row may run over into the
    # margin of the next: shifting g is reading the same memory from another offset.
    margin = max(kernel - FAST_COLUMNS, 0) // 2
    rows = max(-(-x.shape[2] // period), kernel)  # the fast path needs as many as the kernel
    columns = -(-x.shape[3] // period) + 2 * margin
    x, _ = _phases(x, period, rows, columns, margin)
    _, memory = _phases(g, period, rows, columns, 2 * margin)
    result = torch.empty_like(weight)
    for first in sorted({*range(0, 2 * margin, FAST_COLUMNS), 2 * margin}):
        part = slice(first, first + FAST_COLUMNS)
        start = (2 * margin - first) * x.shape[1]
        moved = memory[start : start + x.numel()].view(x.permute(0, 2, 3, 1).shape)
        result[..., part] = _plain_weight_gradient(x, moved.permute(0, 3, 1, 2), weight[..., part])
    return result


def _plain_weight_gradient(x: Tensor, g: Tensor, weight: Tensor) -> Tensor:
    padding = [side // 2 for side in weight.shape[2:]]
    _, gradient, _ = torch.ops.aten.convolution_backward(
        g,
        x,
        weight.contiguous(),
        None,
        [1, 1],
        padding,
        [1, 1],
        False,
        [0, 0],
        x.shape[1],
        [False, True, False],
    )
    return gradient


def _phases(x: Tensor, period: int, rows: int, columns: int, left: int) -> tuple[Tensor, Tensor]:
    """Lay out the pixel phases of each image as images, padded with zeros.

    Parameters
    ----------
    x
        A batch of images.
    period
        The distance of the pixels of one phase; there are period² phases.
    rows, columns
        Size of the padded images.
    left
        Columns of zeros to the left of each phase. As many pixels of zeros follow the last image.

    Returns
    -------
    tuple of Tensor
        The new batch, and its memory as a vector, with the zeros after the last image.
    """
    n, channels, height, width = x.shape
    shape = (period, period, n, rows, columns, channels)
    size = math.prod(shape)
    memory = x.new_zeros(size + left * channels)
    frames = memory[:size].view(shape)
    x = x.permute(0, 2, 3, 1)
    if height % period == 0 and width % period == 0:
        grid = x.unflatten(2, (-1, period)).unflatten(1, (-1, period)).permute(2, 4, 0, 1, 3, 5)
        frames[:, :, :, : grid.shape[3], left : left + grid.shape[4]] = grid
    else:  # the phases differ in size
        for i, j in itertools.product(range(period), repeat=2):
            phase = x[:, i::period, j::period]
            frames[i, j, :, : phase.shape[1], left : left + phase.shape[2]] = phase
    return frames.flatten(0, 2).permute(0, 3, 1, 2), memory


def _first_phase(x: Tensor, period: int) -> Tensor:
    return x[:, :, ::period, ::period].contiguous(memory_format=torch.channels_last)
