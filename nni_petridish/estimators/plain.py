"""The network of an estimator in a form that leaves the package."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nni_petridish.estimators.data import Scaling
from nni_petridish.estimators.models import GrownModel
from nni_petridish.tasks.plain_network import PlainNetwork, uniform


class RawNetwork(nn.Module):
    """A network from raw inputs to probabilities, or to numbers in their own unit.

    Parameters
    ----------
    net
        The network for standardized inputs.
    scaling
        Mean and scale of inputs and targets.
    is_classifier
        Whether the outputs are logits.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, net: nn.Module, scaling: Scaling, is_classifier: bool) -> None:
        super().__init__()
        self.net, self.is_classifier = net, is_classifier
        self.register_buffer("mean", torch.tensor(scaling.mean, dtype=torch.float32))
        self.register_buffer("scale", torch.tensor(scaling.scale, dtype=torch.float32))
        self.target_mean, self.target_scale = scaling.target_mean, scaling.target_scale

    def forward(self, x: Tensor) -> Tensor:
        """Return probabilities (n, classes), or numbers (n,)."""
        outputs = self.net((x - self.mean) / self.scale)
        if self.is_classifier:
            return outputs.softmax(1)
        return outputs.flatten() * self.target_scale + self.target_mean


def plain_network(
    model: GrownModel, scaling: Scaling, shape: tuple[int, ...], is_classifier: bool
) -> PlainNetwork:
    """Return the network of a model for export; it takes raw inputs of this shape."""
    net = RawNetwork(model.build(), scaling, is_classifier).eval()
    mean, scale = (torch.tensor(a, dtype=torch.float32) for a in (scaling.mean, scaling.scale))

    def inputs(n: int) -> tuple[Tensor]:
        return (mean + scale * (4 * uniform(n, *shape) - 2),)

    output = "probabilities" if is_classifier else "prediction"
    return PlainNetwork(net, net, inputs, ("input",), (output,))
