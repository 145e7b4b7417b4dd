"""Scores that know what the network could do without a candidate.

A candidate û is worth what it removes of the residual −g (g = ∇_{x_k} L) beyond what the site's own
features remove: part of g would vanish if only the layers that are there were trained on. With H,
the channels of x_k at every pixel and a constant, the best readout H·W of −g is least squares; what
it leaves is −g⊥, and û⊥ is what H leaves of û.

The network that is trained after a growth does not keep û as it is: the merge is a 1x1 convolution
that mixes its channels. The mixture scores allow for that. They ask what the best mixture û·W
removes, not û itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nni_petridish.core.held_out import Losses, Observation, alpha_tables_of, observe

_RIDGE = 1e-3
"""Share of a Gram matrix's mean diagonal that is added to it: few images have many channels."""


@dataclass
class Regression:
    """Sums for the least-squares problem min_W ‖Y − X·W‖², over rows that come in batches.

    Parameters
    ----------
    gram
        XᵀX.
    target
        XᵀY.
    """

    gram: Tensor
    target: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> Regression:
        """Return the sums of one batch."""
        return cls((x.T @ x).double(), (x.T @ y).double())

    def __add__(self, other: Regression) -> Regression:
        return Regression(self.gram + other.gram, self.target + other.target)

    def solve(self, right: Tensor) -> Tensor:
        """Return (XᵀX + εI)⁻¹ · right."""
        size = len(self.gram)
        ridge = _RIDGE * self.gram.diagonal().mean() + torch.finfo(torch.float64).tiny
        return torch.linalg.solve(self.gram + ridge * torch.eye(size, dtype=torch.float64), right)

    def explained(self) -> float:
        """Return what the best W removes of ‖Y‖²: tr(YᵀX·(XᵀX + εI)⁻¹·XᵀY)."""
        return float((self.target * self.solve(self.target)).sum())


@dataclass
class Readout:
    """The regressions of a candidate at one site.

    Parameters
    ----------
    own
        Of −g and û (side by side) on H, the site's own features.
    candidate
        Of −g on the channels of û.
    inner
        ⟨−g, û⟩.
    """

    own: Regression
    candidate: Regression
    inner: float

    @classmethod
    def of(cls, own: Tensor, negative: Tensor, u: Tensor) -> Readout:
        """Return the regressions of one batch."""
        return cls(
            Regression.of(own, torch.cat([negative, u], 1)),
            Regression.of(u, negative),
            float((negative * u).sum()),
        )

    def __add__(self, other: Readout) -> Readout:
        return Readout(
            self.own + other.own, self.candidate + other.candidate, self.inner + other.inner
        )

    def residual(self) -> tuple[Regression, float]:
        """Return the regression of −g⊥ on the channels of û⊥, and ⟨−g⊥, û⊥⟩."""
        width = self.own.target.shape[1] - len(self.candidate.gram)
        of_g, of_u = self.own.target[:, :width], self.own.target[:, width:]
        fitted = self.own.solve(of_u)
        left = Regression(
            self.candidate.gram - of_u.T @ fitted, self.candidate.target - fitted.T @ of_g
        )
        return left, self.inner - float((fitted * of_g).sum())


def readouts(net: nn.Module, losses: Losses) -> dict[str, list[list[Readout]]]:
    """Return the regressions of every candidate at each of its sites, by key of the α table."""
    found: dict[int, tuple[str, list[Readout]]] = {}

    def visit(seen: Observation) -> None:
        features, negative = _rows(seen.x_k), -_rows(seen.g)
        own = torch.cat([features, torch.ones_like(features[:, :1])], 1)
        batch = [Readout.of(own, negative, _rows(u)) for u in seen.candidates]
        before = found.get(id(seen.site))
        if before is not None:
            batch = [old + new for old, new in zip(before[1], batch, strict=True)]
        found[id(seen.site)] = seen.site.key, batch

    observe(net, losses, visit)
    tables = alpha_tables_of(net)
    return {
        key: [[one[i] for of, one in found.values() if of == key] for i in range(len(t.shortcuts))]
        for key, t in tables.items()
    }


def _rows(value: Tensor) -> Tensor:
    """Return a tensor with one row for each pixel (or token, or example), one column a channel."""
    value = value.detach()
    return (value.movedim(1, -1) if value.dim() == 4 else value).flatten(0, -2).to("cpu")


def residual_gain(sites: list[Readout]) -> float:
    """Return ⟨−g⊥, û⊥⟩² / ⟨û⊥, û⊥⟩: the gain beyond what the site's own features remove."""
    parts = [site.residual() for site in sites]
    norm = sum(float(left.gram.diagonal().sum()) for left, _ in parts)
    return float(sum(inner for _, inner in parts) ** 2 / norm) if norm > 0 else 0.0


def mixture_gain(sites: list[Readout]) -> float:
    """Return what the best mixture of a candidate's channels removes of ‖g‖²."""
    return sum(site.candidate.explained() for site in sites)


def residual_mixture_gain(sites: list[Readout]) -> float:
    """Return what the best mixture removes beyond the best readout of the site's own features."""
    return sum(site.residual()[0].explained() for site in sites)


READOUT_SCORES: dict[str, Callable[[list[Readout]], float]] = {
    "residual_gain": residual_gain,
    "mixture_gain": mixture_gain,
    "residual_mixture_gain": residual_mixture_gain,
}
"""Scores of a candidate, from its regressions at each of its sites."""
