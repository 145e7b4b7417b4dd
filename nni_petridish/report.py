"""What a search has found, as a table and as a picture."""

from __future__ import annotations

import html
from pathlib import Path

from nni_petridish.atomic import write_file
from nni_petridish.records import ModelRecord
from nni_petridish.search import Search

REPORT_FILE = "report.html"
PICTURE_FILE = "hull.svg"


def hull_rows(search: Search) -> list[dict[str, str]]:
    """Return one row per model on the hull, from the cheapest to the most accurate."""
    return [
        {
            "model": record.id,
            "parent": record.parent or "-",
            "growths": str(len(search.lineage(record.id)) - 1),
            "parameters": f"{record.parameters:,}",
            "multiply-adds": f"{record.multiply_adds:,}",
            "error": f"{record.error:.4f}",
            "chosen": str(search.times_chosen(record.id)),
        }
        for record in search.hull()
    ]


def hull_table(search: Search) -> str:
    """Return the hull as a table for a terminal."""
    rows = hull_rows(search)
    if not rows:
        return "No model is finished yet."
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    lines = [{name: name for name in rows[0]}, *rows]
    return "\n".join(
        "  ".join(line[name].rjust(width) for name, width in widths.items()) for line in lines
    )


def plot_hull(search: Search, path: Path) -> None:
    """Draw error versus multiply-adds, with the hull and who grew from whom."""
    import io

    from matplotlib.figure import Figure  # no pyplot: no window system, no global state

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    models = {record.id: record for record in search.models() if record.error == record.error}
    for record in models.values():
        if record.parent in models:
            _line([models[record.parent], record], axes, color="0.8", linewidth=1, zorder=1)
    hull = search.hull()
    on_hull = {record.id for record in hull}
    others = [record for record in models.values() if record.id not in on_hull]
    axes.scatter(*_points(others), s=22, color="0.55", label="other models", zorder=2)
    _line(hull, axes, color="tab:blue", marker="o", label="lower convex hull", zorder=3)
    for record in hull:
        axes.annotate(
            record.id, _point(record), xytext=(4, 5), textcoords="offset points", fontsize=8
        )
    axes.set_xlabel("multiply-adds (millions)")
    axes.set_ylabel("validation error")
    axes.grid(alpha=0.3)
    axes.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix[1:], metadata={"Date": None})
    write_file(path, buffer.getvalue())


def write_report(search: Search, folder: Path) -> Path:
    """Write the report of a gallery; return its path."""
    picture = folder / PICTURE_FILE
    plot_hull(search, picture)
    rows = hull_rows(search)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in (rows[0] if rows else {}))
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row.values()) + "</tr>"
        for row in rows
    )
    svg = picture.read_text(encoding="utf-8")
    svg = svg[svg.index("<svg") :]
    document = _PAGE.format(
        title=html.escape(folder.name),
        models=len(search.models()),
        head=head,
        body=body,
        picture=svg,
    )
    write_file(folder / REPORT_FILE, document.encode())
    return folder / REPORT_FILE


def _point(record: ModelRecord) -> tuple[float, float]:
    return record.multiply_adds / 1e6, record.error


def _points(records: list[ModelRecord]) -> tuple[list[float], list[float]]:
    points = [_point(record) for record in records]
    return [x for x, _ in points], [y for _, y in points]


def _line(records: list[ModelRecord], axes: object, **style: object) -> None:
    axes.plot(*_points(records), **style)  # type: ignore[attr-defined]


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Petridish: {title}</title><style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 1rem }}
table {{ border-collapse: collapse }}
th, td {{ padding: .25rem .75rem; text-align: right; border-bottom: 1px solid #8886 }}
svg {{ background: #fff; border-radius: 6px; max-width: 100%; height: auto }}
</style></head><body>
<h1>{title}</h1>
<p>{models} models; those on the lower convex hull of validation error versus multiply-adds:</p>
<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>
{picture}
</body></html>
"""
