"""Bounded reading of files and documents that may come from anywhere.

Sizes are checked before anything is parsed. What is refused raises an OSError with a text of its
own, a ValueError or a YAMLError, as reading a file that is missing or no JSON does.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import yaml

MAX_JSON_BYTES = 64 * 2**20
MAX_YAML_BYTES = 2**20
MAX_YAML_NODES = 100_000
"""Nodes of a YAML document, each alias counted with all that it stands for."""
MAX_DEPTH = 100
"""Lists and mappings inside one another; of our own formats none has more than ten."""
MAX_HEADER_BYTES = 16 * 2**20
"""Header of a safetensors file; that of 10,000 tensors has about one MiB."""


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; anything else, such as a pipe or device, is an OSError."""
    # A pipe without a writer would block in open() itself.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, limit: int | None = None) -> bytes:
    """Read a regular file of at most ``limit`` bytes."""
    with open_regular(path) as file:
        data = file.read() if limit is None else file.read(limit + 1)
    if limit is not None and len(data) > limit:
        raise OSError(errno.EINVAL, f"it has more than {limit:,} bytes", str(path))
    return data


def read_json(path: Path) -> Any:
    """Read a JSON file of bounded size and depth."""
    return parse_json(read_regular(path, MAX_JSON_BYTES))


def parse_json(text: str | bytes) -> Any:
    """Parse JSON of bounded size and depth.

    >>> parse_json("[" * 200 + "]" * 200)
    Traceback (most recent call last):
    ...
    ValueError: lists and mappings are nested more than 100 deep
    """
    if len(text) > MAX_JSON_BYTES:
        raise ValueError(f"it has more than {MAX_JSON_BYTES:,} bytes")
    too_deep = f"lists and mappings are nested more than {MAX_DEPTH} deep"
    try:
        document = json.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    if _is_deeper(document, MAX_DEPTH):
        raise ValueError(too_deep)
    return document


def _is_deeper(document: Any, depth: int) -> bool:
    level = [document]
    for _ in range(depth):
        level = [
            part
            for item in level
            if isinstance(item, dict | list)
            for part in (item.values() if isinstance(item, dict) else item)
            if isinstance(part, dict | list)
        ]
        if not level:
            return False
    return True


def parse_yaml(text: str) -> Any:
    """Parse YAML of bounded size and depth, aliases included.

    >>> parse_yaml("a: [1, 2]")
    {'a': [1, 2]}
    >>> parse_yaml("a: &a [*a]")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    yaml.composer.ComposerError: an alias stands for a part that contains it
    ...
    """
    import yaml

    if len(text) > MAX_YAML_BYTES:
        raise yaml.composer.ComposerError(problem=f"it has more than {MAX_YAML_BYTES:,} bytes")
    try:
        return yaml.load(text, Loader=_bounded_loader())
    except yaml.YAMLError:
        raise
    except (ValueError, OverflowError) as error:  # a date such as 2020-13-45; 5000 digits
        raise yaml.constructor.ConstructorError(problem=str(error)) from None


@cache
def _bounded_loader() -> Any:
    """Return PyYAML's safe loader, made to count; a function because yaml is imported lazily."""
    import yaml

    class BoundedLoader(yaml.SafeLoader):
        """A loader that refuses documents that are small to write but large to visit."""

        def __init__(self, stream: Any) -> None:
            super().__init__(stream)
            self._depth = 0
            self._sizes: dict[int, int] = {}

        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            mark = self.peek_event().start_mark
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise _error(f"lists and mappings are nested more than {MAX_DEPTH} deep", mark)
            is_alias = self.check_event(yaml.AliasEvent)
            node = super().compose_node(parent, index)
            self._depth -= 1
            if is_alias and id(node) not in self._sizes:
                raise _error("an alias stands for a part that contains it", mark)
            if not is_alias:
                self._sizes[id(node)] = 1 + sum(self._sizes[id(part)] for part in _parts(node))
            if self._sizes[id(node)] > MAX_YAML_NODES:
                raise _error(f"with its aliases it has more than {MAX_YAML_NODES:,} values", mark)
            return node

    def _error(problem: str, mark: Any) -> Exception:
        return yaml.composer.ComposerError(problem=problem, problem_mark=mark)

    return BoundedLoader


def _parts(node: Any) -> list[Any]:
    """Return the parts of a YAML node: keys and values, items, or none of a scalar."""
    value = node.value
    if not isinstance(value, list):
        return []
    return [part for item in value for part in (item if isinstance(item, tuple) else (item,))]


def refuse_large_header(start: bytes | Path) -> None:
    """Raise a ValueError if the header of a safetensors file is larger than any that we write.

    Parameters
    ----------
    start
        The file, or its content.
    """
    if isinstance(start, Path):
        with open_regular(start) as file:
            start = file.read(8)
    size = int.from_bytes(start[:8], "little")
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"its header has {size:,} bytes but at most {MAX_HEADER_BYTES:,} fit")


def as_mapping(document: Any) -> dict[str, Any]:
    """Return a document that must be a mapping; a ValueError if it is none."""
    if not isinstance(document, Mapping):
        raise ValueError(f"it must be a mapping but is a {type(document).__name__}")
    return dict(document)
