"""Commands and Python blocks of the documentation, read by the parser and the compiler."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from nni_petridish.__main__ import _parser

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FILES = sorted([*PAGES, *ROOT.glob("configs/*.yml"), ROOT / "Makefile", ROOT / "Dockerfile"])
PARSER = _parser()
CALL = "nni-petridish "


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the language and the contents of every fenced block."""
    for found in re.finditer(r"^ *```(\w*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
        yield found[1], found[2]


def calls(block: str) -> Iterator[str]:
    """Yield the calls of the command in a block of a shell, without comments."""
    lines = re.sub(r"\\?\n +(?=\[?-)", " ", block).splitlines()  # a call may have several lines
    for line in lines:
        for part in line.split("  #")[0].split("&&"):
            program, found, arguments = part.strip().removeprefix("$ ").partition(CALL)
            if found and program in ("", ".venv/bin/"):
                yield arguments.strip()


def mentions(text: str) -> Iterator[str]:
    """Yield the calls of the command in the text outside of blocks, as far as they go."""
    yield from re.findall(rf"`[^`\n]*?{CALL}([^`\n]+)`", text)
    yield from re.findall(rf"^# .*?{CALL}(.+)$", text, re.MULTILINE)  # of configurations


def subcommand(words: list[str]) -> argparse.ArgumentParser:
    """Return the parser of the innermost command that the words name."""
    parser = PARSER
    for word in words:
        choices = [a.choices for a in parser._actions if isinstance(a.choices, dict)]
        if not choices or word not in choices[0]:
            break
        parser = choices[0][word]
    return parser


def unknown_options(call: str) -> list[str]:
    """Return the options in a call, or in a synopsis of one, that its command does not have."""
    words = re.sub(r"[\[\](),;.]", " ", call).split()
    known = subcommand(words)._option_string_actions
    return [word for word in words if re.fullmatch(r"--?[a-z][a-z-]*", word) and word not in known]


def is_synopsis(call: str) -> bool:
    return "[" in call or "..." in call


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_in_a_block_parses(page: Path) -> None:
    for language, block in blocks(page.read_text()):
        for call in calls(block) if language in ("", "sh", "bash") else ():
            assert not unknown_options(call), f"{name(page)}: {call}"
            if not is_synopsis(call):
                PARSER.parse_args(shlex.split(call))
                for path in re.findall(r"\bconfigs/[\w./-]+", call):
                    assert (ROOT / path).exists(), f"{name(page)}: {path}"


@pytest.mark.parametrize("file", FILES, ids=name)
def test_every_command_that_is_mentioned_exists(file: Path) -> None:
    for call in mentions(file.read_text()):
        assert subcommand(call.split()[:1]) is not PARSER or call.startswith("-"), call
        assert not unknown_options(call), f"{name(file)}: {call}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_python_block_compiles(page: Path) -> None:
    for language, block in blocks(page.read_text()):
        if language == "python":
            compile(block, name(page), "exec")


def test_the_checks_find_calls_and_what_is_wrong_in_them() -> None:
    block = (
        ".venv/bin/nni-petridish show galleries/digits   # the hull\n"
        "nni-petridish tune FILE [--trials N]\n        [--pruner NAME] [--nonsense]\n"
        "source x && nni-petridish analogy\n"
    )
    found = list(calls(block))
    assert found == [
        "show galleries/digits",
        "tune FILE [--trials N] [--pruner NAME] [--nonsense]",
        "analogy",
    ]
    assert [unknown_options(call) for call in found] == [[], ["--nonsense"], []]
    assert list(mentions("`nni-petridish judge scores --data D`")) == ["judge scores --data D"]
    assert unknown_options("judge scores --data D --taus 1") == ["--taus"]
    assert subcommand(["judgment"]) is PARSER
    assert list(blocks("a\n```python\nx = 1\n```\n")) == [("python", "x = 1\n")]
