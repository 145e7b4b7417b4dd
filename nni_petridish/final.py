"""Final training: a found architecture from scratch, larger, on all training images.

The test images are looked at once per repetition, when its training is over. A repetition that is
finished is never trained again, one that was interrupted goes on from its last epoch.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nni_petridish.atomic import ExclusiveLock, to_json, write_file
from nni_petridish.complexity import count_multiply_adds, count_parameters
from nni_petridish.config import SearchConfig
from nni_petridish.data import load_data
from nni_petridish.errors import ConfigError, GalleryError
from nni_petridish.export import SavedModel, from_gallery, write_model
from nni_petridish.gallery import Gallery
from nni_petridish.genotype import MERGES, VisionGenotype
from nni_petridish.recipe import Recipe
from nni_petridish.records import check_number
from nni_petridish.training import evaluate, fit
from search_spaces import VisionSpace

if TYPE_CHECKING:
    from nni_petridish.data import DataSet

PAPER_CELLS, PAPER_FILTERS, PAPER_EPOCHS = 6, 32, 600
RESULT_FILE, MODEL_FILE, SETTINGS_FILE = "result.json", "model.safetensors", "settings.json"


@dataclass(frozen=True)
class FinalTraining:
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

    @property
    def name(self) -> str:
        """A name for its folder: model, cells per stage, filters, epochs, an unusual merge."""
        space, epochs, merge = self.space, self.recipe.epochs, self.genotype.merge
        suffix = "" if merge == MERGES[0] else f"-{merge}"
        return f"{self.model}-N{space.cells_per_stage}-F{space.filters}-{epochs}epochs{suffix}"

    def size(self) -> tuple[int, int]:
        """Return (multiply-adds, parameters); the auxiliary head does not count."""
        return _size(self.space, self.genotype)

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

    def run(
        self,
        folder: Path,
        repetitions: int = 1,
        *,
        stop: Callable[[], bool] | None = None,
        progress: bool = False,
        on_result: Callable[[dict[str, Any]], object] | None = None,
    ) -> list[dict[str, Any]]:
        """Train so many repetitions, those done earlier included; return their results.

        Parameters
        ----------
        folder
            Where checkpoints, models and results are kept; made if it is not there.
        repetitions
            How many; more may be asked for later.
        stop
            Asked before every step; true raises `Interrupted`.
        on_result
            Called with the result of each repetition.
        """
        check_number("repetitions", repetitions, 1, whole=True)
        self._claim(folder)
        results = []
        with ExclusiveLock(folder / "lock", f"The final training in {folder}"):
            data: DataSet | None = None
            for repetition in range(repetitions):
                result = _read_result(folder / f"run-{repetition}")
                if result is None:
                    data = data or load_data(**{**self.data, "validation": 0})
                    result = self._repeat(folder, repetition, data, stop, progress)
                results.append(result)
                if on_result is not None:
                    on_result(result)
        return results

    def _claim(self, folder: Path) -> None:
        """Make the folder, or see that it holds the same training."""
        path = folder / SETTINGS_FILE
        try:
            found = json.loads(path.read_bytes())
        except FileNotFoundError:
            found = None
        except (OSError, ValueError) as error:
            raise GalleryError(f"{path} cannot be read: {error}.") from None
        if found is None:
            if folder.is_dir() and any(folder.iterdir()):
                raise GalleryError(f"{folder} is not empty and holds no final training.")
            folder.mkdir(parents=True, exist_ok=True)
            write_file(path, to_json(self.identity()))
        elif found != self.identity():
            wanted = self.identity()
            different = [key for key in wanted if wanted[key] != found.get(key)]
            raise GalleryError(
                f"{folder} holds another final training ({', '.join(different)} differ): choose"
                " another folder."
            )

    def _repeat(
        self,
        folder: Path,
        repetition: int,
        data: DataSet,
        stop: Callable[[], bool] | None,
        progress: bool,
    ) -> dict[str, Any]:
        home, seed = folder / f"run-{repetition}", self.seed + repetition
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
        metrics = evaluate(net, data.test, self.recipe)
        multiply_adds, parameters = self.size()
        assert parameters == count_parameters(net)
        result = {
            "repetition": repetition,
            "seed": seed,
            "test_error": metrics.error,
            "test_loss": metrics.loss,
            "images": len(data.train),
            "multiply_adds": multiply_adds,
            "parameters": parameters,
            "history": list(history.records),
        }
        weights = {k: w for k, w in net.state_dict().items() if not k.startswith("auxiliary.")}
        facts = {k: v for k, v in result.items() if k != "history"} | {
            "id": self.model,
            "data": self.data.get("name"),
            "normalisation": normalisation(data),
        }
        space = {"space": "vision", **self.space.describe()}
        write_model(SavedModel(space, self.genotype, weights, facts), home / MODEL_FILE)
        write_file(home / RESULT_FILE, to_json(result))  # last: it says that all is there
        shutil.rmtree(home / "checkpoint", ignore_errors=True)
        return result


def final_training(
    gallery: Path,
    id: str | None = None,
    *,
    cells_per_stage: int | None = None,
    filters: int | None = None,
    epochs: int = PAPER_EPOCHS,
    seed: int = 0,
    max_multiply_adds: float | None = None,
    merge: str | None = None,
    changes: dict[str, Any] | None = None,
) -> FinalTraining:
    """Prepare the final training of a model of a gallery; the numbers are the paper's.

    Parameters
    ----------
    gallery, id
        Which model; the most accurate one by default.
    cells_per_stage
        N; 6 by default, but in macro mode the architecture says how many cells there are.
    filters
        F; 32 by default.
    max_multiply_adds
        Choose the largest F that stays within this instead.
    merge
        op_merge, if it is not to be that of the search: after a search with the weighted sum,
        ``"concat_project"`` is the paper's CP-end (appendix B.3).
    changes
        To the recipe of the search.
    """
    config = SearchConfig.of_gallery(Gallery(gallery))
    model = from_gallery(gallery, id)
    genotype = model.genotype
    if not isinstance(genotype, VisionGenotype):
        raise ConfigError(f"The final training is for vision but the model is {genotype.space}.")
    options = {key: value for key, value in model.space.items() if key != "space"}
    if merge is not None:
        genotype, options["merge"] = replace(genotype, merge=merge), merge
    if cells_per_stage is None:
        cells_per_stage = PAPER_CELLS if genotype.mode == "cell" else options["cells_per_stage"]
    if filters is not None and max_multiply_adds is not None:
        raise ConfigError("Only one of filters and max_multiply_adds can be given.")
    space = VisionSpace(**{**options, "cells_per_stage": cells_per_stage, "filters": 1})
    space.check(genotype)
    if max_multiply_adds is not None:
        filters = widest(space, genotype, max_multiply_adds)
    space = replace(space, filters=PAPER_FILTERS if filters is None else filters)
    unknown = [name for name in changes or {} if name not in asdict(config.recipe)]
    if unknown:
        raise ConfigError(f"a recipe has {', '.join(asdict(config.recipe))} but got {unknown[0]}.")
    check_number("seed", seed, 0, whole=True)
    recipe = replace(config.recipe, **{"epochs": epochs, **(changes or {})})
    data = {k: v for k, v in config.data.items() if k not in ("validation", "limit")}
    return FinalTraining(str(model.facts["id"]), genotype, space, recipe, data, seed)


def widest(space: VisionSpace, genotype: VisionGenotype, limit: float) -> int:
    """Return the largest F whose network has at most ``limit`` multiply-adds."""

    def fits(filters: int) -> bool:
        return _size(replace(space, filters=filters), genotype)[0] <= limit

    if not fits(1):
        raise ConfigError(f"Even F = 1 has more than {limit:,} multiply-adds.")
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def summary(results: list[dict[str, Any]]) -> str:
    """Return the paper's way of reporting: best | mean ± standard deviation."""
    errors = [float(result["test_error"]) for result in results]
    spread = statistics.stdev(errors) if len(errors) > 1 else math.nan
    runs = f"{len(errors)} run{'s' if len(errors) > 1 else ''}"
    around = "" if math.isnan(spread) else f" ± {spread:.4f}"
    return f"test error {min(errors):.4f} | {statistics.fmean(errors):.4f}{around}  ({runs})"


def normalisation(data: DataSet) -> dict[str, list[float]]:
    """Return mean and std of each channel, for pixels from 0 to 255."""
    split: Any = data.train
    return {"mean": split.mean.tolist(), "std": split.std.tolist()}


def _read_result(home: Path) -> dict[str, Any] | None:
    path = home / RESULT_FILE
    try:
        return dict(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise GalleryError(f"{path} cannot be read: {error}.") from None


def _size(space: VisionSpace, genotype: VisionGenotype) -> tuple[int, int]:
    with torch.device("meta"):  # shapes alone: nothing is computed
        net = space.build(genotype)
        return count_multiply_adds(net, space.image_shape), count_parameters(net)
