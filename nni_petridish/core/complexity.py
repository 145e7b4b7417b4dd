"""The size of a network: parameters and multiply-adds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nni_petridish.core.grow import candidate_parameters
from nni_petridish.core.modes import evaluation_mode
from nni_petridish.errors import ConfigError
from nni_petridish.kernels.switch import plain_ops

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


_AUXILIARY = "auxiliary"
"""Name of the submodule that is a second classifier, used in training only."""


def count_parameters(net: nn.Module) -> int:
    """Count the parameters of a network.

    Modules used in training only do not count: the auxiliary head and attached candidates.
    """
    # A runtime-checkable protocol does not see submodules from Python 3.12 on.
    auxiliary = dict(net.named_children()).get(_AUXILIARY)
    scaffold = candidate_parameters(net) + list(auxiliary.parameters() if auxiliary else [])
    left_out = {id(parameter) for parameter in scaffold}
    return sum(p.numel() for p in net.parameters() if id(p) not in left_out)


def _unfit(shape: Sequence[int], error: Exception) -> str:
    """Return a line that says why a network cannot take an input."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    hint = "; leave the batch dimension out" if len(shape) == 4 else ""
    return (
        f"image_shape must be the shape of one input, such as (channels, height, width), but got"
        f" {tuple(shape)}{hint}: {reason.rstrip('.')}."
    )


def count_multiply_adds(
    net: nn.Module,
    image_shape: Sequence[int],
    dtype: torch.dtype | None = None,
    *,
    candidates: bool = False,
) -> int:
    """Count the multiply-adds of convolutions and linear layers for one image.

    A conv costs ``C_in · C_out · k² · H · W / groups``; batch norm, pooling, activations and
    additions cost nothing. Candidates and the auxiliary head do not run at test time.

    Parameters
    ----------
    net
        The network. It runs once, in eval mode, and is not changed.
    image_shape
        The shape of one input without the batch dimension, such as (channels, height, width).
    dtype
        The type of the input. By default, that of the network's parameters.
    candidates
        Whether to count attached candidates too: the forward pass of a training step.

    Raises
    ------
    ConfigError
        If the network cannot take one input of this shape, as with a batch dimension in it.
    """
    parameter = next(net.parameters())
    image = torch.zeros((1, *image_shape), device=parameter.device, dtype=dtype or parameter.dtype)
    return count_for_inputs(net, [image], candidates=candidates)


def count_for_inputs(net: nn.Module, inputs: Sequence[Tensor], *, candidates: bool = False) -> int:
    """Count the multiply-adds of `count_multiply_adds` for given inputs of a network."""
    total = 0

    def count(module: nn.Module, inputs: Any, output: Tensor) -> None:
        nonlocal total
        if isinstance(module, _CONVS):
            taps = math.prod(module.kernel_size) * module.in_channels // module.groups
        else:
            assert isinstance(module, nn.Linear)
            taps = module.in_features
        total += taps * output.numel()

    counted = [m for m in net.modules() if isinstance(m, (*_CONVS, nn.Linear))]
    handles = [module.register_forward_hook(count) for module in counted]
    try:
        # Candidates are skipped where no gradient is needed, and fast kernels call no hooks.
        with evaluation_mode(net), plain_ops(), torch.set_grad_enabled(candidates):
            net(*inputs)
    except (RuntimeError, ValueError, IndexError) as error:
        raise ConfigError(_unfit(inputs[0].shape[1:], error)) from error
    finally:
        for handle in handles:
            handle.remove()
    return total
