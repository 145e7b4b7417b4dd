"""Selections against brute force, and growths that avoid what was grown before."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from nni_petridish import attach_candidates, finalize_candidates
from nni_petridish.core.selection import Selection, architecture, count_selections, next_best
from nni_petridish.errors import ExhaustedError
from search_spaces import VisionSpace

TINY = VisionSpace(
    (1, 8, 8), 10, cells_per_stage=1, filters=2, stages=1, ops=["identity", "max_pool_3x3"]
)


@pytest.mark.parametrize("seed", range(3))
def test_selections_come_in_the_order_of_their_scores(seed: int) -> None:
    rng = random.Random(seed)
    counts, kept, pool = {"a": 4, "b": 3, "p": 3, "q": 2, "r": 2}, {"a": 2, "b": 1}, ["p", "q", "r"]
    scores = {key: torch.tensor([rng.random() for _ in range(n)]) for key, n in counts.items()}
    rivals = sorted(pool, key=lambda key: -float(scores[key].max()))[:2]
    tops = {key: scores[key].argsort(descending=True).tolist() for key in counts}
    best: Selection = {key: tops[key][:n] for key, n in kept.items()}
    best |= {key: tops[key][:1] for key in rivals}
    taken: list[frozenset[tuple[str, frozenset[int]]]] = []
    values: list[float] = []
    while True:
        found = next_best(best, scores, [dict.fromkeys(pool, 1)], lambda s: _set(s) in taken)
        if found is None:
            break
        taken.append(_set(found))
        values.append(sum(float(scores[key][i]) for key in found for i in found[key]))
    everything = {
        frozenset({("a", frozenset(a)), ("b", frozenset(b)), *pairs})
        for a in itertools.combinations(range(4), 2)
        for b in itertools.combinations(range(3), 1)
        for two in itertools.combinations(pool, 2)
        for pairs in itertools.product(
            *([(key, frozenset([i])) for i in range(counts[key])] for key in two)
        )
    }
    assert values == sorted(values, reverse=True)
    assert set(taken) == everything
    assert len(taken) == len(everything)
    assert _set(best) == taken[0]


def _set(selection: Selection) -> frozenset[tuple[str, frozenset[int]]]:
    return frozenset((key, frozenset(indices)) for key, indices in selection.items())


def test_growths_select_every_architecture_once_and_then_say_that_there_are_no_more() -> None:
    torch.manual_seed(0)
    taken = []
    net = TINY.build(TINY.seed())
    for _ in range(count_selections(net, i_max=2)):
        net = attach_candidates(TINY.build(TINY.seed()))
        taken.append(finalize_candidates(net, i_max=2, taken=taken))
        assert net.genotype == taken[-1]
        assert net(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert len({architecture(genotype) for genotype in taken}) == len(taken) == 6
    with pytest.raises(ExhaustedError, match="was grown before"):
        finalize_candidates(attach_candidates(TINY.build(TINY.seed())), i_max=2, taken=taken)
