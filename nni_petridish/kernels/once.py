"""Backward passes that cannot be differentiated again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_MESSAGE = (
    b"the fast kernels of nni_petridish can be differentiated once only: use"
    b" nni_petridish.kernels.switch.plain_ops() around the forward pass for second derivatives."
)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a second derivative an error, like torch's decorator, that says what to do."""

    @functools.wraps(backward)
    def wrapper(ctx: Any, *gradients: Any) -> Any:
        with torch.no_grad():
            outputs = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return outputs
        if not any(isinstance(g, Tensor) and g.requires_grad for g in gradients):
            return outputs
        listed = outputs if isinstance(outputs, tuple) else (outputs,)
        raise_later: Any = torch._C._functions.DelayedError(_MESSAGE, len(listed))
        marked = [
            one if one is None else one.detach().requires_grad_(one.is_floating_point())
            for one in listed
        ]
        return raise_later(*marked)

    return wrapper
