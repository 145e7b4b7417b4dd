"""Reports of judgements: Markdown, CSV and a picture."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from nni_petridish.gallery.files import write_file
from nni_petridish.studies.judge.scores import CHILD_SCORES, SIZE_SCORES
from nni_petridish.studies.judge.settings import LENGTHS
from nni_petridish.studies.judge.simulate import Simulated
from nni_petridish.studies.judge.tables import TruthTable
from nni_petridish.studies.judge.verdicts import (
    CEILING,
    RANDOM,
    STEP_SCORES,
    Estimate,
    Verdict,
    estimate,
    paired_p,
    read_results,
    select,
    verdicts,
)

_MAIN = ("alpha", "gain", "pooled_consensus", "prior", "flops", CEILING)
_SIGNIFICANT = 0.01


def write_scores_report(folder: Path, table: TruthTable) -> str:
    """Write ``scores.md``, ``scores.csv`` and ``scores.svg`` to a folder; return the Markdown."""
    found = verdicts(read_results(folder), table)
    text = scores_markdown(found, table.name)
    write_file(folder / "scores.md", text.encode())
    write_file(folder / "scores.csv", _to_csv([asdict(v) for v in found]).encode())
    write_file(folder / "scores.svg", _picture(found))
    return text


def scores_markdown(found: Sequence[Verdict], name: str) -> str:
    """Return the verdicts as tables."""
    steps = sorted({v.step for v in found if v.step is not None})
    parents = {(v.code, v.length, v.repetition) for v in found}
    codes = {v.code for v in found}
    parts = [
        f"## Scores on {name}: {len(parents)} parents of {len(codes)} architectures",
        "Mean over parents [95 % interval, bootstrap over architectures]. τ: Kendall's τ of the"
        " score and the tabulated mean accuracy of the children. top-1: the best child is chosen;"
        " near: within one point of it; regret: points that the chosen child lacks to it. p:"
        f" Wilcoxon's signed-rank test of τ against |α| (alpha), {len(_all_scores()) - 1}"
        " comparisons, not corrected.",
        f"### All parents, after {steps[-1]} steps of weak learning",
        _overview(found, steps[-1]),
        "### τ by steps of weak learning and by the parent's training",
        _by_steps(found, steps),
        "### τ by growths of the parent and by its training",
        _by_depth(found, steps[-1]),
    ]
    return "\n\n".join(parts) + "\n"


def _all_scores() -> list[str]:
    return [*STEP_SCORES, *CHILD_SCORES, *SIZE_SCORES, RANDOM, CEILING]


def _overview(found: Sequence[Verdict], step: int) -> str:
    alphas = select(found, "alpha", step)
    rows = []
    for score in _all_scores():
        own = select(found, score, step)
        p = math.nan if score == "alpha" else paired_p(own, alphas, "tau")
        shares = [f"{100 * estimate(own, measure).mean:.0f} %" for measure in ("hit", "near")]
        regret = _show(estimate(own, "regret"))
        rows.append([score, _show(estimate(own, "tau")), *shares, regret, _show_p(p)])
    return _markdown(["score", "τ", "top-1", "near", "regret", "p"], rows)


def _by_steps(found: Sequence[Verdict], steps: Sequence[int]) -> str:
    rows = []
    for score in STEP_SCORES:
        for length in LENGTHS:
            cells = [_tau(select(found, score, step, length)) for step in steps]
            rows.append([score, length, *cells])
    return _markdown(["score", "training", *(f"{step} steps" for step in steps)], rows)


def _by_depth(found: Sequence[Verdict], step: int) -> str:
    rows = []
    for depth in sorted({v.depth for v in found}):
        for length in LENGTHS:
            chosen = [select(found, score, step, length, depth) for score in _MAIN]
            rows.append([str(depth), length, str(len(chosen[0])), *map(_tau, chosen)])
    return _markdown(["growths", "training", "parents", *_MAIN], rows)


def _tau(chosen: Sequence[Verdict]) -> str:
    return _show(estimate(chosen, "tau")) if chosen else "–"


def _picture(found: Sequence[Verdict]) -> bytes:
    """Return τ against the steps of weak learning, one line for each score and training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    steps = sorted({v.step for v in found if v.step is not None})
    for place, length in enumerate(LENGTHS):
        axes = figure.add_subplot(1, 2, place + 1)
        axes.set_title(f"{length} training of the parent")
        for score in STEP_SCORES:
            chosen = [select(found, score, step, length) for step in steps]
            if not all(chosen):
                continue
            estimates = [estimate(one, "tau") for one in chosen]
            low, high = [e.mean - e.low for e in estimates], [e.high - e.mean for e in estimates]
            means = [e.mean for e in estimates]
            axes.errorbar(steps, means, (low, high), label=score, capsize=3, marker="o")
        for score, style in (("flops", ":"), (CEILING, "--")):
            own = select(found, score, None, length)
            if own:
                axes.axhline(estimate(own, "tau").mean, color="gray", ls=style, label=score)
        axes.set_xlabel("steps of weak learning")
        axes.set_ylabel("Kendall's τ")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    return buffer.getvalue()


def write_policies_report(folder: Path, table: TruthTable, found: Sequence[Simulated]) -> str:
    """Write ``policies.md`` and ``policies.csv`` to a folder; return the Markdown."""
    text = policies_markdown(table, found)
    write_file(folder / "policies.md", text.encode())
    write_file(folder / "policies.csv", _to_csv(_policy_rows(found)).encode())
    return text


def policies_markdown(table: TruthTable, found: Sequence[Simulated]) -> str:
    """Return one table for each limit."""
    searches = {one.policy: len(one.regrets[min(one.regrets)]) for one in found}
    repetitions = max(searches.values())
    fewer = "".join(f" ({name}: {n})" for name, n in searches.items() if n < repetitions)
    comparisons = sum(
        len(one.regrets) + len(one.clock_regrets) for one in found if one.reference is not None
    )
    parts = [
        f"## Policies on {table.name}: {repetitions} searches each{fewer}",
        "Mean regret ± standard error in points. n: after n trainings; time n: when n trainings"
        " of networks at the limit would be over (time goes with multiply-adds, weak learning"
        " takes 40 % of a growth). + better, − worse than the policy that it changes, p < 0.01"
        f" by Mann and Whitney's test, {comparisons} comparisons, not corrected.",
    ]
    for limit in dict.fromkeys(one.limit for one in found):
        chosen = {one.policy: one for one in found if one.limit == limit}
        first = next(iter(chosen.values()))
        header = ["policy", *map(str, first.regrets), *(f"time {n}" for n in first.clock_regrets)]
        parts.append(f"### Within {limit / 1e6:g}M multiply-adds")
        parts.append(_markdown(header, [_policy_cells(one, chosen) for one in chosen.values()]))
    return "\n\n".join(parts) + "\n"


def _policy_cells(one: Simulated, others: dict[str, Simulated]) -> list[str]:
    base = others.get(one.reference) if one.reference else None
    cells = [one.policy]
    for own, reference in (
        (one.regrets, base.regrets if base else None),
        (one.clock_regrets, base.clock_regrets if base else None),
    ):
        for n, regrets in own.items():
            mark = ""
            if reference is not None and unpaired_p(regrets, reference[n]) < _SIGNIFICANT:
                better = statistics.fmean(regrets) < statistics.fmean(reference[n])
                mark = " +" if better else " −"
            cells.append(f"{statistics.fmean(regrets):.2f} ± {standard_error(regrets):.2f}{mark}")
    return cells


def _policy_rows(found: Sequence[Simulated]) -> list[dict[str, object]]:
    by_name = {(one.policy, one.limit): one for one in found}
    rows: list[dict[str, object]] = []
    for one in found:
        base = by_name.get((one.reference, one.limit)) if one.reference else None
        for clock, own in (("trainings", one.regrets), ("time", one.clock_regrets)):
            for n, regrets in own.items():
                p = math.nan
                if base is not None:
                    reference = base.regrets if clock == "trainings" else base.clock_regrets
                    p = unpaired_p(regrets, reference[n])
                rows.append(
                    {
                        "policy": one.policy,
                        "limit": one.limit,
                        "clock": clock,
                        "n": n,
                        "regret": statistics.fmean(regrets),
                        "standard_error": standard_error(regrets),
                        "reference": one.reference or "",
                        "p": "" if math.isnan(p) else p,
                    }
                )
    return rows


def unpaired_p(left: Sequence[float], right: Sequence[float]) -> float:
    """Return the two-sided p value of Mann and Whitney's test."""
    from scipy.stats import mannwhitneyu

    return float(mannwhitneyu(left, right).pvalue)


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; 0 for a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _show(one: Estimate) -> str:
    return f"{one.mean:.2f} [{one.low:.2f}, {one.high:.2f}]"


def _show_p(p: float) -> str:
    return "" if math.isnan(p) else f"{p:.2g}"


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _to_csv(rows: Sequence[dict[str, object]]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()
