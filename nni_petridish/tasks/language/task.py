"""Language modelling as a task: the recurrent space, a text, and how to train."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from nni_petridish.core.genotype import Genotype
from nni_petridish.registry import PERPLEXITY, Measure
from nni_petridish.tasks.language.recipe import LanguageRecipe
from nni_petridish.tasks.language.text import Corpus
from nni_petridish.tasks.language.training import evaluate_language, fit_language, language_losses
from nni_petridish.tasks.task import NO_CALLBACKS, Callbacks, Phase, Record

if TYPE_CHECKING:
    from search_spaces import RecurrentSpace


@dataclass(frozen=True)
class RecurrentTask:
    """Language modelling with DARTS's recipe, which the paper keeps.

    Parameters
    ----------
    space
        The space of networks.
    corpus
        Training, validation and test text; the test text is only looked at by `test`.
    recipe
        The recipe of training; its number of epochs is replaced by that of each phase.
    """

    space: RecurrentSpace
    corpus: Corpus
    recipe: LanguageRecipe

    measure: ClassVar[Measure] = PERPLEXITY

    def seed(self) -> Genotype:
        """Return the cell with one relu node."""
        return self.space.seed()

    def build(self, genotype: Genotype) -> nn.Module:
        """Build a network with fresh weights."""
        return self.space.build(genotype)

    def train(
        self, net: nn.Module, phase: Phase, callbacks: Callbacks = NO_CALLBACKS
    ) -> list[Record]:
        """Train by the recipe, the same in every phase; measure on the validation text as well."""
        history = fit_language(
            net,
            self.corpus.train,
            replace(self.recipe, epochs=phase.epochs),
            seed=phase.random_seed,
            validation=self.corpus.validation,
            on_epoch=lambda record: callbacks.on_epoch(phase.name, record),
            checkpoint=phase.checkpoint,
            progress=callbacks.progress,
            label=phase.label,
            stop=callbacks.should_stop,
        )
        return list(history.records)

    def steps(self, epochs: int) -> int:
        """Return about the number of steps in so many epochs: their lengths are random."""
        words = len(self.corpus.train) // self.recipe.batch_size
        return epochs * max(1, round(words / (0.975 * self.recipe.bptt)))

    def evaluate(self, net: nn.Module) -> Record:
        """Measure on the validation text; ``error``, which the search minimizes, is perplexity."""
        return self._measure(net, self.corpus.validation)

    def validation_losses(self, net: nn.Module) -> Iterator[Tensor]:
        """Yield differentiable parts of the validation loss, which is their sum."""
        yield from language_losses(net, self.corpus.validation, self.recipe)

    def test(self, net: nn.Module) -> Record:
        """Measure on the test text, for the report on a finished model."""
        return self._measure(net, self.corpus.test)

    def size(self, net: nn.Module) -> tuple[int, int]:
        """Return (multiply-adds of one word, parameters)."""
        return self.space.size(net)

    def _measure(self, net: nn.Module, text: Tensor) -> Record:
        metrics = evaluate_language(net, text, self.recipe)
        return {"error": metrics.perplexity, "perplexity": metrics.perplexity, "loss": metrics.loss}
