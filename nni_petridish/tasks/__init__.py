"""Problems that networks are trained on, and training itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nni_petridish._support.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Callbacks": ".task",
        "LanguageRecipe": ".language.recipe",
        "Phase": ".task",
        "Recipe": ".vision.recipe",
        "RecurrentTask": ".language.task",
        "Task": ".task",
        "VisionTask": ".vision.task",
        "evaluate": ".vision.training",
        "fit": ".vision.training",
        "load_data": ".vision.data",
        "load_text": ".language.text",
    },
)

if TYPE_CHECKING:
    from nni_petridish.tasks.language.recipe import LanguageRecipe
    from nni_petridish.tasks.language.task import RecurrentTask
    from nni_petridish.tasks.language.text import load_text
    from nni_petridish.tasks.task import Callbacks, Phase, Task
    from nni_petridish.tasks.vision.data import load_data
    from nni_petridish.tasks.vision.recipe import Recipe
    from nni_petridish.tasks.vision.task import VisionTask
    from nni_petridish.tasks.vision.training import evaluate, fit
