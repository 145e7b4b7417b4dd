"""Fronts for NNI and Lightning: the only room that imports them.

Take its names from here or from the package: they say what to install where NNI or Lightning is
missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nni_petridish._support.lazy import attach
from nni_petridish.errors import needing

_load, __dir__, __all__ = attach(
    __name__,
    {
        "GrowingCallback": ".lightning",
        "Petridish": ".strategy",
        "PetridishTuner": ".tuner",
        "RecipeEvaluator": ".evaluators.recipe",
        "model_space": ".space",
        "read_darts": ".user_spaces.darts_form",
        "write_darts": ".user_spaces.darts_form",
    },
)


_EXTRAS = {"GrowingCallback": "lightning"}
"""The extra that a name needs, if it is not ``nni``."""


def __getattr__(name: str) -> Any:
    with needing(_EXTRAS.get(name, "nni"), name):
        return _load(name)


if TYPE_CHECKING:
    from nni_petridish.nni_adapter.evaluators.recipe import RecipeEvaluator
    from nni_petridish.nni_adapter.lightning import GrowingCallback
    from nni_petridish.nni_adapter.space import model_space
    from nni_petridish.nni_adapter.strategy import Petridish
    from nni_petridish.nni_adapter.tuner import PetridishTuner
    from nni_petridish.nni_adapter.user_spaces.darts_form import read_darts, write_darts
