"""Compilation of the C kernels, on first use or into a wheel.

This module imports nothing but the standard library: setup.py loads it, too.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path

REALS = ("float", "double")
LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"},
    "x86-64-v2": {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"},
}
"""The levels of x86-64 for which a wheel has kernels, and the flags that each adds to the next."""


def levels_of(flags: Collection[str]) -> list[str]:
    """Return the levels of a processor with these flags of /proc/cpuinfo, the highest first."""
    found: list[str] = []
    for level, needed in reversed(LEVELS.items()):
        if not needed <= set(flags):
            break
        found.insert(0, level)
    return found


def flags_of(march: str) -> tuple[str, ...]:
    """Return the flags of the compiler for a kind of processor."""
    return ("-O3", f"-march={march}", "-fno-math-errno", "-fPIC", "-fopenmp", "-std=gnu11")


def built_name(real: str, level: str) -> str:
    """Return the name of a library in a wheel."""
    return f"native-{real}-{level}.so"


def compile_library(compiler: str, sources: Path, real: str, march: str, target: Path) -> None:
    """Compile the kernels for numbers of a type and a kind of processor.

    Raises
    ------
    OSError, subprocess.SubprocessError
        If the compiler cannot be run, fails, or takes more than two minutes.
    """
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = f"{folder}/native.o"
        source = str(sources / "native.c")
        # In two steps: -fopenmp in the first only, so that the second links no runtime.
        for command in (
            [compiler, *flags_of(march), f"-DREAL={real}", "-c", source, "-o", made],
            [compiler, "-shared", made, "-o", str(target)],
        ):
            subprocess.run(command, check=True, capture_output=True, timeout=120)
