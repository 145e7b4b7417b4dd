"""Language models in a form that leaves the package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nni_petridish.tasks.plain_network import PlainNetwork, uniform


def language_model(net: Any, space: Mapping[str, Any]) -> PlainNetwork:
    """Return a network that takes one word at a time and its state, so that a text has any length.

    Parameters
    ----------
    net
        The network, in eval mode.
    space
        All options of its space.
    """

    def reference(word: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        logits, new = net(word[None], state)
        return logits[0], new

    def inputs(batch: int) -> tuple[Tensor, ...]:
        words = (uniform(batch) * space["vocabulary"]).to(torch.int64)
        return words, uniform(batch, space["hidden"]) - 0.5

    step = _OneWord(net).eval()
    return PlainNetwork(step, reference, inputs, ("word", "state"), ("logits", "new_state"))


class _OneWord(nn.Module):
    """One step of the cell in plain operations; training's fused kernel does not export."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, word: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        cell = self.net.cell
        input_weight, weight_0 = cell.weight.split([cell.embedding, cell.hidden])
        projected = nn.functional.embedding(word, self.net.embedding)[None] @ input_weight
        new = cell._step_by_step(projected, state, None, weight_0)[0]
        return self.net.decode(new), new
