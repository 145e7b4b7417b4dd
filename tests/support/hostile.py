"""Malformed input, generated: configurations, genotypes, ids, command lines and galleries."""

from __future__ import annotations

import contextlib
import copy
import datetime
import hashlib
import io
import json
import math
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import strategies as st

from nni_petridish.__main__ import main
from nni_petridish.gallery.files import _SEAL
from nni_petridish.gallery.journal import decode, encode

SECONDS = 60
"""Time after which a command counts as hanging; on a busy machine it is long."""

_SMALL = (0, -1, 1, 2, 3, 7, 1.5, -0.0, 1e-320, 1e308, math.nan, math.inf, -math.inf)
_LARGE = (2**31, 2**63, 10**17, 10**19, 10**400, True, False)
ODD_NUMBERS = st.sampled_from((*_SMALL, *_LARGE))
_PATHS = ("", " ", "x", "../../x", "/dev/zero", "/", "~", "~nobody/x", "\n", "a\nb", "\x1b[31m")
_MARKS = ("1e-3", "null", "{}", "[", "*a", "&a", "!!python/object:os.system", "a" * 5000, "é")
_WORDS = ("cuda", "auto", "vision", "recurrent", "macro", "identity", "%s", "{0}", "$HOME", "-1")
ODD_TEXTS = st.sampled_from((*_PATHS, *_MARKS, *_WORDS))
ODD_VALUES = st.one_of(
    st.none(),
    ODD_NUMBERS,
    ODD_TEXTS,
    st.binary(max_size=4),
    st.just(datetime.date(2020, 2, 29)),
    st.lists(ODD_NUMBERS | ODD_TEXTS, max_size=3),
    st.dictionaries(ODD_TEXTS | st.integers(), ODD_NUMBERS | ODD_TEXTS, max_size=3),
    st.fixed_dictionaries({"low": ODD_NUMBERS, "high": ODD_NUMBERS}),
)


@dataclass(frozen=True)
class Told:
    """Words of a command, and its exit code."""

    code: object
    output: str
    errors: str


def command(*arguments: str) -> Told:
    """Run a command in this process; an error of the user must be told in one line."""
    output, errors = io.StringIO(), io.StringIO()
    with _alarm(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            code: object = main(arguments)
        except SystemExit as exit:  # argparse
            code = exit.code
    told = Told(code, output.getvalue(), errors.getvalue())
    assert code in (0, 1, 2), told
    assert "Traceback" not in told.errors, told
    if code == 2:
        last = told.errors.rstrip("\n").splitlines()[-1]
        assert last.startswith("nni-petridish"), told
        assert len(last) < 3000, told
    return told


@contextlib.contextmanager
def _alarm() -> Iterator[None]:
    def on_alarm(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"the command hangs after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def files_of(folder: Path) -> dict[str, bytes | None]:
    """Return the content of all files of a folder; None for folders and special files."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if not path.is_symlink()
    }


# Documents.


def _places(document: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    parts = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    for key, part in parts:
        yield (*place, key)
        yield from _places(part, (*place, key))


@st.composite
def broken(draw: st.DrawFn, document: Any, values: st.SearchStrategy[Any] = ODD_VALUES) -> Any:
    """Draw a document with one to three parts replaced, removed, added or nested."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(document))
        if not places:
            break
        *path, last = draw(st.sampled_from(places))
        part = document
        for key in path:
            part = part[key]
        change = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add", "wrap"]))
        if change == "remove":
            del part[last]
        elif change == "add" and isinstance(part, dict):
            part[draw(ODD_TEXTS)] = copy.deepcopy(draw(values))
        elif change == "wrap":
            part[last] = [part[last]] if draw(st.booleans()) else {"x": part[last]}
        else:
            part[last] = copy.deepcopy(draw(values))
    return document


# Galleries.

Change = Callable[[Path], None]


def _truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _write(text: bytes) -> Change:
    return lambda path: path.write_bytes(text) and None


DAMAGES: dict[str, Change] = {
    "truncated": _truncated,
    "zeroed": _zeroed,
    "removed": Path.unlink,
    "a pipe": _pipe,
    "a device": _device,
    "a loop of links": _loop,
    "a folder": _folder,
    "empty": lambda path: os.truncate(path, 0),
    "deep": _write(b"[" * 100_000),
    "a list": _write(b"[]"),
    "null": _write(b"null"),
    "no text": _write(b"\xff\xfe\x00"),
    "a huge header": _write((2**40).to_bytes(8, "little") + b"{" * 100),
}


def forge(path: Path, document: Any) -> None:
    """Write a JSON file of a gallery and make its checksum right, or leave it out if it may be."""
    if isinstance(document, dict):
        document.pop(_SEAL, None)
    path.write_text(json.dumps(document, default=str))
    sums = path.parent / "checksums.json"
    if sums.exists() and path != sums:
        known = json.loads(sums.read_text())
        known[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        sums.write_text(json.dumps(known))


def read_journal(path: Path) -> list[Any]:
    """Return the events of a journal."""
    return [decode(line) for line in path.read_bytes().splitlines()]


def forge_journal(path: Path, events: Any) -> None:
    """Write a journal whose checksums are right, whatever its events are."""
    lines = [encode(event) for event in events if isinstance(event, dict)]
    path.write_bytes(b"".join(line + b"\n" for line in lines))


def copy_gallery(source: Path, target: Path) -> Path:
    """Copy a gallery over an earlier copy of it."""
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target))
