"""Files that describe a final training, as ``configs/imagenet_transfer.yml``; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from nni_petridish.gallery.select import parse_count
from nni_petridish.running.config import read_yaml
from nni_petridish.search.checks import mapping, prefix, refuse_unknown
from nni_petridish.search.settings import check_number
from nni_petridish.tasks.vision import kind as vision
from nni_petridish.tasks.vision.data import describe
from nni_petridish.tasks.vision.recipe import Recipe
from search_spaces.vision.size import seed_size
from search_spaces.vision.space import VisionSpace

_KEYS = (
    "cells_per_stage",
    "filters",
    "max_multiply_adds",
    "merge",
    "stem",
    "epochs",
    "repetitions",
    "seed",
    "data",
    "recipe",
)


def is_final_file(path: Path) -> bool:
    """Return whether a YAML file seems to describe a final training, not a search."""
    document = read_yaml(path)
    return not {"searchSpace", "tuner"} & set(document) and bool(set(_KEYS) & set(document))


def read_final_file(path: Path) -> dict[str, Any]:
    """Read a YAML file such as ``configs/imagenet_transfer.yml``.

    Returns
    -------
    dict
        The arguments of `final_training`, and ``repetitions``; only what the file says. Folders in
        it are relative to the file's own.
    """
    document = read_yaml(path)
    refuse_unknown(document, _KEYS, "")
    options = dict(document)
    for name in ("cells_per_stage", "filters", "epochs", "repetitions"):
        if options.get(name) is not None:
            check_number(name, options[name], 1, whole=True)
    if options.get("max_multiply_adds") is not None:
        options["max_multiply_adds"] = parse_count(str(options["max_multiply_adds"]))
    changes = mapping("recipe", options.pop("recipe", {}))
    refuse_unknown(changes, tuple(f.name for f in fields(Recipe) if f.name != "epochs"), "recipe.")
    if "data" in options:
        options["data"] = vision.read_training_data(mapping("data", options["data"]), path.parent)
        with prefix("recipe."):
            Recipe.named(options["data"]["name"], **changes)
    return {name: value for name, value in options.items() if value is not None} | {
        "changes": changes
    }


def describe_final_file(path: Path) -> str:
    """Check such a file and say what it is for, with the size of the seed if it tells enough."""
    options = read_final_file(path)
    text = f"{path} is valid: nni-petridish train GALLERY MODEL --config {path}"
    data: Mapping[str, Any] | None = options.get("data")
    if data is None or "filters" not in options:
        return text
    shape, classes = describe(data["name"], data.get("root"), data.get("image_size") or 224)
    known = ("cells_per_stage", "filters", "stem")
    space = VisionSpace(shape, classes, **{k: options[k] for k in known if k in options})
    multiply_adds, parameters = seed_size(space)
    size = f"{parameters:,} parameters, {multiply_adds:,} multiply-adds"
    return f"{text}\nA seed would have {size} there."
