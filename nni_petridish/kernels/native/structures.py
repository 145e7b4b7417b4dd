"""Python mirrors of the C structures (c/) that are passed to the kernels.

Each structure is declared twice, in C and here. `check_sizes` compares their sizes when the library
is loaded, because a missing field would shift all that follow.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any


def _fields(numbers: str, tensors: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_long) for name in numbers.split()] + [
        (name, ctypes.c_void_p) for name in tensors.split()
    ]


class BatchStruct(ctypes.Structure):
    """A batch of images: ``batch`` of images.h."""

    _fields_ = _fields("images height width channels parts threads", "")


class PoolStruct(ctypes.Structure):
    """A pooling: ``pool`` of pool.h."""

    _fields_ = [
        *_fields("kind stride", "x y mean variance g totals products dx"),
        ("adds", ctypes.c_long),
    ]


class CellSizeStruct(ctypes.Structure):
    """The sizes of a recurrent cell: ``cell_size`` of recurrence.h."""

    _fields_ = _fields("steps rows hidden width nodes threads", "")


class CellStruct(ctypes.Structure):
    """A recurrent cell: ``cell`` of recurrence.h."""

    _fields_ = _fields(
        "",
        "sources activations weights shares mask first gates states outputs masked g total dgates"
        " dfirst",
    )


class CandidateNodeStruct(ctypes.Structure):
    """A candidate node of a recurrent cell: ``candidate_node`` of recurrence.h."""

    _fields_ = [
        *_fields("activation", "weight z masked g dgates gamma beta dgamma dbeta"),
        *_fields("", "running_mean running_variance batches"),
        ("alpha", ctypes.c_double),
        ("dalpha", ctypes.c_double),
    ]


UNIT = struct.Struct("3l 8P 10P lP")
"""The fields of ``unit`` of unit.h in order."""

PROJECTION = struct.Struct("2l 13P l 2P")
"""The fields of ``projection`` of projection.h in order."""

CANDIDATE = struct.Struct("6l 2P 3l 3l4P 3l4P 7P 7P 2d")
"""The fields of ``candidate`` of native.c in order; the last is the gradient of α."""

SHORTCUT = struct.Struct("7P 4P 4P")
"""The fields of ``shortcut`` of merge.h in order."""

MERGE = struct.Struct("l 3P 7P 2P P 3P 2P 2P")
"""The fields of ``merge`` of merge.h in order."""

LAYER_NORM = struct.Struct("7P 2P l 2P 2P 3P")
"""The fields of ``layer_norm`` of norm.h in order."""

TERM = struct.Struct("2l 3l3l 3l P2P P2P 4Pd4Pd")
"""The fields of ``term`` of folding.h in order."""

SUM_OF_TERMS = struct.Struct("l P P 4Pd 2P 2P")
"""The fields of ``sum_of_terms`` of folding.h in order."""

SIZES = {
    "batch": ctypes.sizeof(BatchStruct),
    "unit": UNIT.size,
    "pool": ctypes.sizeof(PoolStruct),
    "projection": PROJECTION.size,
    "candidate": CANDIDATE.size,
    "shortcut": SHORTCUT.size,
    "merge": MERGE.size,
    "layer_norm": LAYER_NORM.size,
    "term": TERM.size,
    "sum_of_terms": SUM_OF_TERMS.size,
    "cell": ctypes.sizeof(CellStruct),
    "cell_size": ctypes.sizeof(CellSizeStruct),
    "candidate_node": ctypes.sizeof(CandidateNodeStruct),
}
"""The size of each structure in bytes, by its name in C."""


def check_sizes(library: ctypes.CDLL) -> None:
    """Compare the sizes of the structures in C and in Python.

    Raises
    ------
    TypeError
        If they differ, with the name of the structure and both sizes.
    """
    for name, size in SIZES.items():
        in_c = ctypes.c_long.in_dll(library, f"size_of_{name}").value
        if in_c != size:
            raise TypeError(f"structure {name!r} has {in_c} bytes in C but {size} in Python.")
