"""The hull and the lineage as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nni_petridish.registry import ERROR, Measure
from nni_petridish.search.records import ModelRecord
from nni_petridish.search.search import Search


def hull_rows(search: Search, measure: Measure = ERROR) -> list[dict[str, str]]:
    """Return one row per model on the hull, from the cheapest to the most accurate."""
    return [model_row(search, record, measure) for record in search.hull()]


def model_row(search: Search, record: ModelRecord, measure: Measure = ERROR) -> dict[str, str]:
    """Return the row of a model: values by column titles."""
    complexity = search.complexity
    timed = {} if complexity.is_count else {complexity.title: _cost(search, record)}
    return {
        "model": record.id,
        "parent": record.parent or "-",
        "growths": str(len(search.lineage(record.id)) - 1),
        "parameters": f"{record.parameters:,}",
        "multiply-adds": f"{record.multiply_adds:,}",
        **timed,
        measure.name: f"{record.error:.4f}",
        "chosen": str(search.times_chosen(record.id)),
    }


def hull_table(search: Search, measure: Measure = ERROR) -> str:
    """Return the hull as a table for a terminal."""
    rows = hull_rows(search, measure)
    return text_table(rows) if rows else "No model is finished yet."


def text_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows with the same keys as right-aligned columns under their titles."""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    lines = [{name: name for name in rows[0]}, *rows]
    return "\n".join(
        "  ".join(line[name].rjust(width) for name, width in widths.items()) for line in lines
    )


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows with the same keys as a table in Markdown."""
    lines = [list(rows[0]), ["---:"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def lineage_table(search: Search) -> str:
    """Return all models as a tree, each under its parent; a star marks those on the hull."""
    on_hull = {record.id for record in search.hull()}
    lines = []
    for record, last in walk(search):
        branches = "".join("   " if end else "│  " for end in last[:-1])
        branch = ("└─ " if last[-1] else "├─ ") if last else ""
        star = " *" if record.id in on_hull else ""
        lines.append((branches + branch + record.id, record, star))
    width = max((len(name) for name, _, _ in lines), default=0)
    return "\n".join(
        f"{name.ljust(width)}  {record.error:.4f}  {_cost(search, record):>13}{star}"
        for name, record, star in lines
    )


def _cost(search: Search, record: ModelRecord) -> str:
    return search.complexity.text(search.complexity.of(record.outcome))


def walk(search: Search) -> Iterator[tuple[ModelRecord, list[bool]]]:
    """Yield the models depth first, each with one flag per generation below its root.

    A flag says whether the ancestor of that generation, at last the model itself, is the last of
    its siblings. Roots are the seeds and the models whose parent was damaged: they have no flags.
    """
    models = {record.id: record for record in search.models()}
    children: dict[str | None, list[ModelRecord]] = {}
    for record in models.values():
        children.setdefault(record.parent if record.parent in models else None, []).append(record)
    # A stack, not recursion: a lineage may be longer than Python's stack is deep.
    stack: list[tuple[ModelRecord, list[bool]]] = [(r, []) for r in children.get(None, [])[::-1]]
    while stack:
        record, last = stack.pop()
        yield record, last
        below = children.get(record.id, [])
        stack += [(child, [*last, child is below[-1]]) for child in below[::-1]]
