"""Fronts for NNI: the only room that imports nni or Lightning.

Take its names from here or from the package: they say what to install where NNI is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nni_petridish._support.lazy import attach
from nni_petridish.errors import needing

_load, __dir__, __all__ = attach(
    __name__,
    {
        "Petridish": ".strategy",
        "PetridishTuner": ".tuner",
        "RecipeEvaluator": ".evaluators.recipe",
        "model_space": ".space",
        "read_darts": ".user_spaces.darts_form",
        "write_darts": ".user_spaces.darts_form",
    },
)


def __getattr__(name: str) -> Any:
    with needing("nni", name):
        return _load(name)


if TYPE_CHECKING:
    from nni_petridish.nni_adapter.evaluators.recipe import RecipeEvaluator
    from nni_petridish.nni_adapter.space import model_space
    from nni_petridish.nni_adapter.strategy import Petridish
    from nni_petridish.nni_adapter.tuner import PetridishTuner
    from nni_petridish.nni_adapter.user_spaces.darts_form import read_darts, write_darts
