"""The places of old channels in a wider network of the vision space.

A factorized reduce concatenates two halves, each of which gets wider. So the old channels of every
layer are in two blocks: the first half at the beginning, the second half at that of the new second
half. All other modules work with any order of channels, as long as it is the same everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nni_petridish.core.widen import first_channels


def place_channels(name: str, module: nn.Module, inputs: bool, old: int, new: int) -> Tensor:
    """Return the place of every old channel of a module; see `nni_petridish.core.widen.Placing`."""
    leaf = name.rpartition(".")[2]
    is_color, is_class = name == "stem.0" and inputs, name == "classifier" and not inputs
    if is_color or is_class or (leaf in ("even", "odd") and not inputs):
        return first_channels(old, new)
    if name.endswith("merge.conv") and inputs:
        assert isinstance(module, nn.Conv2d)
        shortcuts = module.in_channels // module.out_channels
        before, after = old // shortcuts, new // shortcuts
        return torch.cat([i * after + in_halves(before, after) for i in range(shortcuts)])
    return in_halves(old, new)


def in_halves(old: int, new: int) -> Tensor:
    """Return the places of channels whose halves both stay first in their halves."""
    first = first_channels(old // 2, new // 2)
    second = first_channels(old - old // 2, new - new // 2)
    return torch.cat([first, new // 2 + second])
