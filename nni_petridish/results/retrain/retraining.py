"""A retraining in a folder: several repetitions, each of which may be killed and go on.

A repetition that is finished is never trained again, one that was interrupted goes on from its last
epoch. The network, the data and the recipe are the business of a subclass: `VisionRetraining` or
`LanguageRetraining`.
"""

from __future__ import annotations

import json
import shutil
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from nni_petridish.core.genotype import Genotype
from nni_petridish.errors import GalleryError
from nni_petridish.gallery.files import to_json, write_file
from nni_petridish.gallery.locks import ExclusiveLock
from nni_petridish.gallery.saved_model import SavedModel, write_model
from nni_petridish.registry import Measure
from nni_petridish.search.settings import check_number
from nni_petridish.tasks.distributed import World, current_world

RESULT_FILE, MODEL_FILE, SETTINGS_FILE = "result.json", "model.safetensors", "settings.json"
Data = TypeVar("Data")


class Retraining(ABC, Generic[Data]):
    """What to train, checked; `run` trains it."""

    model: str
    measure: ClassVar[Measure]
    """The number that is measured on the test data."""

    @property
    @abstractmethod
    def name(self) -> str:
        """A name for its folder."""

    @property
    @abstractmethod
    def title(self) -> str:
        """What is trained, in a few words."""

    @abstractmethod
    def size(self) -> tuple[int, int]:
        """Return (multiply-adds, parameters)."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return what must not change between repetitions, as JSON reads it."""

    @abstractmethod
    def check_world(self, world: World) -> None:
        """Raise `ConfigError` if these processes cannot train it together."""

    @abstractmethod
    def load(self) -> Data:
        """Load the data; done once, and only if something is left to train."""

    @abstractmethod
    def repeat(
        self,
        home: Path,
        repetition: int,
        data: Data,
        world: World,
        stop: Callable[[], bool] | None,
        progress: bool,
    ) -> dict[str, Any]:
        """Train one repetition in the folder ``home``, `keep` its model, return its result."""

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
        self.check_world(world)  # before anything is made
        lock = ExclusiveLock(folder / "lock", f"The final training in {folder}")
        world.on_main(lambda: self._claim(folder, lock))
        results = []
        try:
            data: Data | None = None
            for repetition in range(repetitions):
                home = folder / f"run-{repetition}"
                result = world.on_main(partial(_read_result, home))
                if result is None:
                    data = self.load() if data is None else data
                    result = self.repeat(home, repetition, data, world, stop, progress)
                results.append(result)
                if on_result is not None:
                    on_result(result)
        finally:
            lock.release()
        return results

    def keep(
        self,
        home: Path,
        space: dict[str, Any],
        genotype: Genotype,
        weights: dict[str, Tensor],
        result: dict[str, Any],
        more: dict[str, Any],
    ) -> dict[str, Any]:
        """Write model and result of a repetition; its checkpoint goes."""
        facts = {k: v for k, v in result.items() if k != "history"} | {"id": self.model, **more}
        write_model(SavedModel(space, genotype, weights, facts), home / MODEL_FILE)
        write_file(home / RESULT_FILE, to_json(result))  # last: it says that all is there
        shutil.rmtree(home / "checkpoint", ignore_errors=True)
        return result

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


def describe_result(result: dict[str, Any], measure: Measure) -> str:
    """Return the result of one repetition in words."""
    number = _shown(_number(result, measure), measure)
    return f"run {result['repetition']}: test {measure.name} {number}"


def summary(results: list[dict[str, Any]], measure: Measure) -> str:
    """Return the paper's way of reporting: best | mean ± standard deviation."""
    numbers = [_number(result, measure) for result in results]
    runs = f"{len(numbers)} run{'s' if len(numbers) > 1 else ''}"
    best, mean = _shown(min(numbers), measure), _shown(statistics.fmean(numbers), measure)
    spread = f" ± {_shown(statistics.stdev(numbers), measure)}" if len(numbers) > 1 else ""
    return f"test {measure.name} {best} | {mean}{spread}  ({runs})"


def _number(result: dict[str, Any], measure: Measure) -> float:
    return float(result[f"test_{measure.name}"])


def _shown(number: float, measure: Measure) -> str:
    return f"{number:.4f}" if measure.is_share else f"{number:.2f}"


def _read_result(home: Path) -> dict[str, Any] | None:
    path = home / RESULT_FILE
    try:
        return dict(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise GalleryError(f"{path} cannot be read: {error}.") from None
