"""The crossover: the compute from which growing is ahead of an opponent, and stays so.

It is read off mean any-time curves with a point after every epoch. Its interval comes from
resampled random seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nni_petridish.studies.comparison import measures
from nni_petridish.studies.comparison.findings import Findings
from nni_petridish.studies.comparison.section import GROWTH

POINTS = 401
"""Points of a curve, at equal distances from nothing to the whole budget."""
_DRAWS = 2000
_OUTSIDE = 2.5
"""Percent of the resamples beyond each end of an interval."""


@dataclass(frozen=True)
class Crossover:
    """The compute from which a method is ahead of an opponent until the end of the budget.

    Parameters
    ----------
    seeds
        Number of random seeds.
    share
        The share of the budget; infinite for never.
    low, high
        Its 95 % interval by bootstrap over the seeds; NaN for a single seed.
    certainty
        The share of the resamples in which the method is ahead at the end.
    lead
        Mean error of the opponent minus that of the method at the end of the budget.
    """

    seeds: int
    share: float
    low: float
    high: float
    certainty: float
    lead: float


def ahead_from(own: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the first index from which ``own`` is below ``other`` until the end of the last axis.

    It is the length of that axis if ``own`` is not below at the end.

    >>> ahead_from(np.array([9.0, 5.0, 4.0, 2.0]), np.array([9.0, 6.0, 3.0, 3.0]))
    array(3)
    """
    behind = own >= other
    length = behind.shape[-1]
    last = length - 1 - np.argmax(behind[..., ::-1], axis=-1)
    return np.where(behind.any(axis=-1), last + 1, 0)


def crossover(own: np.ndarray, other: np.ndarray, draws: int = _DRAWS) -> Crossover:
    """Compare two methods whose curves cover the budget at equal distances.

    Parameters
    ----------
    own, other
        Errors, of shape (schedules, seeds, points): at every compute, the schedule with the lowest
        mean counts. Seeds are paired.
    draws
        Number of resamples.
    """
    seeds, points = own.shape[1:]
    everyone = np.full((1, seeds), 1 / seeds)
    mean, opponent = _means(own, everyone), _means(other, everyone)
    lead = float(opponent[0, -1] - mean[0, -1])
    share = _shares(ahead_from(mean, opponent), points)[0]
    if seeds < 2:
        return Crossover(seeds, share, math.nan, math.nan, math.nan, lead)
    chosen = np.random.default_rng(0).integers(seeds, size=(draws, seeds))
    weights = np.stack([np.bincount(row, minlength=seeds) for row in chosen]) / seeds
    found = _shares(ahead_from(_means(own, weights), _means(other, weights)), points)
    # Between a share and never there is nothing to interpolate.
    low = np.percentile(found, _OUTSIDE, method="lower")
    high = np.percentile(found, 100 - _OUTSIDE, method="higher")
    certainty = float(np.isfinite(found).mean())
    return Crossover(seeds, float(share), float(low), float(high), certainty, lead)


def families(found: Findings) -> dict[str, list[str]]:
    """Return the methods of each curve, by the name of the one with the largest share.

    Methods that differ in their shares alone are one: trainings of different lengths.
    """
    listed = found.comparison.section.methods
    alike: dict[str, list[str]] = {}
    for name in (name for name in found.comparison.methods if found.results[name]):
        alike.setdefault(repr(replace(listed[name], share=1.0)), []).append(name)
    return {max(names, key=lambda name: listed[name].share): names for names in alike.values()}


def curves(found: Findings, names: Sequence[str], seeds: Sequence[int]) -> np.ndarray:
    """Return the errors of methods, of shape (methods, seeds, `POINTS`), over the budget."""
    shares = np.linspace(0, 1, POINTS)
    errors = [
        [_at(found, name, seed, shares * (found.budget(seed, found.unit) or 0.0)) for seed in seeds]
        for name in names
    ]
    return found.measure.scale * np.array(errors)


def common_seeds(found: Findings, names: Sequence[str]) -> list[int]:
    """Return the random seeds that all methods and the reference have."""
    every = (found.reference, *names)
    return [s for s in found.comparison.seeds if all(s in found.results[n] for n in every)]


def crossovers(found: Findings) -> dict[tuple[str, str], Crossover]:
    """Compare every method of kind ``growth`` with every one of another kind."""
    kinds = {name: method.kind for name, method in found.comparison.section.methods.items()}
    lines = families(found)
    compared = {}
    for own in (name for name in lines if kinds[name] == GROWTH):
        for other in (name for name in lines if kinds[name] != GROWTH):
            seeds = common_seeds(found, lines[own] + lines[other])
            if seeds:
                errors, others = (curves(found, lines[name], seeds) for name in (own, other))
                compared[own, other] = crossover(errors, others)
    return compared


def _at(found: Findings, name: str, seed: int, compute: np.ndarray) -> np.ndarray:
    points = found.curve(name, seed, found.unit, epochs=True)
    # A little above, since the reference's own last model lies at its end.
    return np.array([measures.error_at(points, at * (1 + 1e-9)) for at in compute])


def _means(errors: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the mean curves of resamples, of shape (resamples, points)."""
    best: np.ndarray = np.einsum("ms,nsp->nmp", weights, errors).min(axis=0)
    return best


def _shares(indices: np.ndarray, points: int) -> np.ndarray:
    return np.where(indices < points, indices / (points - 1), math.inf)
