"""Statistics of a comparison: paired tests, their correction, and the power of the design."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

_EXACT = 14
"""Number of pairs up to which all signs are enumerated."""
_DRAWS = 20_000


@dataclass(frozen=True)
class Paired:
    """A paired comparison of two methods over random seeds.

    Parameters
    ----------
    n
        Number of pairs.
    mean, error
        Mean difference and its standard error.
    t_test, wilcoxon, permutation
        Two-sided p values; NaN where a test has none.
    """

    n: int
    mean: float
    error: float
    t_test: float
    wilcoxon: float
    permutation: float


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Paired | None:
    """Compare a with b, seed by seed; None if they share no seed.

    >>> result = paired({1: 2.0, 2: 3.0, 3: 4.5}, {1: 1.0, 2: 2.0, 3: 3.0})
    >>> result.n, round(result.mean, 3), result.permutation
    (3, 1.167, 0.25)
    """
    differences = np.array([a[seed] - b[seed] for seed in a if seed in b])
    n = len(differences)
    if n == 0:
        return None
    mean = float(differences.mean())
    if n == 1:
        return Paired(1, mean, math.nan, math.nan, math.nan, math.nan)
    error = float(differences.std(ddof=1)) / math.sqrt(n)
    if not differences.any():
        return Paired(n, 0.0, 0.0, 1.0, 1.0, 1.0)
    # Differences that are equal, up to rounding, have no spread to test by.
    has_spread = error > 1e-9 * abs(mean)
    t_test = 2 * float(stats.t.sf(abs(mean) / error, n - 1)) if has_spread else math.nan
    wilcoxon = float(stats.wilcoxon(differences, zero_method="zsplit").pvalue)
    return Paired(n, mean, error, t_test, wilcoxon, permutation_test(differences))


def permutation_test(differences: np.ndarray) -> float:
    """Return the two-sided p value of the mean under random signs, exact for few pairs."""
    n, observed = len(differences), abs(differences.sum())
    if n <= _EXACT:
        signs = np.array(list(itertools.product((-1, 1), repeat=n)))
        sums = np.abs(signs @ differences)
        return float((sums >= observed * (1 - 1e-12)).mean())
    signs = np.random.default_rng(0).choice((-1, 1), size=(_DRAWS, n))
    sums = np.abs(signs @ differences)
    return float(((sums >= observed * (1 - 1e-12)).sum() + 1) / (_DRAWS + 1))


def holm(values: Sequence[float]) -> list[float]:
    """Return p values corrected for the number of comparisons; NaN stays NaN and counts.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    count, largest = len(values), 0.0
    corrected = [math.nan] * count
    order = sorted((i for i in range(count) if not math.isnan(values[i])), key=lambda i: values[i])
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (count - rank) * values[i]))
        corrected[i] = largest
    return corrected


def detectable(deviation: float, n: int, alpha: float = 0.05, power: float = 0.8) -> float:
    """Return the smallest mean difference that a paired t test of n pairs finds with this power.

    Parameters
    ----------
    deviation
        Standard deviation of the paired differences, from a pilot.
    n
        Number of pairs.
    alpha
        Level of the test, two-sided.
    power
        Probability of finding the difference.

    Examples
    --------
    >>> round(detectable(1.0, 10), 2)
    1.0
    """
    if n < 2:
        return math.inf
    critical = stats.t.ppf(1 - alpha / 2, n - 1)

    def missing(effect: float) -> float:
        # The other tail has next to nothing; SciPy gives NaN where this one has nearly all.
        found = stats.nct.sf(critical, n - 1, effect * math.sqrt(n))
        return float(np.nan_to_num(found, nan=1.0)) - power

    largest = 1.0
    while missing(largest) < 0:
        largest *= 2
    return deviation * float(optimize.brentq(missing, 1e-6, largest))


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error, NaN for fewer than two values."""
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    return mean, float(np.std(values, ddof=1)) / math.sqrt(len(values))
