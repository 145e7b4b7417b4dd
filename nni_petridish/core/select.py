"""Named scores of candidates, by which finalizing can select (Algorithm 2 selects by |α|).

A score returns one number for each candidate of every α table, the larger the better. Pass its
result to ``finalize_candidates(net, scores=...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nni_petridish.core.alpha_table import AlphaTable
from nni_petridish.core.grow import sites
from nni_petridish.core.modes import evaluation_mode
from nni_petridish.core.pursuit import METHODS, explained, selection_order
from nni_petridish.core.weak_learner import Candidates
from nni_petridish.errors import ConfigError, GrowthError

Losses = Callable[[nn.Module], Iterable[Tensor]]
"""A function that returns parts of the loss, one for each batch, with L as their sum."""
Scores = Mapping[str, Sequence[float]]
"""The numbers of the candidates in the order of each α table, by its key."""
Score = Callable[[nn.Module, Losses], dict[str, list[float]]]


def alpha_score(net: nn.Module, losses: Losses) -> dict[str, list[float]]:
    """Return |α| of every candidate, the paper's score; ``losses`` is not used."""
    return {key: table.alpha.detach().abs().tolist() for key, table in _tables(net).items()}


def random_score(net: nn.Module, losses: Losses) -> dict[str, list[float]]:
    """Return a number drawn from torch's default generator: the control for any other score."""
    return {key: torch.rand(len(table.shortcuts)).tolist() for key, table in _tables(net).items()}


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


@dataclass
class Products:
    """Inner products of the candidates û of one α table and g = ∇_{x_k} L, over all its sites.

    Parameters
    ----------
    correlations
        B_i = ⟨−g, û_i⟩ of each candidate, shape (n,).
    gram
        G_ij = ⟨û_i, û_j⟩ of each pair, shape (n, n).
    residual
        ⟨g, g⟩.
    """

    correlations: Tensor
    gram: Tensor
    residual: float = 0.0

    @property
    def norms(self) -> Tensor:
        """U = ⟨û, û⟩ of each candidate, shape (n,)."""
        return self.gram.diagonal()

    def add(self, g: Tensor, candidates: Sequence[Tensor]) -> None:
        """Add the inner products at one site on one batch."""
        g = g.detach().flatten()
        rows = torch.stack([u.flatten() for u in candidates])
        self.correlations -= (rows @ g).to("cpu", torch.float64)
        self.gram += (rows @ rows.T).to("cpu", torch.float64)
        self.residual += float(g @ g)

    def gains(self) -> list[float]:
        """Return B²/U of each candidate; 0 for a candidate that is 0."""
        norms = self.norms
        found = torch.where(norms > 0, self.correlations.square() / norms, torch.zeros_like(norms))
        return [float(gain) for gain in found]


def held_out_products(net: nn.Module, losses: Losses) -> dict[str, Products]:
    """Return the inner products of all α tables, in evaluation mode; see `gain_score`."""
    products = {key: _no_products(table) for key, table in _tables(net).items()}
    passed: list[tuple[str, Tensor, list[Tensor]]] = []
    handles = [
        site.weak_learner.register_forward_hook(_observer(site.key, passed))
        for site in sites(net)
        if site.weak_learner is not None
    ]
    try:
        with evaluation_mode(net):
            for loss in losses(net):
                outputs = [x_k for _, x_k, _ in passed]
                # Unused: outputs of a batch whose loss comes later.
                gradients = torch.autograd.grad(loss, outputs, allow_unused=True)
                for (key, _, candidates), g in zip(passed, gradients, strict=True):
                    if g is not None:
                        products[key].add(g, candidates)
                passed[:] = [one for one, g in zip(passed, gradients, strict=True) if g is None]
    finally:
        for handle in handles:
            handle.remove()
    for key, found in products.items():
        if not found.norms.any():
            raise GrowthError(
                f"the gain of {key!r} is unknown: its candidates do not run in evaluation, or there"
                " are no held-out batches."
            )
    return products


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


SCORES: dict[str, Score] = {
    "alpha": alpha_score,
    "gain": gain_score,
    "random": random_score,
    **{method: _pursuit_score(method) for method in METHODS},
}
"""The scores by name."""


def score_named(name: str) -> Score:
    """Return the score with this name."""
    if name not in SCORES:
        raise ConfigError(f"score must be one of {', '.join(SCORES)} but got {name!r}.")
    return SCORES[name]


def _tables(net: nn.Module) -> dict[str, AlphaTable]:
    tables = {site.key: site.weak_learner.table for site in sites(net) if site.weak_learner}
    if not tables:
        raise GrowthError("no candidates are attached: call attach_candidates first.")
    return tables


def _observer(
    key: str, passed: list[tuple[str, Tensor, list[Tensor]]]
) -> Callable[[Candidates, Any, Tensor], None]:
    """Return a forward hook that keeps x_k + sf(x_c), whose gradient is g, and every û."""

    def observe(module: Candidates, arguments: Any, x_k: Tensor) -> None:
        with torch.no_grad():
            passed.append((key, x_k, [op(z) for op, z in module.ops_with_inputs(arguments[1])]))

    return observe


def _no_products(table: AlphaTable) -> Products:
    count = len(table.shortcuts)
    zeros = torch.zeros(count + 1, count, dtype=torch.float64)
    return Products(zeros[0], zeros[1:])
