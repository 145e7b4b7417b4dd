"""Retraining of a found recurrent cell: from scratch, with DARTS's mean of the nodes as output.

The validation text says when SGD becomes averaged SGD, as in DARTS; the test text is looked at once
per repetition, when its training is over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from nni_petridish.core.complexity import count_parameters
from nni_petridish.errors import ConfigError, DataError
from nni_petridish.gallery.saved_model import SavedModel
from nni_petridish.registry import PERPLEXITY, Measure
from nni_petridish.tasks.distributed import World
from nni_petridish.tasks.language.inference import text_facts
from nni_petridish.tasks.language.kind import SEARCH_ONLY_DATA, TextRetrainingOptions, make_space
from nni_petridish.tasks.language.recipe import RETRAINING_DIFFERENCES, LanguageRecipe
from nni_petridish.tasks.language.task import RecurrentTask
from nni_petridish.tasks.language.text import Corpus, load_text
from nni_petridish.tasks.recipes import changed_recipe
from nni_petridish.tasks.retraining import Retraining
from nni_petridish.tasks.task import Callbacks, Phase, Record
from search_spaces import RecurrentSpace
from search_spaces.recurrent.genotype import RecurrentGenotype
from search_spaces.recurrent.network import RecurrentNetwork


@dataclass(frozen=True)
class LanguageRetraining(Retraining[Corpus, RecurrentNetwork]):
    """A retraining on a text; `load_text` takes ``data``."""

    genotype: RecurrentGenotype
    space: RecurrentSpace
    recipe: LanguageRecipe

    measure: ClassVar[Measure] = PERPLEXITY
    examples: ClassVar[str] = "words"

    @property
    def name(self) -> str:
        """The name of its folder: model, width, epochs."""
        return f"{self.model}-E{self.space.embedding}-{self.recipe.epochs}epochs"

    @property
    def title(self) -> str:
        """The model with its width."""
        return f"{self.model} with embedding {self.space.embedding}"

    @property
    def widths(self) -> dict[str, int]:
        """The width of the embedding."""
        return {"embedding": self.space.embedding}

    def size(self) -> tuple[int, int]:
        """Return (multiply-adds of one word, parameters)."""
        with torch.device("meta"):  # shapes alone
            net = self.build()
        return net.multiply_adds(), count_parameters(net)

    def check_world(self, world: World) -> None:
        """Refuse a device that is not there, and several processes."""
        super().check_world(world)
        if world.size > 1:
            raise ConfigError(f"A language model trains in one process but there are {world.size}.")

    def load(self) -> Corpus:
        """Load the text, all of it."""
        corpus = load_text(**self.data)
        if corpus.vocabulary != self.space.vocabulary:
            raise DataError(
                f"The text has {corpus.vocabulary} different words but the search's had"
                f" {self.space.vocabulary}."
            )
        return corpus

    def build(self) -> RecurrentNetwork:
        """Build the network; its output is DARTS's mean of the nodes."""
        return self.space.build(self.genotype, for_retraining=True)

    def train(
        self, net: RecurrentNetwork, data: Corpus, phase: Phase, callbacks: Callbacks
    ) -> list[Record]:
        """Train by the recipe; validation decides when SGD is averaged."""
        return self._task(data).train(net, phase, callbacks)

    def test(self, net: RecurrentNetwork, data: Corpus) -> Record:
        """Measure on the test text."""
        metrics = self._task(data).test(net)
        return {"test_perplexity": metrics["perplexity"], "test_loss": metrics["loss"]}

    def count_examples(self, data: Corpus) -> int:
        """Return the number of training words."""
        return len(data.train)

    def data_facts(self, data: Corpus) -> dict[str, Any]:
        """Return the words of the text."""
        return text_facts(data)

    def _task(self, corpus: Corpus) -> RecurrentTask:
        return RecurrentTask(self.space, corpus, self.recipe)


def make_retraining(
    model: SavedModel,
    searched: tuple[Mapping[str, Any], LanguageRecipe] | None,
    options: TextRetrainingOptions,
    changes: Mapping[str, Any],
) -> LanguageRetraining:
    """Prepare the retraining of a cell; the numbers are the paper's where nothing is given.

    Parameters
    ----------
    model
        The model that a search found.
    searched
        Data and recipe of the search.
    options
        Width and length of the training; by default the search's width and the epochs of
        `RETRAINING_DIFFERENCES`.
    changes
        Changes to the recipe: the search's with `RETRAINING_DIFFERENCES`.
    """
    genotype, space = RecurrentGenotype.require(model.genotype), make_space(model.space)
    if searched is None:
        raise ConfigError("the text of the search is unknown, and a cell moves to no other one.")
    if options.embedding is not None:
        space = replace(space, embedding=options.embedding, hidden=options.embedding)
    data, recipe = searched
    wanted = dict(RETRAINING_DIFFERENCES[str(data["name"])])
    if options.epochs is not None:
        wanted["epochs"] = options.epochs
    recipe = changed_recipe(recipe, {**wanted, **changes})
    whole = {k: v for k, v in data.items() if k not in SEARCH_ONLY_DATA}
    id = str(model.facts["id"])
    return LanguageRetraining(id, genotype, space, recipe, whole, options.seed or 0)
