"""Retraining of a found recurrent cell: from scratch, with DARTS's mean of the nodes as output.

The validation text says when SGD becomes averaged SGD, as in DARTS; the test text is looked at once
per repetition, when its training is over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from nni_petridish.core.complexity import count_parameters
from nni_petridish.errors import ConfigError, DataError
from nni_petridish.gallery.files import to_json
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.gallery.saved_model import from_gallery
from nni_petridish.registry import PERPLEXITY, Measure
from nni_petridish.results.retrain.retraining import Retraining
from nni_petridish.running.config import SearchConfig
from nni_petridish.search.checks import prefix
from nni_petridish.search.settings import check_number
from nni_petridish.tasks.device import resolve_device
from nni_petridish.tasks.distributed import World
from nni_petridish.tasks.language.recipe import FINAL_DIFFERENCES, LanguageRecipe
from nni_petridish.tasks.language.task import RecurrentTask
from nni_petridish.tasks.language.text import Corpus, load_text
from nni_petridish.tasks.task import NO_CALLBACKS, Callbacks, Phase
from search_spaces import RecurrentSpace
from search_spaces.recurrent.genotype import RecurrentGenotype


@dataclass(frozen=True)
class LanguageRetraining(Retraining[Corpus]):
    """What to train, checked; `run` trains it.

    Parameters
    ----------
    model
        Id of the model in its gallery, for the records.
    genotype
        Its architecture.
    space
        The space to build it in: its width may differ from the search's.
    recipe
        How to train.
    data
        Arguments of `load_text`.
    seed
        Repetition r is seeded by ``seed + r``.
    """

    model: str
    genotype: RecurrentGenotype
    space: RecurrentSpace
    recipe: LanguageRecipe
    data: dict[str, Any]
    seed: int = 0

    measure: ClassVar[Measure] = PERPLEXITY

    @property
    def name(self) -> str:
        """A name for its folder: model, width, epochs."""
        return f"{self.model}-E{self.space.embedding}-{self.recipe.epochs}epochs"

    @property
    def title(self) -> str:
        """What is trained, in a few words."""
        return f"{self.model} with embedding {self.space.embedding}"

    def size(self) -> tuple[int, int]:
        """Return (multiply-adds of one word, parameters)."""
        with torch.device("meta"):  # shapes alone
            net = self.space.build(self.genotype, for_retraining=True)
        return net.multiply_adds(), count_parameters(net)

    def identity(self) -> dict[str, Any]:
        """Return what must not change between repetitions."""
        document = {
            "model": self.model,
            "genotype": self.genotype.to_dict(),
            "space": self._described_space(),
            "recipe": {k: v for k, v in asdict(self.recipe).items() if k != "device"},
            "data": {k: v for k, v in self.data.items() if k != "root"},
            "seed": self.seed,
        }
        return dict(json.loads(to_json(document)))

    def check_world(self, world: World) -> None:
        """Refuse a device that is not there, and several processes."""
        resolve_device(self.recipe.device)
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

    def repeat(
        self,
        home: Path,
        repetition: int,
        data: Corpus,
        world: World,
        stop: Callable[[], bool] | None,
        progress: bool,
    ) -> dict[str, Any]:
        """Train one repetition, look at the test text and keep the model."""
        seed = self.seed + repetition
        task = RecurrentTask(self.space, data, self.recipe)
        torch.manual_seed(seed)
        net = task.build_for_retraining(self.genotype)
        history = task.train(
            net,
            Phase(
                "final",
                self.recipe.epochs,
                seed,
                label=f"{self.model} run {repetition}",
                checkpoint=home / "checkpoint",
            ),
            Callbacks(should_stop=stop or NO_CALLBACKS.should_stop, progress=progress),
        )
        tested, (multiply_adds, parameters) = task.test(net), self.size()
        result = {
            "repetition": repetition,
            "seed": seed,
            "test_perplexity": tested["perplexity"],
            "test_loss": tested["loss"],
            "validation_perplexity": history[-1]["validation_error"],
            "words": len(data.train),
            "multiply_adds": multiply_adds,
            "parameters": parameters,
            "history": history,
        }
        facts = {"data": self.data.get("name")}
        space = self._described_space()
        return self.keep(home, space, self.genotype, net.state_dict(), result, facts)

    def _described_space(self) -> dict[str, Any]:
        return {"space": self.space.name, **self.space.describe()}


def language_retraining(
    gallery: Path,
    id: str | None = None,
    *,
    embedding: int | None = None,
    epochs: int | None = None,
    seed: int = 0,
    changes: Mapping[str, Any] | None = None,
) -> LanguageRetraining:
    """Prepare the retraining of a cell of a gallery.

    Parameters
    ----------
    gallery, id
        Which model; the one of lowest perplexity by default.
    embedding
        Width of embedding and cell; by default the search's.
    epochs
        By default those of `FINAL_DIFFERENCES`, the paper's for Penn Treebank.
    changes
        To the recipe: the search's with `FINAL_DIFFERENCES`.
    """
    model = from_gallery(gallery, id)
    config = SearchConfig.of_gallery(Gallery(gallery))
    if not isinstance(model.genotype, RecurrentGenotype):
        raise ConfigError(f"Not a recurrent cell: the model is of {model.genotype.space}.")
    check_number("seed", seed, 0, whole=True)
    space = RecurrentSpace(**{k: v for k, v in model.space.items() if k != "space"})
    if embedding is not None:
        space = replace(space, embedding=embedding, hidden=embedding)
    text = str(config.data["name"])
    wanted = {**FINAL_DIFFERENCES[text], **({} if epochs is None else {"epochs": epochs})}
    known = tuple(f.name for f in fields(LanguageRecipe))
    for name in changes or {}:
        if name not in known:
            raise ConfigError(f"a recipe has {', '.join(known)} but got {name}.")
    with prefix("recipe."):
        recipe = replace(config.recipe, **{**wanted, **(changes or {})})
    data = {k: v for k, v in config.data.items() if k != "limit"}
    return LanguageRetraining(str(model.facts["id"]), model.genotype, space, recipe, data, seed)
