"""The library of inner loops in C (c/), compiled on first use where there is a C compiler.

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

import torch

from nni_petridish.kernels.cache import make_cache_folder
from nni_petridish.kernels.native.structures import check_sizes

_SOURCES = Path(__file__).with_name("c")
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fPIC", "-fopenmp", "-std=gnu11")
_REAL = {torch.float32: "float", torch.float64: "double"}
_logger = logging.getLogger(__name__)


@functools.cache
def native_library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the kernels for numbers of this type; None where they cannot be had."""
    if os.environ.get("NNI_PETRIDISH_NATIVE") == "0" or not sys.platform.startswith("linux"):
        return None
    compiler = next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)
    if compiler is None:
        return None
    try:
        library = ctypes.CDLL(str(_compiled(compiler, _REAL[dtype])), mode=os.RTLD_NOW)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: no home
        _logger.warning("native kernels could not be compiled, PyTorch's are used: %s", error)
        return None
    check_sizes(library)  # a mistake in this package, not on this machine: never passed over
    return library


def _compiled(compiler: str, real: str) -> Path:
    """Compile the sources unless that was done before, on this kind of processor."""
    path = _cache_folder() / f"native-{real}-{_digest(compiler)}.so"
    if path.exists() and _is_whole(path):
        return path
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made, whole = f"{folder}/native.o", f"{folder}/native.so"
        # In two steps: only the first knows of OpenMP, so that the second links no runtime.
        for command in (
            [compiler, *_FLAGS, f"-DREAL={real}", "-c", str(_SOURCES / "native.c"), "-o", made],
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
    parts = [source.read_bytes() for source in sorted(_SOURCES.iterdir())]
    parts.append(" ".join((compiler, *_FLAGS, platform.machine())).encode())
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    parts += [line.encode() for line in lines if line.startswith(("flags", "Features"))][:1]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _cache_folder() -> Path:
    folder = make_cache_folder()
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:  # what lies there is run
        raise PermissionError(f"others may write to {folder}; set XDG_CACHE_HOME")
    return folder
