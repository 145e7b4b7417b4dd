"""Wrappers of a network that grows: compiled networks, and DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nni_petridish.errors import GrowthError


def inside(net: nn.Module) -> nn.Module:
    """Return the network inside of a compiled one; any other network is returned as it is."""
    original = getattr(net, "_orig_mod", None)
    return original if isinstance(original, nn.Module) else net


def check_next_wrapper(net: nn.Module) -> None:
    """Make the next forward pass refuse a DistributedDataParallel made before the last change.

    Such a wrapper would leave the gradients of new parameters as they are in each process, and the
    processes would drift apart without a word. Nothing is done outside of a process group.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return

    def check(module: nn.Module, inputs: Any) -> None:
        wrapper = DistributedDataParallel._active_ddp_module
        if wrapper is not None and not _is_up_to_date(wrapper):
            raise GrowthError(
                "the network changed since DistributedDataParallel was made: wrap it anew after"
                " attach, finalize and detach."
            )
        handle.remove()

    handle = net.register_forward_pre_hook(check)


def _is_up_to_date(wrapper: DistributedDataParallel) -> bool:
    ignored = wrapper.parameters_to_ignore
    named = wrapper.module.named_parameters()
    present = {id(parameter) for name, parameter in named if name not in ignored}
    return present == {id(parameter) for parameter in wrapper._module_parameters}
