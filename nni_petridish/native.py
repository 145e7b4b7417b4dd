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
from collections.abc import Sequence
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
        return self.kernel in (3, 5) and self.stride in (1, 2)


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
        ("adds", ctypes.c_long),
    ]


class _Branch(ctypes.Structure):
    _fields_ = [
        ("units", _Unit * 2),
        *_fields("", "gamma beta dgamma dbeta"),
        ("length", ctypes.c_long),
        *((name, ctypes.c_double) for name in ("alpha", "dalpha", "eps")),
    ]


class _Pool(ctypes.Structure):
    _fields_ = [
        *_fields("kind stride", "x y mean variance g totals products dx"),
        ("adds", ctypes.c_long),
    ]


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


class BackwardPass(NamedTuple):
    """Of a candidate, whose output, times α, has the gradient g = ∇_{x_k} L."""

    g: Tensor
    alpha: float
    x: Tensor
    """Its input."""
    parameters: Sequence[Tensor]
    dx: Tensor | None
    """Where the gradient of x goes, if it is wanted."""
    adds: bool
    """Whether it is added to what is there."""


class Branch(NamedTuple):
    """One unit, or two with a batch norm between them; then a batch norm without γ and β."""

    geometries: Sequence[Geometry]
    eps: float

    def gradients(self, of: BackwardPass) -> BranchGradients:
        """Compute it, and its gradients.

        The parameters are the depthwise and the pointwise weight of each unit; before those of a
        second, γ and β of the norm between the two.
        """
        g, alpha, x, parameters, dx, adds = of
        _check_output(g, x, self.geometries[0].stride)
        grads = [torch.empty_like(parameter) for parameter in parameters]
        moments = x.new_empty(len(self.geometries), 2, x.shape[1])
        units = []
        for i, geometry in enumerate(self.geometries):
            mean, variance = moments[i].unbind()
            (depthwise, pointwise), (d_depthwise, d_pointwise) = (
                tensors[4 * i : 4 * i + 2] for tensors in (parameters, grads)
            )
            places = _at(
                mean=mean,
                variance=variance,
                depthwise=depthwise,
                pointwise=pointwise,
                ddepthwise=d_depthwise,
                dpointwise=d_pointwise,
                **({"x": x, "dx": dx} if i == 0 else {}),
            )
            units.append(_Unit(*geometry, **places, adds=adds and i == 0))
        names = ("gamma", "beta", "dgamma", "dbeta")
        between = dict(zip(names, [*parameters[2:4], *grads[2:4]], strict=False))
        call = _Branch((_Unit * 2)(*units), **_at(**between))
        call.length, call.alpha, call.eps = len(units), alpha, self.eps
        enough = _loaded(x).branch_gradients(ctypes.byref(call), *_at(g=g).values(), _batch(x))
        _check(enough)
        return BranchGradients(call.dalpha, grads, moments)


class BranchGradients(NamedTuple):
    """Of a `Branch` or a `Pooling`."""

    alpha: float
    parameters: list[Tensor]
    moments: Tensor
    """Mean and biased variance of what each norm takes, shape (norms, 2, channels)."""


class Pooling(NamedTuple):
    """Over squares of 3x3 pixels; then a batch norm without γ and β."""

    kind: str
    """``max``, ``avg`` (which counts no padding) or ``none``."""
    stride: int
    eps: float

    def gradients(self, of: BackwardPass) -> BranchGradients:
        """Compute it, and its gradients; it has no parameters."""
        g, alpha, x, _, dx, adds = of
        _check_output(g, x, self.stride)
        found = x.new_empty(4, x.shape[1])
        mean, variance, totals, products = found.unbind()
        places = _at(
            x=x, g=g, mean=mean, variance=variance, totals=totals, products=products, dx=dx
        )
        call = _Pool(("none", "avg", "max").index(self.kind), self.stride, **places, adds=adds)
        dalpha, settings = ctypes.c_double(), (ctypes.c_double(alpha), ctypes.c_double(self.eps))
        _check(
            _loaded(x).pool_gradients(
                ctypes.byref(call), ctypes.byref(dalpha), *settings, _batch(x)
            )
        )
        return BranchGradients(dalpha.value, [], found[:2].unsqueeze(0))


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each channel."""
    mean, variance = x.new_empty(2, x.shape[1]).unbind()
    call = _Pool(0, 1, **_at(x=x, mean=mean, variance=variance))
    _check(_loaded(x).pool_forward(ctypes.byref(call), _batch(x)))
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
    if len({(t.dtype, t.device) for t in tensors.values() if t is not None}) > 1:
        raise TypeError("native kernels take tensors of one type, on the CPU.")
    return {
        name: ctypes.c_void_p(None if t is None else t.data_ptr()) for name, t in tensors.items()
    }


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
