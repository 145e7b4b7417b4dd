"""Files that describe a retraining, such as ``configs/imagenet_transfer.yml``; read without torch.

A file is for models of the default kind.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from nni_petridish.gallery.select import parse_count
from nni_petridish.registry import DEFAULT_KIND, kind_of
from nni_petridish.running.config import read_yaml
from nni_petridish.running.schema import Part, check, keys_of, left_out, part, part_of, value_of
from nni_petridish.search.constraints import Count

_KIND = {"space": DEFAULT_KIND}


@cache
def file_part() -> type[Part]:
    """Return the model of a whole file."""
    kind = kind_of(_KIND)
    keys = keys_of(kind.RETRAINING)
    repetitions = left_out("Trainings, with random seeds that follow one another.")
    keys["repetitions"] = (value_of(Count | None), repetitions)
    keys["data"] = (part_of(kind.DATA, without=kind.SEARCH_ONLY_DATA), left_out("The images."))
    recipe = part_of(kind.RECIPE, without=("epochs",), partial=True)
    keys["recipe"] = (recipe, left_out("Changes to the recipe of the data."))
    return part("Retraining", keys, "A retraining.")


def is_retraining_file(path: Path) -> bool:
    """Return whether a YAML file seems to describe a retraining, not a search."""
    document = read_yaml(path)
    return not {"searchSpace", "tuner"} & set(document) and bool(
        set(file_part().model_fields) & set(document)
    )


def read_retraining_file(path: Path) -> dict[str, Any]:
    """Read a YAML file such as ``configs/imagenet_transfer.yml``.

    Returns
    -------
    dict
        The arguments of `prepare_retraining`, and ``repetitions``; only those that the file has.
        Folders in it are relative to the file's own.
    """
    document = read_yaml(path)
    check(file_part(), document)
    options = {name: value for name, value in document.items() if value is not None}
    if "max_multiply_adds" in options:
        options["max_multiply_adds"] = parse_count(str(options["max_multiply_adds"]))
    changes = options.pop("recipe", {})
    if "data" in options:
        kind = kind_of(_KIND)
        options["data"] = kind.read_data(options["data"], path.parent, for_retraining=True)
        kind.read_recipe(changes, options["data"], for_retraining=True)
    return {**options, "changes": changes}


def describe_retraining_file(path: Path) -> str:
    """Check such a file and say what it is for, with the size of the seed if it names the width."""
    options = read_retraining_file(path)
    text = f"{path} is valid: nni-petridish train GALLERY MODEL --config {path}"
    if "data" not in options or "filters" not in options:
        return text
    kind = kind_of(_KIND)
    of_space = {field.name for field in fields(kind.SPACE)}
    space = {name: value for name, value in options.items() if name in of_space}
    multiply_adds, parameters = kind.seed_size(space, options["data"])
    size = f"{parameters:,} parameters, {multiply_adds:,} multiply-adds"
    return f"{text}\nA seed would have {size} there."
