"""Image classifiers in a form that leaves the package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nni_petridish.errors import ConfigError
from nni_petridish.tasks.plain_network import PlainNetwork, uniform
from nni_petridish.tasks.vision.inference import DEFAULT_RANGE, UNKNOWN_NORMALIZATION


def image_classifier(
    net: nn.Module,
    space: Mapping[str, Any],
    facts: Mapping[str, Any],
    pixels: bool,
) -> PlainNetwork:
    """Return a network that takes normalized images, or pixels.

    Parameters
    ----------
    net
        The network, in eval mode.
    space
        All options of its space.
    facts
        The facts of its `SavedModel`.
    pixels
        Whether it takes raw pixels and normalizes them itself.
    """
    shape, scale, name = space["image_shape"], 1.0, "input"
    if pixels:
        statistics = facts.get("normalisation")
        if statistics is None:
            raise ConfigError(f"{UNKNOWN_NORMALIZATION} Export for normalized images instead.")
        net = _Normalized(net, statistics).eval()
        scale, name = float((facts.get("pixel_range") or DEFAULT_RANGE)[1]), "pixels"

    def images(batch: int) -> tuple[Tensor, ...]:
        return (scale * uniform(batch, *shape),)

    return PlainNetwork(net, net, images, (name,), ("logits",))


class _Normalized(nn.Module):
    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module, statistics: Mapping[str, Any]) -> None:
        super().__init__()
        for name in ("mean", "std"):
            value = torch.tensor(statistics[name], dtype=torch.float32)
            self.register_buffer(name, value.view(1, -1, 1, 1))
        self.net = net

    def forward(self, pixels: Tensor) -> Tensor:
        result: Tensor = self.net((pixels - self.mean) / self.std)
        return result
