"""Retraining on images: a found architecture from scratch, larger, on all training images.

The test images are looked at once per repetition, when its training is over. Started by torchrun,
all processes train the same repetition together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from nni_petridish.core.complexity import count_multiply_adds, count_parameters
from nni_petridish.core.genotype import MERGES
from nni_petridish.errors import ConfigError, GrowthError
from nni_petridish.gallery.saved_model import SavedModel
from nni_petridish.registry import ERROR, Measure
from nni_petridish.tasks.distributed import World
from nni_petridish.tasks.loop import loop_options
from nni_petridish.tasks.recipes import changed_recipe
from nni_petridish.tasks.retraining import Retraining
from nni_petridish.tasks.task import Callbacks, Phase, Record
from nni_petridish.tasks.vision.data import describe, load_data
from nni_petridish.tasks.vision.inference import image_facts
from nni_petridish.tasks.vision.kind import (
    SEARCH_ONLY_DATA,
    ImageRetrainingOptions,
    make_space,
)
from nni_petridish.tasks.vision.recipe import Recipe
from nni_petridish.tasks.vision.training import evaluate, fit
from search_spaces import VisionSpace
from search_spaces.vision.genotype import VisionGenotype
from search_spaces.vision.network import VisionNetwork

if TYPE_CHECKING:
    from nni_petridish.tasks.vision.data import DataSet

PAPER_CELLS, PAPER_FILTERS, PAPER_EPOCHS = 6, 32, 600


@dataclass(frozen=True)
class VisionRetraining(Retraining["DataSet", VisionNetwork]):
    """A retraining on images; `load_data` takes ``data``, and nothing is set aside."""

    genotype: VisionGenotype
    space: VisionSpace
    recipe: Recipe

    measure: ClassVar[Measure] = ERROR
    examples: ClassVar[str] = "images"

    @property
    def name(self) -> str:
        """The name of its folder: model, unusual stem, N, F, epochs, unusual merge."""
        space, epochs, merge = self.space, self.recipe.epochs, self.genotype.merge
        stem = "" if space.stem == "plain" else f"{space.stem}-"
        size = f"N{space.cells_per_stage}-F{space.filters}"
        suffix = "" if merge == MERGES[0] else f"-{merge}"
        return f"{self.model}-{stem}{size}-{epochs}epochs{suffix}"

    @property
    def title(self) -> str:
        """The model with N and F."""
        return f"{self.model} with N={self.space.cells_per_stage}, F={self.space.filters}"

    @property
    def widths(self) -> dict[str, int]:
        """N and F."""
        return {"cells_per_stage": self.space.cells_per_stage, "filters": self.space.filters}

    def size(self) -> tuple[int, int]:
        """Return (multiply-adds, parameters); the auxiliary head does not count."""
        return size_of(self.space, self.genotype)

    def check_world(self, world: World) -> None:
        """Refuse a device that is not there, and processes that cannot share the batch."""
        super().check_world(world)
        share = world.share(self.recipe.batch_size)
        # The auxiliary head ends in maps of one pixel.
        pixels = 1 if self.recipe.auxiliary_weight > 0 else self.space.smallest_map
        self.recipe.check_batch(share, pixels)

    def load(self) -> DataSet:
        """Load the images; none is set aside for validation."""
        return load_data(**{**self.data, "validation": 0})

    def build(self) -> VisionNetwork:
        """Build the network, with an auxiliary head if the recipe gives it a weight."""
        return self.space.build(self.genotype, auxiliary=self.recipe.auxiliary_weight > 0)

    def train(
        self, net: VisionNetwork, data: DataSet, phase: Phase, callbacks: Callbacks
    ) -> list[Record]:
        """Train by the recipe, without validation."""
        options = loop_options(phase, callbacks)
        history = fit(net, data.train, self.recipe, seed=phase.random_seed, **options)
        return list(history.records)

    def test(self, net: VisionNetwork, data: DataSet) -> Record:
        """Measure on the test images."""
        metrics = evaluate(net, data.test, self.recipe)
        return {"test_error": metrics.error, "test_loss": metrics.loss}

    def count_examples(self, data: DataSet) -> int:
        """Return the number of training images."""
        return len(data.train)

    def data_facts(self, data: DataSet) -> dict[str, Any]:
        """Return normalization, range of pixels and class names."""
        return image_facts(data)

    def weights(self, net: VisionNetwork) -> dict[str, Tensor]:
        """Return the weights without those of the auxiliary head, which only trains."""
        return {k: w for k, w in net.state_dict().items() if not k.startswith("auxiliary.")}


def make_retraining(
    model: SavedModel,
    searched: tuple[Mapping[str, Any], Recipe] | None,
    options: ImageRetrainingOptions,
    changes: Mapping[str, Any],
) -> VisionRetraining:
    """Prepare the retraining of a model; the numbers are the paper's where nothing is given.

    Parameters
    ----------
    model
        The model that a search found.
    searched
        Data and recipe of the search; None if other data are named.
    options
        Size, data and length of the training.
    changes
        Changes to the recipe: the search's, or that of the other data.
    """
    found, space = VisionGenotype.require(model.genotype), make_space(model.space)
    if options.filters is not None and options.max_multiply_adds is not None:
        raise ConfigError("Only one of filters and max_multiply_adds can be given.")
    if options.merge is not None:
        found, space = replace(found, merge=options.merge), replace(space, merge=options.merge)
    data, recipe = _data_and_recipe(searched, options.data)
    cells = options.cells_per_stage or _default_cells(space)
    genotype = space.deepened(found, cells)
    space = replace(
        space,
        filters=options.filters or PAPER_FILTERS,
        cells_per_stage=cells,
        stem=options.stem or space.stem,
        **({} if options.data is None else _shape_of(options.data)),
    )
    if options.max_multiply_adds is not None:
        space = replace(space, filters=widest(space, genotype, float(options.max_multiply_adds)))
    usual = recipe.epochs if data["name"] == "image_folder" else PAPER_EPOCHS
    recipe = changed_recipe(recipe, {"epochs": options.epochs or usual, **changes})
    channels, height, width = space.image_shape
    recipe.check_image((channels, height, width))
    id = str(model.facts["id"])
    return VisionRetraining(id, genotype, space, recipe, data, options.seed or 0)


def widest(space: VisionSpace, genotype: VisionGenotype, limit: float) -> int:
    """Return the largest F whose network has at most ``limit`` multiply-adds."""

    def fits(filters: int) -> bool:
        return size_of(replace(space, filters=filters), genotype)[0] <= limit

    # The smallest F may be too narrow: a factorized reduce needs a filter for each phase.
    smallest = 1 if _is_wide_enough(replace(space, filters=1), genotype) else 2
    if not fits(smallest):
        raise ConfigError(f"Even F = {smallest} has more than {limit:,.0f} multiply-adds.")
    low, high = smallest, 2 * smallest
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _is_wide_enough(space: VisionSpace, genotype: VisionGenotype) -> bool:
    try:
        size_of(space, genotype)
    except GrowthError:
        return False
    return True


def size_of(space: VisionSpace, genotype: VisionGenotype) -> tuple[int, int]:
    """Return (multiply-adds, parameters) of an architecture."""
    with torch.device("meta"):  # shapes alone: nothing is computed
        net = space.build(genotype)
        return count_multiply_adds(net, space.image_shape), count_parameters(net)


def _data_and_recipe(
    searched: tuple[Mapping[str, Any], Recipe] | None, other: Mapping[str, Any] | None
) -> tuple[dict[str, Any], Recipe]:
    """Return the data to train on and their recipe: the other data's, or the search's."""
    if other is not None:
        return dict(other), Recipe.named(str(other["name"]))
    if searched is None:
        raise ConfigError("data must be named: those of the search are unknown.")
    data, recipe = searched
    return {k: v for k, v in data.items() if k not in SEARCH_ONLY_DATA}, recipe


def _default_cells(searched: VisionSpace) -> int:
    """Return the paper's N, or if a macro model's cells cannot be repeated to that, its own."""
    fits = searched.mode == "cell" or PAPER_CELLS % searched.cells_per_stage == 0
    return PAPER_CELLS if fits else searched.cells_per_stage


def _shape_of(data: Mapping[str, Any]) -> dict[str, Any]:
    described = describe(data["name"], data.get("root"), data.get("image_size"))
    return described._asdict()
