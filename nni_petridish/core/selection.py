"""Selections of candidates that a growth can make: their number, and the best that is left.

A selection is what Algorithm 2 keeps: the indices of candidates by the key of their α table. It is
usually the one of largest |α|. If that architecture was grown from the same parent before, the next
best is taken, so that no search trains it twice by accident.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from nni_petridish.core.alpha_table import largest_first
from nni_petridish.core.genotype import Genotype
from nni_petridish.core.site import sites

Selection = dict[str, list[int]]
_Ranks = tuple[tuple[str, tuple[int, ...]], ...]


def architecture(genotype: Genotype) -> object:
    """Return a value that is equal for genotypes that differ in the order of shortcuts only."""
    learners = genotype.learners_by_key()
    cells = sorted((key, tuple(tuple(sorted(one)) for one in learners[key])) for key in learners)
    return (genotype.width, tuple(cells))


def count_selections(net: nn.Module, i_max: int) -> int:
    """Return the number of architectures that a growth of a network can select.

    >>> from search_spaces import VisionSpace
    >>> space = VisionSpace((1, 8, 8), 10, cells_per_stage=1, stages=1, ops=["identity"])
    >>> net = space.build(space.seed())
    >>> count_selections(net, i_max=1), count_selections(net, i_max=2)
    (2, 1)
    """
    ways: dict[str, int] = {}
    pools: dict[str, dict[str, int]] = {}
    for site in sites(net):
        count, room = len(site.eligible_shortcuts()), site.room()
        if count:
            kept = min(count, i_max if room is None else min(i_max, room))
            place = ways if site.pool is None else pools.setdefault(site.pool, {})
            place[site.key] = math.comb(count, kept)
    if not ways and not pools:
        return 0
    return math.prod(ways.values()) * math.prod(
        _ways_of_pool(list(rivals.values()), i_max) for rivals in pools.values()
    )


def _ways_of_pool(ways: Sequence[int], i_max: int) -> int:
    """Return the number of ways to choose I_max of the rivals, each with its own ways."""
    sums = [1] + [0] * min(i_max, len(ways))  # elementary symmetric polynomials
    for way in ways:
        for k in range(len(sums) - 1, 0, -1):
            sums[k] += way * sums[k - 1]
    return sums[-1]


def next_best(
    best: Selection,
    scores: Mapping[str, Tensor],
    pools: Sequence[Mapping[str, int]],
    is_taken: Callable[[Selection], bool],
) -> Selection | None:
    """Return the selection of the largest sum of scores that is not taken; None if all are.

    Parameters
    ----------
    best
        The selection of the largest scores.
    scores
        The score of every candidate, by key.
    pools
        The tables that compete, each with the number of candidates that it would keep.
    is_taken
        Whether a selection was made before.
    """
    order = {key: largest_first(scores[key]) for key in scores}
    value = {key: [float(scores[key][i]) for i in order[key]] for key in scores}
    ranked = [
        (sorted(pool, key=lambda key: -value[key][0]), pool) for pool in pools
    ]  # the rivals of each pool, the best first

    def loss(ranks: _Ranks) -> float:
        return -sum(value[key][rank] for key, chosen in ranks for rank in chosen)

    # Selections are found in the order of their sum: every other one is reached from the best by
    # steps that replace a candidate, or a rival, by a worse one.
    first: _Ranks = tuple((key, tuple(range(len(chosen)))) for key, chosen in best.items())
    queue, seen = [(loss(first), first)], {first}
    while queue:
        _, ranks = heapq.heappop(queue)
        selection = {key: [order[key][rank] for rank in chosen] for key, chosen in ranks}
        if not is_taken(selection):
            return selection
        for worse in _worse(ranks, {key: len(order[key]) for key in order}, ranked):
            if worse not in seen:
                seen.add(worse)
                heapq.heappush(queue, (loss(worse), worse))
    return None


def _worse(
    ranks: _Ranks,
    counts: Mapping[str, int],
    ranked: Sequence[tuple[list[str], Mapping[str, int]]],
) -> Iterator[_Ranks]:
    """Yield the selections with one candidate, or one rival, replaced by the next worse one."""
    chosen = dict(ranks)
    for key, kept in ranks:
        for rank in kept:
            if rank + 1 < counts[key] and rank + 1 not in kept:
                moved = tuple(sorted({*kept, rank + 1} - {rank}))
                yield tuple((k, moved if k == key else v) for k, v in ranks)
    for rivals, sizes in ranked:
        for place, key in enumerate(rivals):
            following = [other for other in rivals[place + 1 :] if other not in chosen]
            if key in chosen and following:
                other = following[0]
                # The new rival starts with its best candidates.
                is_at_best = chosen[key] == tuple(range(len(chosen[key])))
                if is_at_best:
                    fresh = (other, tuple(range(sizes[other])))
                    yield tuple(fresh if k == key else (k, v) for k, v in ranks)
