"""Results of a comparison as tables, for a terminal, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable, Sequence

from nni_petridish.results.report.svg import short_count
from nni_petridish.results.report.tables import markdown_table, text_table
from nni_petridish.studies.comparison.crossover_page import CROSSOVER, crossover_rows
from nni_petridish.studies.comparison.findings import (
    QUANTITIES,
    Findings,
    median_or_never,
    primary,
)
from nni_petridish.studies.comparison.statistics import mean_and_error

Row = dict[str, str]
Format = Callable[[Sequence[Row]], str]
_TESTED = ("test", "area", "at_other", "hypervolume")
_COLUMNS = ("method", "seed", *QUANTITIES, "multiply_adds", "parameters", "models", "seconds")
_UNITS = {"seconds": "processor time", "operations": "multiply-adds times examples"}


def result_rows(found: Findings) -> list[Row]:
    """Return one row per method: its errors and what they cost."""
    rows = []
    for method, results in found.results.items():
        if not results:
            continue
        counts = [len(result["models"]) for result in results.values()]
        sizes = [result["best"]["multiply_adds"] for result in results.values()]
        row = {"method": method, "seeds": str(len(results))}
        for name in ("final", "test", "validation", "area", "hypervolume"):
            values = list(found.values(method, name).values())
            row[_title(found, name)] = _shown(values)
        row["multiply-adds"] = short_count(statistics.fmean(sizes))
        row["models"] = f"{statistics.fmean(counts):.3g}"
        for unit, title in _UNITS.items():
            row[f"{title} used"] = _share(found, method, unit)
        row[f"reaches {found.comparison.section.baseline}"] = _reach(found, method)
        rows.append(row)
    return _without_empty(rows)


def test_rows(found: Findings, quantity: str) -> list[Row]:
    """Return one row per method that is compared with the reference."""
    return [
        {
            "method": method,
            f"− {found.reference}": f"{_number(result.mean)} ± {_number(result.error, False)}",
            "pairs": str(result.n),
            "p (t test)": _p(result.t_test),
            "p (Holm)": _p(corrected),
            "p (Wilcoxon)": _p(result.wilcoxon),
            "p (permutation)": _p(result.permutation),
        }
        for method, (result, corrected) in found.tests(quantity).items()
    ]


def view_rows(found: Findings) -> list[Row]:
    """Return one row per method in the second view, at equal compute in the other unit."""
    rows = []
    for method, results in found.results.items():
        if not results:
            continue
        row = {"method": method}
        for name in ("at_other", "other_area"):
            values = list(found.values(method, name).values())
            row[_title(found, name)] = _shown(values)
        rows.append(row)
    return rows


def power_rows(spread: Findings, n: int) -> list[Row]:
    """Return one row per method: the differences that n seeds can show, by the spread of others."""
    return [
        {
            "method": method,
            "seeds": str(len(spread.results[method])),
            "standard deviation of the difference": f"{deviation:.2f}",
            "detectable, p < 0.05": f"{alone:.2f}",
            "detectable after Holm's correction": f"{strict:.2f}",
        }
        for method, (deviation, alone, strict) in spread.power(primary(spread), n).items()
    ]


def to_page(found: Findings, pilot: Findings, form: Format, heading: str) -> str:
    """Return all tables.

    Parameters
    ----------
    found
        The results.
    pilot
        Those of the pilot, which may have none: then the results tell their own power.
    form
        Makes a table of rows.
    heading
        Goes before a title.
    """
    section, count = found.comparison.section, len(found.comparison.methods) - 1
    seeds = len(found.comparison.seeds)
    parts = [legend(found), form(result_rows(found))]
    for quantity in (primary(found), *(q for q in _TESTED if q != primary(found))):
        rows = test_rows(found, quantity)
        if rows:
            role = "primary" if quantity == primary(found) else "secondary"
            parts += [
                f"{heading}{_title(found, quantity)}: {role}, {count} comparisons",
                form(rows),
            ]
    parts += [f"{heading}Second view: equal {_UNITS[found.other_unit]}", form(view_rows(found))]
    rows = crossover_rows(found)
    if rows:
        parts += [f"{heading}Crossover", CROSSOVER, form(rows)]
    if not found.comparison.is_pilot:
        by_pilot = power_rows(pilot, section.repeats)
        rows = by_pilot or power_rows(found, section.repeats)
        if rows:
            title = f"What {seeds} seeds can show in the {_title(found, primary(found))}"
            source = _FROM_PILOT if by_pilot else _FROM_RESULTS
            parts += [f"{heading}{title}", f"{source} {_POWER}", form(rows)]
    return "\n\n".join(parts) + "\n"


def to_markdown(found: Findings, pilot: Findings) -> str:
    """Return all tables as a page in Markdown."""
    kind = "Pilot of a comparison" if found.comparison.is_pilot else "Comparison"
    return f"# {kind} at equal compute\n\n{to_page(found, pilot, markdown_table, '## ')}"


def to_text(found: Findings, pilot: Findings) -> str:
    """Return all tables for a terminal."""
    return to_page(found, pilot, text_table, "")


def to_csv(found: Findings) -> str:
    """Return every run as one line, for statistics of one's own."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    for method, results in found.results.items():
        for seed, result in results.items():
            values = {name: found.values(method, name).get(seed, "") for name in QUANTITIES}
            best = result["best"]
            sizes = {"multiply_adds": best["multiply_adds"], "parameters": best["parameters"]}
            spent = {"models": len(result["models"]), "seconds": round(result["seconds"], 3)}
            writer.writerow({"method": method, "seed": seed, **values, **sizes, **spent})
    return buffer.getvalue()


def legend(found: Findings) -> str:
    """Explain the numbers."""
    measure, section = found.measure, found.comparison.section
    form = "in percent" if measure.is_share else "as a plain number"
    limit = section.max_multiply_adds
    within = "" if limit is None else f" within {short_count(limit)} multiply-adds"
    final = found.comparison.section.final_training
    trained = f", trained from scratch for {final.epochs} epochs" if final else ""
    return (
        f"The {measure.name} is given {form}, as mean ± standard error over random seeds. Each"
        f" method had the {_UNITS[found.unit]} that {found.reference} took with the same seed."
        f" Validation selects its best model{within}{trained}; the test data are used once for each"
        f" number. Differences to {found.reference} are taken seed by seed; Holm's correction of"
        " the t test is for the comparisons of one table."
    )


_FROM_PILOT = "From the spread of the pilot's seeds, which are not among those that count:"
_FROM_RESULTS = "From the spread of these seeds themselves, since no pilot was run:"
_POWER = "the smallest difference that a paired t test finds with probability 0.8."


def _title(found: Findings, quantity: str) -> str:
    return QUANTITIES[quantity].title.format(error=found.measure.name)


def _share(found: Findings, method: str, unit: str) -> str:
    """Return the compute of a method as a share of the reference's."""
    shares = [
        result[unit] / budget
        for seed, result in found.results[method].items()
        if (budget := found.budget(seed, unit))
    ]
    return f"{statistics.fmean(shares):.0%}" if shares else ""


def _reach(found: Findings, method: str) -> str:
    values = list(found.values(method, "reach").values())
    if not values:
        return ""
    reached = sum(map(math.isfinite, values))
    median = median_or_never(values)
    share = f", median {median:.0%}" if math.isfinite(median) else ""
    return f"{reached} of {len(values)}{share}"


def _shown(values: Sequence[float]) -> str:
    if not values:
        return ""
    mean, error = mean_and_error(values)
    return f"{mean:.2f}" if math.isnan(error) else f"{mean:.2f} ± {error:.2f}"


def _number(value: float, signed: bool = True) -> str:
    if math.isnan(value):
        return "-"
    value = round(value, 2) + 0.0  # no negative zero
    return f"{value:+.2f}".replace("-", "−") if signed else f"{value:.2f}"


def _p(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2g}" if value >= 0.001 else f"{value:.0e}"


def _without_empty(rows: list[Row]) -> list[Row]:
    if not rows:
        return []
    kept = [name for name in rows[0] if any(row[name] for row in rows)]
    return [{name: row[name] or "-" for name in kept} for row in rows]
