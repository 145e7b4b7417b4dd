"""Inference on words: the facts that a saved language model keeps, and predictions by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nni_petridish.core.modes import evaluation_mode
from nni_petridish.errors import DataError
from nni_petridish.tasks.language.text import END, UNKNOWN, Corpus, tokenize

FACTS_VERSION = 1


def text_facts(corpus: Corpus) -> dict[str, Any]:
    """Return the facts of a text that a model needs to take words.

    ``words`` is the vocabulary in the order of the word numbers, ``tokens`` how a text is cut into
    words: ``"prose"`` by `tokenize`, else ``"white space"``.
    """
    tokens = "prose" if corpus.is_prose else "white space"
    return {"version": FACTS_VERSION, "words": list(corpus.words), "tokens": tokens}


class WordPredictor:
    """Predictions of a language model for the word after a text.

    Parameters
    ----------
    net
        The network; it takes word numbers.
    facts
        The facts of its `SavedModel`, see `text_facts`.
    """

    def __init__(self, net: Any, facts: Mapping[str, Any]) -> None:
        self._net = net
        self._words: Sequence[str] | None = facts.get("words")
        self._is_prose = facts.get("tokens") == "prose"

    def __call__(self, text: str | Sequence[str], *, count: int = 1) -> list[str]:
        """Return the most probable next words, the first one first.

        Parameters
        ----------
        text
            A text, cut into words like the training text, or a sequence of words. Words that the
            model does not know are read as ``<unk>``.
        count
            The number of words to return.
        """
        if self._words is None:
            raise DataError(
                "The words of the text are unknown: the model is of an earlier version, and its"
                " text is not at hand."
            )
        numbers = self._numbers(self._words, self._cut(text) if isinstance(text, str) else text)
        device = self._net.embedding.device
        tokens = torch.tensor(numbers, dtype=torch.int64, device=device)[:, None]
        with torch.no_grad(), evaluation_mode(self._net):
            logits, _ = self._net(tokens)
        best = logits[-1, 0].topk(min(count, len(self._words))).indices.tolist()
        return [self._words[number] for number in best]

    def _cut(self, text: str) -> list[str]:
        if self._is_prose:
            return tokenize(text)
        first, *rest = text.splitlines() or [""]
        return [*first.split(), *(word for line in rest for word in (END, *line.split()))]

    def _numbers(self, words: Sequence[str], text: Sequence[str]) -> list[int]:
        number = {word: i for i, word in enumerate(words)}
        unknown = next((word for word in text if word not in number), None)
        if unknown is not None and UNKNOWN not in number:
            raise DataError(f"the text must be of words that the model knows but has {unknown!r}.")
        # The state of training was never empty: a text begins after the end of another one.
        return [number.get(word, number.get(UNKNOWN, -1)) for word in text] or [number.get(END, 0)]
