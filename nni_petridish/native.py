"""Inner loops of training in C (c/native.c).

At 16 channels a step of weak learning is a long chain of light passes over memory: PyTorch's own
kernels wait for it most of the time. These do in one pass what belongs together: the batch norm and
ReLU before a depthwise conv happen while it reads its input, their gradients while it writes its
own. They take images in channels_last on the CPU. Where they cannot be compiled (no compiler, not
Linux) or are switched off (environment variable ``NNI_PETRIDISH_NATIVE=0``), everything is done by
PyTorch, slower.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nni_petridish.kernels import fast_kernels_apply
from nni_petridish.native_library import native_library


class Geometry(NamedTuple):
    """Of a conv with a square kernel and "same" padding."""

    kernel: int
    stride: int
    dilation: int

    @property
    def padding(self) -> int:
        """Zeros on each side."""
        return self.dilation * (self.kernel - 1) // 2

    @property
    def is_native(self) -> bool:
        """Whether there are loops for it."""
        return self.kernel in (3, 5) and self.stride in (1, 2) and self.dilation in (1, 2)


def _fields(numbers: str, tensors: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_long) for name in numbers.split()] + [
        (name, ctypes.c_void_p) for name in tensors.split()
    ]


class _Batch(ctypes.Structure):
    _fields_ = _fields("images height width channels threads", "")


class _Unit(ctypes.Structure):
    _fields_ = [
        *_fields("kernel stride dilation", "x scale shift depthwise pointwise y mean variance"),
        *_fields("", "g of_g of_y constant centre dx totals products ddepthwise dpointwise"),
        *_fields("adds", "kept"),
    ]


class _Pool(ctypes.Structure):
    _fields_ = [
        *_fields("kind stride", "x y mean variance g totals products dx"),
        ("adds", ctypes.c_long),
    ]


class _Projection(ctypes.Structure):
    _fields_ = _fields(
        "parts outputs",
        "x even odd y mean variance g of_g of_y constant dx deven dodd",
    ) + _fields("adds", "totals products")


def native_applies(x: Tensor) -> bool:
    """Return whether these kernels can take x."""
    return (
        x.device.type == "cpu"
        and x.ndim == 4
        and x.shape[2] * x.shape[3] > 1  # within an image they find what to do together
        and x.numel() > 0
        and fast_kernels_apply(x)
        and native_library(x.dtype) is not None
    )


class Combination(NamedTuple):
    """of_g·g + of_x·x + constant, each a vector over channels; without of_x, of_g·g."""

    of_g: Tensor
    of_x: Tensor | None
    constant: Tensor | None


class Unit(NamedTuple):
    """Batch norm, ReLU, depthwise conv and pointwise conv, as one."""

    geometry: Geometry
    depthwise: Tensor
    pointwise: Tensor
    affine: tuple[Tensor, Tensor] | None
    """Scale and shift of the norm, if there is one."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, and mean and biased variance of its channels."""
        y = x.new_empty(x.shape[0], *_strided(x, self.geometry.stride), x.shape[1])
        y = y.permute(0, 3, 1, 2)
        mean, variance = x.new_empty(2, x.shape[1]).unbind()
        unit = self._with(x=x, y=y, mean=mean, variance=variance)
        _check(_loaded(x).unit_forward(ctypes.byref(unit), _batch(x)))
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
        """Return the gradients, that of the output y being a combination of g and y.

        Parameters
        ----------
        g, y, of
            The combination.
        x, mean
            The input, and the mean of its channels if a norm comes first.
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
        unit = self._with(
            **dict(
                zip(("dx", "totals", "products", "ddepthwise", "dpointwise"), found, strict=True)
            ),
            **dict(zip(("of_g", "of_y", "constant"), of, strict=True)),
            **{"x": x, "y": y, "g": g, "centre": mean},
        )
        _check(_loaded(x).unit_backward(ctypes.byref(unit), _batch(x)))
        return found

    def _with(self, **tensors: Tensor | None) -> _Unit:
        """Return the unit with what it takes and makes."""
        scale, shift = self.affine or (None, None)
        own = {"depthwise": self.depthwise, "pointwise": self.pointwise}
        return _Unit(*self.geometry, **_at(**tensors, **own, scale=scale, shift=shift))


class UnitGradients(NamedTuple):
    """Of a `Unit`."""

    before_relu: Tensor | None
    """b, the gradient of what the ReLU takes."""
    totals: Tensor
    """Σ b of each channel, if b is wanted."""
    products: Tensor
    """Σ b·(x − mean) of each channel, likewise."""
    depthwise: Tensor
    pointwise: Tensor


class Projection(NamedTuple):
    """ReLU and a 1x1 conv to another number of channels; or two, which halve the image.

    Of each square of four pixels the first conv sees the even one and the second the odd one, and
    what they make is concatenated.
    """

    weights: Sequence[Tensor]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, and mean and biased variance of its channels."""
        outputs, parts = self._outputs(x), len(self.weights)
        y = x.new_empty(x.shape[0], *_strided(x, parts), outputs).permute(0, 3, 1, 2)
        mean, variance = x.new_empty(2, outputs).unbind()
        call = self._with(outputs, x=x, y=y, mean=mean, variance=variance)
        _check(_loaded(x).projection_forward(ctypes.byref(call), _batch(x)))
        return y, mean, variance

    def backward(
        self, g: Tensor, y: Tensor, of: Combination, x: Tensor, want_input: bool
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Return the gradients of x, if wanted, and of the weights; that of y is a combination."""
        _check_shapes(g, y)
        dx = torch.empty_like(x) if want_input else None
        gradients = [torch.empty_like(weight) for weight in self.weights]
        places = dict(zip(("of_g", "of_y", "constant"), of, strict=True))
        places |= dict(zip(("deven", "dodd"), gradients, strict=False))
        call = self._with(self._outputs(x), x=x, y=y, g=g, dx=dx, **places)
        _check(_loaded(x).projection_backward(ctypes.byref(call), _batch(x)))
        return dx, gradients

    def _outputs(self, x: Tensor) -> int:
        if any(weight.shape[1:] != (x.shape[1], 1, 1) for weight in self.weights):
            raise ValueError(f"the weights of a projection do not fit {x.shape[1]} channels.")
        return sum(weight.shape[0] for weight in self.weights)

    def _with(self, outputs: int, **tensors: Tensor | None) -> _Projection:
        """Return the projection with what it takes and makes."""
        weights = dict(zip(("even", "odd"), self.weights, strict=False))
        return _Projection(len(self.weights), outputs, **_at(**weights, **tensors))


class Kernel(NamedTuple):
    """What a candidate computes before the batch norm, without γ and β, at its end."""

    geometries: Sequence[Geometry]
    """Of one unit, or of two with a batch norm between them; or of what else it is."""
    other: str | None = None
    """``max`` or ``avg`` (which counts no padding) pooling, ``none`` of them, or ``reduce``: ReLU
    and two 1x1 convs, of the even and the odd pixels."""


class Candidate(NamedTuple):
    """A candidate in the backward pass: what its kernel takes, and where the gradients go."""

    kernel: Kernel
    alpha: float
    x: Tensor
    """Its input."""
    dx: Tensor | None
    """Where the gradient of x goes, if it is wanted."""
    adds: bool
    """Whether it is added to what is there."""
    parameters: Sequence[Tensor]
    """The depthwise and the pointwise weight of each unit, between those of two γ and β; or the two
    weights of a reduction."""
    gradients: Sequence[Tensor]
    running: Sequence[Tensor]
    """Mean, variance and number of batches of each norm, to be updated; none if they are not."""


_ONE_TYPE = "native kernels take tensors of one type, on the CPU."
_OTHERS = ("none", "avg", "max", "reduce")
_CANDIDATE = struct.Struct("5l 2P 3l 3l4P 3l4P 7P 7P 2d")
"""A candidate as C has it: see c/native.c. The last number is the gradient of α."""
_NOWHERE = (0, 0)


def candidate_gradients(
    g: Tensor, candidates: Sequence[Candidate], eps: float, momentum: float
) -> list[float]:
    """Compute a site's candidates and their gradients, g being that of x_k; return those of α."""
    _check_types(g, candidates)
    calls = b"".join(_packed(g, candidate) for candidate in candidates)
    memory = ctypes.create_string_buffer(calls, len(calls))
    settings = ctypes.c_double(eps), ctypes.c_double(momentum)
    run = _loaded(g).candidate_gradients
    _check(run(memory, ctypes.c_long(len(candidates)), ctypes.c_void_p(g.data_ptr()), *settings))
    return [found[-1] for found in _CANDIDATE.iter_unpack(memory)]


def _packed(g: Tensor, of: Candidate) -> bytes:
    (geometries, other), x, running = of.kernel, of.x, of.running
    _check_output(g, x, geometries[0].stride)
    n, channels, height, width = x.shape
    weights = [tensor.data_ptr() for tensor in of.parameters] or _NOWHERE
    gradients = [tensor.data_ptr() for tensor in of.gradients] or _NOWHERE
    statistics = [tensor.data_ptr() for tensor in running] or (0, 0, 0)
    first = (*geometries[0], *weights[:2], *gradients[:2])
    if len(geometries) > 1:
        second = (*geometries[1], *weights[4:], *gradients[4:])
        norms = (*weights[2:4], *gradients[2:4], *statistics[:3], 0, 0, 0, 0, *statistics[-3:])
    else:
        second = (0,) * 7
        norms = (0, 0, 0, 0, *statistics, *(0,) * 7)
    return _CANDIDATE.pack(
        *(n, height, width, channels, torch.get_num_threads()),
        *(x.data_ptr(), 0 if of.dx is None else of.dx.data_ptr(), of.adds),
        *((len(geometries), 0) if other is None else (0, _OTHERS.index(other))),
        *(*first, *second, *norms, of.alpha, 0.0),
    )


def _check_types(g: Tensor, candidates: Sequence[Candidate]) -> None:
    for candidate in candidates:
        for tensors in ((candidate.x,), candidate.parameters, candidate.running):
            for tensor in tensors:
                # The numbers of batches are integers.
                if tensor.dtype is not g.dtype and tensor.dtype is not torch.int64:
                    raise TypeError(_ONE_TYPE)
                if not tensor.is_cpu:
                    raise TypeError(_ONE_TYPE)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each channel."""
    mean, variance = x.new_empty(2, x.shape[1]).unbind()
    call = _Pool(0, 1, **_at(x=x, mean=mean, variance=variance))
    _check(_loaded(x).pool_forward(ctypes.byref(call), ctypes.c_long(1), _batch(x)))
    return mean, variance


def correlations(g: Tensor, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ g and Σ g·(x − mean) of each channel."""
    _check_shapes(g, x)
    x = x.contiguous(memory_format=torch.channels_last)
    totals, products = x.new_empty(2, x.shape[1]).unbind()
    places = _at(totals=totals, products=products, g=g, x=x, mean=mean)
    _check(_loaded(x).correlations(*places.values(), _batch(x)))
    return totals, products


def combine(g: Tensor, x: Tensor, of: Combination) -> Tensor:
    """Return the combination of g and x."""
    _check_shapes(g, x)
    x = x.contiguous(memory_format=torch.channels_last)
    out = torch.empty_like(x)
    _loaded(g).combine(*_at(out=out, g=g, x=x, **of._asdict()).values(), _batch(g))
    return out


def _strided(x: Tensor, stride: int) -> tuple[int, int]:
    return (x.shape[2] - 1) // stride + 1, (x.shape[3] - 1) // stride + 1


def _loaded(x: Tensor) -> ctypes.CDLL:
    library = native_library(x.dtype)
    assert library is not None
    return library


def _at(**tensors: Tensor | None) -> dict[str, Any]:
    """Return where tensors lie, all of one type; the layout is the caller's business."""
    _check_one_type(t for t in tensors.values() if t is not None)
    return {
        name: ctypes.c_void_p(None if t is None else t.data_ptr()) for name, t in tensors.items()
    }


def _check_one_type(tensors: Iterable[Tensor]) -> None:
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
        raise TypeError(_ONE_TYPE)


def _batch(x: Tensor) -> _Batch:
    n, channels, height, width = x.shape
    return _Batch(n, height, width, channels, torch.get_num_threads())


def _check_shapes(g: Tensor, x: Tensor) -> None:
    """Refuse what would be read beyond its end."""
    _check_output(g, x, 1)


def _check_output(g: Tensor, x: Tensor, stride: int) -> None:
    expected = (*x.shape[:2], *_strided(x, stride))
    if g.shape != expected:
        raise ValueError(f"a gradient of shape {tuple(g.shape)} cannot be that of {expected}")


def _check(enough_memory: int) -> None:
    if not enough_memory:
        raise MemoryError("no memory for the frames of a unit")
