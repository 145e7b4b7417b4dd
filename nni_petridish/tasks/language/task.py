"""Language modelling as a task: the recurrent space, a text, and how to train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from nni_petridish.core.genotype import Genotype
from nni_petridish.tasks.language.recipe import LanguageRecipe
from nni_petridish.tasks.language.text import Corpus
from nni_petridish.tasks.language.training import evaluate_language, fit_language, language_losses

if TYPE_CHECKING:
    from search_spaces import RecurrentSpace

Record = dict[str, float]


@dataclass(frozen=True)
class RecurrentTask:
    """Language modelling with DARTS's recipe, which the paper keeps.

    Parameters
    ----------
    space
        What networks may look like.
    corpus
        Training, validation and test text; the test text is only looked at by `test`.
    recipe
        How to train; its number of epochs is replaced by that of each phase.
    """

    space: RecurrentSpace
    corpus: Corpus
    recipe: LanguageRecipe

    def seed(self) -> Genotype:
        """Return the cell with one relu node."""
        return self.space.seed()

    def build(self, genotype: Genotype) -> nn.Module:
        """Build a network with fresh weights."""
        return self.space.build(genotype)

    def build_final(self, genotype: Genotype) -> nn.Module:
        """Build a network to train from scratch: its output is DARTS's mean of the nodes."""
        return self.space.build(genotype, final=True)

    def train(
        self,
        net: nn.Module,
        *,
        phase: str,
        epochs: int,
        seed: int,
        label: str,
        checkpoint: Path | None = None,
        on_epoch: Callable[[Record], object] | None = None,
        stop: Callable[[], bool] | None = None,
        progress: bool = False,
    ) -> list[Record]:
        """Train by the recipe, the same in every phase; measure on the validation text as well."""
        history = fit_language(
            net,
            self.corpus.train,
            replace(self.recipe, epochs=epochs),
            seed=seed,
            validation=self.corpus.validation,
            on_epoch=on_epoch,
            checkpoint=checkpoint,
            progress=progress,
            label=label,
            stop=stop,
        )
        return list(history.records)

    def steps(self, epochs: int) -> int:
        """Return about how many steps so many epochs are: their lengths are random."""
        words = len(self.corpus.train) // self.recipe.batch_size
        return epochs * max(1, round(words / (0.975 * self.recipe.bptt)))

    def evaluate(self, net: nn.Module) -> Record:
        """Measure on the validation text; ``error``, what the search minimises, is perplexity."""
        return self._measure(net, self.corpus.validation)

    def validation_losses(self, net: nn.Module) -> Iterator[Tensor]:
        """Yield differentiable parts of the validation loss; their sum is what `evaluate` says."""
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
