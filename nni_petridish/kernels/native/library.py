"""The library of C kernels (c/): that of the wheel, or compiled on first use.

A wheel of `make wheel` has the kernels for the levels of x86-64, and the highest that the processor
has is chosen. Otherwise they are compiled on first use if there is a C compiler.

The library runs on the threads of PyTorch's own OpenMP runtime: it is linked without one and finds
the symbols in the process. A second runtime would bring a second set of threads, and the two sets
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
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from nni_petridish.kernels.cache import make_cache_folder
from nni_petridish.kernels.native.compiler import (
    built_name,
    compile_library,
    flags_of,
    levels_of,
)
from nni_petridish.kernels.native.structures import check_sizes

_SOURCES = Path(__file__).with_name("c")
_BUILT = Path(__file__).with_name("built")
# Another level of x86-64 than this processor's own may be asked for, to test or to compare it.
_MARCH = os.environ.get("NNI_PETRIDISH_MARCH", "native")
_REAL = {torch.float32: "float", torch.float64: "double"}
_logger = logging.getLogger(__name__)


@functools.cache
def native_library(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the kernels for numbers of this type; None if they are not available."""
    if os.environ.get("NNI_PETRIDISH_NATIVE") == "0" or not sys.platform.startswith("linux"):
        return None
    built = _built_library(_REAL[dtype])
    if built is not None:
        return built
    compiler = next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)
    if compiler is None:
        _say_once_that_there_is_no_compiler()
        return None
    try:
        library = ctypes.CDLL(str(_compiled(compiler, _REAL[dtype])), mode=os.RTLD_NOW)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: no home
        _logger.warning("native kernels could not be compiled, PyTorch's are used: %s", error)
        return None
    check_sizes(library)  # an error here is a bug of this package and must not be caught
    return library


def _built_library(real: str) -> ctypes.CDLL | None:
    """Return the library of the wheel for this processor; None without one, or if it fails."""
    levels = levels_of(_processor().split()) if _MARCH == "native" else []
    path = next(filter(Path.is_file, (_BUILT / built_name(real, x) for x in levels)), None)
    if path is None:
        return None
    try:
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOW)
    except OSError as error:  # an older C library, or another runtime of OpenMP
        _logger.warning("the kernels of the wheel could not be loaded: %s", error)
        return None
    check_sizes(library)
    return library


@functools.cache
def _say_once_that_there_is_no_compiler() -> None:
    _logger.warning(
        "there is no C compiler (gcc, clang or cc): training on the CPU works but takes two to"
        " three times as long; NNI_PETRIDISH_NATIVE=0 silences this."
    )


def _compiled(compiler: str, real: str) -> Path:
    """Compile the sources, unless they were compiled before for this processor; return the path."""
    path = _cache_folder() / f"native-{real}-{_digest(compiler)}.so"
    if os.path.lexists(path) and _is_own(path, stat.S_ISREG) and _is_whole(path):
        return path
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        whole = f"{folder}/native.so"
        compile_library(compiler, _SOURCES, real, _MARCH, Path(whole))
        library = Path(whole).read_bytes()
        Path(whole).write_bytes(library + hashlib.sha256(library).digest())
        os.chmod(whole, 0o700)
        os.replace(whole, path)  # atomic: other processes may compile at the same time
    return path


def _is_whole(path: Path) -> bool:
    """Return whether a library ends in its checksum: loading a truncated one crashes."""
    content = path.read_bytes()
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


def _digest(compiler: str) -> str:
    """Return a hash of sources, compiler and processor: machines may share a home folder."""
    parts = [source.read_bytes() for source in sorted(_SOURCES.iterdir())]
    parts.append(" ".join((compiler, *flags_of(_MARCH), platform.machine())).encode())
    parts.append(_processor().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> str:
    """Return the line of /proc/cpuinfo with the flags of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _cache_folder() -> Path:
    """Return the folder of compiled libraries, whose code is executed: no one else may write."""
    folder = make_cache_folder()
    if not _is_own(folder, stat.S_ISDIR):
        raise PermissionError(f"{folder} is a link, or others may write to it; set XDG_CACHE_HOME")
    for parent in folder.resolve().parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:  # the folder could be exchanged
            raise PermissionError(f"others may write to {parent}; set XDG_CACHE_HOME")
    return folder


def _is_own(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """Return whether a path is no link, of the right kind, and written by this user alone."""
    found = path.lstat()
    is_private = found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return is_kind(found.st_mode) and is_private
