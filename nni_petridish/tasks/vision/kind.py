"""Image classification in a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from nni_petridish.errors import ConfigError
from nni_petridish.registry import ARGUMENTS, ERROR
from nni_petridish.search.constraints import Count, Folder, OneOf, prefix, resolve
from nni_petridish.tasks.vision.data import DATA_NAMES, Description, check_data, describe
from nni_petridish.tasks.vision.recipe import Recipe
from search_spaces.vision.space import VisionSpace

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nni_petridish.tasks.plain_network import PlainNetwork
    from nni_petridish.tasks.task import Task


@dataclass(frozen=True)
class DataOptions:
    """The images of a search, see `load_data`.

    Parameters
    ----------
    name
        The data set.
    root
        The folder that it is in.
    validation
        Training images to set aside for validation.
    limit
        Train on so many of the remaining images only.
    seed
        Orders the images before they are set aside.
    image_size, workers
        Of image_folder: side of the square crops, and processes that read.
    """

    name: Annotated[str, OneOf(DATA_NAMES)] = "digits"
    root: Folder | None = None
    validation: Count | None = None
    limit: Count | None = None
    seed: Annotated[int, Ge(0)] | None = None
    image_size: Count | None = None
    workers: Annotated[int, Ge(0)] | None = None


MEASURE = ERROR
TUNED_RANGES = {"l1": (1e-5, 0.1), "i_max": (2, 4)}
"""They span the values that the paper tried."""
L1_GROUPS = (1e-5, 1e-3, 1e-1)
"""The values of λ that the paper compared."""
SPACE = VisionSpace
DATA = DataOptions
RECIPE = Recipe
DECIDED_BY_DATA = ("image_shape", "num_classes")
_PLACE = f"{ARGUMENTS}.data"


def read_data(data: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Return the arguments of `load_data`; raise unless the files are there."""
    result = _read_data(data, base, _PLACE)
    if result["name"] == "image_folder" and not result.get("validation"):
        raise ConfigError(f"{_PLACE}.validation must be at least 1: a search needs validation.")
    return result


def read_training_data(data: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Return the same for a retraining, which sets nothing aside."""
    return _read_data(data, base, "data")


def _read_data(data: Mapping[str, Any], base: Path, place: str) -> dict[str, Any]:
    result = {"name": DataOptions.name, **data}
    if result.get("root") is not None:
        result["root"] = str(resolve(result["root"], base))
    with prefix(f"{place}: "):
        check_data(result["name"], result.get("root"))
    return result


def check_space(options: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Check that the options of `VisionSpace` fit the images."""
    image_shape, num_classes = _describe(data)
    with prefix("searchSpace."):
        VisionSpace(image_shape, num_classes, **options)


def full_space(options: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of the space; the number of classes is not looked for."""
    known = {key: value for key, value in options.items() if key != "space"}
    if "image_shape" not in known:
        size = data.get("image_size") or 224
        folder = data["name"] == "image_folder"  # may be gone: it is not looked at
        shape = (3, size, size) if folder else describe(data["name"]).image_shape
        known |= {"image_shape": shape, "num_classes": 1}
    return {"space": "vision", **VisionSpace(**known).describe()}


def describe_space(space: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of the space; images and classes, if not given, are those of the data."""
    full = dict(space)
    if "image_shape" not in full:
        full |= zip(DECIDED_BY_DATA, _describe(data), strict=True)
    return {"space": "vision", **make_space(full).describe()}


def make_space(space: Mapping[str, Any]) -> VisionSpace:
    """Return the space that is described by plain data."""
    return VisionSpace(**{key: value for key, value in space.items() if key != "space"})


def space_of_weights(
    space: Mapping[str, Any], data: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return the space with the shape of the images and the number of classes."""
    if "image_shape" in space:
        return dict(space)
    channels = weights["stem.0.weight"].shape[1]
    classes = weights["classifier.weight"].shape[0]
    if data.get("name") == "image_folder":  # may be gone: it is not looked at
        height = width = int(data.get("image_size") or 224)
    else:
        _, height, width = describe(str(data.get("name"))).image_shape
    return {**space, "image_shape": [channels, height, width], "num_classes": classes}


def seed_size(space: Mapping[str, Any], data: Mapping[str, Any]) -> tuple[int, int]:
    """Return (multiply-adds of an image, parameters) of the seed."""
    from search_spaces.vision.size import seed_size

    options = {key: value for key, value in space.items() if key != "space"}
    return seed_size(VisionSpace(*_describe(data), **options))


def with_defaults(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as they are: the general defaults are the paper's for images."""
    return dict(arguments)


def read_recipe(options: Mapping[str, Any], data: Mapping[str, Any]) -> Recipe:
    """Return the recipe of the data set with changes; raise unless it fits the images."""
    with prefix(f"{ARGUMENTS}.recipe."):
        recipe = Recipe.named(data["name"], **options)
        recipe.check_image(_describe(data).image_shape)
    return recipe


def make_recipe(values: Mapping[str, Any]) -> Recipe:
    """Return the recipe with these values."""
    return Recipe(**values)


def load_task(space: Mapping[str, Any], data: Mapping[str, Any], recipe: Recipe) -> Task:
    """Load the images and make the task."""
    from nni_petridish.tasks.vision.data import load_data
    from nni_petridish.tasks.vision.task import VisionTask

    options = {key: value for key, value in space.items() if key != "space"}
    images = load_data(**data)
    described = VisionSpace(images.image_shape, images.num_classes, **options)
    return VisionTask(described, images, recipe)


def plain_network(
    net: nn.Module, space: Mapping[str, Any], facts: Mapping[str, Any], pixels: bool
) -> PlainNetwork:
    """Return an image classifier that takes normalized images, or pixels."""
    from nni_petridish.tasks.vision.plain_network import image_classifier

    return image_classifier(net, space, facts.get("normalisation"), pixels)


def check_retraining(space: Mapping[str, Any], cells_per_stage: int) -> None:
    """Refuse numbers of cells that the learners of a macro search cannot be spread over."""
    searched = space.get("cells_per_stage", VisionSpace.cells_per_stage)
    if space.get("mode") == "macro" and cells_per_stage % searched:
        raise ConfigError(
            f"cells_per_stage must be a multiple of {searched}, the search's, in macro mode"
            f" but got {cells_per_stage!r}."
        )


def _describe(data: Mapping[str, Any]) -> Description:
    with prefix(f"{_PLACE}: "):
        return describe(data["name"], data.get("root"), data.get("image_size") or 224)
