"""``nni-petridish init``: look at data and write a configuration that fits them."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nni_petridish.errors import ConfigError, DataError
from nni_petridish.gallery.files import write_file
from nni_petridish.registry import Kind, Suggestion, kind_names, kind_of
from nni_petridish.running.commands import ReadConfig
from nni_petridish.running.process import cores

_OTHER_TABLES = (".parquet", ".feather", ".xls", ".xlsx")
_COLUMN = 34
_WIDEST = 120


def add_init_options(parser: argparse.ArgumentParser, read_config: ReadConfig) -> None:
    """Add the options of ``init``.

    Parameters
    ----------
    parser
        The parser of the command.
    read_config
        Checks the file that was written.
    """
    parser.add_argument(
        "source",
        nargs="?",
        default=".",
        metavar="DATA",
        help="a folder of images (train/CLASS/*, val/CLASS/*) or texts (train.txt, valid.txt,"
        " test.txt), an .npz or .csv file, or a name such as cifar10 (default: this folder)",
    )
    parser.add_argument("--root", metavar="FOLDER", help="of a data set that is named")
    parser.add_argument(
        "--out", type=Path, default=Path("petridish.yml"), metavar="FILE", help="the file to write"
    )
    parser.set_defaults(command=lambda options: _init(options, read_config))


def _init(options: argparse.Namespace, read_config: ReadConfig) -> int:
    out: Path = options.out
    if os.path.lexists(out):
        raise ConfigError(f"{out} is there already: it is not overwritten.")
    kind_name, suggestion = suggest(options.source, options.root)
    name = re.sub(r"\W+", "-", Path(options.source).resolve().stem).strip("-") or "search"
    write_file(out, to_yaml(kind_name, suggestion, name, out.absolute().parent).encode())
    try:
        read_config(out)
    except BaseException:
        out.unlink()
        raise
    print(f"Found {suggestion.found}.")
    for note in suggestion.notes:
        print(note)
    file = shlex.quote(str(out))
    print(f"{out} is written; read it, change it, and go on with")
    print(f"  nni-petridish check {file}     # time and memory of a growth")
    print(f"  nni-petridish search {file}    # or run, with several workers and NNI's web UI")
    return 0


def suggest(source: str, root: str | None = None) -> tuple[str, Suggestion]:
    """Return the kind of the data and settings that fit them.

    Parameters
    ----------
    source
        A file, a folder, or the name of a data set.
    root
        The folder of a data set that is named.
    """
    if source.lower().endswith(_OTHER_TABLES):
        raise DataError(f"{source}: a table must be a file of comma-separated values (.csv).")
    for name in kind_names():
        suggestion = kind_of({"space": name}).suggest(source, root)
        if suggestion is not None:
            return name, suggestion
    what = "holds neither images nor texts" if Path(source).exists() else "is no data"
    raise DataError(
        f"{source} {what} that are known: give a folder with train/CLASS/* and val/CLASS/*, one"
        " with train.txt, valid.txt and test.txt, an .npz or .csv file, or a name such as cifar10"
        " or pydoc."
    )


def to_yaml(kind_name: str, suggestion: Suggestion, name: str, folder: Path) -> str:
    """Return a configuration in which every setting has a comment.

    Parameters
    ----------
    kind_name, suggestion
        See `suggest`.
    name
        The name of the search.
    folder
        The folder of the file, which paths are relative to.
    """
    kind = kind_of({"space": kind_name})
    data = dict(suggestion.data)
    if "root" in data:
        data["root"] = _relative(str(data["root"]), folder)
    arguments: dict[str, Any] = {
        "gallery": f"galleries/{name}",
        "data": data,
        "seed": 0,
        **suggestion.settings,
        "recipe": dict(suggestion.recipe),
    }
    experiment = {
        "experimentName": f"Petridish on {name}",
        "trialCommand": "python -m nni_petridish.trial",
        "trialCodeDirectory": ".",
        "trialConcurrency": min(2, cores()),
        "trainingService": {"platform": "local"},
        "searchSpace": {"space": kind_name, **suggestion.space},
        "tuner": {
            "className": "nni_petridish.tuner.PetridishTuner",
            "codeDirectory": ".",
            "classArgs": arguments,
        },
    }
    head = [
        f"# A first search on {suggestion.found}.",
        "# Editors complete and check this file with the output of: nni-petridish schema",
    ]
    return "\n".join([*head, *_lines(experiment, _comments(kind))]) + "\n"


def _relative(root: str, folder: Path) -> str:
    """Return a path relative to the folder if it is inside of it, else the whole path."""
    path = Path(root).expanduser().absolute()
    return os.path.relpath(path, folder) if path.is_relative_to(folder) else str(path)


def _comments(kind: Kind) -> dict[str, str]:
    """Return the meaning of each setting: the first sentence of its documentation."""
    from nni_petridish.running.schema import field_texts
    from nni_petridish.search.settings import GrowthSettings, Limits, SearchSettings

    sources = (Limits, GrowthSettings, SearchSettings, kind.RECIPE, kind.DATA, kind.SPACE)
    texts = {name: text for one in sources for name, text in field_texts(one).items()}
    ends = re.compile(r"(?<=[^.])\. |;|\.$")
    short = {name: ends.split(text.replace("``", ""))[0] for name, text in texts.items()}
    return short | {
        "space": "the kind of networks",
        "gallery": "folder of the models; search again with --resume to go on",
        "trialConcurrency": "workers of nni-petridish run",
        "trialCommand": "one trial is one growth",
        "codeDirectory": "the folders below are relative to this one",
        "searchSpace": "the networks that the search may reach",
        "recipe": "training; other settings come from the recipe of the data",
        "seed_epochs": "epochs of the seed model (paper: 200)",
        "weak_epochs": "epochs of weak learning (paper: 80)",
        "final_epochs": "epochs after finalizing (paper: 80)",
        "seed": "random seed of the search",
        "limits": "all of them apply",
        "batch_size": "examples in a step",
        "lr": "the first learning rate",
    }


def _lines(values: Mapping[str, Any], comments: Mapping[str, str], indent: int = 0) -> list[str]:
    """Return a mapping as YAML, each key with its comment."""
    import yaml

    lines = []
    for key, value in values.items():
        is_part = isinstance(value, Mapping)
        plain = yaml.safe_dump(value, default_flow_style=True, width=1000, allow_unicode=True)
        shown = "" if is_part else " " + plain.removesuffix("...\n").strip()
        line = f"{' ' * indent}{key}:{shown}"
        comment = comments.get(key, "")
        room = _WIDEST - max(_COLUMN, len(line) + 2) - 2
        if comment and room > 10:
            cut = comment if len(comment) <= room else comment[: room - 3].rsplit(" ", 1)[0] + "..."
            line = f"{line.ljust(_COLUMN)}  # {cut}"
        lines.append(line)
        if is_part:
            lines += _lines(value, comments, indent + 2)
    return lines
