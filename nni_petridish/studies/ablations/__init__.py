"""Ablations: searches that differ in one setting, repeated, as tables beside the paper's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nni_petridish._support.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, {"Ablations": ".settings", "ablate": ".work"})

if TYPE_CHECKING:
    from nni_petridish.studies.ablations.settings import Ablations
    from nni_petridish.studies.ablations.work import ablate
