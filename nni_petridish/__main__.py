"""The command ``nni-petridish``, ``python -m nni_petridish``: its subcommands and their rooms."""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import pkgutil
import re
import sys
from collections.abc import Container, Sequence
from typing import NamedTuple, NoReturn, TextIO

from nni_petridish import __version__
from nni_petridish.errors import PetridishError
from nni_petridish.running.process import INTERRUPTED, keep_freed_memory, set_threads

_LONGEST_LINE = 2000
_NO_READER = 128 + 13
"""Exit code of a command whose output nobody reads any more, as shells have it for SIGPIPE."""
_READ_CONFIG = "nni_petridish.studies.commands:read_config"
_FINISH_SEARCH = "nni_petridish.results.commands:finish_search"


class Command(NamedTuple):
    """A command: its line in the list of commands, its room, and examples for its help.

    ``rooms`` names the function that adds its options, followed by the functions of higher rooms
    that it is given. They are imported only for the command that was called.
    """

    help: str
    rooms: tuple[str, ...]
    examples: tuple[str, ...]
    description: str | None = None


COMMANDS = {
    "run": Command(
        "run a search through nnictl: several workers, NNI's web UI",
        ("nni_petridish.nni_adapter.commands:add_run_options", _READ_CONFIG, _FINISH_SEARCH),
        (
            "nni-petridish run configs/petridish.yml",
            "nni-petridish run configs/petridish.yml --resume --port 8080",
        ),
    ),
    "search": Command(
        "run the same search in this process, one growth after the other",
        ("nni_petridish.running.commands:add_search_options", _READ_CONFIG, _FINISH_SEARCH),
        ("nni-petridish search configs/petridish.yml --resume --verbose",),
    ),
    "init": Command(
        "look at your data and write a configuration that fits them",
        ("nni_petridish.running.init:add_init_options", _READ_CONFIG),
        (
            "nni-petridish init my_images",
            "nni-petridish init table.csv",
            "nni-petridish init cifar10 --root data",
        ),
    ),
    "check": Command(
        "check a configuration, and estimate time and memory of a growth",
        ("nni_petridish.results.commands:add_check_options", _READ_CONFIG),
        ("nni-petridish check configs/petridish.yml --quick",),
    ),
    "schema": Command(
        "print the JSON schema of configuration files, for editors",
        ("nni_petridish.running.schema_command:add_schema_options",),
        ("nni-petridish schema > petridish.schema.json",),
    ),
    "show": Command(
        "show the models of a search",
        ("nni_petridish.results.commands:add_show_options",),
        ("nni-petridish show galleries/digits", "nni-petridish show galleries/digits g00004"),
    ),
    "export": Command(
        "write a model to a file of its own",
        ("nni_petridish.results.commands:add_export_options",),
        (
            "nni-petridish export galleries/digits --best --format onnx --out best.onnx",
            "nni-petridish export galleries/digits --near 60M --out model.safetensors",
        ),
    ),
    "train": Command(
        "train a model from scratch on all training data, as large as you like",
        ("nni_petridish.results.retrain.command:add_train_options",),
        ("nni-petridish train galleries/digits --near 60M --epochs 20 --repetitions 5",),
    ),
    "serve": Command(
        "show the report of a gallery in a browser, refreshed while a search runs",
        ("nni_petridish.results.serve:add_serve_options",),
        ("nni-petridish serve galleries/digits",),
        "Show the report of a gallery in a browser of this machine. The page refreshes itself while"
        " a search runs. Nothing is written. Ctrl-C ends the server.",
    ),
    "analogy": Command(
        "compare Petridish with FSLR, LARS and others on feature selection",
        ("nni_petridish.estimators.feature_selection.cli:add_analogy_options",),
        ("nni-petridish analogy",),
        "Run Petridish on linear regression beside the methods it generalizes: order of entry,"
        " agreement with LARS, distance of the coefficient paths, error and time.",
    ),
    "tune": Command(
        "tune λ and I_max with Optuna: one trial is one whole search",
        ("nni_petridish.studies.tuning.cli:add_tune_options",),
        ("nni-petridish tune configs/tune.yml --trials 20 --jobs 2",),
    ),
    "ablate": Command(
        "run ablations and print them as tables beside the paper's",
        ("nni_petridish.studies.ablations.cli:add_ablate_options",),
        ("nni-petridish ablate configs/ablations.yml --only i_max,l1",),
    ),
    "compare": Command(
        "compare Petridish with other methods at equal compute, over random seeds",
        ("nni_petridish.studies.comparison.cli:add_compare_options",),
        ("nni-petridish compare configs/compare_digits.yml",),
    ),
    "judge": Command(
        "judge scores and search policies by tables of trained architectures",
        ("nni_petridish.studies.judge.cli:add_judge_options",),
        ("nni-petridish judge --help",),
    ),
    "completion": Command(
        "print a completion script for a shell",
        ("nni_petridish.__main__:add_completion_options",),
        ('eval "$(nni-petridish completion bash)"',),
    ),
}
"""The commands, in the order of the help."""
FIRST_STEPS = [
    "nni-petridish init digits                # or your own data: writes petridish.yml",
    "nni-petridish search petridish.yml",
    "nni-petridish serve galleries/digits     # the models in your browser",
]
"""The first commands of a new user, for the help of all commands."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; an error of the user is printed in one line."""
    line = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser(called=line[:1])  # all other words are those of this command
    if not line:
        parser.print_help(sys.stderr)
        return 2
    options = parser.parse_args(line)
    options.line = line  # for those that say how to go on
    set_threads(1)  # before any command imports torch
    keep_freed_memory()
    logging.basicConfig(
        format="%(levelname)s: %(message)s", level=logging.WARNING, handlers=[_PresentStderr()]
    )
    try:
        result: int = options.command(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NO_READER
    except (PetridishError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":  # of torchrun's processes, the first one speaks
            print(f"nni-petridish: {_one_line(_reason(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("nni-petridish: stopped; what was finished is kept.", file=sys.stderr)
        return INTERRUPTED
    return result


class _PresentStderr(logging.StreamHandler[TextIO]):
    """A handler for the present standard error: a live display puts another one in its place."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        raise AttributeError("the stream is always the standard error.")


def _reason(error: Exception) -> str:
    """Return the text of an error; one of the system names its file first."""
    if isinstance(error, OSError) and error.strerror:
        place = "" if error.filename is None else f"{error.filename}: "
        return f"{place}{error.strerror}."
    return str(error)


def _one_line(text: str) -> str:
    """Return a text without line breaks and control characters, which a file's name may have."""
    shown = "".join(char if char.isprintable() else " " for char in text)
    return shown if len(shown) <= _LONGEST_LINE else f"{shown[: _LONGEST_LINE - 3]}..."


def _with_guess(message: str) -> str:
    """Return a message on a command that there is not, with the one that was meant."""
    wrong = re.search(r"COMMAND: invalid choice: '(.*?)'", message)
    near = difflib.get_close_matches(wrong[1], COMMANDS, n=1) if wrong else []
    return f"there is no command {wrong[1]!r}; is it {near[0]}?" if wrong and near else message


class _Parser(argparse.ArgumentParser):
    """A parser whose errors, which repeat the user's words, are one line each."""

    def error(self, message: str) -> NoReturn:
        super().error(_one_line(_with_guess(message)))


def _parser(called: Container[str] = COMMANDS) -> argparse.ArgumentParser:
    """Return the parser; of commands that are not ``called`` it knows the name only."""
    parser = _Parser(
        prog="nni-petridish",
        description="Grow neural networks from small to large.",
        epilog="\n  ".join(["to begin with:", *FIRST_STEPS]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(
            name,
            help=command.help,
            description=command.description or command.help,
            epilog="\n  ".join(["examples:", *command.examples]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name in called:
            add_options, *given = map(pkgutil.resolve_name, command.rooms)
            add_options(subparser, *given)
    return parser


def add_completion_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``completion``."""
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    parser.set_defaults(command=_complete)


def _complete(options: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(_parser(), shell=options.shell))
    return 0


if __name__ == "__main__":
    sys.exit(main())
