"""Zero-cost scores of a network with fresh weights, from one batch; the larger the better.

SNIP (Lee et al. 2019), GraSP (Wang et al. 2020), SynFlow (Tanaka et al. 2020), jacob_cov and NWOT
(Mellor et al. 2021), as used for architecture search by Abdelfattah et al. 2021. A network may
change; score a copy if it is needed again.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nni_petridish.kernels.switch import plain_ops

_WEIGHTED = (nn.Conv2d, nn.Linear)
_RECTIFIERS = (torch.ops.aten.relu.default, torch.ops.aten.relu_.default)


def snip(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return Σ|w·∂L/∂w| over the weights of convolutions and linear layers."""
    weights = _weights(net)
    loss = F.cross_entropy(net.train()(images), labels)
    gradients = torch.autograd.grad(loss, weights)
    return float(_dot([w.detach().abs() for w in weights], [g.abs() for g in gradients]))


def grasp(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return −Σ w·(H g): how much removing weights would raise the flow of gradients."""
    weights = _weights(net)
    with plain_ops():  # fast kernels have no second derivative
        loss = F.cross_entropy(net.train()(images), labels)
        gradients = torch.autograd.grad(loss, weights, create_graph=True)
        flow = _dot([g.detach() for g in gradients], gradients)
        curvature = torch.autograd.grad(flow, weights, allow_unused=True)
    products = [
        torch.zeros(()) if h is None else (w.detach() * h).sum()
        for w, h in zip(weights, curvature, strict=True)
    ]
    return -float(torch.stack(products).sum())


def synflow(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return Σ|w|·∂R/∂|w| with R the sum of outputs for an image of ones; no data is used.

    In evaluation mode fresh batch norms are the identity. The result spans orders of magnitude, so
    double precision is needed; its order is what counts.
    """
    net = net.double().eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.abs_()
    weights = _weights(net)
    output = net(torch.ones_like(images[:1], dtype=torch.float64)).sum()
    gradients = torch.autograd.grad(output, weights)
    result = float(_dot([w.detach() for w in weights], gradients))
    net.float()
    return result


def jacov(net: nn.Module, images: Tensor, labels: Tensor | None = None) -> float:
    """Return how little the input gradients of different images are correlated."""
    inputs = images.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(net.train()(inputs).sum(), inputs)
    correlations = torch.corrcoef(gradient.flatten(1).double())
    values = torch.linalg.eigvalsh(torch.nan_to_num(correlations)) + 1e-5
    values = values.clamp(min=1e-12)
    return -float((values.log() + 1 / values).sum())


def nwot(net: nn.Module, images: Tensor, labels: Tensor | None = None) -> float:
    """Return log|det K| of the kernel of common ReLU patterns of the images."""
    with torch.no_grad(), plain_ops(), _RectifierKernel(len(images)) as observer:
        net.train()(images)
    return float(torch.linalg.slogdet(observer.kernel).logabsdet)


class _RectifierKernel(TorchDispatchMode):
    """Sums, over all ReLUs that run, the number of units in which each two images agree.

    It sees the ops, not the modules: a network may call the function.
    """

    def __init__(self, images: int) -> None:
        super().__init__()
        self.kernel = torch.zeros(images, images, dtype=torch.float64)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in _RECTIFIERS and len(output) == len(self.kernel):
            on = (output > 0).flatten(1).float()
            self.kernel.add_((on @ on.T + (1 - on) @ (1 - on).T).double())
        return output


def _weights(net: nn.Module) -> list[Tensor]:
    return [module.weight for module in net.modules() if isinstance(module, _WEIGHTED)]


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    products = [(a * b).sum() for a, b in zip(left, right, strict=True)]
    return functools.reduce(operator.add, products)
