"""Results of ablations, as tables beside the paper's."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nni_petridish.registry import ERROR, Measure
from nni_petridish.results.report.svg import short_count
from nni_petridish.results.report.tables import markdown_table, text_table
from nni_petridish.studies.ablations.paper import PAPER, PaperRow
from nni_petridish.studies.ablations.section import Table
from nni_petridish.studies.ablations.settings import AblationRun, Ablations

Result = dict[str, Any]
Row = dict[str, str]


@dataclass(frozen=True)
class Finding:
    """Results of one variant.

    Parameters
    ----------
    variant
        Its name.
    results
        Results of its finished runs, by random seed.
    measure
        The number by which the variants are compared.
    """

    variant: str
    results: Mapping[int, Result]
    measure: Measure = ERROR

    def errors(self) -> dict[int, float]:
        """Return the compared errors by random seed: test errors, or else validation errors."""
        finals = {seed: result["final"] for seed, result in self.results.items()}
        return {
            seed: self.measure.scale * (final["test_error"] if final else self._validation(seed))
            for seed, final in finals.items()
        }

    def validation_errors(self) -> list[float]:
        """Return the lowest errors in the searches."""
        return [self.measure.scale * self._validation(seed) for seed in self.results]

    def test_errors(self) -> list[float]:
        """Return the test errors after retraining, if there are any."""
        finals = [result["final"] for result in self.results.values()]
        return [self.measure.scale * final["test_error"] for final in finals if final]

    def _validation(self, seed: int) -> float:
        return float(self.results[seed]["validation_error"])


def findings(ablations: Ablations, table: Table) -> list[Finding]:
    """Read the results of the finished runs of a table."""
    found = []
    for variant in table.variants:
        runs = [ablations.run(table, variant, r) for r in range(ablations.section.repeats)]
        results = {run.seed: run.result() for run in runs}
        done = {seed: result for seed, result in results.items() if result is not None}
        found.append(Finding(variant, done, ablations.measure))
    return found


def title_of(table: Table) -> str:
    """Return the title of a table."""
    paper = PAPER.get(table.name)
    return f"{paper.title} ({paper.source})" if paper else table.name


def legend(ablations: Ablations) -> str:
    """Explain the columns of the tables."""
    form = "in percent" if ablations.measure.is_share else "as a plain number"
    return (
        f"The {ablations.measure.name} is given {form}, as mean ± standard deviation over the"
        " searches. − default: mean difference to the variant that changes nothing, with the same"
        " random seeds, ± its standard error. Multiply-adds and parameters: of the final model."
    )


def table_rows(table: Table, found: Sequence[Finding]) -> list[Row]:
    """Return one row per variant; columns that nobody fills are left out. See `legend`."""
    paper = PAPER[table.name].rows if table.name in PAPER else {}
    default = next((one for one in found if one.variant == table.default), None)
    rows = [_row(one, default, paper.get(one.variant)) for one in found]
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    return [{name: row[name] or "-" for name in names} for row in rows]


def to_text(ablations: Ablations) -> str:
    """Return all tables for a terminal."""
    return "\n\n".join(
        f"{title_of(table)}\n{text_table(table_rows(table, findings(ablations, table)))}"
        for table in ablations.tables
    )


def to_markdown(ablations: Ablations) -> str:
    """Return all tables as a page in Markdown."""
    parts = [_markdown(table, findings(ablations, table)) for table in ablations.tables]
    return "\n\n".join(["# Ablations", legend(ablations), *parts]) + "\n"


def to_csv(ablations: Ablations) -> str:
    """Return every run as one line, for statistics of one's own."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, ["table", "variant", *_COLUMNS], lineterminator="\n")
    writer.writeheader()
    for table in ablations.tables:
        for one in findings(ablations, table):
            for result in one.results.values():
                row = {"table": table.name, "variant": one.variant}
                writer.writerow(row | {name: _get(result, name) for name in _COLUMNS})
    return buffer.getvalue()


def describe_run(run: AblationRun, result: Result | str) -> str:
    """Return the outcome of a run in one line."""
    if isinstance(result, str):
        return f"{run.name}, seed {run.seed}: failed: {result}"
    final, name = result["final"], run.measure.name
    tested = f", test {name} {final['test_error']:.4f}" if final else ""
    validated = f"validation {name} {result['validation_error']:.4f}"
    return f"{run.name}, seed {run.seed}: {validated}{tested}"


_COLUMNS = (
    "seed",
    "model",
    "models",
    "validation_error",
    "multiply_adds",
    "parameters",
    "seconds",
    "final.test_error",
    "final.multiply_adds",
    "final.parameters",
    "final.cells_per_stage",
    "final.filters",
    "final.seconds",
)


def _get(result: Result, name: str) -> Any:
    part, _, key = name.rpartition(".")
    return (result["final"] or {}).get(key, "") if part else result[name]


def _markdown(table: Table, found: Sequence[Finding]) -> str:
    paper = PAPER.get(table.name)
    measure = f"\n\nPaper: {paper.measure}." if paper else ""
    return f"## {title_of(table)}\n\n{markdown_table(table_rows(table, found))}{measure}"


def _row(one: Finding, default: Finding | None, paper: PaperRow | None) -> Row:
    results = list(one.results.values())
    finals = [result["final"] for result in results if result["final"]]
    sized = finals if len(finals) == len(results) else results
    return {
        "variant": one.variant,
        "searches": str(len(results)),
        f"validation {one.measure.name}": _spread(one.validation_errors()),
        f"test {one.measure.name}": _spread(one.test_errors()),
        "− default": _difference(one, default),
        "multiply-adds": _count([result["multiply_adds"] for result in sized]),
        "parameters": _count([result["parameters"] for result in sized]),
        "search (s)": _mean([result["seconds"] for result in results]),
        **_paper_row(paper),
    }


def _paper_row(paper: PaperRow | None) -> Row:
    if paper is None:
        return dict.fromkeys(_PAPER_COLUMNS, "")
    around = "" if paper.spread is None else f" ± {paper.spread:.2f}"
    millions = [paper.multiply_adds, paper.parameters]
    days = "" if paper.gpu_days is None else f"{paper.gpu_days:g}"
    sizes = ["" if number is None else f"{number:g}M" for number in millions]
    return dict(zip(_PAPER_COLUMNS, [f"{paper.error:g}{around}", *sizes, days], strict=True))


_PAPER_COLUMNS = (
    "paper: error",
    "paper: multiply-adds",
    "paper: parameters",
    "paper: search (GPU-days)",
)


def _difference(one: Finding, default: Finding | None) -> str:
    if default is None or one.variant == default.variant:
        return ""
    mine, theirs = one.errors(), default.errors()
    pairs = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
    if not pairs:
        return ""
    if len(pairs) < 2:
        return f"{pairs[0]:+.2f}"
    error = statistics.stdev(pairs) / math.sqrt(len(pairs))
    return f"{statistics.fmean(pairs):+.2f} ± {error:.2f}"


def _spread(errors: Sequence[float]) -> str:
    if not errors:
        return ""
    around = f" ± {statistics.stdev(errors):.2f}" if len(errors) > 1 else ""
    return f"{statistics.fmean(errors):.2f}{around}"


def _count(numbers: Sequence[float]) -> str:
    return short_count(statistics.fmean(numbers)) if numbers else ""


def _mean(numbers: Sequence[float]) -> str:
    return f"{statistics.fmean(numbers):.0f}" if numbers else ""
