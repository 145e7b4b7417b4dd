"""The scores that are judged: of trained candidates, of fresh children, of sizes, and composites.

Each is a function in a dictionary. To judge another one, add it there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from nni_petridish.core import zero_cost
from nni_petridish.core.consensus import consensus, pooled
from nni_petridish.core.grow import sites
from nni_petridish.core.held_out import Losses, Products, held_out_products
from nni_petridish.core.line_search import line_score
from nni_petridish.core.modes import evaluation_mode
from nni_petridish.core.readout import READOUT_SCORES, Readout, readouts
from nni_petridish.core.select import alpha_score
from nni_petridish.studies.judge.tables import Row

KeyScores = dict[str, list[float]]
"""One number for each candidate in the order of its α table, by key."""


class Evidence:
    """A network with trained candidates and its held-out losses; products are computed once."""

    def __init__(self, net: nn.Module, losses: Losses) -> None:
        self.net, self.losses = net, losses

    @cached_property
    def products(self) -> dict[str, Products]:
        """The inner products of gradients and candidates."""
        return held_out_products(self.net, self.losses)

    @cached_property
    def readouts(self) -> dict[str, list[list[Readout]]]:
        """The regressions of gradients on candidates and on the network's own features."""
        return readouts(self.net, self.losses)

    def few_losses(self, net: nn.Module) -> Iterator[Tensor]:
        """Return the losses of the first two held-out batches."""
        return itertools.islice(iter(self.losses(net)), 2)


def alpha(evidence: Evidence) -> KeyScores:
    """Return |α|, the paper's score."""
    return alpha_score(evidence.net, evidence.losses)


def gain(evidence: Evidence) -> KeyScores:
    """Return the least-squares decrease B²/U."""
    return {key: products.gains() for key, products in evidence.products.items()}


def cosine(evidence: Evidence) -> KeyScores:
    """Return B²/(U·⟨g, g⟩), the share of the site's residual that the candidate explains."""
    return {
        key: [gain / max(products.residual, 1e-300) for gain in products.gains()]
        for key, products in evidence.products.items()
    }


def slope(evidence: Evidence) -> KeyScores:
    """Return |α·B|, the first-order change of the loss along the candidate."""
    alphas = alpha(evidence)
    return {
        key: [abs(a * float(b)) for a, b in zip(alphas[key], p.correlations, strict=True)]
        for key, p in evidence.products.items()
    }


def gradient_norm(evidence: Evidence) -> KeyScores:
    """Return the norm of the loss's gradient in the candidate's own weights, without α."""
    net = evidence.net
    found: KeyScores = {}
    learners = [(site.key, site.weak_learner) for site in sites(net) if site.weak_learner]
    groups = [(key, list(op.parameters())) for key, learner in learners for op in learner.ops]
    everything = [parameter for _, group in groups for parameter in group]
    totals = [torch.zeros_like(parameter) for parameter in everything]
    with evaluation_mode(net):
        for loss in evidence.few_losses(net):
            gradients = torch.autograd.grad(loss, everything, allow_unused=True)
            for total, gradient in zip(totals, gradients, strict=True):
                if gradient is not None:
                    total += gradient
    squares = iter([float(total.square().sum()) for total in totals])
    for key, group in groups:
        found.setdefault(key, []).append(sum(next(squares) for _ in group) ** 0.5)
    return found


def line(evidence: Evidence) -> KeyScores:
    """Return the true decrease of the loss along the candidate, on the first two batches."""
    return line_score(evidence.net, evidence.few_losses)


def _from_readouts(name: str) -> Callable[[Evidence], KeyScores]:
    value = READOUT_SCORES[name]

    def score(evidence: Evidence) -> KeyScores:
        found = evidence.readouts
        return {key: [value(candidate) for candidate in table] for key, table in found.items()}

    return score


CANDIDATE_SCORES: dict[str, Callable[[Evidence], KeyScores]] = {
    "alpha": alpha,
    "gain": gain,
    "cosine": cosine,
    "slope": slope,
    "gradient": gradient_norm,
    "line": line,
    **{name: _from_readouts(name) for name in READOUT_SCORES},
}
"""Scores of candidates, at every checkpoint of weak learning."""

CHILD_SCORES: dict[str, Callable[[nn.Module, Tensor, Tensor], float]] = {
    "synflow": zero_cost.synflow,
    "snip": zero_cost.snip,
    "grasp": zero_cost.grasp,
    "jacov": zero_cost.jacov,
    "nwot": zero_cost.nwot,
}
"""Scores of a child with fresh weights, from (network, images, labels)."""

SIZE_SCORES: dict[str, Callable[[Row], float]] = {
    "flops": lambda row: row.multiply_adds,
    "parameters": lambda row: row.parameters,
    "cheapest": lambda row: -row.multiply_adds,
}
"""Scores of a child by its row in the table; the accuracies are not looked at."""


@dataclass(frozen=True)
class Facts:
    """The numbers of all children of a parent, for scores that are made of others.

    Parameters
    ----------
    children
        The codes of the children, one for each candidate.
    keys
        The key of the α table of each candidate.
    scores
        The scores of the candidates after some steps of weak learning, by name and code.
    fresh
        The scores of the children with fresh weights, by name and code.
    rows
        The rows of the children, for their sizes.
    """

    children: Sequence[str]
    keys: Sequence[str]
    scores: Mapping[str, Mapping[str, float]]
    fresh: Mapping[str, Mapping[str, float]]
    rows: Mapping[str, Row]

    def learned(self, name: str) -> list[float]:
        """Return a score of the candidates."""
        return [self.scores[name][child] for child in self.children]

    def untrained(self, name: str) -> list[float]:
        """Return a score of the children with fresh weights."""
        return [self.fresh[name][child] for child in self.children]

    def multiply_adds(self) -> list[float]:
        """Return the multiply-adds of the children."""
        return [self.rows[child].multiply_adds for child in self.children]


def pooled_alpha(facts: Facts) -> list[float]:
    """Return the mean |α| of a candidate's table, and within a table the multiply-adds."""
    sizes = facts.multiply_adds()
    largest = max(sizes)
    means = pooled(facts.learned("alpha"), facts.keys)
    return [mean * (1 + 1e-6 * size / largest) for mean, size in zip(means, sizes, strict=True)]


def prior(facts: Facts) -> list[float]:
    """Return the consensus of jacov, nwot and multiply-adds: no candidate is trained."""
    return consensus([facts.untrained("jacov"), facts.untrained("nwot"), facts.multiply_adds()])


def alpha_consensus(facts: Facts) -> list[float]:
    """Return the consensus of |α|, residual gain, jacov, nwot and multiply-adds."""
    learned = [facts.learned("alpha"), facts.learned("residual_gain")]
    untrained = [facts.untrained("jacov"), facts.untrained("nwot")]
    return consensus([*learned, *untrained, facts.multiply_adds()])


def pooled_consensus(facts: Facts) -> list[float]:
    """Return that consensus with |α| and residual gain pooled over each α table."""
    learned = [pooled(facts.learned(name), facts.keys) for name in ("alpha", "residual_gain")]
    untrained = [facts.untrained("jacov"), facts.untrained("nwot")]
    return consensus([*learned, *untrained, facts.multiply_adds()])


COMPOSITE_SCORES: dict[str, Callable[[Facts], list[float]]] = {
    "pooled_alpha": pooled_alpha,
    "prior": prior,
    "consensus": alpha_consensus,
    "pooled_consensus": pooled_consensus,
}
"""Scores that are made of others, at every checkpoint; they need no new run."""
