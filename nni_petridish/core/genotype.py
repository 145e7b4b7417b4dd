"""Base of all architectures: frozen, validated, and JSON in and out.

A genotype lists the shortcuts that each weak learner merges (Eq. 4 of the paper). Widths and depths
belong to the space that builds it. Each space has its own family of genotypes, a subclass that
declares its fields and checks them.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from nni_petridish import errors
from nni_petridish._support.reading import parse_json
from nni_petridish.core.diagram import CellDiagram, diagrams_of_learners
from nni_petridish.errors import GenotypeError
from nni_petridish.registry import genotype_homes

VERSION = 1

MAX_BYTES = 2**20
MAX_LEARNERS = 1000
"""Weak learners of one α table, and shortcuts of one weak learner; real ones have some ten."""

MAX_WIDTH = 1000
"""The largest multiple of the filters of a space."""

#: The forms of op_merge, which merges the shortcuts of a weak learner into one tensor (B.3).
MERGES = ("concat_project", "weighted_sum")

Shortcut = tuple[str, str]
"""``(source, op)``: one candidate op_j(z_i)."""
Learner = tuple[Shortcut, ...]
"""The shortcuts that one finished weak learner merges, in order of |α|."""


def learner_name(index: int) -> str:
    """Return the name of the output of the index-th weak learner as an input: ``h0``, ..."""
    return f"h{index}"


@dataclass(frozen=True)
class Genotype(ABC):
    """Base of all architectures; ``Genotype.from_json`` finds the family by its ``space``.

    A family is a frozen dataclass with a ``space``. Its fields are the keys of its JSON form, in
    order. A field with a default is written only if it has another value.

    Examples
    --------
    >>> text = (
    ...     '{"version": 1, "space": "vision", "mode": "cell",'
    ...     ' "cells": {"normal": [[["prev", "identity"]]], "reduce": []}}'
    ... )
    >>> genotype = Genotype.from_json(text)
    >>> genotype.cells["normal"]
    ((('prev', 'identity'),),)
    >>> Genotype.from_json(genotype.to_json()) == genotype
    True
    """

    space: ClassVar[str]
    table: ClassVar[str]
    """The name of the field that holds the weak learners."""
    noun: ClassVar[str] = ""
    """The name of the family in error messages; by default the space and "genotype"."""
    key_noun: ClassVar[str] = "key"
    """The name of an α table's key in error messages."""
    _families: ClassVar[dict[str, type[Genotype]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "space" in vars(cls):
            Genotype._families[cls.space] = cls

    @classmethod
    def from_json(cls, text: str | bytes) -> Genotype:
        """Read a genotype from JSON.

        Raises
        ------
        GenotypeError
            If anything is wrong, with its place.
        """
        try:
            if len(text) > MAX_BYTES:
                raise GenotypeError(f"genotype: must have at most {MAX_BYTES:,} bytes.")
            data = parse_json(text)
        except (TypeError, ValueError) as error:
            raise GenotypeError(f"genotype: not JSON ({error}).") from None
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: object) -> Genotype:
        """Read a genotype from plain data, as returned by `to_dict`."""
        if not isinstance(data, Mapping):
            raise GenotypeError(f"genotype: must be an object but got {show(data)}.")
        version = data.get("version")
        if isinstance(version, bool) or version != VERSION:
            raise GenotypeError(f"version: must be {VERSION} but got {show(version)}.")
        family = cls._family(data.get("space"))
        fields = {key: value for key, value in data.items() if key not in ("version", "space")}
        return family._from_fields(fields)

    @classmethod
    def _family(cls, space: object) -> type[Genotype]:
        """Return the family with this name among the subclasses of this class."""
        homes = genotype_homes()
        if isinstance(space, str) and space in homes:
            importlib.import_module(homes[space])
        families = {name: f for name, f in cls._families.items() if issubclass(f, cls)}
        if not isinstance(space, str) or space not in families:
            known = {**homes, **families} if cls is Genotype else families
            raise GenotypeError(f"space: must be {one_of(known)} but got {show(space)}.")
        return families[space]

    @classmethod
    def require(cls, genotype: object) -> Self:
        """Return the genotype if it is of this family, else raise `GenotypeError`."""
        if not isinstance(genotype, cls):
            found = genotype.space if isinstance(genotype, Genotype) else type(genotype).__name__
            raise GenotypeError(f"space: must be {cls.space} but got {found!r}.")
        return genotype

    def to_dict(self) -> dict[str, Any]:
        """Return the genotype as plain data (lists, not tuples), ready for JSON."""
        values = {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }
        return {"version": VERSION, "space": self.space, **_plain(values)}

    def to_json(self, indent: int | None = None) -> str:
        """Return the genotype as JSON; equal genotypes give equal text."""
        return json.dumps(self.to_dict(), indent=indent)

    @property
    def merge(self) -> str:
        """op_merge of all weak learners: one of `MERGES`."""
        return MERGES[0]

    @property
    def width(self) -> float:
        """The channels of the network as a multiple of those that its space has."""
        return 1.0

    @property
    def growths(self) -> int:
        """The largest number of weak learners of any α table."""
        return max(map(len, self.learners_by_key().values()), default=0)

    @abstractmethod
    def learners_by_key(self) -> Mapping[str, Sequence[Learner]]:
        """Return the weak learners of each α table, in the order of growth."""

    def cell_diagrams(self) -> Mapping[str, CellDiagram]:
        """Return the diagrams of the cells for a report, by α table.

        By default the weak learners alone; a family that knows its seed and its inputs overrides
        this.
        """
        return diagrams_of_learners(self.learners_by_key(), learner_name)

    def grown(self, additions: Mapping[str, Learner], merge: str | None = None) -> Self:
        """Return the genotype with one more weak learner for every key in ``additions``.

        ``merge`` is the op_merge of the new learners. A family without such a field ignores it. In
        the others it can only change if there is no weak learner yet.
        """
        before = self.learners_by_key()
        for key in additions:
            self._check_key(key)
        after = {key: (*before.get(key, ()), learner) for key, learner in additions.items()}
        return self._with_learners({**before, **after}, merge)

    def _check_key(self, key: str) -> None:
        """Raise `GenotypeError` unless there is an α table with this key."""
        known = self.learners_by_key()
        if key not in known:
            there = f"there {'is' if len(known) == 1 else 'are'} {', '.join(known)}"
            raise GenotypeError(f"{self.table}: has no {self.key_noun} {key!r}; {there}.")

    @abstractmethod
    def _with_learners(self, learners: Mapping[str, Sequence[Learner]], merge: str | None) -> Self:
        """Return the genotype with these weak learners in place of its own."""

    @classmethod
    def _from_fields(cls, fields: Mapping[str, Any]) -> Self:
        known = dataclasses.fields(cls)
        names = [field.name for field in known]
        for field in known:
            if field.name not in fields and field.default is dataclasses.MISSING:
                raise GenotypeError(f"{field.name}: is missing.")
        unknown = sorted(map(str, fields.keys() - set(names)))
        if unknown:
            noun = cls.noun or f"{cls.space} genotype"
            name = unknown[0] if unknown[0].isprintable() else show(unknown[0])
            raise GenotypeError(f"{name[:60]}: is not a key of a {noun}.")
        return cls(**fields)


@dataclass(frozen=True)
class LearnersGenotype(Genotype):
    """Base of the families with a field that maps each key to its weak learners."""

    def learners_by_key(self) -> Mapping[str, Sequence[Learner]]:
        """Return the weak learners of each α table, in the order of growth."""
        learners: Mapping[str, Sequence[Learner]] = getattr(self, self.table)
        return learners

    def _with_learners(self, learners: Mapping[str, Sequence[Learner]], merge: str | None) -> Self:
        changes: dict[str, Any] = {self.table: learners}
        if any(field.name == "merge" for field in dataclasses.fields(self)):
            changes["merge"] = merge or self.merge
            if self.growths and changes["merge"] != self.merge:
                raise GenotypeError(f"merge: is {self.merge!r} in the parent but got {merge!r}.")
        return dataclasses.replace(self, **changes)


class FrozenMapping(Mapping[str, Any]):
    """An immutable, hashable mapping that keeps the order of its items."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(sorted(self._items.items())))

    def __repr__(self) -> str:
        return repr(self._items)


def check_learners(
    place: str,
    learners: object,
    sources: Sequence[str],
    ops: Sequence[str],
) -> tuple[Learner, ...]:
    """Return the weak learners of one α table as tuples, or raise `GenotypeError`.

    Parameters
    ----------
    place
        The place of the learners in the genotype, for error messages.
    learners
        Lists of lists of ``[source, op]``.
    sources
        The inputs that exist before any growth. The i-th learner may also read the outputs of
        earlier ones.
    ops
        The eligible operations.
    """
    listed = as_list(learners)
    if listed is None:
        raise GenotypeError(f"{place}: must be a list of learners but got {show(learners)}.")
    if len(listed) > MAX_LEARNERS:
        raise GenotypeError(
            f"{place}: must have at most {MAX_LEARNERS} learners but has {len(listed)}."
        )
    known = [(*sources, *map(learner_name, range(i))) for i in range(len(listed))]
    return tuple(
        _check_learner(f"{place}[{i}]", item, known[i], ops) for i, item in enumerate(listed)
    )


def _check_learner(
    place: str, learner: object, sources: Sequence[str], ops: Sequence[str]
) -> Learner:
    listed = as_list(learner)
    if not listed:
        raise GenotypeError(
            f"{place}: must be a list of at least one [source, op] but got {show(learner)}."
        )
    if len(listed) > MAX_LEARNERS:
        raise GenotypeError(
            f"{place}: must have at most {MAX_LEARNERS} shortcuts but has {len(listed)}."
        )
    return tuple(
        _check_shortcut(f"{place}[{i}]", item, sources, ops) for i, item in enumerate(listed)
    )


def _check_shortcut(
    place: str, shortcut: object, sources: Sequence[str], ops: Sequence[str]
) -> Shortcut:
    pair = as_list(shortcut)
    if pair is None or len(pair) != 2:
        raise GenotypeError(f"{place}: must be [source, op] but got {show(shortcut)}.")
    source, op = pair
    if not isinstance(op, str) or op not in ops:
        raise GenotypeError(f"{place}: op must be {one_of(ops)} but got {show(op)}.")
    if not isinstance(source, str) or source not in sources:
        forward = isinstance(source, str) and re.fullmatch(r"h\d+", source)
        why = " (a forward reference)" if forward else ""
        allowed = one_of(sources)
        raise GenotypeError(f"{place}: source must be {allowed} but got {show(source)}{why}.")
    return source, op


def as_list(value: object) -> Sequence[Any] | None:
    """Return a list or tuple unchanged, and None for anything else."""
    return value if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else None


def one_of(names: Sequence[str] | Mapping[str, Any]) -> str:
    """Return the allowed names for an error message: ``one of a, b``."""
    return "one of " + ", ".join(names) if len(names) > 1 else next(iter(names), "nothing")


def show(value: object) -> str:
    """Return the repr of a value for an error message, cut to 60 characters."""
    return errors.show(value, 60)


def check_merge(merge: object) -> None:
    """Raise `GenotypeError` unless a value is one of `MERGES`."""
    if merge not in MERGES:
        raise GenotypeError(f"merge: must be {one_of(MERGES)} but got {show(merge)}.")


def check_width(width: object) -> None:
    """Raise `GenotypeError` unless a value is a possible width."""
    if isinstance(width, int | float) and not isinstance(width, bool) and 1 <= width <= MAX_WIDTH:
        return
    raise GenotypeError(f"width: must be a number from 1 to {MAX_WIDTH} but got {show(width)}.")


def _plain(value: Any) -> Any:
    """Convert mappings to dicts and tuples to lists, recursively, for JSON."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
