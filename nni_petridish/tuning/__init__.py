"""Optuna over λ and I_max: one trial is one whole search."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {"Section": "section", "Tuning": "settings", "tune": "study"}

__all__ = ["Section", "Tuning", "tune"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


if TYPE_CHECKING:
    from nni_petridish.tuning.section import Section
    from nni_petridish.tuning.settings import Tuning
    from nni_petridish.tuning.study import tune
