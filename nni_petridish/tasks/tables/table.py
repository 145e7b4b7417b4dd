"""A table in a file of comma-separated values: numbers, texts, and a class to predict.

The first row names the columns, unless all of it are numbers. A column of numbers is one feature; a
cell that is empty or ``NA`` is missing. A column of texts has a feature of 0 or 1 for each of its
values.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nni_petridish._support.reading import read_regular
from nni_petridish.errors import DataError, show

if TYPE_CHECKING:
    import numpy as np

MOST_BYTES = 2**30
MOST_TEXTS = 20
"""Values of a column of texts; with more, such as names, it says little and widens the network."""
MOST_CLASSES = 100
LEAST_ROWS = 12
_MISSING = ("", "na", "n/a", "nan", "null", "none", "?")
_DELIMITERS = ",;\t|"


@dataclass(frozen=True)
class Column:
    """A column of features.

    Parameters
    ----------
    name
        Its name.
    values
        The values of a column of texts; none for numbers.
    """

    name: str
    values: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """The number of features."""
        return len(self.values) or 1

    def features(self, cell: object) -> list[float]:
        """Return the features of a cell: a number, NaN if it is missing, or a 1 at its value."""
        text = str(cell).strip()
        if self.values:
            return [float(text == value) for value in self.values]
        number = as_number(text)
        if number is None:
            raise DataError(f"column {self.name!r} must be a number but got {show(cell, 60)}.")
        return [number]


@dataclass(frozen=True)
class Table:
    """A table with one column to predict.

    Parameters
    ----------
    columns
        The columns of features.
    target
        The name of the column to predict.
    classes
        Its values, in order.
    features
        The features of each row, (rows, features); NaN where a number is missing.
    labels
        The class of each row.
    """

    columns: tuple[Column, ...]
    target: str
    classes: tuple[str, ...]
    features: np.ndarray
    labels: np.ndarray

    @property
    def num_features(self) -> int:
        """The number of features of a row."""
        return sum(column.width for column in self.columns)


def read_table(data: Mapping[str, Any]) -> Table:
    """Read the table that the options of a search name: ``root``, ``target`` and ``drop``."""
    path = check_table(data.get("root"))
    return _read(path, path.stat().st_mtime_ns, data.get("target"), tuple(data.get("drop") or ()))


def check_table(root: object) -> Path:
    """Return the path of a table; raise `DataError` unless there is a file."""
    if not root:
        raise DataError("root must be the path of a file of comma-separated values.")
    path = Path(str(root))
    if not path.is_file():
        raise DataError(f"{path} must be a file of comma-separated values but there is none.")
    return path


def texts_by_column(path: Path) -> dict[str, int]:
    """Return the number of different values of every column that is not all numbers."""
    names, rows = _rows(path)
    counts = {}
    for i, name in enumerate(names):
        cells = {row[i] for row in rows}
        if any(as_number(cell) is None for cell in cells):
            counts[name] = len(cells - _missing(cells))
    return counts


def column_names(path: Path) -> list[str]:
    """Return the names of all columns."""
    return _rows(path)[0]


def as_number(cell: str) -> float | None:
    """Return the number in a cell, NaN if it is missing, None if it is a text.

    >>> as_number(" 1.5"), as_number("NA"), as_number("red"), as_number("inf")
    (1.5, nan, None, None)
    """
    if cell.strip().lower() in _MISSING:
        return math.nan
    try:
        number = float(cell) if "_" not in cell else math.inf
    except ValueError:
        return None
    return number if math.isfinite(number) else None


@lru_cache(maxsize=4)
def _read(path: Path, changed: int, target: str | None, drop: tuple[str, ...]) -> Table:
    """Read a table; ``changed``, the time of its last change, makes a new file a new entry."""
    import numpy as np

    names, rows = _rows(path)
    if len(rows) < LEAST_ROWS:
        raise DataError(f"{path} must have at least {LEAST_ROWS} rows but has {len(rows)}.")
    target = names[-1] if target is None else target
    for option, name in [("target", target), *(("drop", name) for name in drop)]:
        if name not in names:
            raise DataError(f"{path}: {option} must be one of {_listed(names)} but got {name!r}.")
    kept = [i for i, name in enumerate(names) if name != target and name not in drop]
    if not kept:
        raise DataError(f"{path} must have a column beside {target!r} but has none.")
    columns = [_column(path, names[i], [row[i] for row in rows]) for i in kept]
    cells = [
        [
            number
            for i, column in zip(kept, columns, strict=True)
            for number in column.features(row[i])
        ]
        for row in rows
    ]
    classes, labels = _classes(path, target, [row[names.index(target)] for row in rows])
    features = np.array(cells, dtype=np.float64)
    return Table(tuple(columns), target, classes, features, np.array(labels, dtype=np.int64))


def _rows(path: Path) -> tuple[list[str], list[list[str]]]:
    """Return the names of the columns, and the rows."""
    try:
        text = read_regular(path, MOST_BYTES).decode("utf-8-sig")
        first = text.partition("\n")[0]
        delimiter = max(_DELIMITERS, key=first.count)
        rows = [row for row in csv.reader(io.StringIO(text), delimiter=delimiter) if any(row)]
    except UnicodeDecodeError:
        raise DataError(f"{path} must be text in UTF-8.") from None
    except (OSError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{path} cannot be read as a table: {reason}.") from None
    if not rows:
        raise DataError(f"{path} is empty.")
    names = [name.strip() for name in rows[0]]
    if all(as_number(name) is not None for name in names):
        names = [f"column_{i + 1}" for i in range(len(names))]
    else:
        rows = rows[1:]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{path}: the name {twice!r} stands for two columns.")
    for i, row in enumerate(rows, start=1):
        if len(row) != len(names):
            raise DataError(
                f"{path}: row {i} must have {len(names)} cells, one for each column, but has"
                f" {len(row)}."
            )
    return names, [[cell.strip() for cell in row] for row in rows]


def _column(path: Path, name: str, cells: Sequence[str]) -> Column:
    values = set(cells)
    if all(as_number(cell) is not None for cell in values):
        return Column(name)
    texts = sorted(values - _missing(values))
    if len(texts) > MOST_TEXTS:
        raise DataError(
            f"{path}: column {name!r} must have at most {MOST_TEXTS} different texts but has"
            f" {len(texts)}: leave it out with drop, or turn it into numbers."
        )
    return Column(name, tuple(texts))


def _classes(path: Path, target: str, cells: Sequence[str]) -> tuple[tuple[str, ...], list[int]]:
    """Return the classes in order, numbers by size, and the class of each row."""
    if missing := _missing(set(cells)):
        raise DataError(f"{path}: column {target!r} must have a class in each row, not {missing}.")
    values = set(cells)
    numbers = {cell: as_number(cell) for cell in values}
    are_numbers = all(number is not None for number in numbers.values())
    if are_numbers and len(values) > MOST_CLASSES:
        raise DataError(
            f"{path}: column {target!r} has {len(values)} different numbers; a search predicts"
            f" classes, at most {MOST_CLASSES}: nni_petridish.GrowingRegressor predicts numbers."
        )
    if not 2 <= len(values) <= MOST_CLASSES:
        raise DataError(
            f"{path}: column {target!r} must have 2 to {MOST_CLASSES} classes but has"
            f" {len(values)}."
        )
    ordered = sorted(values, key=lambda cell: (numbers[cell] or 0.0 if are_numbers else 0.0, cell))
    index = {cell: i for i, cell in enumerate(ordered)}
    return tuple(ordered), [index[cell] for cell in cells]


def _missing(cells: set[str]) -> set[str]:
    return {cell for cell in cells if cell.lower() in _MISSING}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
