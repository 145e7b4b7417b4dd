"""Settings of a retraining on images: the paper's numbers, and those of the user.

The search's own data are trained on unless others are given; then the architecture moves to them
and is trained by their recipe, as in the paper's transfer to ImageNet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from nni_petridish.errors import ConfigError
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.gallery.saved_model import from_gallery
from nni_petridish.results.retrain.vision import VisionRetraining, widest
from nni_petridish.running.config import CONFIG_FILE, SearchConfig
from nni_petridish.search.checks import prefix
from nni_petridish.search.settings import check_number
from nni_petridish.tasks.vision.data import describe
from nni_petridish.tasks.vision.recipe import Recipe
from search_spaces import VisionSpace
from search_spaces.vision.genotype import VisionGenotype

PAPER_CELLS, PAPER_FILTERS, PAPER_EPOCHS = 6, 32, 600
#: Of the search's data: a final training has no validation and leaves no image out.
_SEARCH_ONLY = ("validation", "limit")


def vision_retraining(
    gallery: Path,
    id: str | None = None,
    *,
    cells_per_stage: int | None = None,
    filters: int | None = None,
    epochs: int | None = None,
    seed: int = 0,
    max_multiply_adds: float | None = None,
    merge: str | None = None,
    stem: str | None = None,
    data: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
) -> VisionRetraining:
    """Prepare the retraining of a model of a gallery; the numbers are the paper's.

    Parameters
    ----------
    gallery, id
        Which model; the most accurate one by default.
    cells_per_stage
        N; 6 by default. A macro model's cells are repeated, so N must be a multiple of its own.
    filters
        F; 32 by default.
    epochs
        600 by default; for other data those of their recipe (ImageNet: 250).
    max_multiply_adds
        Choose the largest F that stays within this instead.
    merge
        op_merge, if it is not to be that of the search: after a search with the weighted sum,
        ``"concat_project"`` is the paper's CP-end (appendix B.3).
    stem
        ``plain`` or ``imagenet``; by default that of the search.
    data
        Arguments of `load_data`, to train on other images than the search did.
    changes
        To the recipe: the search's, or that of the other data.
    """
    model = from_gallery(gallery, id)
    found = model.genotype
    if not isinstance(found, VisionGenotype):
        raise ConfigError(f"The final training is for vision but the model is {found.space}.")
    if filters is not None and max_multiply_adds is not None:
        raise ConfigError("Only one of filters and max_multiply_adds can be given.")
    check_number("seed", seed, 0, whole=True)
    searched = VisionSpace(**{k: v for k, v in model.space.items() if k != "space"})
    if merge is not None:
        found, searched = replace(found, merge=merge), replace(searched, merge=merge)
    if cells_per_stage is None:
        cells_per_stage = _default_cells(searched)
    trained_on, recipe = _data_and_recipe(gallery, data)
    space = replace(
        searched,
        filters=PAPER_FILTERS if filters is None else filters,
        cells_per_stage=cells_per_stage,
        stem=searched.stem if stem is None else stem,
        **({} if data is None else _shape_of(data)),
    )
    genotype = searched.deepened(found, cells_per_stage)
    if max_multiply_adds is not None:
        space = replace(space, filters=widest(space, genotype, max_multiply_adds))
    if epochs is None:
        epochs = recipe.epochs if trained_on["name"] == "image_folder" else PAPER_EPOCHS
    recipe = _changed(recipe, {"epochs": epochs, **(changes or {})})
    channels, height, width = space.image_shape
    recipe.check_image((channels, height, width))
    return VisionRetraining(str(model.facts["id"]), genotype, space, recipe, trained_on, seed)


def _data_and_recipe(
    gallery: Path, data: Mapping[str, Any] | None
) -> tuple[dict[str, Any], Recipe]:
    """Return the data to train on and their recipe: the given ones, or the search's."""
    if data is not None:
        return dict(data), Recipe.named(str(data["name"]))
    if not (gallery / CONFIG_FILE).exists():
        raise ConfigError(
            f"{gallery} does not say which data its search used (NasExperiment's evaluator had"
            " them): name the data in a file and give it by --config."
        )
    config = SearchConfig.of_gallery(Gallery(gallery))
    return {k: v for k, v in config.data.items() if k not in _SEARCH_ONLY}, config.recipe


def _default_cells(searched: VisionSpace) -> int:
    """Return the paper's N, or if a macro model's cells cannot be repeated to that, its own."""
    fits = searched.mode == "cell" or PAPER_CELLS % searched.cells_per_stage == 0
    return PAPER_CELLS if fits else searched.cells_per_stage


def _shape_of(data: Mapping[str, Any]) -> dict[str, Any]:
    described = describe(data["name"], data.get("root"), data.get("image_size") or 224)
    return described._asdict()


def _changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    known = tuple(f.name for f in fields(Recipe))
    for name in changes:
        if name not in known:
            raise ConfigError(f"a recipe has {', '.join(known)} but got {name}.")
    with prefix("recipe."):
        return replace(recipe, **changes)
