"""Networks in a form that leaves the package: plain operations, any batch size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Runner = Callable[..., Any]
"""Runs an exported network: tensors in, one tensor or several out."""


@dataclass(frozen=True)
class PlainNetwork:
    """A network to export, and its inputs.

    Parameters
    ----------
    net
        The network, in eval mode. The first dimension of all its inputs is the batch.
    reference
        The model's own network, called the same way, to compare with.
    inputs
        Makes inputs for a batch of the given size.
    input_names, output_names
        Names of the inputs and outputs in an ONNX file.
    """

    net: nn.Module
    reference: Runner
    inputs: Callable[[int], tuple[Tensor, ...]]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]

    def dynamic_shapes(self) -> tuple[dict[int, Any], ...]:
        """Return the dimensions of the inputs that may have any size: the batch."""
        batch = torch.export.Dim("batch", min=1, max=65536)
        return tuple({0: batch} for _ in self.input_names)

    def distance(self, run: Runner) -> float:
        """Return the largest difference between ``run`` and the model, for another batch size."""
        inputs = self.inputs(3)
        with torch.no_grad():
            pairs = zip(_listed(run(*inputs)), _listed(self.reference(*inputs)), strict=True)
            return max(float((a - b).abs().max()) for a, b in pairs)


def uniform(*shape: int) -> Tensor:
    """Return random numbers from 0 to 1, the same in each call."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def _listed(outputs: Any) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]
