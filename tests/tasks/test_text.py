from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from nni_petridish.errors import DataError
from nni_petridish.tasks.language.text import (
    END,
    UNKNOWN,
    check_text,
    load_text,
    to_columns,
    tokenize,
)

TEXTS = {
    "train": "the cat sat\nthe dog sat on the mat\n\n",
    "valid": "the bird sat\n",
    "test": "a cat on the mat\n",
}


def write(folder: Path, pattern: str = "{}.txt", **changes: str) -> Path:
    for part, text in {**TEXTS, **changes}.items():
        (folder / pattern.format(part)).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("pattern", ["{}.txt", "ptb.{}.txt", "wiki.{}.tokens"])
def test_a_folder_is_read_word_by_word(tmp_path: Path, pattern: str) -> None:
    corpus = load_text("text_folder", write(tmp_path, pattern))

    def words(numbers: torch.Tensor) -> list[str]:
        return [corpus.words[i] for i in numbers]

    assert words(corpus.train) == [
        *("the", "cat", "sat", END),
        *("the", "dog", "sat", "on", "the", "mat", END),
    ]
    assert words(corpus.validation) == ["the", UNKNOWN, "sat", END]
    assert words(corpus.test) == [UNKNOWN, "cat", "on", "the", "mat", END]
    assert corpus.vocabulary == len(set(corpus.words)) == 8
    assert corpus.train.dtype == torch.int64


def test_without_unknown_words_there_is_no_word_for_them(tmp_path: Path) -> None:
    root = write(tmp_path, valid="the cat\n", test="the dog\n")
    assert UNKNOWN not in load_text("text_folder", root).words
    assert load_text("text_folder", root).vocabulary == 7


def test_a_bounded_vocabulary_keeps_the_most_frequent_words(tmp_path: Path) -> None:
    corpus = load_text("text_folder", write(tmp_path), vocabulary=4)
    assert set(corpus.words) == {END, UNKNOWN, "the", "sat"}
    assert int(corpus.train.max()) == 3


def test_a_limit_shortens_the_training_text_only(tmp_path: Path) -> None:
    whole = load_text("text_folder", write(tmp_path))
    short = load_text("text_folder", tmp_path, limit=5)
    assert torch.equal(short.train, whole.train[:5])
    assert short.words == whole.words
    assert torch.equal(short.test, whole.test)


def test_the_embedded_text_needs_nothing_and_is_always_the_same() -> None:
    corpus, again = load_text(), load_text("pydoc")
    assert corpus.vocabulary == 2000
    assert corpus.words == again.words
    assert torch.equal(corpus.train, again.train)
    sizes = [len(part) for part in (corpus.train, corpus.validation, corpus.test)]
    assert 50_000 < sizes[0] < 500_000
    assert all(0.05 < size / sum(sizes) < 0.2 for size in sizes[1:])
    unknown = corpus.words.index(UNKNOWN)
    for part in (corpus.train, corpus.validation, corpus.test):
        assert (part == unknown).float().mean() < 0.1
        assert int(part.max()) < 2000


def test_paragraphs_of_the_embedded_text_are_in_one_part_only() -> None:
    corpus = load_text(vocabulary=100_000)
    end = corpus.words.index(END)

    def paragraphs(numbers: torch.Tensor) -> list[tuple[int, ...]]:
        cuts = [-1, *(numbers == end).nonzero().flatten().tolist()]
        return [tuple(numbers[a + 1 : b].tolist()) for a, b in itertools.pairwise(cuts)]

    parts = [paragraphs(part) for part in (corpus.train, corpus.validation, corpus.test)]
    everything = [paragraph for part in parts for paragraph in part]
    assert all(len(part) > 100 for part in parts)
    known = [p for p in everything if corpus.words.index(UNKNOWN) not in p]
    assert len(set(known)) == len(known) > 0.8 * len(everything)


def test_tokens_are_words_numbers_and_punctuation_without_rules() -> None:
    text = "The *for* loop\n**************\n\n+----+----+\nx1 = 3.14  # __init__\n"
    assert tokenize(text) == [
        *("the", "*", "for", "*", "loop"),
        *("x", "N", "=", "N", ".", "N", "#", "__init__"),
    ]


def test_columns_follow_the_text_downwards() -> None:
    columns = to_columns(torch.arange(11), 3)
    assert columns.tolist() == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    with pytest.raises(DataError, match="a text of 5 words is too short for 3 sequences"):
        to_columns(torch.arange(5), 3)


def test_what_is_wrong_is_said_in_one_line(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    good = tmp_path / "good"
    good.mkdir()
    write(good)
    broken = tmp_path / "broken"
    broken.mkdir()
    write(broken, valid="\n")
    binary = tmp_path / "binary"
    binary.mkdir()
    write(binary)
    (binary / "test.txt").write_bytes(b"\xff\xfe\xff")
    for problem, call in {
        "text must be one of pydoc, ptb, text_folder but got 'x'": lambda: load_text("x"),
        "must hold train.txt, valid.txt, test.txt": lambda: load_text("ptb", empty),
        "pydoc is embedded and has no root": lambda: load_text("pydoc", good),
        "vocabulary must be at least 3 but got 2": lambda: load_text("ptb", good, vocabulary=2),
        "limit must be at least 2 but got 1": lambda: load_text("ptb", good, limit=1),
        "valid.txt must hold words but is empty": lambda: load_text("ptb", broken),
        "test.txt must be UTF-8 text": lambda: load_text("ptb", binary),
    }.items():
        with pytest.raises(DataError) as caught:
            call()
        assert problem in str(caught.value)
        assert "\n" not in str(caught.value)
    assert check_text("ptb", good) == good
    assert check_text("pydoc") is None
