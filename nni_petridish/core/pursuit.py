"""Selection of candidates that do not repeat each other, as in linear regression.

Candidates that compute nearly the same all have a large |α| or a large gain of their own, though
one of them would do. To first order, adding Σ w_i·û_i to x_k lowers the loss like the least-squares
problem min_w ‖−g − Σ w_i·û_i‖² does, with g = ∇_{x_k} L. Its Gram matrix G_ij = ⟨û_i, û_j⟩ and
its correlations b_i = ⟨−g, û_i⟩ are all that the methods of feature selection need: forward
regression, orthogonal matching pursuit, least-angle regression and the lasso.

>>> gram = torch.tensor([[1.0, 0.9, 0.0], [0.9, 1.0, 0.0], [0.0, 0.0, 1.0]])
>>> correlations = torch.tensor([2.0, 1.9, 1.0])  # the second repeats the first
>>> selection_order(gram, correlations, "omp")
[0, 2, 1]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nni_petridish.errors import ConfigError

_COLLINEAR = 1e-6
"""Share of a candidate's square norm that selected ones must leave for it to count as another."""


def selection_order(gram: Tensor, correlations: Tensor, method: str) -> list[int]:
    """Return the candidates in the order in which a method selects them.

    Candidates that are 0, or that selected ones repeat exactly, come last.

    Parameters
    ----------
    gram
        G, shape (n, n). The scale of a candidate does not matter: G is normalized first.
    correlations
        b, shape (n,).
    method
        ``"forward"`` takes the candidate with the largest least-squares decrease given the selected
        ones, ``"omp"`` the one with the largest correlation with what they leave. ``"lars"`` and
        ``"lasso"`` follow scikit-learn's paths: the order in which candidates enter.
    """
    if method not in METHODS:
        raise ConfigError(f"method must be one of {', '.join(METHODS)} but got {method!r}.")
    scale = gram.double().diagonal().clamp_min(0).sqrt()
    scale = torch.where(scale > 0, scale.reciprocal(), torch.zeros_like(scale))
    normalized = scale[:, None] * gram.double() * scale
    order = METHODS[method](normalized, correlations.double() * scale)
    known = set(order)
    return order + [i for i in range(len(correlations)) if i not in known]


def explained(gram: Tensor, correlations: Tensor, chosen: Sequence[int]) -> float:
    """Return what the chosen candidates remove of ‖g‖² by least squares: b_Sᵀ·G_SS⁻¹·b_S."""
    weights = _fit(gram, correlations, chosen)
    return float(weights @ correlations.double()[list(chosen)])


def held_out_decreases(
    fitted: tuple[Tensor, Tensor], held_out: tuple[Tensor, Tensor], order: Sequence[int]
) -> list[float]:
    """Return the decrease of ‖g‖² on held-out data by the first 1, 2, ... candidates of an order.

    The weights are fitted on one part of the data; on the other the decrease is 2wᵀb − wᵀGw. It
    rises as long as another candidate helps, and it is negative where none does: the number of
    candidates to keep is where it is largest.

    Parameters
    ----------
    fitted, held_out
        (G, b) of the two parts.
    order
        The candidates, in the order in which they would be added.
    """
    gram, correlations = (part.double() for part in held_out)
    decreases = []
    for count in range(1, len(order) + 1):
        chosen = list(order[:count])
        w = _fit(*fitted, chosen)
        decreases.append(float(2 * w @ correlations[chosen] - w @ gram[chosen][:, chosen] @ w))
    return decreases


def _fit(gram: Tensor, correlations: Tensor, chosen: Sequence[int]) -> Tensor:
    """Return the least-squares weights of some candidates; the smallest ones if several fit."""
    rows = list(chosen)
    return torch.linalg.lstsq(
        gram.double()[rows][:, rows], correlations.double()[rows, None], driver="gelsd"
    ).solution[:, 0]


def _greedy(gram: Tensor, correlations: Tensor, by_decrease: bool) -> list[int]:
    """Select one candidate after the other, and project the others off it (Gram-Schmidt)."""
    gram, left = gram.clone(), correlations.clone()
    own = gram.diagonal().clone()
    chosen: list[int] = []
    for _ in range(len(left)):
        rest = gram.diagonal()
        is_new = rest > _COLLINEAR * own.clamp_min(_COLLINEAR)
        is_new[chosen] = False
        if not is_new.any():
            break
        merit = left.square() / rest.clamp_min(_COLLINEAR) if by_decrease else left.abs()
        best = int(torch.where(is_new, merit, -torch.ones_like(merit)).argmax())
        row = gram[best] / gram[best, best]
        left = left - row * left[best]
        gram = gram - torch.outer(row, gram[best])
        chosen.append(best)
    return chosen


def _forward(gram: Tensor, correlations: Tensor) -> list[int]:
    return _greedy(gram, correlations, by_decrease=True)


def _omp(gram: Tensor, correlations: Tensor) -> list[int]:
    return _greedy(gram, correlations, by_decrease=False)


def _lars(gram: Tensor, correlations: Tensor) -> list[int]:
    return _path(gram, correlations, "lar")


def _lasso(gram: Tensor, correlations: Tensor) -> list[int]:
    return _path(gram, correlations, "lasso")


def _path(gram: Tensor, correlations: Tensor, method: str) -> list[int]:
    """Return the order in which candidates enter a path of scikit-learn."""
    from sklearn.linear_model import lars_path_gram

    _, _, coefficients = lars_path_gram(
        correlations.numpy(), gram.numpy(), n_samples=1, method=method, return_path=True
    )
    entered = [(row != 0).argmax() if (row != 0).any() else None for row in coefficients]
    found = [(int(step), i) for i, step in enumerate(entered) if step is not None]
    return [i for _, i in sorted(found)]


METHODS: dict[str, Callable[[Tensor, Tensor], list[int]]] = {
    "forward": _forward,
    "omp": _omp,
    "lars": _lars,
    "lasso": _lasso,
}
"""The methods by name; each takes a normalized G and b."""
