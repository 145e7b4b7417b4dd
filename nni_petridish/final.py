"""Final training: a found architecture from scratch, larger, on all training images.

The test images are looked at once per repetition, when its training is over. A repetition that is
finished is never trained again, one that was interrupted goes on from its last epoch. Started by
torchrun, all processes train the same repetition together.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nni_petridish.atomic import ExclusiveLock, to_json, write_file
from nni_petridish.complexity import count_multiply_adds, count_parameters
from nni_petridish.data import load_data
from nni_petridish.distributed import World, current_world
from nni_petridish.errors import ConfigError, GalleryError
from nni_petridish.export import SavedModel, write_model
from nni_petridish.genotype import MERGES, VisionGenotype
from nni_petridish.recipe import Recipe
from nni_petridish.records import check_number
from nni_petridish.training import evaluate, fit, resolve_device
from search_spaces import VisionSpace

if TYPE_CHECKING:
    from nni_petridish.data import DataSet
    from search_spaces.vision_network import VisionNetwork

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
        """A name for its folder: model, unusual stem, N, F, epochs, unusual merge."""
        space, epochs, merge = self.space, self.recipe.epochs, self.genotype.merge
        stem = "" if space.stem == "plain" else f"{space.stem}-"
        size = f"N{space.cells_per_stage}-F{space.filters}"
        suffix = "" if merge == MERGES[0] else f"-{merge}"
        return f"{self.model}-{stem}{size}-{epochs}epochs{suffix}"

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
        world = current_world()
        # What cannot be is said before anything is made.
        resolve_device(self.recipe)
        world.share(self.recipe.batch_size)
        lock = ExclusiveLock(folder / "lock", f"The final training in {folder}")
        world.on_main(lambda: self._claim(folder, lock))
        results = []
        try:
            data: DataSet | None = None
            for repetition in range(repetitions):
                home = folder / f"run-{repetition}"
                result = world.on_main(partial(_read_result, home))
                if result is None:
                    data = data or load_data(**{**self.data, "validation": 0})
                    result = self._repeat(home, repetition, data, world, stop, progress)
                results.append(result)
                if on_result is not None:
                    on_result(result)
        finally:
            lock.release()
        return results

    def _claim(self, folder: Path, lock: ExclusiveLock) -> None:
        """Make the folder, or see that it holds the same training; keep others out of it."""
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
        lock.acquire()

    def _repeat(
        self,
        home: Path,
        repetition: int,
        data: DataSet,
        world: World,
        stop: Callable[[], bool] | None,
        progress: bool,
    ) -> dict[str, Any]:
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


def size_of(space: VisionSpace, genotype: VisionGenotype) -> tuple[int, int]:
    """Return (multiply-adds, parameters) of an architecture."""
    with torch.device("meta"):  # shapes alone: nothing is computed
        net = space.build(genotype)
        return count_multiply_adds(net, space.image_shape), count_parameters(net)
