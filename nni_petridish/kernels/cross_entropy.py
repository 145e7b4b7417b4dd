"""Cross-entropy over a large vocabulary, without all logits in memory at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nni_petridish.kernels.once import once_differentiable
from nni_petridish.kernels.products import product

#: Rows per block: logits of shape (256, 10,000) fit into a processor's cache.
_ROWS = 256


def linear_cross_entropy(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """Return ``cross_entropy(linear(x, weight, bias), targets)``, the mean over rows.

    The gradient is computed together with the loss, block by block, while the logits of a block are
    in the cache. With 10,000 words this is nearly twice as fast on a CPU.

    Parameters
    ----------
    x
        Input of the linear layer, shape (rows, width).
    weight, bias
        Parameters of the linear layer, shapes (words, width) and (words,).
    targets
        Word indices, shape (rows,).
    """
    if torch.is_grad_enabled():
        result: Tensor = _LinearCrossEntropy.apply(x, weight, bias, targets)
        return result
    total = x.new_zeros(())
    for rows, own in zip(x.split(_ROWS), targets.split(_ROWS), strict=True):
        total += _nll(product(rows, weight.t()).add_(bias), own)[0]
    return total / len(x)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
        n = len(x)
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
        grad_bias, total = torch.zeros_like(bias), x.new_zeros(())
        parts = zip(x.split(_ROWS), targets.split(_ROWS), grad_x.split(_ROWS), strict=True)
        for rows, own, grad_rows in parts:
            loss, probability = _nll(product(rows, weight.t()).add_(bias), own)
            total += loss
            # ∂/∂logits = (softmax − one-hot) / n
            probability[torch.arange(len(own), device=own.device), own] -= 1
            probability /= n
            grad_rows.copy_(product(probability, weight))
            grad_weight += product(probability.t(), rows)
            grad_bias += probability.sum(0)
        ctx.save_for_backward(grad_x, grad_weight, grad_bias)
        return total / n

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*(grad * saved for saved in ctx.saved_tensors), None)


def _nll(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ −log p(target) and the softmax, which overwrites the logits."""
    logits -= logits.amax(1, keepdim=True)
    own = logits.gather(1, targets.unsqueeze(1)).sum()
    norm = logits.exp_().sum(1, keepdim=True)
    return norm.log().sum() - own, logits.div_(norm)
