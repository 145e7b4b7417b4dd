"""Named scores of candidates, by which finalizing can select (Algorithm 2 selects by |α|).

A score returns one number for each candidate of every α table, the larger the better. Pass its
result to ``finalize_candidates(net, scores=...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from nni_petridish.core.depth import depth_score
from nni_petridish.core.held_out import Losses, Products, alpha_tables_of, held_out_products
from nni_petridish.core.line_search import line_score
from nni_petridish.core.pursuit import METHODS, explained, selection_order
from nni_petridish.core.readout import READOUT_SCORES, readouts
from nni_petridish.core.standout import standout_score
from nni_petridish.core.untrained import consensus_score, prior_score
from nni_petridish.errors import ConfigError

Scores = Mapping[str, Sequence[float]]
"""The numbers of the candidates in the order of each α table, by its key."""
Score = Callable[[nn.Module, Losses], dict[str, list[float]]]


def alpha_score(net: nn.Module, losses: Losses) -> dict[str, list[float]]:
    """Return |α| of every candidate, the paper's score; ``losses`` is not used."""
    return {key: table.alpha.detach().abs().tolist() for key, table in alpha_tables_of(net).items()}


def random_score(net: nn.Module, losses: Losses) -> dict[str, list[float]]:
    """Return a number drawn from torch's default generator: the control for any other score."""
    return {
        key: torch.rand(len(table.shortcuts)).tolist()
        for key, table in alpha_tables_of(net).items()
    }


def gain_score(net: nn.Module, losses: Losses) -> dict[str, list[float]]:
    """Return the gain B²/U of every candidate û on held-out batches.

    With g = ∇_{x_k} L, B = ⟨−g, û⟩ and U = ⟨û, û⟩, each summed over all sites of the table, B²/U is
    what a least-squares step along û removes of the residual −g: the criterion of forward
    regression. It does not depend on the scale of û or on α, and compares sites of different
    resolution.

    Parameters
    ----------
    net
        A network with candidates attached, in isolated weak learning. It does not change.
    losses
        Returns parts of the loss on held-out batches.
    """
    return {key: products.gains() for key, products in held_out_products(net, losses).items()}


def _pursuit_score(method: str) -> Score:
    """Return the score that selects in the order of a method of `nni_petridish.core.pursuit`.

    A candidate's number is what would be left unexplained if the selection stopped before it.
    """

    def score(net: nn.Module, losses: Losses) -> dict[str, list[float]]:
        return {
            key: _unexplained(
                products, selection_order(products.gram, products.correlations, method)
            )
            for key, products in held_out_products(net, losses).items()
        }

    return score


def _unexplained(products: Products, order: Sequence[int]) -> list[float]:
    found = [0.0] * len(order)
    before = 0.0
    everything = explained(products.gram, products.correlations, order)
    for place, i in enumerate(order):
        found[i] = everything - before
        before = explained(products.gram, products.correlations, order[: place + 1])
    return found


def _readout_score(name: str) -> Score:
    """Return the score with this name of `nni_petridish.core.readout`."""

    def score(net: nn.Module, losses: Losses) -> dict[str, list[float]]:
        found = readouts(net, losses)
        value = READOUT_SCORES[name]
        return {key: [value(candidate) for candidate in table] for key, table in found.items()}

    return score


SCORES: dict[str, Score] = {
    "alpha": alpha_score,
    "gain": gain_score,
    "random": random_score,
    "line": line_score,
    "prior": prior_score,
    "depth": depth_score,
    "consensus": consensus_score,
    "standout": standout_score,
    **{name: _readout_score(name) for name in READOUT_SCORES},
    **{method: _pursuit_score(method) for method in METHODS},
}
"""The scores by name."""


def score_named(name: str) -> Score:
    """Return the score with this name."""
    if name not in SCORES:
        raise ConfigError(f"score must be one of {', '.join(SCORES)} but got {name!r}.")
    return SCORES[name]
