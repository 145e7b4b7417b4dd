"""The device that a recipe names."""

from __future__ import annotations

import torch

from nni_petridish.errors import ConfigError


def resolve_device(name: str) -> torch.device:
    """Return the device of a name: ``cpu``, ``cuda``, or ``auto`` (cuda if there is one).

    `ConfigError` is raised if this machine has none such.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device must be available on this machine but got 'cuda'.")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)
