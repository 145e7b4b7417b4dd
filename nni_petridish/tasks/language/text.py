"""Text to model: corpora by name, their vocabulary, and how they are cut into batches.

A corpus is a folder with three files of words, or the documentation topics that ship inside every
CPython, which need no download. Nothing is downloaded here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nni_petridish.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

#: ``pydoc`` is embedded; the others are folders and differ in their default place only.
TEXT_NAMES = ("pydoc", "ptb", "text_folder")
DEFAULT_ROOTS = {"ptb": Path("data") / "ptb", "text_folder": Path("data")}

END = "<eos>"
UNKNOWN = "<unk>"
NUMBER = "N"

_PARTS = ("train", "valid", "test")
#: Names of the three files: plain ones, those of Penn Treebank, those of WikiText.
_PATTERNS = ("{}.txt", "ptb.{}.txt", "wiki.{}.tokens")
#: Words of the embedded text: 98.5 % of it; the others become UNKNOWN.
_PYDOC_VOCABULARY = 2000
_WORD = re.compile(r"[^\W\d]+|\d+|([^\w\s])\1*")
_RULE = re.compile(r"[-=*+|~^\s]*")


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text in its three parts, as word numbers.

    Attributes
    ----------
    name
        The name it was loaded by.
    words
        The vocabulary: word number to word, from frequent to rare.
    train, validation, test
        Word numbers, each a vector of int64.
    """

    name: str
    words: tuple[str, ...]
    train: Tensor
    validation: Tensor
    test: Tensor

    @property
    def vocabulary(self) -> int:
        """The number of different words."""
        return len(self.words)

    @property
    def is_prose(self) -> bool:
        """Whether `tokenize` cut the text; otherwise white space separates the words."""
        return self.name == "pydoc"


def load_text(
    name: str = "pydoc",
    root: str | Path | None = None,
    *,
    vocabulary: int | None = None,
    limit: int | None = None,
) -> Corpus:
    """Load a corpus.

    Parameters
    ----------
    name
        ``pydoc`` (embedded), ``ptb`` or ``text_folder``.
    root
        The folder with ``train.txt``, ``valid.txt`` and ``test.txt``, or ``ptb.train.txt`` ..., or
        ``wiki.train.tokens`` ...; words are what white space separates, and a line ends in
        ``<eos>``. By default ``data/ptb`` or ``data``.
    vocabulary
        Keep so many words, the most frequent of the training text, ``<eos>`` and ``<unk>``
        included; all others become ``<unk>``. By default all words of the training text, and 2000
        of pydoc.
    limit
        Train on the first `limit` words only, for short searches. The vocabulary stays.

    Examples
    --------
    >>> corpus = load_text("pydoc", vocabulary=500)
    >>> corpus.vocabulary, "<unk>" in corpus.words, corpus.train.dtype
    (500, True, torch.int64)
    """
    import torch

    for what, value, least in (("vocabulary", vocabulary, 3), ("limit", limit, 2)):
        if value is not None and value < least:
            raise DataError(f"{what} must be at least {least} but got {value}.")
    parts, words = _read_parts(name, root, vocabulary)
    number = {word: i for i, word in enumerate(words)}
    train, validation, test = (
        torch.tensor([number.get(word, number.get(UNKNOWN, -1)) for word in part]) for part in parts
    )
    return Corpus(name, words, train[:limit], validation, test)


def count_vocabulary(name: str, root: str | Path | None, vocabulary: int | None) -> int:
    """Return the vocabulary that `load_text` would have; needs no torch."""
    return len(_read_parts(name, root, vocabulary)[1])


def _read_parts(
    name: str, root: str | Path | None, vocabulary: int | None
) -> tuple[list[list[str]], tuple[str, ...]]:
    """Return the words of the three parts of a text, and its vocabulary."""
    folder = check_text(name, root)
    parts = _read_pydoc() if folder is None else [_read_words(path) for path in _files(folder)]
    if name == "pydoc" and vocabulary is None:
        vocabulary = _PYDOC_VOCABULARY
    return parts, _vocabulary(parts, vocabulary)


def check_text(name: str, root: str | Path | None = None) -> Path | None:
    """Check, without loading, that a corpus is known and there; return its folder, if any."""
    if name not in TEXT_NAMES:
        raise DataError(f"text must be one of {', '.join(TEXT_NAMES)} but got {name!r}.")
    if name == "pydoc":
        if root is not None:
            raise DataError(f"pydoc is embedded and has no root but got {str(root)!r}.")
        return None
    folder = DEFAULT_ROOTS[name] if root is None else Path(root).expanduser()
    _files(folder)
    return folder


def to_columns(tokens: Tensor, batch: int) -> Tensor:
    """Cut a text into `batch` equal stretches side by side, shape (steps, batch).

    What is left over at the end is dropped. Column k of one batch goes on in column k of the next:
    that is what lets a state be carried over.
    """
    steps = len(tokens) // batch
    if steps < 2:
        raise DataError(
            f"a text of {len(tokens)} words is too short for {batch} sequences side by side."
        )
    return tokens[: steps * batch].view(batch, steps).t().contiguous()


def is_corpus(folder: Path) -> bool:
    """Return whether a folder holds the three files of a text."""
    try:
        return bool(_files(folder))
    except DataError:
        return False


def _files(folder: Path) -> list[Path]:
    for pattern in _PATTERNS:
        files = [folder / pattern.format(part) for part in _PARTS]
        if all(file.is_file() for file in files):
            return files
    wanted = ", ".join(f"{part}.txt" for part in _PARTS)
    raise DataError(f"{folder} must hold {wanted} (or ptb.train.txt, ...) but does not.")


def _read_words(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise DataError(f"{path} must be UTF-8 text but is not.") from None
    words = [word for line in lines if line.strip() for word in (*line.split(), END)]
    if not words:
        raise DataError(f"{path} must hold words but is empty.")
    return words


def _read_pydoc() -> list[list[str]]:
    """Return CPython's documentation topics: of each the first 80 % are for training.

    The rest of a topic is half validation, half test; cut between paragraphs. Topics repeat each
    other: a paragraph counts once, so that none is in two parts.
    """
    from pydoc_data.topics import topics

    parts: list[list[str]] = [[], [], []]
    seen: set[tuple[str, ...]] = set()
    for name in sorted(topics):
        words = (tuple(tokenize(text)) for text in re.split(r"\n\s*\n", topics[name]))
        paragraphs = [p for p in dict.fromkeys(words) if p and p not in seen]
        seen.update(paragraphs)
        first, second = round(0.8 * len(paragraphs)), round(0.9 * len(paragraphs))
        cuts = (paragraphs[:first], paragraphs[first:second], paragraphs[second:])
        for part, cut in zip(parts, cuts, strict=True):
            part.extend(word for paragraph in cut for word in (*paragraph, END))
    return parts


def tokenize(text: str) -> list[str]:
    """Split prose and code into lower-case words, ``N`` for numbers, and punctuation.

    Lines that only draw a rule or a frame are left out.

    Examples
    --------
    >>> tokenize('Returns "self.__spam" >= 42.')
    ['returns', '"', 'self', '.', '__spam', '"', '>', '=', 'N', '.']
    """
    lines = [line for line in text.lower().splitlines() if not _RULE.fullmatch(line)]
    found = (match.group() for match in _WORD.finditer("\n".join(lines)))
    return [NUMBER if word.isdigit() else word for word in found]


def _vocabulary(parts: Sequence[Iterable[str]], limit: int | None) -> tuple[str, ...]:
    """Return the words of the training text by frequency; UNKNOWN is among them if needed."""
    counts = Counter(parts[0])
    missing = any(word not in counts for part in parts[1:] for word in part)
    special = {END}
    if missing or UNKNOWN in counts or (limit is not None and limit < len(counts)):
        special.add(UNKNOWN)
    ordinary = sorted(counts.keys() - special, key=lambda word: (-counts[word], word))
    room = None if limit is None else limit - len(special)
    return (*sorted(special), *ordinary[:room])
