"""Ablations: searches that differ in one setting, repeated, as tables beside the paper's."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {"Ablations": "settings", "ablate": "work"}

__all__ = ["Ablations", "ablate"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


if TYPE_CHECKING:
    from nni_petridish.ablations.settings import Ablations
    from nni_petridish.ablations.work import ablate
