"""The part of a configuration that is about language models, checked without torch.

``searchSpace`` has the options of `RecurrentSpace` but the vocabulary, which the text decides;
``data`` has the arguments of `load_text`; ``recipe`` the fields of `LanguageRecipe` but its epochs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from nni_petridish.errors import ConfigError
from nni_petridish.language_recipe import LanguageRecipe
from nni_petridish.records import check_number
from nni_petridish.text import check_text
from search_spaces.recurrent import RecurrentSpace

if TYPE_CHECKING:
    from nni_petridish.recurrent_task import RecurrentTask

DATA_KEYS = ("name", "root", "vocabulary", "limit")
SPACE_KEYS = tuple(f.name for f in fields(RecurrentSpace) if f.name != "vocabulary")
RECIPE_KEYS = tuple(f.name for f in fields(LanguageRecipe) if f.name != "epochs")
#: λ and I_max where a configuration names none: see docs/recurrent.md on the scale of λ.
DEFAULT_L1 = 0.01
DEFAULT_I_MAX = 1


def check_recurrent_space(options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless a space can be made of the options, whatever the text."""
    _refuse_unknown(options, SPACE_KEYS)
    if "ops" in options and not isinstance(options["ops"], list):
        raise ConfigError(f"ops must be a list but got {options['ops']!r}.")
    RecurrentSpace(vocabulary=2, **options)


def read_text_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `load_text`; `pydoc` if no name is given."""
    _refuse_unknown(data, DATA_KEYS)
    result = {"name": "pydoc", **data}
    for key, least in (("vocabulary", 3), ("limit", 2)):
        if result.get(key) is not None:
            check_number(key, result[key], least, whole=True)
    check_text(result["name"], result.get("root"))
    return result


def read_language_recipe(options: Mapping[str, Any], text: str) -> LanguageRecipe:
    """Return the recipe of a text with the options' changes."""
    _refuse_unknown(options, RECIPE_KEYS)
    return LanguageRecipe.named(text, **options)


def load_recurrent_task(
    space: Mapping[str, Any], data: Mapping[str, Any], recipe: LanguageRecipe
) -> RecurrentTask:
    """Make the task that a checked configuration describes; loads the text."""
    from nni_petridish.recurrent_task import RecurrentTask
    from nni_petridish.text import load_text

    options = {key: value for key, value in space.items() if key != "space"}
    corpus = load_text(**data)
    return RecurrentTask(RecurrentSpace(corpus.vocabulary, **options), corpus, recipe)


def _refuse_unknown(options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in options:
        if key not in known:
            raise ConfigError(f"{key} is not known; there are {', '.join(known)}.")
