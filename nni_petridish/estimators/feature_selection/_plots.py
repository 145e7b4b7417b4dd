"""Pictures of the comparison: coefficient paths side by side, and convergence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ._compare import Row
from ._convergence import Convergence
from ._data import Dataset

NAMED = 10  # as many curves can be told apart by color


def plot_paths(rows: Sequence[Row], data: Dataset, path: str | Path, columns: int = 5) -> Path:
    """Draw every method's coefficients against their L1 norm, on common axes, into an image file.

    Parameters
    ----------
    rows
        The result of `compare`.
    data
        The data set compared on.
    path
        The file to write; its ending decides the format.
    columns
        The number of pictures side by side.
    """
    columns = min(columns, len(rows))
    lines = -(-len(rows) // columns)
    figure = Figure(figsize=(2.6 * columns, 2.5 * lines + 0.5), layout="constrained")
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    # The features that LARS takes first keep their color throughout.
    named = rows[0].path.order[:NAMED]
    # As far as all of them reach, so that the pictures can be compared.
    reach = min(np.abs(row.path.coefs).sum(axis=0).max() for row in rows)
    for row, axes in zip(rows, grid.flat, strict=False):
        _draw(axes, row, named, 1.05 * float(reach))
    for axes in list(grid.flat)[len(rows) :]:
        axes.set_axis_off()
    handles, _ = grid[0, 0].get_legend_handles_labels()
    labels = [data.columns[j] for j in named]
    figure.legend(handles, labels, loc="outside lower center", ncols=NAMED, fontsize=8)
    figure.suptitle(f"{data.name}: coefficients against their L1 norm", fontsize=10)
    return _save(figure, path)


def plot_convergence(results: Sequence[Convergence], path: str | Path) -> Path:
    """Draw errors against step sizes, both logarithmic, into an image file.

    Parameters
    ----------
    results
        The result of `convergence`.
    path
        The file to write; its ending decides the format.
    """
    figure = Figure(figsize=(3.4 * len(results), 3.0), layout="constrained")
    grid = figure.subplots(1, len(results), squeeze=False)
    for result, axes in zip(results, grid.flat, strict=True):
        axes.loglog(result.sizes, result.errors, "o-", lw=1, ms=4)
        first_order = result.errors[0] * result.sizes / result.sizes[0]
        axes.loglog(result.sizes, first_order, "k:", lw=1, label="order 1")
        axes.set_title(f"{result.method}: order {result.order:.2f}", fontsize=9)
        axes.set_xlabel("step" if "FSLR" in result.method else "share of training", fontsize=8)
        axes.set_ylabel("largest coefficient difference", fontsize=8)
        axes.set_xticks(result.sizes, [f"{size:g}" for size in result.sizes])
        axes.minorticks_off()
        axes.tick_params(labelsize=7)
        axes.legend(fontsize=8)
    return _save(figure, path)


def _save(figure: Figure, path: str | Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path


def _draw(axes: Axes, row: Row, named: Sequence[int], reach: float) -> None:
    norm = np.abs(row.path.coefs).sum(axis=0)
    # One point beyond, so that lines go on to the edge; what lies further would set the scale.
    end = int(np.argmax(norm > reach)) + 1 if norm.max() > reach else len(norm)
    norm, coefs = norm[:end], row.path.coefs[:, :end]
    marker = "o" if row.refits else None
    for position, j in enumerate(named):
        axes.plot(norm, coefs[j], color=f"C{position}", label=str(j), marker=marker, ms=2, lw=1)
    for j in range(len(coefs)):
        if j not in named and coefs[j].any():
            axes.plot(norm, coefs[j], color="0.8", zorder=0, lw=1)
    axes.set_xlim(0, reach)
    axes.set_title(row.method, fontsize=9)
    axes.tick_params(labelsize=7)
