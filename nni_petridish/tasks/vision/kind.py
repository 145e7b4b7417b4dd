"""Image classification in a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Le

from nni_petridish.core.genotype import MERGES
from nni_petridish.errors import ConfigError, DataError
from nni_petridish.registry import ARGUMENTS, ERROR, Suggestion
from nni_petridish.search.constraints import (
    Count,
    Depth,
    Folder,
    OneOf,
    Width,
    check_fields,
    prefix,
    resolve,
)
from nni_petridish.tasks.vision.data import (
    DATA_NAMES,
    Description,
    check_data,
    check_validation,
    describe,
)
from nni_petridish.tasks.vision.folder import LARGEST_DEFAULT, find_image_size
from nni_petridish.tasks.vision.recipe import Recipe
from search_spaces.vision.space import STEMS, VisionSpace

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nni_petridish.gallery.saved_model import SavedModel
    from nni_petridish.tasks.plain_network import PlainNetwork
    from nni_petridish.tasks.retraining import Retraining
    from nni_petridish.tasks.task import Task
    from nni_petridish.tasks.vision.inference import ImagePredictor


@dataclass(frozen=True)
class DataOptions:
    """The images of a search, see `load_data`.

    Parameters
    ----------
    name
        The data set.
    root
        The folder that it is in; of npz, the file.
    validation
        Training images to set aside for validation. The images in ``val`` of an image_folder are
        the test set: a search never looks at them.
    limit
        Train on so many of the remaining images only.
    seed
        Orders the images before they are set aside.
    image_size
        The side of the images: of the square crops of image_folder (default: that of the images,
        at most 224), or a divisor of the set's own, to which they are reduced by averaging.
    workers
        For image_folder: number of reading processes.
    """

    name: Annotated[str, OneOf(DATA_NAMES)] = "digits"
    root: Folder | None = None
    validation: Count | None = None
    limit: Count | None = None
    seed: Annotated[int, Ge(0)] | None = None
    image_size: Annotated[int, Ge(1), Le(10_000)] | None = None
    workers: Annotated[int, Ge(0), Le(1000)] | None = None


@dataclass(frozen=True)
class ImageRetrainingOptions:
    """A retraining on images.

    Parameters
    ----------
    cells_per_stage
        N, the number of normal cells at each resolution; 6 by default. The cells of a macro model
        are repeated, so N must be a multiple of the search's.
    filters
        F, the width of the first stage; 32 by default.
    max_multiply_adds
        In place of F: as wide as so many multiply-adds allow, for instance 600M.
    merge
        op_merge, if it is not to be the search's: after a search with the weighted sum,
        ``concat_project`` is the paper's CP-end (appendix B.3).
    stem
        ``plain``, or ``imagenet`` for large images; by default the search's.
    epochs
        Epochs of the training; 600 by default, for other data those of their recipe.
    seed
        The first random seed.
    data
        Other images than the search's: arguments of `load_data`.
    """

    cells_per_stage: Depth | None = None
    filters: Width | None = None
    max_multiply_adds: float | str | None = None
    merge: Annotated[str, OneOf(MERGES)] | None = None
    stem: Annotated[str, OneOf(STEMS)] | None = None
    epochs: Count | None = None
    seed: Annotated[int, Ge(0)] | None = None
    data: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_fields(self)


MEASURE = ERROR
TUNED_RANGES = {"l1": (1e-5, 0.1), "i_max": (2, 4)}
"""These ranges span the values that the paper tried."""
L1_GROUPS = (1e-5, 1e-3, 1e-1)
"""The values of λ that the paper compared."""
SPACE = VisionSpace
DATA = DataOptions
RECIPE = Recipe
RETRAINING = ImageRetrainingOptions
SEARCH_ONLY_DATA = ("validation", "limit")
DECIDED_BY_DATA = ("image_shape", "num_classes")
_PLACE = f"{ARGUMENTS}.data"


def read_data(
    data: Mapping[str, Any], base: Path, *, for_retraining: bool = False
) -> dict[str, Any]:
    """Return the arguments of `load_data`; raise unless the files are there."""
    place = "data" if for_retraining else _PLACE
    result = {"name": DataOptions.name, **data}
    if result.get("root") is not None:
        result["root"] = str(resolve(result["root"], base))
    name, root = result["name"], result.get("root")
    with prefix(f"{place}: "):
        folder = check_data(name, root)
    if name == "image_folder":
        if not for_retraining and not result.get("validation"):
            raise ConfigError(
                f"{place}.validation must be at least 1: a search sets aside so many images of"
                f" {folder / 'train'}; {folder / 'val'} is the test set."
            )
        # The default of earlier versions is left out, so that their galleries still fit.
        if not result.get("image_size") and (size := find_image_size(folder)) != LARGEST_DEFAULT:
            result["image_size"] = size
    if result.get("validation") is not None:
        with prefix(f"{place}."):
            check_validation(name, root, result["validation"])
    return result


def suggest(source: str, root: str | None) -> Suggestion | None:
    """Suggest settings for images: a data set by name, an image folder or an .npz file."""
    from nni_petridish.tasks.vision.suggestion import suggest_for_images

    return suggest_for_images(source, root)


def check_space(options: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Check that the options of `VisionSpace` fit the images."""
    image_shape, num_classes = _describe(data)
    with prefix("searchSpace."):
        VisionSpace(image_shape, num_classes, **options)


def full_space(options: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of the space; the number of classes is not looked for."""
    known = {key: value for key, value in options.items() if key != "space"}
    if "image_shape" not in known:
        known |= {"image_shape": _image_shape(data), "num_classes": 1}
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
    _, height, width = _image_shape(data)
    return {**space, "image_shape": [channels, height, width], "num_classes": classes}


def seed_size(space: Mapping[str, Any], data: Mapping[str, Any]) -> tuple[int, int]:
    """Return (multiply-adds of an image, parameters) of the seed."""
    from search_spaces.vision.size import seed_size

    options = {key: value for key, value in space.items() if key != "space"}
    return seed_size(VisionSpace(*_describe(data), **options))


def with_defaults(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as they are: the general defaults are the paper's for images."""
    return dict(arguments)


def read_recipe(
    options: Mapping[str, Any], data: Mapping[str, Any], *, for_retraining: bool = False
) -> Recipe:
    """Return the recipe of the data set with changes; raise unless it fits the images."""
    with prefix("recipe." if for_retraining else f"{ARGUMENTS}.recipe."):
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
    net: nn.Module, space: Mapping[str, Any], facts: Mapping[str, Any], pixels: bool | None
) -> PlainNetwork:
    """Return an image classifier that takes pixels (default), or normalized images."""
    from nni_petridish.tasks.vision.plain_network import image_classifier

    return image_classifier(net, space, facts, pixels is not False)


def make_predictor(
    net: nn.Module, space: Mapping[str, Any], facts: Mapping[str, Any]
) -> ImagePredictor:
    """Return a function that predicts the classes of raw images."""
    from nni_petridish.tasks.vision.inference import ImagePredictor

    return ImagePredictor(net, space["image_shape"], facts)


def data_facts(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return normalization, range of pixels and class names; nothing if no image is at hand."""
    from nni_petridish.tasks.vision.data import load_data
    from nni_petridish.tasks.vision.inference import image_facts

    try:
        return image_facts(load_data(**data))
    except (DataError, OSError):
        return {}


def check_retraining(space: Mapping[str, Any], cells_per_stage: int) -> None:
    """Refuse numbers of cells that the learners of a macro search cannot be spread over."""
    searched = space.get("cells_per_stage", VisionSpace.cells_per_stage)
    if space.get("mode") == "macro" and cells_per_stage % searched:
        raise ConfigError(
            f"cells_per_stage must be a multiple of {searched}, the search's, in macro mode"
            f" but got {cells_per_stage!r}."
        )


def make_retraining(
    model: SavedModel,
    searched: tuple[Mapping[str, Any], Recipe] | None,
    options: Mapping[str, Any],
    changes: Mapping[str, Any],
) -> Retraining[Any, Any]:
    """Prepare the retraining of a model."""
    from nni_petridish.tasks.vision.retraining import make_retraining

    return make_retraining(model, searched, ImageRetrainingOptions(**options), changes)


def _image_shape(data: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the shape of the images; an image folder may be gone and is not looked at."""
    size = data.get("image_size")
    if data.get("name") == "image_folder":
        return 3, size or LARGEST_DEFAULT, size or LARGEST_DEFAULT
    return describe(str(data.get("name")), data.get("root"), size).image_shape


def _describe(data: Mapping[str, Any]) -> Description:
    with prefix(f"{_PLACE}: "):
        return describe(data["name"], data.get("root"), data.get("image_size"))
