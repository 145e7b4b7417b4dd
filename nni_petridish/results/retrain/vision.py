"""Retraining on images: a found architecture from scratch, larger, on all training images.

The test images are looked at once per repetition, when its training is over. Started by torchrun,
all processes train the same repetition together.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from nni_petridish.core.complexity import count_multiply_adds, count_parameters
from nni_petridish.core.genotype import MERGES
from nni_petridish.errors import ConfigError
from nni_petridish.gallery.files import to_json
from nni_petridish.registry import ERROR, Measure
from nni_petridish.results.retrain.retraining import Retraining
from nni_petridish.tasks.device import resolve_device
from nni_petridish.tasks.distributed import World
from nni_petridish.tasks.vision.data import load_data
from nni_petridish.tasks.vision.recipe import Recipe
from nni_petridish.tasks.vision.training import evaluate, fit
from search_spaces import VisionSpace
from search_spaces.vision.genotype import VisionGenotype

if TYPE_CHECKING:
    from nni_petridish.tasks.vision.data import DataSet
    from search_spaces.vision.network import VisionNetwork


@dataclass(frozen=True)
class VisionRetraining(Retraining["DataSet"]):
    """What to train, checked; `run` trains it.

    Parameters
    ----------
    model
        Id of the model in its gallery, for the records.
    genotype
        Its architecture.
    space
        The space to build it in: its width and depth may differ from the search's.
    recipe
        How to train.
    data
        Arguments of `load_data`; nothing is set aside for validation.
    seed
        Repetition r is seeded by ``seed + r``.
    """

    model: str
    genotype: VisionGenotype
    space: VisionSpace
    recipe: Recipe
    data: dict[str, Any]
    seed: int = 0

    measure: ClassVar[Measure] = ERROR

    @property
    def name(self) -> str:
        """A name for its folder: model, unusual stem, N, F, epochs, unusual merge."""
        space, epochs, merge = self.space, self.recipe.epochs, self.genotype.merge
        stem = "" if space.stem == "plain" else f"{space.stem}-"
        size = f"N{space.cells_per_stage}-F{space.filters}"
        suffix = "" if merge == MERGES[0] else f"-{merge}"
        return f"{self.model}-{stem}{size}-{epochs}epochs{suffix}"

    @property
    def title(self) -> str:
        """What is trained, in a few words."""
        return f"{self.model} with N={self.space.cells_per_stage}, F={self.space.filters}"

    def size(self) -> tuple[int, int]:
        """Return (multiply-adds, parameters); the auxiliary head does not count."""
        return size_of(self.space, self.genotype)

    def identity(self) -> dict[str, Any]:
        """Return what must not change between repetitions."""
        recipe = {k: v for k, v in asdict(self.recipe).items() if k != "device"}
        data = {k: v for k, v in self.data.items() if k not in ("root", "workers")}
        document = {
            "model": self.model,
            "genotype": self.genotype.to_dict(),
            "space": {"space": "vision", **self.space.describe()},
            "recipe": recipe,
            "data": data,
            "seed": self.seed,
        }
        return dict(json.loads(to_json(document)))

    def check_world(self, world: World) -> None:
        """Refuse a device that is not there, and processes that cannot share the batch."""
        resolve_device(self.recipe.device)
        world.share(self.recipe.batch_size)

    def load(self) -> DataSet:
        """Load the images; none is set aside for validation."""
        return load_data(**{**self.data, "validation": 0})

    def repeat(
        self,
        home: Path,
        repetition: int,
        data: DataSet,
        world: World,
        stop: Callable[[], bool] | None,
        progress: bool,
    ) -> dict[str, Any]:
        """Train one repetition, all processes together."""
        seed = self.seed + repetition
        torch.manual_seed(seed)
        net = self.space.build(self.genotype, auxiliary=self.recipe.auxiliary_weight > 0)
        history = fit(
            net,
            data.train,
            self.recipe,
            seed=seed,
            checkpoint=home / "checkpoint",
            stop=stop,
            progress=progress,
            label=f"{self.model} run {repetition}",
        )
        facts = {"repetition": repetition, "seed": seed, "images": len(data.train)}
        return world.on_main(
            lambda: self._finish(home, net, data, facts | {"history": list(history.records)})
        )

    def _finish(
        self, home: Path, net: VisionNetwork, data: DataSet, known: dict[str, Any]
    ) -> dict[str, Any]:
        """Look at the test images and keep the model."""
        metrics = evaluate(net, data.test, self.recipe)
        multiply_adds, parameters = self.size()
        assert parameters == count_parameters(net)
        result = {
            **known,
            "test_error": metrics.error,
            "test_loss": metrics.loss,
            "multiply_adds": multiply_adds,
            "parameters": parameters,
        }
        weights = {k: w for k, w in net.state_dict().items() if not k.startswith("auxiliary.")}
        facts = {"data": self.data.get("name"), "normalisation": normalisation(data)}
        space = {"space": "vision", **self.space.describe()}
        return self.keep(home, space, self.genotype, weights, result, facts)


def widest(space: VisionSpace, genotype: VisionGenotype, limit: float) -> int:
    """Return the largest F whose network has at most ``limit`` multiply-adds."""

    def fits(filters: int) -> bool:
        return size_of(replace(space, filters=filters), genotype)[0] <= limit

    if not fits(1):
        raise ConfigError(f"Even F = 1 has more than {limit:,.0f} multiply-adds.")
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def normalisation(data: DataSet) -> dict[str, list[float]]:
    """Return mean and std of each channel, for pixels from 0 to 255."""
    split: Any = data.train
    return {"mean": split.mean.tolist(), "std": split.std.tolist()}


def size_of(space: VisionSpace, genotype: VisionGenotype) -> tuple[int, int]:
    """Return (multiply-adds, parameters) of an architecture."""
    with torch.device("meta"):  # shapes alone: nothing is computed
        net = space.build(genotype)
        return count_multiply_adds(net, space.image_shape), count_parameters(net)
