"""Language modeling in a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from nni_petridish.errors import ConfigError, DataError
from nni_petridish.registry import ARGUMENTS, PERPLEXITY, Suggestion
from nni_petridish.search.constraints import (
    Count,
    Folder,
    OneOf,
    Width,
    check_fields,
    prefix,
    resolve,
)
from nni_petridish.tasks.language.recipe import LanguageRecipe
from nni_petridish.tasks.language.text import TEXT_NAMES, check_text, count_vocabulary
from search_spaces.recurrent.space import RecurrentSpace

if TYPE_CHECKING:
    from torch import Tensor

    from nni_petridish.gallery.saved_model import SavedModel
    from nni_petridish.tasks.language.inference import WordPredictor
    from nni_petridish.tasks.plain_network import PlainNetwork
    from nni_petridish.tasks.retraining import Retraining
    from nni_petridish.tasks.task import Task


@dataclass(frozen=True)
class TextOptions:
    """The text of a search, see `load_text`.

    Parameters
    ----------
    name
        The corpus.
    root
        The folder that it is in.
    vocabulary
        Keep so many words, the most frequent ones.
    limit
        Train on the first so many words only.
    """

    name: Annotated[str, OneOf(TEXT_NAMES)] = "pydoc"
    root: Folder | None = None
    vocabulary: Annotated[int, Ge(3)] | None = None
    limit: Annotated[int, Ge(3)] | None = None


@dataclass(frozen=True)
class TextRetrainingOptions:
    """A retraining of a found cell.

    Parameters
    ----------
    embedding
        Width of embedding and cell; by default the search's.
    epochs
        Epochs of the training.
    seed
        The first random seed.
    """

    embedding: Width | None = None
    epochs: Count | None = None
    seed: Annotated[int, Ge(0)] | None = None

    def __post_init__(self) -> None:
        check_fields(self)


MEASURE = PERPLEXITY
TUNED_RANGES = {"l1": (1e-4, 0.1)}
"""The paper names one λ, 10, in a scale it does not give; here larger ones select noise.

See docs/results/recurrent.md. I_max is 1: recurrent cells grow by one node at a time.
"""
L1_GROUPS = (1e-4, 1e-3, 1e-2, 1e-1)
SPACE = RecurrentSpace
DATA = TextOptions
RECIPE = LanguageRecipe
RETRAINING = TextRetrainingOptions
SEARCH_ONLY_DATA = ("limit",)
DECIDED_BY_DATA = ("vocabulary",)
_PLACE = f"{ARGUMENTS}.data"


def read_data(
    data: Mapping[str, Any], base: Path, *, for_retraining: bool = False
) -> dict[str, Any]:
    """Return the arguments of `load_text`; raise unless the files are there."""
    place = "data" if for_retraining else _PLACE
    result = {"name": TextOptions.name, **data}
    if result.get("root") is not None:
        result["root"] = str(resolve(result["root"], base))
    with prefix(f"{place}: "):
        check_text(result["name"], result.get("root"))
    return result


def suggest(source: str, root: str | None) -> Suggestion | None:
    """Suggest settings for a text: one by name, or a folder of train, valid and test."""
    from nni_petridish.tasks.language.suggestion import suggest_for_text

    return suggest_for_text(source, root)


def check_space(options: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Check the options of `RecurrentSpace`; the vocabulary is the text's."""
    with prefix("searchSpace."):
        RecurrentSpace(vocabulary=2, **options)


def full_space(options: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of the space; the vocabulary is known only once the text is read."""
    known = {key: value for key, value in options.items() if key != "space"}
    return {"space": "recurrent", **RecurrentSpace(**{"vocabulary": 2, **known}).describe()}


def describe_space(space: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of the space; the vocabulary, if it is not given, is the text's."""
    full = dict(space)
    if "vocabulary" not in full:
        words = count_vocabulary(data["name"], data.get("root"), data.get("vocabulary"))
        full["vocabulary"] = words
    return {"space": "recurrent", **make_space(full).describe()}


def make_space(space: Mapping[str, Any]) -> RecurrentSpace:
    """Return the space that is described by plain data."""
    return RecurrentSpace(**{key: value for key, value in space.items() if key != "space"})


def space_of_weights(
    space: Mapping[str, Any], data: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return the space with the size of the vocabulary."""
    return {"vocabulary": weights["embedding"].shape[0], **space}


def seed_size(space: Mapping[str, Any], data: Mapping[str, Any]) -> tuple[int, int]:
    """Return (multiply-adds of a word, parameters) of the seed."""
    words = count_vocabulary(data["name"], data.get("root"), data.get("vocabulary"))
    options = {key: value for key, value in space.items() if key != "space"}
    described = RecurrentSpace(vocabulary=words, **options)
    embedding, hidden = described.embedding, described.hidden or described.embedding
    # [x; h] W0 and s0 W1; the decoder is the embedding, behind a projection if widths differ.
    cell = (embedding + hidden) * 2 * hidden + hidden * 2 * hidden
    projection = 0 if hidden == embedding else hidden * embedding
    multiply_adds = cell + projection + words * embedding
    return multiply_adds, multiply_adds + words  # the decoder's bias


def with_defaults(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a search with the defaults λ = 0.01 and I_max = 1.

    The paper's λ of 10 selects nothing here, see docs/results/recurrent.md.
    """
    result = {"l1": 0.01, "i_max": 1, **arguments}
    if result["i_max"] != 1:
        raise ConfigError(
            f"i_max must be 1 but got {result['i_max']!r}: a recurrent cell grows by one node at a"
            " time."
        )
    return result


def read_recipe(
    options: Mapping[str, Any], data: Mapping[str, Any], *, for_retraining: bool = False
) -> LanguageRecipe:
    """Return the recipe of the text with changes."""
    with prefix("recipe." if for_retraining else f"{ARGUMENTS}.recipe."):
        return LanguageRecipe.named(data["name"], **options)


def make_recipe(values: Mapping[str, Any]) -> LanguageRecipe:
    """Return the recipe with these values."""
    return LanguageRecipe(**values)


def load_task(space: Mapping[str, Any], data: Mapping[str, Any], recipe: LanguageRecipe) -> Task:
    """Read the text and make the task."""
    from nni_petridish.tasks.language.task import RecurrentTask
    from nni_petridish.tasks.language.text import load_text

    options = {key: value for key, value in space.items() if key != "space"}
    corpus = load_text(**data)
    described = RecurrentSpace(vocabulary=corpus.vocabulary, **options)
    return RecurrentTask(described, corpus, recipe)


def plain_network(
    net: Any, space: Mapping[str, Any], facts: Mapping[str, Any], pixels: bool | None
) -> PlainNetwork:
    """Return a language model that takes one word at a time and its state."""
    from nni_petridish.tasks.language.plain_network import language_model

    if pixels is not None:
        raise ConfigError("A language model has no pixels.")
    return language_model(net, space)


def data_facts(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the words of the text; nothing if it is not at hand."""
    from nni_petridish.tasks.language.inference import text_facts
    from nni_petridish.tasks.language.text import load_text

    try:
        return text_facts(load_text(**data))
    except (DataError, OSError):
        return {}


def make_predictor(net: Any, space: Mapping[str, Any], facts: Mapping[str, Any]) -> WordPredictor:
    """Return a function that predicts the words after a text."""
    from nni_petridish.tasks.language.inference import WordPredictor

    return WordPredictor(net, facts)


def check_retraining(space: Mapping[str, Any], cells_per_stage: int) -> None:
    """Raise `ConfigError`: a language model has one cell."""
    raise ConfigError("cells_per_stage is for vision but the space is recurrent.")


def make_retraining(
    model: SavedModel,
    searched: tuple[Mapping[str, Any], LanguageRecipe] | None,
    options: Mapping[str, Any],
    changes: Mapping[str, Any],
) -> Retraining[Any, Any]:
    """Prepare the retraining of a cell."""
    from nni_petridish.tasks.language.retraining import make_retraining

    return make_retraining(model, searched, TextRetrainingOptions(**options), changes)
