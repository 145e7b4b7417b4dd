"""Inner loops of training in C (native.c), compiled on first use where there is a C compiler.

At 16 channels a step of weak learning is a long chain of light passes over memory: PyTorch's own
kernels wait for it most of the time. These do in one pass what belongs together: the batch norm and
ReLU before a depthwise conv happen while it reads its input, their gradients while it writes its
own. They take images in channels_last on the CPU. Where they cannot be compiled (no compiler, not
Linux) or are switched off (environment variable ``NNI_PETRIDISH_NATIVE=0``), everything is done by
PyTorch, slower.

The threads are those of PyTorch's own OpenMP runtime: the library is linked without one and finds
its symbols in the process. A second runtime would have a second set of threads, and the two sets
would wait for each other.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from nni_petridish.cache import make_cache_folder
from nni_petridish.kernels import fast_kernels_apply

_SOURCE = Path(__file__).with_name("native.c")
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fPIC", "-fopenmp", "-std=gnu11")
_REAL = {torch.float32: "float", torch.float64: "double"}
_logger = logging.getLogger(__name__)


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


class _Batch(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_long) for name in ("images", "height", "width", "channels", "threads")
    ]


class _Conv(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in Geometry._fields]


def native_applies(x: Tensor) -> bool:
    """Return whether these kernels can take x."""
    return (
        x.device.type == "cpu"
        and x.ndim == 4
        and x.shape[2] * x.shape[3] > 1  # within an image they find what to do together
        and x.numel() > 0
        and fast_kernels_apply(x)
        and _library(x.dtype) is not None
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
        n, channels, height, width = x.shape
        stride = self.geometry.stride
        size = ((height - 1) // stride + 1, (width - 1) // stride + 1)
        y = x.new_empty(n, *size, channels).permute(0, 3, 1, 2)
        mean, variance = x.new_empty(2, channels).unbind()
        scale, shift = self.affine or (None, None)
        enough = _loaded(x).unit_forward(
            *_at(y, mean, variance, x, scale, shift, self.depthwise, self.pointwise),
            _batch(x),
            _Conv(*self.geometry),
        )
        _check(enough)
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
        scale, shift = self.affine or (None, None)
        enough = _loaded(x).unit_backward(
            *_at(*found, g, y, *of, x, scale, shift, mean, self.depthwise, self.pointwise),
            _batch(x),
            _Conv(*self.geometry),
        )
        _check(enough)
        return found


class UnitGradients(NamedTuple):
    """Of a `Unit`."""

    before_relu: Tensor | None
    """b, the gradient of what the ReLU takes."""
    totals: Tensor
    """Σ b of each channel."""
    products: Tensor
    """Σ b·(x − mean) of each channel."""
    depthwise: Tensor
    pointwise: Tensor


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each channel."""
    mean, variance = x.new_empty(2, x.shape[1]).unbind()
    _check(_loaded(x).moments(*_at(mean, variance, x), _batch(x)))
    return mean, variance


def correlations(g: Tensor, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ g and Σ g·(x − mean) of each channel."""
    _check_shapes(g, x)
    x = x.contiguous(memory_format=torch.channels_last)
    totals, products = x.new_empty(2, x.shape[1]).unbind()
    _check(_loaded(x).correlations(*_at(totals, products, g, x, mean), _batch(x)))
    return totals, products


def combine(g: Tensor, x: Tensor, of: Combination) -> Tensor:
    """Return the combination of g and x."""
    _check_shapes(g, x)
    x = x.contiguous(memory_format=torch.channels_last)
    out = torch.empty_like(x)
    _loaded(g).combine(*_at(out, g, x, *of), _batch(g))
    return out


def _loaded(x: Tensor) -> ctypes.CDLL:
    library = _library(x.dtype)
    assert library is not None
    return library


def _at(*tensors: Tensor | None) -> list[ctypes.c_void_p]:
    """Return where tensors lie, all of one type; the layout is the caller's business."""
    if len({(t.dtype, t.device) for t in tensors if t is not None}) != 1:
        raise TypeError("native kernels take tensors of one type, on the CPU.")
    return [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in tensors]


def _batch(x: Tensor) -> _Batch:
    n, channels, height, width = x.shape
    return _Batch(n, height, width, channels, torch.get_num_threads())


def _check_shapes(g: Tensor, x: Tensor) -> None:
    """Refuse what would be read beyond its end."""
    if g.shape != x.shape:
        raise ValueError(f"a gradient of shape {tuple(g.shape)} cannot be that of {tuple(x.shape)}")


def _check(enough_memory: int) -> None:
    if not enough_memory:
        raise MemoryError("no memory for the frames of a unit")


@functools.cache
def _library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the kernels for numbers of this type; None where they cannot be had."""
    if os.environ.get("NNI_PETRIDISH_NATIVE") == "0" or not sys.platform.startswith("linux"):
        return None
    compiler = next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)
    if compiler is None:
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler, _REAL[dtype])), mode=os.RTLD_NOW)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: no home
        _logger.warning("native kernels could not be compiled, PyTorch's are used: %s", error)
        return None


def _compiled(compiler: str, real: str) -> Path:
    """Compile native.c unless that was done before, on this kind of processor."""
    path = _cache_folder() / f"native-{real}-{_digest(compiler)}.so"
    if path.exists() and _is_whole(path):
        return path
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made, whole = f"{folder}/native.o", f"{folder}/native.so"
        # In two steps: only the first knows of OpenMP, so that the second links no runtime.
        for command in (
            [compiler, *_FLAGS, f"-DREAL={real}", "-c", str(_SOURCE), "-o", made],
            [compiler, "-shared", made, "-o", whole],
        ):
            subprocess.run(command, check=True, capture_output=True, timeout=120)
        library = Path(whole).read_bytes()
        Path(whole).write_bytes(library + hashlib.sha256(library).digest())
        os.replace(whole, path)  # complete, or not there: others may compile at the same time
    return path


def _is_whole(path: Path) -> bool:
    """Return whether a library ends in its checksum: to load half of one ends the process."""
    content = path.read_bytes()
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


def _digest(compiler: str) -> str:
    """Return what tells apart sources, compilers and processors: homes are shared by machines."""
    parts = [_SOURCE.read_bytes(), " ".join((compiler, *_FLAGS, platform.machine())).encode()]
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    parts += [line.encode() for line in lines if line.startswith(("flags", "Features"))][:1]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _cache_folder() -> Path:
    folder = make_cache_folder()
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:  # what lies there is run
        raise PermissionError(f"others may write to {folder}; set XDG_CACHE_HOME")
    return folder
