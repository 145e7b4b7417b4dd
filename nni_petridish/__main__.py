"""The command ``nni-petridish``, ``python -m nni_petridish``: its subcommands and their rooms."""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

from nni_petridish import __version__
from nni_petridish.errors import PetridishError
from nni_petridish.estimators.feature_selection.cli import add_analogy_command
from nni_petridish.nni_adapter.commands import add_run_command
from nni_petridish.results.commands import add_check_command, add_model_commands, finish_search
from nni_petridish.results.retrain.command import add_train_command
from nni_petridish.results.serve import add_serve_command
from nni_petridish.running.commands import add_search_command
from nni_petridish.running.init import add_init_command
from nni_petridish.running.process import INTERRUPTED, keep_freed_memory, set_threads
from nni_petridish.running.schema_command import add_schema_command
from nni_petridish.studies.ablations.cli import add_ablate_command
from nni_petridish.studies.commands import read_config
from nni_petridish.studies.comparison.cli import add_compare_command
from nni_petridish.studies.judge.cli import add_judge_command
from nni_petridish.studies.tuning.cli import add_tune_command

_LONGEST_LINE = 2000
_NO_READER = 128 + 13
"""Exit code of a command whose output nobody reads any more, as shells have it for SIGPIPE."""
EXAMPLES = {
    "run": [
        "nni-petridish run configs/petridish.yml",
        "nni-petridish run configs/petridish.yml --resume --port 8080",
    ],
    "search": ["nni-petridish search configs/petridish.yml --resume --verbose"],
    "init": [
        "nni-petridish init my_images",
        "nni-petridish init table.csv",
        "nni-petridish init cifar10 --root data",
    ],
    "check": ["nni-petridish check configs/petridish.yml --quick"],
    "schema": ["nni-petridish schema > petridish.schema.json"],
    "show": ["nni-petridish show galleries/digits", "nni-petridish show galleries/digits g00004"],
    "export": [
        "nni-petridish export galleries/digits --best --format onnx --out best.onnx",
        "nni-petridish export galleries/digits --near 60M --out model.safetensors",
    ],
    "train": ["nni-petridish train galleries/digits --near 60M --epochs 20 --repetitions 5"],
    "serve": ["nni-petridish serve galleries/digits"],
    "analogy": ["nni-petridish analogy"],
    "tune": ["nni-petridish tune configs/tune.yml --trials 20 --jobs 2"],
    "ablate": ["nni-petridish ablate configs/ablations.yml --only i_max,l1"],
    "judge": ["nni-petridish judge --help"],
    "completion": ['eval "$(nni-petridish completion bash)"'],
    "compare": ["nni-petridish compare configs/compare_digits.yml"],
}
"""Examples of each command, for its help."""
FIRST_STEPS = [
    "nni-petridish init digits                # or your own data: writes petridish.yml",
    "nni-petridish search petridish.yml",
    "nni-petridish serve galleries/digits     # the models in your browser",
]
"""The first commands of a new user, for the help of all commands."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; an error of the user is printed in one line."""
    line = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
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
    near = difflib.get_close_matches(wrong[1], EXAMPLES, n=1) if wrong else []
    return f"there is no command {wrong[1]!r}; is it {near[0]}?" if wrong and near else message


class _Parser(argparse.ArgumentParser):
    """A parser whose errors, which repeat the user's words, are one line each."""

    def error(self, message: str) -> NoReturn:
        super().error(_one_line(_with_guess(message)))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="nni-petridish",
        description="Grow neural networks from small to large.",
        epilog="\n  ".join(["to begin with:", *FIRST_STEPS]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_run_command(commands, read_config, finish_search)
    add_search_command(commands, read_config, finish_search)
    add_init_command(commands, read_config)
    add_check_command(commands, read_config)
    add_schema_command(commands)
    add_model_commands(commands)  # show, export
    add_train_command(commands)
    add_serve_command(commands)
    add_analogy_command(commands)
    add_tune_command(commands)
    add_ablate_command(commands)
    add_compare_command(commands)
    add_judge_command(commands)
    completion = commands.add_parser("completion", help="print a completion script for a shell")
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    completion.set_defaults(command=_complete)
    for name, command in commands.choices.items():
        command.description = _descriptions(commands)[name]
        command.epilog = "\n  ".join(["examples:", *EXAMPLES.get(name, [])])
        command.formatter_class = argparse.RawDescriptionHelpFormatter
    return parser


def _complete(options: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(_parser(), shell=options.shell))
    return 0


def _descriptions(commands: Any) -> dict[str, str]:
    """Return the line of each command in the list of commands."""
    return {action.dest: str(action.help) for action in commands._choices_actions}


if __name__ == "__main__":
    sys.exit(main())
