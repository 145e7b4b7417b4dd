"""Candidates on held-out batches: g = ∇_{x_k} L at every site, every û, and their products."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nni_petridish.core.alpha_table import AlphaTable
from nni_petridish.core.grow import sites
from nni_petridish.core.modes import evaluation_mode
from nni_petridish.core.site import Site
from nni_petridish.core.weak_learner import Candidates
from nni_petridish.errors import GrowthError

Losses = Callable[[nn.Module], Iterable[Tensor]]
"""A function that returns parts of the loss, one for each batch, with L as their sum."""


@dataclass(frozen=True)
class Observation:
    """One site on one batch.

    Parameters
    ----------
    site
        The site.
    x_k
        Its layer.
    g
        ∇_{x_k} L of the batch.
    candidates
        û of every candidate, in the order of the α table.
    """

    site: Site
    x_k: Tensor
    g: Tensor
    candidates: Sequence[Tensor]


def observe(net: nn.Module, losses: Losses, visit: Callable[[Observation], object]) -> None:
    """Call ``visit`` for every site on every held-out batch, in evaluation mode.

    Parameters
    ----------
    net
        A network with candidates attached, in isolated weak learning. It does not change.
    losses
        Returns parts of the loss on held-out batches.
    visit
        Takes an observation; its tensors are not part of any graph.
    """
    passed: list[tuple[Site, Tensor, list[Tensor]]] = []
    handles = [
        site.weak_learner.register_forward_hook(_observer(site, passed))
        for site in sites(net)
        if site.weak_learner is not None
    ]
    try:
        with evaluation_mode(net):
            for loss in losses(net):
                outputs = [x_k for _, x_k, _ in passed]
                # Unused: outputs of a batch whose loss comes later.
                gradients = torch.autograd.grad(loss, outputs, allow_unused=True)
                for (site, x_k, candidates), g in zip(passed, gradients, strict=True):
                    if g is not None:
                        visit(Observation(site, x_k.detach(), g, candidates))
                passed[:] = [one for one, g in zip(passed, gradients, strict=True) if g is None]
    finally:
        for handle in handles:
            handle.remove()


def _observer(
    site: Site, passed: list[tuple[Site, Tensor, list[Tensor]]]
) -> Callable[[Candidates, Any, Tensor], None]:
    """Return a forward hook that keeps x_k + sf(x_c), whose gradient is g, and every û."""

    def keep(module: Candidates, arguments: Any, x_k: Tensor) -> None:
        with torch.no_grad():
            passed.append((site, x_k, [op(z) for op, z in module.ops_with_inputs(arguments[1])]))

    return keep


def alpha_tables_of(net: nn.Module) -> dict[str, AlphaTable]:
    """Return the α tables of attached candidates by key; raise `GrowthError` if there are none."""
    tables = {site.key: site.weak_learner.table for site in sites(net) if site.weak_learner}
    if not tables:
        raise GrowthError("no candidates are attached: call attach_candidates first.")
    return tables


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
    """Return the inner products of all α tables on held-out batches; see `observe`."""
    products = {key: no_products(table) for key, table in alpha_tables_of(net).items()}
    observe(net, losses, lambda seen: products[seen.site.key].add(seen.g, seen.candidates))
    for key, found in products.items():
        if not found.norms.any():
            raise GrowthError(
                f"the gain of {key!r} is unknown: its candidates do not run in evaluation, or there"
                " are no held-out batches."
            )
    return products


def no_products(table: AlphaTable) -> Products:
    """Return inner products that are all 0, to add to."""
    count = len(table.shortcuts)
    zeros = torch.zeros(count + 1, count, dtype=torch.float64)
    return Products(zeros[0], zeros[1:])
