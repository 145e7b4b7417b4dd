"""Ablations in a configuration: the section ``tuner.classArgs.ablations``.

It stands where the section ``tuning`` stands, for the same reason: the file stays good for a search
and for nnictl. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge

from nni_petridish.core.genotype import MERGES
from nni_petridish.errors import ConfigError
from nni_petridish.registry import ARGUMENTS
from nni_petridish.search.constraints import (
    Count,
    Folder,
    OneOf,
    check_fields,
    prefix,
    read_changes,
    read_mapping,
    refuse_unknown,
)

PLACE = f"{ARGUMENTS}.ablations"
Changes = dict[str, Any]
"""Settings by dotted names: ``i_max``, ``recipe.lr``, ``searchSpace.mode``, ``final.merge``."""
JUDGMENT = ("max_multiply_adds", "final")
"""Keys of the section that a variant may change: how searches are judged."""


@dataclass(frozen=True)
class RetrainingSettings:
    """Settings of the retraining of a search's best model.

    Parameters
    ----------
    cells_per_stage
        N; after a macro-search a multiple of the search's, whose cells are repeated.
    filters
        F, the width of the first stage.
    max_multiply_adds
        In place of F: as wide as so many multiply-adds allow, so that all variants have the same.
    epochs
        Epochs of the training.
    limit
        Train on so many images only; None for all of them, as in the paper.
    merge
        op_merge, if it is not to be the search's (CP-end).
    recipe
        Changes to the recipe of the search.
    """

    cells_per_stage: Count = 6
    filters: Count | None = None
    max_multiply_adds: Annotated[float, Ge(1)] | None = None
    epochs: Count = 600
    limit: Count | None = None
    merge: Annotated[str, OneOf(MERGES)] | None = None
    recipe: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_multiply_adds is not None and self.filters is not None:
            raise ConfigError("filters cannot be given beside max_multiply_adds.")

    @classmethod
    def read(cls, given: object) -> RetrainingSettings:
        """Read the mapping that a user wrote; raise `ConfigError` if it is wrong."""
        from nni_petridish.running.schema import check, part_of  # pydantic: not for --help

        check(part_of(RetrainingSettings), given, "final")
        with prefix("final."):
            return cls(**read_mapping("final", given))


@dataclass(frozen=True)
class Table:
    """One comparison.

    Parameters
    ----------
    name
        The name; the paper's numbers are shown beside a table whose name is in `PAPER`.
    variants
        The changes of each variant, those that the whole table shares included.
    default
        The variant without changes of its own, which the others are compared with.
    """

    name: str
    variants: dict[str, Changes]
    default: str | None

    @classmethod
    def read(cls, name: str, given: object) -> Table:
        """Read the mapping that a user wrote; raise `ConfigError` if it is wrong."""
        place = f"tables.{name}"
        keys = read_mapping(place, given)
        refuse_unknown(keys, ("set", "variants"), place)
        common = read_changes(f"{place}.set", keys.get("set") or {})
        listed = read_mapping(f"{place}.variants", keys.get("variants"))
        if len(listed) < 2:
            raise ConfigError(f"{place}.variants must have at least 2 but got {len(listed)}.")
        own = {
            str(variant): read_changes(f"{place}.variants.{variant}", changes or {})
            for variant, changes in listed.items()
        }
        default = next((variant for variant, changes in own.items() if not changes), None)
        return cls(name, {v: {**common, **changes} for v, changes in own.items()}, default)


@dataclass(frozen=True)
class AblationSettings:
    """Settings of ablations: the searches to compare, and how they are judged.

    Parameters
    ----------
    folder
        The folder of galleries and tables; by default the search's gallery with ``-ablations``
        appended.
    repeats
        Searches of each variant, with random seeds that follow one another.
    max_multiply_adds
        The most accurate model within this limit counts; None for no limit.
    final
        The retraining of that model, see `RetrainingSettings`; None if its validation error is all.
    tables
        The comparisons, by name.
    """

    folder: Folder | None = None
    repeats: Count = 3
    max_multiply_adds: Annotated[float, Ge(1)] | None = None
    final: dict[str, Any] | None = None
    tables: dict[str, Table] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.final is not None:
            RetrainingSettings.read(self.final)

    @classmethod
    def read(cls, given: object) -> AblationSettings:
        """Read the mapping that a user wrote; raise `ConfigError` if it is wrong."""
        from nni_petridish.running.schema import check, part_of  # pydantic: not for --help

        check(part_of(AblationSettings), given, PLACE)
        keys = read_mapping(PLACE, given)
        with prefix(f"{PLACE}."):
            tables: Mapping[str, Any] = read_mapping("tables", keys.get("tables"))
            keys["tables"] = {str(n): Table.read(str(n), table) for n, table in tables.items()}
            if not keys["tables"]:
                raise ConfigError("tables must name at least one comparison.")
            return cls(**keys)


def check_ablations(given: object) -> None:
    """Raise a ConfigError in one line unless the section is well-formed."""
    AblationSettings.read(given)
