"""The structures of C (c/) that Python fills in, field by field.

C cannot tell Python what its structures look like, so each is written down twice. `check_sizes`
compares their sizes when the library is loaded: a field too many here or there would otherwise be
read as another one.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any


def _fields(numbers: str, tensors: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_long) for name in numbers.split()] + [
        (name, ctypes.c_void_p) for name in tensors.split()
    ]


class Batch(ctypes.Structure):
    """A batch of images: ``batch`` of images.h."""

    _fields_ = _fields("images height width channels threads", "")


class Unit(ctypes.Structure):
    """Norm, ReLU, depthwise and pointwise conv: ``unit`` of unit.h."""

    _fields_ = [
        *_fields("kernel stride dilation", "x scale shift depthwise pointwise y mean variance"),
        *_fields("", "g of_g of_y constant centre dx totals products ddepthwise dpointwise"),
        *_fields("adds", "kept"),
    ]


class Pool(ctypes.Structure):
    """A pooling: ``pool`` of pool.h."""

    _fields_ = [
        *_fields("kind stride", "x mean variance g totals products dx"),
        ("adds", ctypes.c_long),
    ]


class Projection(ctypes.Structure):
    """ReLU and 1x1 convs: ``projection`` of projection.h."""

    _fields_ = _fields(
        "parts outputs",
        "x even odd y mean variance g of_g of_y constant dx deven dodd",
    ) + _fields("adds", "totals products")


CANDIDATE = struct.Struct("5l 2P 3l 3l4P 3l4P 7P 7P 2d")
"""``candidate`` of native.c, its numbers in a row; the last is the gradient of α."""

SIZES = {
    "batch": ctypes.sizeof(Batch),
    "unit": ctypes.sizeof(Unit),
    "pool": ctypes.sizeof(Pool),
    "projection": ctypes.sizeof(Projection),
    "candidate": CANDIDATE.size,
}
"""The bytes of each structure, by its name in C."""


def check_sizes(library: ctypes.CDLL) -> None:
    """Raise an error unless the structures of a library are as large as they are here.

    Raises
    ------
    TypeError
        With the name of the structure and both sizes.
    """
    for name, size in SIZES.items():
        in_c = ctypes.c_long.in_dll(library, f"size_of_{name}").value
        if in_c != size:
            raise TypeError(f"structure {name!r} has {in_c} bytes in C but {size} in Python.")
