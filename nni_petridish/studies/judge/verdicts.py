"""Verdicts on scores: how each ranks the children of a parent against their tabulated accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nni_petridish._support.reading import as_mapping, read_json
from nni_petridish.errors import DataError
from nni_petridish.studies.judge.scores import (
    CANDIDATE_SCORES,
    CHILD_SCORES,
    COMPOSITE_SCORES,
    SIZE_SCORES,
    Facts,
)
from nni_petridish.studies.judge.tables import TruthTable

CEILING, RANDOM = "ceiling", "random"
STEP_SCORES = (*CANDIDATE_SCORES, *COMPOSITE_SCORES)
"""The scores that depend on the steps of weak learning."""
MEASURES = ("tau", "hit", "near", "regret")
POINT = 1.0
_DRAWS = 2000


@dataclass(frozen=True)
class Verdict:
    """The verdict on one score for one parent.

    Parameters
    ----------
    code, length, repetition, depth
        The parent; its depth is its number of growths.
    score
        Name of the score.
    step
        Steps of weak learning; None for a score that needs none.
    tau
        Kendall's τ (τ-b) between the score and the mean accuracy of the children.
    hit
        Whether the child of the largest score is the best one.
    near
        Whether its accuracy is within one point of the best one.
    regret
        What its accuracy lacks to the best one, in points.
    """

    code: str
    length: str
    repetition: int
    depth: int
    score: str
    step: int | None
    tau: float
    hit: float
    near: float
    regret: float


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Return the results of all finished parents in a folder."""
    found = []
    for file in sorted((folder / "results").glob("*.json")):
        try:
            found.append(as_mapping(read_json(file)))
        except (OSError, ValueError) as error:
            raise DataError(f"{file}: damaged ({error}); remove it to judge it again.") from None
    return found


def verdicts(results: Iterable[Mapping[str, Any]], table: TruthTable) -> list[Verdict]:
    """Return the verdicts on all scores, with the ceiling and the expectation of chance."""
    return [verdict for result in results for verdict in _of_parent(result, table)]


def _of_parent(result: Mapping[str, Any], table: TruthTable) -> list[Verdict]:
    children: list[str] = result["children"]
    parent = {key: result[key] for key in ("code", "length", "repetition", "depth")}
    truth = [table.rows[child].accuracy for child in children]

    def verdict(score: str, step: int | None, measures: dict[str, float]) -> Verdict:
        everything: dict[str, Any] = {**parent, "score": score, "step": step, **measures}
        return Verdict(**everything)

    found = [
        verdict(name, int(step), compare([values[name][child] for child in children], truth))
        for step, values in result["scores"].items()
        for name in CANDIDATE_SCORES
    ]
    keys = {code: key for key, codes in result["tables"].items() for code in codes}
    for step, values in result["scores"].items():
        facts = Facts(children, [keys[c] for c in children], values, result["fresh"], table.rows)
        found += [
            verdict(name, int(step), compare(score(facts), truth))
            for name, score in COMPOSITE_SCORES.items()
        ]
    for name in CHILD_SCORES:
        scores = [result["fresh"][name][child] for child in children]
        found.append(verdict(name, None, compare(scores, truth)))
    for name, size in SIZE_SCORES.items():
        scores = [size(table.rows[child]) for child in children]
        found.append(verdict(name, None, compare(scores, truth)))
    found.append(verdict(RANDOM, None, chance(truth)))
    found.append(verdict(CEILING, None, ceiling([table.rows[c].accuracies for c in children])))
    return found


def compare(scores: Sequence[float], truth: Sequence[float]) -> dict[str, float]:
    """Return the measures of a score; among equal largest scores the first child is taken.

    >>> compare([0.1, 0.3, 0.2], [90.0, 91.0, 92.5])["regret"]
    1.5
    """
    from scipy.stats import kendalltau

    tau = float(kendalltau(scores, truth).statistic) if len(set(scores)) > 1 else 0.0
    regret = max(truth) - truth[max(range(len(scores)), key=lambda i: scores[i])]
    return {
        "tau": 0.0 if math.isnan(tau) else tau,
        "hit": float(regret == 0),
        "near": float(regret <= POINT),
        "regret": regret,
    }


def chance(truth: Sequence[float]) -> dict[str, float]:
    """Return the expected measures of a random score."""
    n, best = len(truth), max(truth)
    return {
        "tau": 0.0,
        "hit": sum(t == best for t in truth) / n,
        "near": sum(best - t <= POINT for t in truth) / n,
        "regret": best - math.fsum(truth) / n,
    }


def ceiling(accuracies: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the measures of one training of every child as the score, the others as the truth."""
    repetitions = min(map(len, accuracies))
    found = []
    for i in range(repetitions if repetitions > 1 else 0):
        rest = [[a for j, a in enumerate(row) if j != i] for row in accuracies]
        truth = [math.fsum(row) / len(row) for row in rest]
        found.append(compare([row[i] for row in accuracies], truth))
    if not found:
        return dict.fromkeys(MEASURES, math.nan)
    return {name: math.fsum(one[name] for one in found) / len(found) for name in MEASURES}


@dataclass(frozen=True)
class Estimate:
    """A mean over parents, with a 95 % interval by bootstrap and their number."""

    mean: float
    low: float
    high: float
    parents: int


def estimate(chosen: Sequence[Verdict], measure: str) -> Estimate:
    """Return the mean of a measure.

    The bootstrap draws architectures, not parents: short and long trainings of one architecture
    share their children.
    """
    import numpy as np

    groups: dict[str, list[float]] = {}
    for verdict in chosen:
        groups.setdefault(verdict.code, []).append(getattr(verdict, measure))
    sums = np.array([math.fsum(values) for values in groups.values()])
    counts = np.array([len(values) for values in groups.values()])
    drawn = np.random.default_rng(0).integers(len(sums), size=(_DRAWS, len(sums)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(float(sums.sum() / counts.sum()), float(low), float(high), len(chosen))


def paired_p(left: Sequence[Verdict], right: Sequence[Verdict], measure: str) -> float:
    """Return the p value of Wilcoxon's signed-rank test over parents; NaN for fewer than six."""
    from scipy.stats import wilcoxon

    by_parent = {(v.code, v.length, v.repetition): getattr(v, measure) for v in right}
    pairs = [
        (getattr(v, measure), by_parent[v.code, v.length, v.repetition])
        for v in left
        if (v.code, v.length, v.repetition) in by_parent
    ]
    differences = [a - b for a, b in pairs if a != b]
    return float(wilcoxon(differences).pvalue) if len(differences) >= 6 else math.nan


def select(
    found: Iterable[Verdict],
    score: str,
    step: int | None,
    length: str | None = None,
    depth: int | None = None,
) -> list[Verdict]:
    """Return the verdicts on a score after some steps, of all parents or some of them.

    Parameters
    ----------
    found
        The verdicts.
    score, step
        The score, and the steps of weak learning, which count for `STEP_SCORES` only.
    length, depth
        The training and the number of growths of the parents; None for any.
    """
    step = step if score in STEP_SCORES else None
    return [
        v
        for v in found
        if (v.score, v.step) == (score, step)
        and length in (None, v.length)
        and depth in (None, v.depth)
    ]
