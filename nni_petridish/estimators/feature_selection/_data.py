"""Data for the comparison: diabetes, its quadratic expansion, designs with a known answer, CSV."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sklearn.datasets import load_diabetes

from nni_petridish.errors import DataError

from ._arrays import Floats

SEX = 1  # the column of diabetes that has two values: its square would repeat it


@dataclass(frozen=True)
class Dataset:
    """Features, target and, for made-up data, which features matter.

    Parameters
    ----------
    name
        The name of the data set.
    X, y
        The data as they are, not standardized.
    columns
        The name of each feature.
    support
        The features with a nonzero coefficient, if known.
    twins
        For each feature the first one that is equal to it; None if all differ.
    """

    name: str
    X: Floats
    y: Floats
    columns: tuple[str, ...]
    support: tuple[int, ...] | None = None
    twins: tuple[int, ...] | None = None


def diabetes() -> Dataset:
    """Return the LARS paper's data: 442 patients, 10 features."""
    data = load_diabetes()
    return Dataset("diabetes", data.data, data.target, tuple(data.feature_names))


def diabetes_quadratic() -> Dataset:
    """Return the LARS paper's expansion: 10 main effects, 45 interactions and 9 squares."""
    main = diabetes()
    X = (main.X - main.X.mean(axis=0)) / main.X.std(axis=0)
    pairs = list(itertools.combinations(range(10), 2))
    squares = [j for j in range(10) if j != SEX]
    columns = [
        *main.columns,
        *(f"{main.columns[i]}:{main.columns[j]}" for i, j in pairs),
        *(f"{main.columns[j]}^2" for j in squares),
    ]
    expanded = np.column_stack([X, *(X[:, i] * X[:, j] for i, j in pairs), X[:, squares] ** 2])
    return Dataset("diabetes-quadratic", expanded, main.y, tuple(columns))


def synthetic(design: str, seed: int = 0) -> Dataset:
    """Draw X of the named design, and y from its first few (spread) features and noise.

    ``orthogonal``: XᵀX = n·I. ``equicorrelated``: correlation 0.5 between any two. ``toeplitz``:
    correlation 0.7^|i−j|. ``wide``: 100 features, 60 samples. ``duplicates``: five of the features
    occur twice.
    """
    if design not in DESIGNS:
        raise DataError(f"design must be one of {', '.join(DESIGNS)} but got {design!r}.")
    rng = np.random.default_rng(seed)
    X = DESIGNS[design](rng)
    n_features = X.shape[1]
    distinct = n_features - N_TWINS if design == "duplicates" else n_features
    support = tuple(range(0, min(distinct, 20), 4))
    coefficients = np.zeros(n_features)
    coefficients[list(support)] = [2.0, -1.75, 1.5, -1.25, 1.0][: len(support)]
    y = X @ coefficients + rng.normal(size=len(X))
    twins = None
    if design == "duplicates":
        twins = (*range(distinct), *range(N_TWINS))
    columns = tuple(f"x{j}" for j in range(n_features))
    return Dataset(f"synthetic {design}", X, y, columns, support, twins)


N_TWINS = 5


def _orthogonal(rng: np.random.Generator) -> Floats:
    X = rng.normal(size=(100, 20))
    q, _ = np.linalg.qr(X - X.mean(axis=0))
    return np.asarray(q * math.sqrt(len(X)))


def _equicorrelated(rng: np.random.Generator) -> Floats:
    return np.sqrt(0.5) * (rng.normal(size=(100, 20)) + rng.normal(size=(100, 1)))


def _toeplitz(rng: np.random.Generator) -> Floats:
    distance = np.abs(np.subtract.outer(np.arange(20), np.arange(20)))
    return np.asarray(rng.normal(size=(100, 20)) @ np.linalg.cholesky(0.7**distance).T)


def _wide(rng: np.random.Generator) -> Floats:
    return rng.normal(size=(60, 100))


def _duplicates(rng: np.random.Generator) -> Floats:
    X = rng.normal(size=(100, 20))
    return np.hstack([X, X[:, :N_TWINS]])


DESIGNS: dict[str, Callable[[np.random.Generator], Floats]] = {
    "orthogonal": _orthogonal,
    "equicorrelated": _equicorrelated,
    "toeplitz": _toeplitz,
    "wide": _wide,
    "duplicates": _duplicates,
}


def read_csv(path: str | Path, target: str | None = None) -> Dataset:
    """Read numbers from a CSV file whose first line names the columns.

    Parameters
    ----------
    path
        The file.
    target
        The column to predict; the last one by default.
    """
    path = Path(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [
                (reader.line_num, row) for reader in [csv.reader(file)] for row in reader if row
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as CSV ({error}).") from None
    if len(rows) < 3:
        raise DataError(f"{path}: must have a line of names and at least 2 of numbers.")
    columns = _check_columns(path, rows[0][1])
    target = columns[-1] if target is None else target
    if target not in columns:
        raise DataError(f"{path}: target must be one of {', '.join(columns)} but got {target!r}.")
    values = np.array([_parse_row(path, line, row, columns) for line, row in rows[1:]])
    at = columns.index(target)
    if np.ptp(values[:, at]) == 0:
        raise DataError(f"{path}: column {target!r} is the target but has only one value.")
    names = (*columns[:at], *columns[at + 1 :])
    return Dataset(path.name, np.delete(values, at, axis=1), values[:, at], names)


def _check_columns(path: Path, header: Sequence[str]) -> list[str]:
    columns = [name.strip() for name in header]
    if len(columns) < 2:
        raise DataError(f"{path}: must have a target and at least one more column, has 1.")
    for i, name in enumerate(columns):
        if not name:
            raise DataError(f"{path}: column {i + 1} has no name.")
        if name in columns[:i]:
            raise DataError(f"{path}: two columns are named {name!r}.")
    return columns


def _parse_row(path: Path, line: int, row: Sequence[str], columns: Sequence[str]) -> list[float]:
    if len(row) > len(columns):
        raise DataError(
            f"{path}: line {line} has {len(row)} values, one after the last column {columns[-1]!r}."
        )
    if len(row) < len(columns):
        raise DataError(f"{path}: line {line} has no value for column {columns[len(row)]!r}.")
    return [_parse(path, line, name, text) for name, text in zip(columns, row, strict=True)]


def _parse(path: Path, line: int, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise DataError(
            f"{path}: column {column!r}, line {line}: must be a number but got {text!r}."
        ) from None
    if not math.isfinite(value):
        raise DataError(f"{path}: column {column!r}, line {line}: must be finite but got {text!r}.")
    return value


def load(name: str, target: str | None = None) -> Dataset:
    """Return ``diabetes``, ``diabetes-quadratic``, or what the CSV file of that name holds."""
    if name == "diabetes":
        return diabetes()
    if name == "diabetes-quadratic":
        return diabetes_quadratic()
    if not Path(name).is_file():
        raise DataError(
            "data must be diabetes, diabetes-quadratic, synthetic or a CSV file but got"
            f" {name!r}, which is no file."
        )
    return read_csv(name, target)
