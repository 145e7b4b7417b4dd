"""Widening that preserves a network's predictions and gives every new weight a way to learn.

A layer y = W·x gets new inputs z and new outputs v:

    (y)   (W  0)   (x)
    (v) = (V  U) · (z)

with V and U as a fresh layer has them. The old outputs do not read the new channels, so every
prediction is that of the narrow network, in evaluation and in training: batch norms and depthwise
convolutions act on each channel alone. The zero block gets the gradient g·zᵀ in the first step,
since z is not zero; from the second step on V and U get theirs. Copies of channels (Net2Net) would
get equal gradients, and would need noise to become different.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from nni_petridish.core.momentum import carried, start_with
from nni_petridish.errors import GrowthError


class Places(NamedTuple):
    """The places of old channels in a tensor of the wide network; None where it is as it was.

    Parameters
    ----------
    outputs
        Index of each old row: outputs of a layer, or channels.
    inputs
        Index of each old column: inputs of a layer.
    """

    outputs: Tensor | None
    inputs: Tensor | None


Placing = Callable[[str, nn.Module, bool, int, int], Tensor]
"""A function of a module of the wide network and its name, whether its inputs are asked for, and
the old and new numbers of channels; it returns the place of every old channel."""


def first_channels(old: int, new: int) -> Tensor:
    """Return the places of old channels that stay the first ones."""
    if new < old:
        raise GrowthError(f"a wider layer must have at least {old} channels but got {new}.")
    return torch.arange(old)


def find_places(narrow: nn.Module, wide: nn.Module, place: Placing) -> dict[str, Places]:
    """Return the places of all parameters and buffers of a network in a wider one, by name.

    Parameters
    ----------
    narrow, wide
        Two networks of the same modules: convolutions, linear layers, batch norms, and modules
        whose own parameters do not depend on the width.
    place
        Tells the places of channels.
    """
    found: dict[str, Places] = {}
    for name, module in wide.named_modules():
        twin = narrow.get_submodule(name)
        own = chain(twin.named_parameters(recurse=False), twin.named_buffers(recurse=False))
        for leaf, tensor in own:
            other = getattr(module, leaf)
            rows = columns = None
            if other.ndim and isinstance(module, nn.Conv2d | nn.Linear | _BatchNorm):
                rows = place(name, module, False, tensor.shape[0], other.shape[0])
                if other.ndim > 1 and tensor.shape[1] != 1:  # 1: a depthwise convolution
                    columns = place(name, module, True, tensor.shape[1], other.shape[1])
            elif other.shape != tensor.shape:
                raise GrowthError(f"{name}.{leaf} of {type(module).__name__} cannot be widened.")
            found[f"{name}.{leaf}" if name else leaf] = Places(rows, columns)
    return found


@torch.no_grad()
def embed(narrow: Tensor, wide: Tensor, places: Places) -> None:
    """Write a tensor into a wider one; what is new for old outputs becomes 0."""
    narrow = narrow.to(wide.device)
    if places.outputs is None:
        wide.copy_(narrow)
        return
    if places.inputs is None:
        wide[places.outputs] = narrow
        return
    rows = torch.zeros_like(wide[places.outputs])
    rows[:, places.inputs] = narrow
    wide[places.outputs] = rows


def widen_into(wide: nn.Module, narrow: nn.Module, places: Mapping[str, Places]) -> None:
    """Give a wide network the weights and statistics of a narrow one, so that it predicts the same.

    Momenta that the narrow network carries (`nni_petridish.core.momentum`) are kept.

    Parameters
    ----------
    wide
        The network with fresh weights.
    narrow
        The trained network.
    places
        The result of `find_places`.
    """
    own, momenta = wide.state_dict(), {}
    for name, tensor in narrow.state_dict().items():
        embed(tensor, own[name], places[name])
    for name, momentum in carried(narrow).items():
        momenta[name] = torch.zeros_like(own[name])
        embed(momentum, momenta[name], places[name])
    start_with(wide, momenta)
