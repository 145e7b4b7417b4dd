"""``nni-petridish analogy``: feature selection, method by method."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from nni_petridish.errors import ConfigError

if TYPE_CHECKING:
    from ._compare import Row
    from ._data import Dataset

SHOWN = 10  # entries of an order that fit on a line


def add_analogy_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``analogy``."""
    parser.add_argument(
        "--data",
        default="diabetes",
        metavar="NAME",
        help="diabetes, diabetes-quadratic, synthetic, or a CSV file with a line of column names "
        "(default: diabetes)",
    )
    parser.add_argument("--target", help="the CSV column to predict (default: the last)")
    parser.add_argument(
        "--designs",
        default="all",
        metavar="A,B,...",
        help="which synthetic designs: orthogonal, equicorrelated, toeplitz, wide (p > n), "
        "duplicates (default: all)",
    )
    parser.add_argument("--plot", metavar="DIR", help="draw the coefficient paths into this folder")
    parser.add_argument(
        "--convergence",
        action="store_true",
        help="also measure how fast FSLR and Petridish approach their limits as steps shrink",
    )
    parser.add_argument(
        "--k", type=int, default=5, help="compare the first k features as sets (default: 5)"
    )
    parser.add_argument(
        "--folds",
        type=int,
        default=5,
        help="folds of the cross-validated error, 0 for none (default: 5)",
    )
    parser.add_argument(
        "--draws",
        type=int,
        default=20,
        help="draws of each synthetic design for the recovery rate (default: 20)",
    )
    parser.set_defaults(command=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the command and return the exit status."""
    _check(args)
    from ._compare import recovery_rates
    from ._data import DESIGNS, load, synthetic

    if args.data != "synthetic":
        _report(load(args.data, args.target), args)
        return 0
    designs = list(DESIGNS) if args.designs == "all" else args.designs.split(",")
    for design in designs:
        _report(synthetic(design), args)
    if args.draws:
        print(f"how often the first features are the true support ({args.draws} draws)")
        print(format_rates(recovery_rates(args.draws, designs=designs)))
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.k < 1:
        raise ConfigError(f"k must be at least 1 but got {args.k}.")
    if args.folds < 0 or args.folds == 1:
        raise ConfigError(f"folds must be 0 or at least 2 but got {args.folds}.")
    if args.draws < 0:
        raise ConfigError(f"draws cannot be negative but got {args.draws}.")


def _report(data: Dataset, args: argparse.Namespace) -> None:
    from ._compare import compare

    samples, features = data.X.shape
    if args.folds > samples:
        raise ConfigError(f"folds cannot exceed the {samples} samples but got {args.folds}.")
    print(f"{data.name}: {samples} samples, {features} features")
    if data.support is not None:
        print(f"true support: {' '.join(map(str, data.support))}")
    rows = compare(data, k=args.k, folds=args.folds)
    print(format_rows(rows, data, args.k))
    if args.plot:
        from ._plots import plot_paths

        print(f"drawn: {plot_paths(rows, data, _picture(args.plot, data.name))}")
    if args.convergence:
        _report_convergence(data, args)
    print()


def _report_convergence(data: Dataset, args: argparse.Namespace) -> None:
    from ._convergence import convergence

    results = convergence(data)
    for result in results:
        print(f"{result.method}: order {result.order:.2f}")
        for size, error in zip(result.sizes, result.errors, strict=True):
            print(f"  {size:<7g} {error:.5f}")
    if args.plot:
        from ._plots import plot_convergence

        picture = _picture(args.plot, f"{data.name} convergence")
        print(f"drawn: {plot_convergence(results, picture)}")


def _picture(folder: str, name: str) -> str:
    return f"{folder}/analogy_{name.replace(' ', '_')}.png"


def format_rows(rows: Sequence[Row], data: Dataset, k: int) -> str:
    """Return the comparison as a table, with the names of the columns that occur in it."""
    header = ["method", "order of entry", "same", "tau", f"J@{k}", "max d", "mean d", "CV", "s"]
    body = [
        [
            row.method,
            _show_order(row.path.order),
            str(row.prefix),
            _number(row.kendall, ".2f"),
            _number(row.jaccard, ".2f"),
            _number(row.distance_max, ".3g"),
            _number(row.distance_mean, ".3g"),
            _number(row.cv_error, ".6g"),
            _number(row.seconds, ".3f"),
        ]
        for row in rows
    ]
    shown = sorted({j for row in rows for j in row.path.order[:SHOWN]})
    names = ", ".join(f"{j} {data.columns[j]}" for j in shown if data.columns[j] != f"x{j}")
    legend = (
        "same: entries before the first that differs from LARS; tau: Kendall's; "
        f"J@{k}: Jaccard of the first {k};\n"
        "max d, mean d: coefficient difference from LARS at equal L1 norm; CV: cross-validated "
        "squared error; s: seconds"
    )
    return "\n".join([_table(header, body), legend, *([f"columns: {names}"] if names else [])])


def format_rates(rates: Mapping[str, Mapping[str, float]]) -> str:
    """Return the recovery rates as a table, one line per method."""
    designs = list(rates)
    methods = list(rates[designs[0]])
    body = [[method, *(f"{rates[design][method]:.2f}" for design in designs)] for method in methods]
    return _table(["method", *designs], body)


def _show_order(order: Sequence[int]) -> str:
    return " ".join(map(str, order[:SHOWN])) + (" ..." if len(order) > SHOWN else "")


def _number(value: float, spec: str) -> str:
    return "-" if math.isnan(value) else format(value, spec)


def _table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (header, *body)
    ]
    return "\n".join(lines)
