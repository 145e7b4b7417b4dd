"""The operations on vectors, normalized at their end like those on images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


def make_vector_op(name: str, width: int) -> nn.Module:
    """Make norm(f(Wz + b)) for the activation f of this name, or norm(z) for the identity."""
    norm = nn.BatchNorm1d(width, affine=False)
    if name == "identity":
        return norm
    return nn.Sequential(nn.Linear(width, width), _ACTIVATIONS[name](), norm)


def project_vector(width_in: int, width_out: int) -> nn.Sequential:
    """Make a linear layer and batch norm that bring an input to the width of a site."""
    return nn.Sequential(nn.Linear(width_in, width_out, bias=False), nn.BatchNorm1d(width_out))


class ConcatProjectVector(nn.Module):
    """op_merge = proj(concat(...)), proj being a linear layer and a batch norm.

    Parameters
    ----------
    width
        The width of x_k and of each shortcut.
    n
        The number of shortcuts.
    weights
        If given, proj starts as the sum with these weights.

    Attributes
    ----------
    norm_type
        Makes the norm for a width. A subclass can set another one.
    """

    norm_type: ClassVar[type[nn.BatchNorm1d | nn.LayerNorm]] = nn.BatchNorm1d

    def __init__(self, width: int, n: int, weights: Sequence[float] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(n * width, width, bias=False)
        self.norm = self.norm_type(width)
        if weights is not None:
            blocks = torch.cat([weight * torch.eye(width) for weight in weights], dim=1)
            with torch.no_grad():
                self.linear.weight.copy_(blocks)

    def forward(self, shortcuts: Sequence[Tensor]) -> Tensor:
        """Return h."""
        return self.norm(self.linear(torch.cat(list(shortcuts), dim=-1)))
