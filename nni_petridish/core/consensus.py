"""A consensus of several scores of candidates, by the sum of their ranks (Borda's count).

After a short weak learning every single score is noisy: α and gains depend on the random start of a
candidate, and the size of a child says nothing about the data. Scores that err for different
reasons are better together. Ranks make them comparable without weights to tune.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence

_LEAST = 1e-30
"""Stands for 0 under a logarithm."""


def consensus(scores: Iterable[Sequence[float]]) -> list[float]:
    """Return the sum of the ranks that several scores give to the same candidates.

    Parameters
    ----------
    scores
        One number for each candidate, the larger the better, by each score. Equal numbers share
        the mean of their ranks.

    Examples
    --------
    >>> consensus([[0.1, 0.3, 0.2], [5.0, 7.0, 7.0]])
    [2.0, 5.5, 4.5]
    """
    from scipy.stats import rankdata

    return [float(sum(ranks)) for ranks in zip(*map(rankdata, scores), strict=True)]


def pooled(scores: Sequence[float], groups: Sequence[Hashable]) -> list[float]:
    """Return the geometric mean of the scores of each candidate's group.

    Candidates of one α table read the same gradient g. What they have in common, that there is
    something to learn at this layer, is known better than what tells them apart.

    Parameters
    ----------
    scores
        One number for each candidate, not negative.
    groups
        The group of each candidate, such as the key of its α table.

    Examples
    --------
    >>> pooled([1.0, 4.0, 1.0], ["a", "a", "b"])
    [2.0, 2.0, 1.0]
    """
    logarithms: dict[Hashable, list[float]] = {}
    for score, group in zip(scores, groups, strict=True):
        logarithms.setdefault(group, []).append(math.log(max(score, _LEAST)))
    means = {group: math.exp(math.fsum(logs) / len(logs)) for group, logs in logarithms.items()}
    return [means[group] for group in groups]
