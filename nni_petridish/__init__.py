"""Petridish, efficient forward architecture search, for people who use NNI.

The names below load what they need on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "AlphaTable": "weak_learner",
    "ConfigError": "errors",
    "DataError": "errors",
    "GalleryError": "errors",
    "Genotype": "genotype",
    "GenotypeError": "errors",
    "GrowthError": "errors",
    "L1Schedule": "schedules",
    "PetridishError": "errors",
    "SearchError": "errors",
    "Site": "weak_learner",
    "TrainingError": "errors",
    "VisionGenotype": "genotype",
    "alpha_tables": "grow",
    "attach_candidates": "grow",
    "candidate_parameters": "grow",
    "count_multiply_adds": "complexity",
    "count_parameters": "complexity",
    "detach_candidates": "grow",
    "extra_loss": "grow",
    "finalize_candidates": "grow",
    "has_candidates": "grow",
    "sites": "grow",
    "stop_forward": "weak_learner",
    "stop_gradient": "weak_learner",
}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__


if TYPE_CHECKING:
    from nni_petridish.complexity import count_multiply_adds, count_parameters
    from nni_petridish.errors import (
        ConfigError,
        DataError,
        GalleryError,
        GenotypeError,
        GrowthError,
        PetridishError,
        SearchError,
        TrainingError,
    )
    from nni_petridish.genotype import Genotype, VisionGenotype
    from nni_petridish.grow import (
        alpha_tables,
        attach_candidates,
        candidate_parameters,
        detach_candidates,
        extra_loss,
        finalize_candidates,
        has_candidates,
        sites,
    )
    from nni_petridish.schedules import L1Schedule
    from nni_petridish.weak_learner import AlphaTable, Site, stop_forward, stop_gradient
