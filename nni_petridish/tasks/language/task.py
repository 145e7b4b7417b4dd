"""Language modeling as a task: the recurrent space, a text, and a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from torch import Tensor, nn

from nni_petridish.core.grow import candidate_parameters
from nni_petridish.registry import PERPLEXITY, Measure
from nni_petridish.tasks.language.inference import text_facts
from nni_petridish.tasks.language.recipe import LanguageRecipe
from nni_petridish.tasks.language.text import Corpus
from nni_petridish.tasks.language.training import evaluate_language, fit_language, language_losses
from nni_petridish.tasks.loop import History, LoopOptions
from nni_petridish.tasks.space_task import SpaceTask
from nni_petridish.tasks.task import Record

if TYPE_CHECKING:
    from search_spaces import RecurrentSpace


@dataclass(frozen=True)
class RecurrentTask(SpaceTask):
    """Language modeling with DARTS's recipe, which the paper keeps.

    Parameters
    ----------
    space
        The space of networks.
    corpus
        Training, validation and test text; only `test` looks at the test text.
    recipe
        The recipe of training; its number of epochs is replaced by that of each phase.
    """

    space: RecurrentSpace
    corpus: Corpus
    recipe: LanguageRecipe

    measure: ClassVar[Measure] = PERPLEXITY

    def _fit(
        self, net: nn.Module, recipe: LanguageRecipe, seed: int, **options: Unpack[LoopOptions]
    ) -> History:
        text, validation = self.corpus.train, self.corpus.validation
        return fit_language(net, text, recipe, seed=seed, validation=validation, **options)

    def steps(self, epochs: int) -> int:
        """Return the approximate number of steps in so many epochs: their lengths are random."""
        words = len(self.corpus.train) // self.recipe.batch_size
        return epochs * max(1, round(words / (0.975 * self.recipe.bptt)))

    def evaluate(self, net: nn.Module) -> Record:
        """Measure on the validation text; ``error``, which the search minimizes, is perplexity."""
        return self._metrics(net, self.corpus.validation)

    def data_facts(self) -> dict[str, Any]:
        """Return the words of the text."""
        return text_facts(self.corpus)

    def validation_losses(self, net: nn.Module) -> Iterator[Tensor]:
        """Yield differentiable parts of the validation loss, which is their sum."""
        yield from language_losses(net, self.corpus.validation, self.recipe)

    def test(self, net: nn.Module) -> Record:
        """Measure on the test text, for the report on a finished model."""
        return self._metrics(net, self.corpus.test)

    def operations(self, net: nn.Module, epochs: int) -> int:
        """Return the forward multiply-adds of so many epochs, candidates included."""
        # Every matrix of a candidate is applied once to each word.
        candidates = sum(p.numel() for p in candidate_parameters(net) if p.ndim == 2)
        return epochs * len(self.corpus.train) * (self.size(net)[0] + candidates)

    def _metrics(self, net: nn.Module, text: Tensor) -> Record:
        metrics = evaluate_language(net, text, self.recipe)
        return {"error": metrics.perplexity, "perplexity": metrics.perplexity, "loss": metrics.loss}
