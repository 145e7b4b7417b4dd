"""What an architecture is: frozen, validated, and JSON in and out.

A genotype says which shortcuts each weak learner merges (Eq. 4 of the paper), nothing about widths,
depths or weights: those belong to the space that builds it.
"""

from __future__ import annotations

import importlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from nni_petridish.errors import GenotypeError

VERSION = 1

#: The eligible operations Op of the paper's vision tasks, in the order of the α tables.
VISION_OPS = (
    "sep_conv_3x3",
    "sep_conv_5x5",
    "dil_conv_3x3",
    "dil_conv_5x5",
    "max_pool_3x3",
    "avg_pool_3x3",
    "identity",
)
#: The cell inputs In(x_k) that exist before any growth; ``h0``, ``h1``, ... follow.
VISION_SOURCES = ("prev_prev", "prev")
#: How the shortcuts of one weak learner become one tensor (op_merge, appendix B.3).
MERGES = ("concat_project", "weighted_sum")
MODES = ("cell", "macro")
CELL_KEYS = ("normal", "reduce")
#: The module of each family that `Genotype.from_dict` reads; loaded when one is asked for.
_HOMES = {
    "vision": __name__,
    "recurrent": "search_spaces.recurrent.genotype",
    "model": "search_spaces.any_model.genotype",
    "nni": "nni_petridish.nni_adapter.user_spaces.genotype",
    "linear": "search_spaces.linear",
}

Shortcut = tuple[str, str]
"""``(source, op)``: one candidate op_j(z_i)."""
Learner = tuple[Shortcut, ...]
"""The shortcuts that one finished weak learner merges, in order of |α|."""


def learner_name(index: int) -> str:
    """Return the name that the output of the index-th weak learner has as an input: ``h0``, ..."""
    return f"h{index}"


class Genotype(ABC):
    """Base of all architectures; ``Genotype.from_json`` finds the right family by ``space``.

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
    _families: ClassVar[dict[str, type[Genotype]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Genotype._families[cls.space] = cls

    @classmethod
    def from_json(cls, text: str | bytes) -> Genotype:
        """Read a genotype; whatever is wrong raises one `GenotypeError` that names the place."""
        try:
            data = json.loads(text)
        except (TypeError, ValueError) as error:
            raise GenotypeError(f"genotype: not JSON ({error}).") from None
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: object) -> Genotype:
        """Read a genotype from plain data, as `to_dict` makes it."""
        if not isinstance(data, Mapping):
            raise GenotypeError(f"genotype: must be an object but got {_show(data)}.")
        version = data.get("version")
        if isinstance(version, bool) or version != VERSION:
            raise GenotypeError(f"version: must be {VERSION} but got {_show(version)}.")
        family = cls._family(data.get("space"))
        fields = {key: value for key, value in data.items() if key not in ("version", "space")}
        return family._from_fields(fields)

    @classmethod
    def _family(cls, space: object) -> type[Genotype]:
        """Return the family of this name, if it is one of this class."""
        if isinstance(space, str) and space in _HOMES:
            importlib.import_module(_HOMES[space])
        families = {name: f for name, f in cls._families.items() if issubclass(f, cls)}
        if not isinstance(space, str) or space not in families:
            known = {**_HOMES, **families} if cls is Genotype else families
            raise GenotypeError(f"space: must be {_one_of(known)} but got {_show(space)}.")
        return families[space]

    def to_dict(self) -> dict[str, Any]:
        """Return the genotype as plain data (lists, not tuples), ready for JSON."""
        return {"version": VERSION, "space": self.space, **self._to_fields()}

    def to_json(self, indent: int | None = None) -> str:
        """Return the genotype as JSON; equal genotypes give equal text."""
        return json.dumps(self.to_dict(), indent=indent)

    @abstractmethod
    def grown(self, additions: Mapping[str, Learner], merge: str | None = None) -> Genotype:
        """Return the genotype with one more weak learner for every key in ``additions``."""

    @property
    @abstractmethod
    def growths(self) -> int:
        """How many weak learners the most grown part of the network has."""

    @abstractmethod
    def learners_by_key(self) -> Mapping[str, Sequence[Learner]]:
        """Return the weak learners of each α table, in the order of growth."""

    @classmethod
    @abstractmethod
    def _from_fields(cls, fields: Mapping[str, Any]) -> Genotype: ...

    @abstractmethod
    def _to_fields(self) -> dict[str, Any]: ...


class FrozenMapping(Mapping[str, Any]):
    """A mapping that cannot change and can be hashed; keeps the order it was given."""

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


@dataclass(frozen=True)
class VisionGenotype(Genotype):
    """An architecture of the vision space.

    Parameters
    ----------
    mode
        ``"cell"``: every normal cell grows alike, and every reduction cell; ``"macro"``: each cell
        on its own.
    cells
        For each α table (``normal`` and ``reduce``, or ``cell_00``, ``cell_01``, ...) its weak
        learners in the order of growth. The seed has none: its cell
        ``sep_conv_3x3(prev) + skip(prev)`` is implied.
    merge
        op_merge of all its weak learners: ``"concat_project"`` (the paper's choice) or
        ``"weighted_sum"``. Written to JSON only where it is not the default.
    """

    mode: str
    cells: Mapping[str, tuple[Learner, ...]]
    merge: str = "concat_project"

    space: ClassVar[str] = "vision"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise GenotypeError(f"mode: must be {_one_of(MODES)} but got {_show(self.mode)}.")
        if self.merge not in MERGES:
            raise GenotypeError(f"merge: must be {_one_of(MERGES)} but got {_show(self.merge)}.")
        if not isinstance(self.cells, Mapping):
            raise GenotypeError(f"cells: must be an object but got {_show(self.cells)}.")
        _check_keys(self.mode, list(self.cells))
        cells = {key: _check_learners(f"cells.{key}", self.cells[key]) for key in self.cells}
        object.__setattr__(self, "cells", FrozenMapping(cells))

    @classmethod
    def seed(
        cls, mode: str = "cell", num_cells: int = 0, merge: str = "concat_project"
    ) -> VisionGenotype:
        """Return the genotype with no weak learner; macro mode needs the number of cells."""
        keys = CELL_KEYS if mode == "cell" else [macro_key(i) for i in range(num_cells)]
        return cls(mode, dict.fromkeys(keys, ()), merge)

    @property
    def growths(self) -> int:
        """How many weak learners the most grown cell has."""
        return max((len(learners) for learners in self.cells.values()), default=0)

    def learners_by_key(self) -> Mapping[str, Sequence[Learner]]:
        """Return the weak learners of each kind of cell, or of each cell."""
        return self.cells

    def grown(self, additions: Mapping[str, Learner], merge: str | None = None) -> VisionGenotype:
        """Return the genotype with one more weak learner for every key in ``additions``."""
        merge = merge or self.merge
        if self.growths and merge != self.merge:
            raise GenotypeError(f"merge: is {self.merge!r} in the parent but got {merge!r}.")
        for key in additions:
            if key not in self.cells:
                raise GenotypeError(
                    f"cells: has no key {key!r}; there are {', '.join(self.cells)}."
                )
        cells = {
            key: (*learners, *([additions[key]] if key in additions else []))
            for key, learners in self.cells.items()
        }
        return VisionGenotype(self.mode, cells, merge)

    @classmethod
    def _from_fields(cls, fields: Mapping[str, Any]) -> VisionGenotype:
        for name in ("mode", "cells"):
            if name not in fields:
                raise GenotypeError(f"{name}: is missing.")
        unknown = sorted(map(str, fields.keys() - {"mode", "cells", "merge"}))
        if unknown:
            raise GenotypeError(f"{unknown[0]}: is not a key of a vision genotype.")
        if not isinstance(fields["mode"], str):
            raise GenotypeError(f"mode: must be {_one_of(MODES)} but got {_show(fields['mode'])}.")
        return cls(fields["mode"], fields["cells"], fields.get("merge", "concat_project"))

    def _to_fields(self) -> dict[str, Any]:
        cells = {
            key: [[list(shortcut) for shortcut in learner] for learner in learners]
            for key, learners in self.cells.items()
        }
        fields: dict[str, Any] = {"mode": self.mode, "cells": cells}
        if self.merge != "concat_project":
            fields["merge"] = self.merge
        return fields


def macro_key(index: int) -> str:
    """Return the key of the index-th cell in macro mode: ``cell_00``, ``cell_01``, ..."""
    return f"cell_{index:02d}"


def _check_keys(mode: str, keys: list[Any]) -> None:
    expected = list(CELL_KEYS) if mode == "cell" else [macro_key(i) for i in range(len(keys))]
    if mode == "macro" and not keys:
        raise GenotypeError("cells: must have a key cell_00, cell_01, ... for each cell, has none.")
    for key in keys:
        if key not in expected:
            wanted = "normal and reduce" if mode == "cell" else f"{expected[0]} to {expected[-1]}"
            raise GenotypeError(f"cells: {mode} mode has the keys {wanted} but got {_show(key)}.")
    for key in expected:
        if key not in keys:
            raise GenotypeError(f"cells.{key}: is missing.")


def _check_learners(
    place: str,
    learners: object,
    sources: Sequence[str] = VISION_SOURCES,
    ops: Sequence[str] = VISION_OPS,
) -> tuple[Learner, ...]:
    listed = _as_list(learners)
    if listed is None:
        raise GenotypeError(f"{place}: must be a list of learners but got {_show(learners)}.")
    # The i-th learner may read the outputs of those before it.
    known = [(*sources, *map(learner_name, range(i))) for i in range(len(listed))]
    return tuple(
        _check_learner(f"{place}[{i}]", item, known[i], ops) for i, item in enumerate(listed)
    )


def _check_learner(
    place: str, learner: object, sources: Sequence[str], ops: Sequence[str]
) -> Learner:
    listed = _as_list(learner)
    if not listed:
        raise GenotypeError(
            f"{place}: must be a list of at least one [source, op] but got {_show(learner)}."
        )
    return tuple(
        _check_shortcut(f"{place}[{i}]", item, sources, ops) for i, item in enumerate(listed)
    )


def _check_shortcut(
    place: str, shortcut: object, sources: Sequence[str], ops: Sequence[str]
) -> Shortcut:
    pair = _as_list(shortcut)
    if pair is None or len(pair) != 2:
        raise GenotypeError(f"{place}: must be [source, op] but got {_show(shortcut)}.")
    source, op = pair
    if not isinstance(op, str) or op not in ops:
        raise GenotypeError(f"{place}: op must be {_one_of(ops)} but got {_show(op)}.")
    if not isinstance(source, str) or source not in sources:
        forward = isinstance(source, str) and re.fullmatch(r"h\d+", source)
        why = " (a forward reference)" if forward else ""
        allowed = _one_of(sources)
        raise GenotypeError(f"{place}: source must be {allowed} but got {_show(source)}{why}.")
    return source, op


def _as_list(value: object) -> Sequence[Any] | None:
    return value if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else None


def _one_of(names: Sequence[str] | Mapping[str, Any]) -> str:
    return "one of " + ", ".join(names) if len(names) > 1 else next(iter(names), "nothing")


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
