"""Fronts for NNI: the only room that imports nni or Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nni_petridish._lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Petridish": ".strategy",
        "PetridishTuner": ".tuner",
        "RecipeEvaluator": ".evaluators.recipe",
    },
)

if TYPE_CHECKING:
    from nni_petridish.nni_adapter.evaluators.recipe import RecipeEvaluator
    from nni_petridish.nni_adapter.strategy import Petridish
    from nni_petridish.nni_adapter.tuner import PetridishTuner
