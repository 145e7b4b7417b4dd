"""Momenta that outlive an optimizer: those of old parameters, kept when a network grows.

Attaching and finalizing add parameters, so each phase of a growth has an optimizer of its own. A
parameter may carry the momentum that its buffer in the next optimizer starts with. New parameters
carry none and start at rest, which is the same as a first step without momentum.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

_NAME = "start_momentum"


def start_with(net: nn.Module, momenta: Mapping[str, Tensor]) -> None:
    """Let the parameters of a network start with these momenta, by name; others start at rest."""
    for name, parameter in net.named_parameters():
        if name in momenta and momenta[name].shape == parameter.shape:
            setattr(parameter, _NAME, momenta[name])


def carried(net: nn.Module) -> dict[str, Tensor]:
    """Return the momenta that the parameters of a network carry, by name."""
    return {
        name: getattr(parameter, _NAME)
        for name, parameter in net.named_parameters()
        if hasattr(parameter, _NAME)
    }


def start_of(parameter: nn.Parameter) -> Tensor:
    """Return the buffer that an optimizer starts with: the momentum that is carried, or 0.

    It is handed out once: a training after this one starts at rest unless it is told otherwise.
    """
    momentum: Tensor | None = getattr(parameter, _NAME, None)
    if momentum is None:
        return torch.zeros_like(parameter)
    delattr(parameter, _NAME)
    return torch.zeros_like(parameter).copy_(momentum)
