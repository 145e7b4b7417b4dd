"""Constraints of settings, declared with the fields of a dataclass and checked in one place.

The annotation of a field declares its constraints, for instance ``Annotated[int, Ge(1)]`` or
``Annotated[str, OneOf(("cell", "macro"))]``. `check_fields` checks the fields of a dataclass; the
schema of configuration files (`nni_petridish.running.schema`) is made from the same annotations.
"""

from __future__ import annotations

import math
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Union, cast, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MinLen

from nni_petridish.errors import ConfigError, GalleryError, PetridishError, show


@dataclass(frozen=True)
class OneOf:
    """The value must be one of several strings.

    Parameters
    ----------
    allowed
        The allowed values.
    is_open
        Whether values can be added at run time. The JSON schema then accepts any text.
    """

    allowed: Sequence[str]
    is_open: bool = False

    def __get_pydantic_json_schema__(
        self, core_schema: Any, handler: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the JSON schema for pydantic, with the values for completion in editors."""
        known = {**handler(core_schema), "enum": list(self.allowed)}
        return {"anyOf": [known, handler(core_schema)]} if self.is_open else known


@dataclass(frozen=True)
class Meaning:
    """The description of a text in error messages."""

    words: str


class Infinite:
    """The number may be infinite, for instance a limit that is switched off."""


LARGEST = 1e18
"""Larger whole numbers fit neither 64 bits nor, exactly, a float."""
Folder = Annotated[str, Meaning("the name of a folder")]
Device = Annotated[str, OneOf(("auto", "cpu", "cuda"))]
Count = Annotated[int, Ge(1)]
Width = Annotated[int, Ge(1), Le(100_000)]
Depth = Annotated[int, Ge(1), Le(1000)]
Share = Annotated[float, Ge(0), Lt(1)]


def check_fields(instance: object) -> None:
    """Raise a ConfigError of one line unless every field satisfies its annotation."""
    kind: Any = type(instance)
    for name, annotation in annotations_of(kind).items():
        check_value(name, getattr(instance, name), annotation)


def check_value(place: str, value: object, annotation: Any) -> None:
    """Raise a ConfigError of one line unless the annotation allows the value.

    >>> check_value("filters", 8, Count)
    """
    if not allows(annotation, value):
        raise ConfigError(f"{place} {complaint(annotation, value)}")


def complaint(annotation: Any, value: object) -> str:
    """Return the end of an error message about a value that an annotation does not allow.

    >>> complaint(Count, 0)
    'must be a whole number of at least 1 but got 0.'
    """
    reason = f" (beyond ±{LARGEST:.0e})" if _is_huge(value) else ""
    return f"must be {describe(annotation)} but got {show(value)}{reason}."


@cache
def annotations_of(kind: type) -> dict[str, Any]:
    """Return the annotations of a dataclass's fields, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind)}


def allows(annotation: Any, value: object) -> bool:
    """Return whether an annotation allows a value.

    >>> allows(Annotated[float, Ge(0), Lt(1)], 1), allows(int | None, None), allows(int, True)
    (False, True, False)
    """
    kind, constraints = _split(annotation)
    if _is_union(kind):
        return any(allows(part, value) for part in get_args(kind))
    if kind is Any:
        return True
    if kind in (None, types.NoneType):
        return value is None
    if kind is int or kind is float:
        return _is_number(value, kind, constraints)
    if kind is str:
        choices = [c.allowed for c in constraints if isinstance(c, OneOf)]
        return isinstance(value, str) and bool(value.strip()) and all(value in c for c in choices)
    origin = get_origin(kind) or kind
    if issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    if issubclass(origin, Sequence):
        least = max((c.min_length for c in constraints if isinstance(c, MinLen)), default=0)
        listed = isinstance(value, list | tuple) and len(value) >= least
        return listed and all(allows(get_args(kind)[0], part) for part in value)  # type: ignore[attr-defined]
    return isinstance(value, origin)


def describe(annotation: Any) -> str:
    """Return a description of the values that an annotation allows, other than None.

    >>> describe(Annotated[int, Ge(1)] | None)
    'a whole number of at least 1'
    >>> describe(Annotated[float, Gt(0), Le(1)])
    'a number in (0, 1]'
    >>> describe(Annotated[str, OneOf(("cell", "macro"))])
    'one of cell, macro'
    """
    kind, constraints = _split(annotation)
    for constraint in constraints:
        if isinstance(constraint, Meaning):
            return constraint.words
        if isinstance(constraint, OneOf):
            return f"one of {', '.join(constraint.allowed)}"
    if _is_union(kind):
        parts = (part for part in get_args(kind) if part is not types.NoneType)
        return " or ".join(dict.fromkeys(map(describe, parts)))
    if kind is int or kind is float:
        return f"a {'whole ' if kind is int else ''}number{_bounds(constraints)}"
    if kind in (str, bool):
        return "a text" if kind is str else "true or false"
    origin = get_origin(kind) or kind
    if issubclass(origin, Mapping):
        return "a mapping"
    if issubclass(origin, Sequence):
        return f"a list, each item {describe(get_args(kind)[0])},"
    return f"of type {origin.__name__}"


def read_mapping(place: str, value: object) -> dict[str, Any]:
    """Return a copy of a mapping that a user wrote; raise a ConfigError unless it is one."""
    check_value(place, value, dict[str, Any])
    return dict(cast(Mapping[str, Any], value))


def read_changes(place: str, value: object) -> dict[str, Any]:
    """Return a copy of a mapping by names of settings; raise a ConfigError if one is not text.

    >>> read_changes("set", {"recipe.lr": 0.1})
    {'recipe.lr': 0.1}
    """
    changes = read_mapping(place, value)
    for name in changes:
        if not allows(str, name):
            raise ConfigError(f"{place} must have names of settings but got {show(name)}.")
    return changes


def refuse_unknown(found: Mapping[str, Any], known: Sequence[str], place: str) -> None:
    """Raise a ConfigError in one line if a mapping has a key that is not known."""
    for key, value in found.items():
        if key not in known:
            allowed = ", ".join(known)
            raise ConfigError(
                f"{place}.{key} is not a known key (value {show(value)}); allowed are {allowed}."
            )


def resolve(folder: str, base: Path) -> Path:
    """Return the absolute path of a folder given relative to ``base``."""
    return Path(os.path.abspath(base / Path(folder).expanduser()))


@contextmanager
def prefix(place: str) -> Iterator[None]:
    """Prefix the messages of errors raised in this context with a place."""
    try:
        yield
    except GalleryError:
        raise
    except PetridishError as error:
        raise ConfigError(f"{place}{error}{yaml_hint(str(error))}") from None
    except TypeError as error:
        raise ConfigError(f"{place.rstrip('.: ')}: {error}.") from None


def yaml_hint(message: str) -> str:
    """Return a hint if a message is about a number that YAML reads as text, such as ``1e-3``."""
    value = message.rsplit("but got ", 1)[-1].rstrip(".")
    try:
        number = float(value[1:-1]) if value[:1] == "'" else None
    except ValueError:
        number = None
    return "" if number is None else f" YAML reads this as text: write {number!r}."


def _split(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the type and the constraints of ``Annotated[type, *constraints]``."""
    if get_origin(annotation) is Annotated:
        kind, *constraints = get_args(annotation)
        return kind, tuple(constraints)
    return annotation, ()


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def _is_number(value: Any, kind: type, constraints: Iterable[Any]) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        return False
    if _is_huge(value):
        return False
    may_be_infinite = any(isinstance(c, Infinite) for c in constraints)
    if isinstance(value, float) and (math.isnan(value) or math.isinf(value) > may_be_infinite):
        return False
    return all(_is_within(value, constraint) for constraint in constraints)


def _is_huge(value: object) -> bool:
    return isinstance(value, int) and abs(value) > LARGEST


def _is_within(value: Any, constraint: Any) -> bool:
    match constraint:
        case Ge(ge=low):
            return bool(value >= low)
        case Gt(gt=low):
            return bool(value > low)
        case Le(le=high):
            return bool(value <= high)
        case Lt(lt=high):
            return bool(value < high)
    return True


def _bounds(constraints: Iterable[Any]) -> str:
    start, end = "", ""
    for constraint in constraints:
        match constraint:
            case Ge(ge=low):
                words, start = f" of at least {low}", f"[{low}"
            case Gt(gt=low):
                words, start = f" above {low}", f"({low}"
            case Le(le=high):
                words, end = f" of at most {high}", f"{high}]"
            case Lt(lt=high):
                words, end = f" below {high}", f"{high})"
    if start and end:
        return f" in {start}, {end}"
    return words if start or end else ""
