"""Calls of the C kernels (c/).

At 16 channels a step of weak learning is a long chain of light passes over memory, and PyTorch's
kernels are limited by memory most of the time. These kernels fuse passes: a depthwise conv applies
the preceding batch norm and ReLU as it reads its input, and computes their gradients as it writes
its own. They support images in channels_last on the CPU. If they cannot be compiled (no compiler,
not Linux) or are disabled (environment variable ``NNI_PETRIDISH_NATIVE=0``), the slower ops of
PyTorch are used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nni_petridish.kernels.native import structures
from nni_petridish.kernels.native.library import native_library
from nni_petridish.kernels.switch import fast_kernels_apply
from nni_petridish.kernels.waiting import spare_threads

_GRAIN = 32768
"""Numbers of a batch from which several threads pay; torch's own ops have the same limit."""
ONE_TYPE = "native kernels take tensors of one type, on the CPU."


class Geometry(NamedTuple):
    """Geometry of a conv with a square kernel and "same" padding."""

    kernel: int
    stride: int
    dilation: int

    @property
    def padding(self) -> int:
        """The padding on each side."""
        return self.dilation * (self.kernel - 1) // 2

    @property
    def is_native(self) -> bool:
        """Whether the C kernels support it."""
        return self.kernel in (3, 5) and self.stride in (1, 2) and self.dilation in (1, 2)


def native_applies(x: Tensor) -> bool:
    """Return whether the C kernels support x."""
    return (
        x.device.type == "cpu"
        and x.ndim == 4
        and x.shape[2] * x.shape[3] > 1  # they combine the work on the pixels of an image
        and x.numel() > 0
        and fast_kernels_apply(x)
        and native_library(x.dtype) is not None
    )


def native_trains(x: Tensor) -> bool:
    """Return whether the C kernels support x, and x can be saved for a backward pass."""
    # In this order: a compiler cannot trace `is_inference`.
    return native_applies(x) and (not x.is_inference() or torch.is_inference_mode_enabled())


class Combination(NamedTuple):
    """The combination of_g·g + of_x·x + constant of images g and x, or of_g·g without of_x.

    The coefficients are vectors over channels.
    """

    of_g: Tensor
    of_x: Tensor | None
    constant: Tensor | None


class Unit(NamedTuple):
    """Batch norm, ReLU, depthwise conv and pointwise conv in one pass."""

    geometry: Geometry
    depthwise: Tensor
    pointwise: Tensor
    affine: tuple[Tensor, Tensor] | None
    """Scale and shift of the norm; None without a norm."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, and mean and biased variance of its channels."""
        y = x.new_empty(x.shape[0], *strided(x, self.geometry.stride), x.shape[1])
        y = y.permute(0, 3, 1, 2)
        mean, variance = x.new_empty(2, x.shape[1]).unbind()
        call = self._packed(x, (y, mean, variance), (None,) * 10)
        check_memory(loaded(x).unit_forward(call, batch_of(x)))
        return y, mean, variance

    def backward(
        self,
        g: Tensor,
        y: Tensor,
        of: Combination,
        x: Tensor,
        mean: Tensor | None,
        want_input: bool,
    ) -> UnitGradients:
        """Return the gradients, given the gradient of the output y as a combination of g and y.

        Parameters
        ----------
        g, y, of
            The images g and y, and the coefficients of their combination.
        x, mean
            The input, and the mean of its channels if there is a norm.
        want_input
            Whether the gradient before the ReLU is needed.
        """
        _check_shapes(g, y)
        totals, products = x.new_empty(2, x.shape[1]).unbind()
        found = UnitGradients(
            torch.empty_like(x) if want_input else None,
            totals,
            products,
            torch.empty_like(self.depthwise),
            torch.empty_like(self.pointwise),
        )
        call = self._packed(x, (y, None, None), (g, *of, mean, *found))
        check_memory(loaded(x).unit_backward(call, batch_of(x)))
        return found

    def _packed(
        self, x: Tensor, outputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
    ) -> bytes:
        """Return the C structure of the unit with its inputs and outputs."""
        scale, shift = self.affine or (None, None)
        inputs = x, scale, shift, self.depthwise, self.pointwise
        return structures.UNIT.pack(*self.geometry, *pointers(*inputs, *outputs, *gradients), 0, 0)


class UnitGradients(NamedTuple):
    """The gradients of a `Unit`."""

    before_relu: Tensor | None
    """b, the gradient of the input of the ReLU; None if not needed."""
    totals: Tensor
    """Σ b of each channel; undefined without b."""
    products: Tensor
    """Σ b·(x − mean) of each channel; undefined without b."""
    depthwise: Tensor
    pointwise: Tensor


class Projection(NamedTuple):
    """ReLU and a 1x1 conv to another number of channels, or two convs that halve the resolution.

    With two, the first reads the pixels of even rows and columns, the second those of odd rows and
    columns, and their outputs are concatenated.
    """

    weights: Sequence[Tensor]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, and mean and biased variance of its channels."""
        outputs, parts = self._outputs(x), len(self.weights)
        y = x.new_empty(x.shape[0], *strided(x, parts), outputs).permute(0, 3, 1, 2)
        mean, variance = x.new_empty(2, outputs).unbind()
        call = self._packed(x, outputs, (y, mean, variance), (None,) * 7)
        check_memory(loaded(x).projection_forward(call, batch_of(x)))
        return y, mean, variance

    def backward(
        self, g: Tensor, y: Tensor, of: Combination, x: Tensor, want_input: bool
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Return the gradients of x, if needed, and of the weights.

        The gradient of y is given as a combination of g and y.
        """
        _check_shapes(g, y)
        dx = torch.empty_like(x) if want_input else None
        gradients = [torch.empty_like(weight) for weight in self.weights]
        found = g, *of, dx, *_two(gradients)
        call = self._packed(x, self._outputs(x), (y, None, None), found)
        check_memory(loaded(x).projection_backward(call, batch_of(x)))
        return dx, gradients

    def _outputs(self, x: Tensor) -> int:
        if any(weight.shape[1:] != (x.shape[1], 1, 1) for weight in self.weights):
            raise ValueError(f"the weights of a projection do not fit {x.shape[1]} channels.")
        widths = [weight.shape[0] for weight in self.weights]
        if len(widths) == 2 and widths[0] != sum(widths) // 2:
            raise ValueError(f"a projection of two parts cannot have {widths} outputs.")
        return sum(widths)

    def _packed(
        self,
        x: Tensor,
        channels: int,
        outputs: Sequence[Tensor | None],
        gradients: Sequence[Tensor | None],
    ) -> bytes:
        """Return the C structure of the projection with its inputs and outputs."""
        places = pointers(x, *_two(self.weights), *outputs, *gradients)
        return structures.PROJECTION.pack(len(self.weights), channels, *places, 0, 0, 0)


def _two(tensors: Sequence[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Return one or two tensors as two."""
    return tensors[0], tensors[1] if len(tensors) > 1 else None


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each channel."""
    mean, variance = x.new_empty(2, x.shape[1]).unbind()
    call = structures.PoolStruct(0, 1, **addresses(x=x, mean=mean, variance=variance))
    check_memory(loaded(x).pool_forward(ctypes.byref(call), ctypes.c_long(1), batch_of(x)))
    return mean, variance


def correlations(g: Tensor, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ g and Σ g·(x − mean) of each channel."""
    _check_shapes(g, x)
    x = x.contiguous(memory_format=torch.channels_last)
    totals, products = x.new_empty(2, x.shape[1]).unbind()
    places = addresses(totals=totals, products=products, g=g, x=x, mean=mean)
    check_memory(loaded(x).correlations(*places.values(), batch_of(x)))
    return totals, products


def combine(g: Tensor, x: Tensor, of: Combination) -> Tensor:
    """Return the combination of g and x."""
    _check_shapes(g, x)
    x = x.contiguous(memory_format=torch.channels_last)
    out = torch.empty_like(x)
    loaded(g).combine(*addresses(out=out, g=g, x=x, **of._asdict()).values(), batch_of(g))
    return out


def strided(x: Tensor, stride: int) -> tuple[int, int]:
    """Return height and width of the output of an op with this stride."""
    return (x.shape[2] - 1) // stride + 1, (x.shape[3] - 1) // stride + 1


def loaded(x: Tensor) -> ctypes.CDLL:
    """Return the library for x's type; `native_applies` must be true."""
    library = native_library(x.dtype)
    assert library is not None
    return library


def addresses(**tensors: Tensor | None) -> dict[str, Any]:
    """Return the addresses of tensors of one type; the caller must ensure their layout."""
    if len({(t.dtype, t.device) for t in tensors.values() if t is not None}) > 1:
        raise TypeError(ONE_TYPE)
    return {
        name: ctypes.c_void_p(None if t is None else t.data_ptr()) for name, t in tensors.items()
    }


def pointers(*tensors: Tensor | None) -> list[int]:
    """Return the addresses of tensors of one type, 0 for None; the caller ensures their layout."""
    dtype = next(tensor.dtype for tensor in tensors if tensor is not None)
    if any(t is not None and (t.dtype is not dtype or not t.is_cpu) for t in tensors):
        raise TypeError(ONE_TYPE)
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def batch_of(x: Tensor) -> structures.BatchStruct:
    """Return the C structure of the shape of a batch."""
    n, channels, height, width = x.shape
    return structures.BatchStruct(n, height, width, channels, *parts_and_threads(x.numel()))


def parts_and_threads(numbers: int) -> tuple[int, int]:
    """Return the number of parts of a batch of so many numbers, and of threads that compute them.

    The parts, as many as torch has threads, fix the order of sums. The threads change no result, so
    they may follow what the machine has to spare. A small batch needs one.
    """
    parts = torch.get_num_threads()
    return parts, 1 if numbers < _GRAIN else spare_threads(parts)


def _check_shapes(g: Tensor, x: Tensor) -> None:
    """Raise an error if the shapes differ: the kernels would read beyond the end."""
    check_output(g, x, 1)


def check_output(g: Tensor, x: Tensor, stride: int) -> None:
    """Raise an error unless g has the output shape of an op with this stride on x."""
    expected = (*x.shape[:2], *strided(x, stride))
    if g.shape != expected:
        raise ValueError(f"a gradient of shape {tuple(g.shape)} cannot be that of {expected}")


def check_memory(enough_memory: int) -> None:
    """Raise an error if a kernel could not allocate memory."""
    if not enough_memory:
        raise MemoryError("no memory for the images of a kernel")
