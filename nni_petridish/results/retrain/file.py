"""Files that describe a final training, as ``configs/imagenet_transfer.yml``; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from nni_petridish.core.genotype import MERGES
from nni_petridish.gallery.select import parse_count
from nni_petridish.running.config import read_yaml
from nni_petridish.running.schema import Part, check, keys_of, left_out, part, part_of
from nni_petridish.search.constraints import Count, OneOf, prefix
from nni_petridish.tasks.vision import kind as vision
from nni_petridish.tasks.vision.data import describe
from nni_petridish.tasks.vision.recipe import Recipe
from search_spaces.vision.size import seed_size
from search_spaces.vision.space import STEMS, VisionSpace


@dataclass(frozen=True)
class FileOptions:
    """What a file says about a retraining, beside data and recipe; see `vision_retraining`.

    Parameters
    ----------
    cells_per_stage
        N, the number of normal cells at each resolution.
    filters
        F, the width of the first stage.
    max_multiply_adds
        In place of F: as wide as so many multiply-adds allow, for instance 600M.
    merge
        op_merge, if it is not to be the search's.
    stem
        ``plain``, or ``imagenet`` for large images.
    epochs
        Epochs of the training.
    repetitions
        Trainings, with random seeds that follow one another.
    seed
        The first random seed.
    """

    cells_per_stage: Count | None = None
    filters: Count | None = None
    max_multiply_adds: float | str | None = None
    merge: Annotated[str, OneOf(MERGES)] | None = None
    stem: Annotated[str, OneOf(STEMS)] | None = None
    epochs: Count | None = None
    repetitions: Count | None = None
    seed: Annotated[int, Ge(0)] | None = None


@cache
def file_part() -> type[Part]:
    """Return the model of a whole file."""
    data = part_of(vision.DATA, without=("validation", "limit"))
    recipe = part_of(Recipe, without=("epochs",), partial=True)
    parts = {"data": (data, left_out("The images.")), "recipe": (recipe, left_out("Changes."))}
    return part("Retraining", {**keys_of(FileOptions), **parts}, "A retraining.")


def is_final_file(path: Path) -> bool:
    """Return whether a YAML file seems to describe a final training, not a search."""
    document = read_yaml(path)
    return not {"searchSpace", "tuner"} & set(document) and bool(
        set(file_part().model_fields) & set(document)
    )


def read_final_file(path: Path) -> dict[str, Any]:
    """Read a YAML file such as ``configs/imagenet_transfer.yml``.

    Returns
    -------
    dict
        The arguments of `vision_retraining`, and ``repetitions``; only what the file says. Folders
        in it are relative to the file's own.
    """
    document = read_yaml(path)
    check(file_part(), document)
    options = dict(document)
    if options.get("max_multiply_adds") is not None:
        options["max_multiply_adds"] = parse_count(str(options["max_multiply_adds"]))
    changes = options.pop("recipe", {})
    if "data" in options:
        options["data"] = vision.read_training_data(options["data"], path.parent)
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
