"""Damage to files, and commands whose words about it are looked at."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path

from nni_petridish.__main__ import main


def flip(at: float) -> Callable[[bytes], bytes]:
    def damage(data: bytes) -> bytes:
        place = int(at * len(data))
        return (
            data[:place] + bytes(byte ^ 4 for byte in data[place : place + 1]) + data[place + 1 :]
        )

    return damage


_CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "flip-early": flip(0.1),
    "flip-middle": flip(0.53),
    "flip-late": flip(0.97),
    "truncate": lambda data: data[: len(data) * 2 // 3],
    "truncate-a-byte": lambda data: data[:-1],
    "zero": lambda data: bytes(len(data)),
    "empty": lambda data: b"",
    "lengthen": lambda data: data + b"\x00\xff",
    "double": lambda data: data + data,
}
_DELETE, _SWAP = "delete", "swap"
WAYS = [*_CHANGES, _DELETE, _SWAP]
"""The ways in which a file is damaged."""
Told = tuple[int, str, str]
"""Exit code, output, and text on stderr."""


def damage_file(path: Path, way: str, counterpart: Path) -> None:
    """Damage a file in one of the `WAYS`; it may change places with its counterpart."""
    assert path.exists(), f"there is no {path}"
    if way == _DELETE:
        path.unlink()
    elif way == _SWAP:
        held = path.read_bytes()
        path.write_bytes(counterpart.read_bytes())
        counterpart.write_bytes(held)
    else:
        path.write_bytes(_CHANGES[way](path.read_bytes()))


def run(arguments: list[str]) -> Told:
    """Run a command; return its code, its output and what it said on stderr and in the log."""
    out, err = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(err)
    logging.getLogger().addHandler(handler)
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("always")
            warnings.showwarning = lambda text, *where, **options: print(text, file=err)
            code = main(arguments)
    finally:
        logging.getLogger().removeHandler(handler)
    return code, out.getvalue(), err.getvalue()
