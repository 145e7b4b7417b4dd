"""Image classifiers in a form that leaves the package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nni_petridish.errors import ConfigError
from nni_petridish.tasks.plain_network import PlainNetwork, uniform


def image_classifier(
    net: nn.Module,
    space: Mapping[str, Any],
    normalization: Mapping[str, Any] | None,
    pixels: bool,
) -> PlainNetwork:
    """Return a network that takes normalized images, or pixels.

    Parameters
    ----------
    net
        The network, in eval mode.
    space
        All options of its space.
    normalization
        Mean and standard deviation of each channel, in pixels; None if they are unknown.
    pixels
        Whether it takes pixels from 0 to 255 and normalizes them itself.
    """
    if pixels:
        if normalization is None:
            raise ConfigError(
                "The normalization of the images is unknown: the data are not at hand."
            )
        net = _Normalized(net, normalization).eval()
    shape, scale = space["image_shape"], 255.0 if pixels else 1.0

    def images(batch: int) -> tuple[Tensor, ...]:
        return (scale * uniform(batch, *shape),)

    return PlainNetwork(net, net, images, ("input",), ("logits",))


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
