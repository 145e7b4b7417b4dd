"""The repetitions of a retraining in a folder, each of which may be killed and go on.

A repetition that is finished is never trained again; one that was interrupted goes on from its last
epoch. Started by torchrun, all processes train the same repetition together and the first one
writes the files.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nni_petridish._support.reading import as_mapping, read_json, read_regular
from nni_petridish.core.complexity import count_parameters
from nni_petridish.errors import GalleryError
from nni_petridish.gallery.files import make_folder, refuse_link, seal, to_json, unseal, write_file
from nni_petridish.gallery.locks import ExclusiveLock
from nni_petridish.gallery.saved_model import SavedModel, write_model
from nni_petridish.registry import Measure
from nni_petridish.running.worker_report import reporting
from nni_petridish.search.settings import check_number
from nni_petridish.tasks.distributed import World, current_world
from nni_petridish.tasks.retraining import Retraining
from nni_petridish.tasks.task import NO_CALLBACKS, RETRAINING, Callbacks, Phase, Record

_log = logging.getLogger(__name__)

RESULT_FILE, MODEL_FILE, SETTINGS_FILE = "result.json", "model.safetensors", "settings.json"
_MODEL_SUM, _SETTINGS_SUM = "model_sha256", "settings_sha256"
Result = dict[str, Any]


def run_repetitions(
    training: Retraining[Any, Any],
    folder: Path,
    repetitions: int = 1,
    *,
    callbacks: Callbacks = NO_CALLBACKS,
    on_result: Callable[[Result], object] = lambda result: None,
) -> list[Result]:
    """Train so many repetitions, those done earlier included; return their results.

    Parameters
    ----------
    training
        The model to train.
    folder
        The folder of checkpoints, models and results; made if it is not there.
    repetitions
        The number of repetitions; more may be asked for later.
    callbacks
        Asked before every step whether to stop.
    on_result
        Called with the result of each repetition.
    """
    check_number("repetitions", repetitions, 1, whole=True)
    world = current_world()
    training.check_world(world)  # before anything is made
    lock = ExclusiveLock(folder / "lock", f"The final training in {folder}")
    world.on_main(lambda: _claim(training, folder, lock))
    results = []
    try:
        data = None
        for repetition in range(repetitions):
            home = folder / f"run-{repetition}"
            refuse_link(home)
            result = world.on_main(partial(_read_result, home, training, repetition))
            if result is None:
                data = training.load() if data is None else data
                result = _repeat(training, home, repetition, data, world, callbacks)
            results.append(result)
            on_result(result)
    finally:
        lock.release()
    return results


def _repeat(
    training: Retraining[Any, Any],
    home: Path,
    repetition: int,
    data: Any,
    world: World,
    callbacks: Callbacks,
) -> Result:
    """Train one repetition in a folder, all processes together; keep model and result."""
    seed = training.seed + repetition
    torch.manual_seed(seed)
    net = training.build()
    label, checkpoint = f"{training.model} run {repetition}", home / "checkpoint"
    phase = Phase(RETRAINING, training.recipe.epochs, seed, label, checkpoint)
    with _reporting(home, label, phase, world, callbacks) as told:
        history = training.train(net, data, phase, told)
    known = {"repetition": repetition, "seed": seed}
    return world.on_main(lambda: _finish(training, home, net, data, known, history))


def _reporting(
    home: Path, name: str, phase: Phase, world: World, callbacks: Callbacks
) -> AbstractContextManager[Callbacks]:
    """Report on a training, in the first process."""
    if not world.is_main:
        return nullcontext(callbacks)
    with suppress(OSError):  # without its folder there is no report
        home.mkdir(parents=True, exist_ok=True)
    return reporting(home, name, {phase.name: phase.epochs}, callbacks)


def _finish(
    training: Retraining[Any, Any],
    home: Path,
    net: nn.Module,
    data: Any,
    known: Result,
    history: list[Record],
) -> Result:
    """Look at the test data, and write model and result; the checkpoint goes."""
    multiply_adds, parameters = training.size()
    assert parameters == count_parameters(net)
    result = {**known, training.examples: training.count_examples(data), **training.test(net, data)}
    if "validation_error" in history[-1]:
        result[f"validation_{training.measure.name}"] = history[-1]["validation_error"]
    result |= {"multiply_adds": multiply_adds, "parameters": parameters}
    facts = {
        **result,
        "id": training.model,
        "data": training.data.get("name"),
        **training.data_facts(data),
    }
    space, weights = training.described_space(), training.weights(net)
    write_model(SavedModel(space, training.genotype, weights, facts), home / MODEL_FILE)
    result |= {"history": history, _SETTINGS_SUM: _settings_sum(training)}
    result[_MODEL_SUM] = _file_sum(home / MODEL_FILE)
    write_file(home / RESULT_FILE, seal(result))  # last: it says that all is there
    shutil.rmtree(home / "checkpoint", ignore_errors=True)
    return result


def _claim(training: Retraining[Any, Any], folder: Path, lock: ExclusiveLock) -> None:
    """Make the folder, or see that it holds the same training; keep others out of it."""
    path, wanted = folder / SETTINGS_FILE, training.identity()
    found = _read_json(path)
    if found is None:
        if folder.is_dir() and any(folder.iterdir()):
            raise GalleryError(f"{folder} is not empty and holds no final training.")
        make_folder(folder)
        write_file(path, to_json(wanted))
    elif found != wanted:
        different = [key for key in wanted if wanted[key] != found.get(key)]
        raise GalleryError(
            f"{folder} holds another final training ({', '.join(different)} differ): choose"
            " another folder."
        )
    lock.acquire()


def count_finished(folder: Path, repetitions: int) -> int:
    """Return how many of the first so many repetitions in a folder are finished."""
    return sum((folder / f"run-{r}" / RESULT_FILE).exists() for r in range(repetitions))


def describe_result(result: Result, measure: Measure) -> str:
    """Return the result of one repetition in words."""
    number = _shown(_number(result, measure), measure)
    return f"run {result['repetition']}: test {measure.name} {number}"


def summary(results: list[Result], measure: Measure) -> str:
    """Return the paper's way of reporting: best | mean ± standard deviation."""
    numbers = [_number(result, measure) for result in results]
    runs = f"{len(numbers)} run{'s' if len(numbers) > 1 else ''}"
    best, mean = _shown(min(numbers), measure), _shown(statistics.fmean(numbers), measure)
    spread = f" ± {_shown(statistics.stdev(numbers), measure)}" if len(numbers) > 1 else ""
    return f"test {measure.name} {best} | {mean}{spread}  ({runs})"


def _number(result: Result, measure: Measure) -> float:
    return float(result[f"test_{measure.name}"])


def _shown(number: float, measure: Measure) -> str:
    return f"{number:.4f}" if measure.is_share else f"{number:.2f}"


def _read_result(home: Path, training: Retraining[Any, Any], repetition: int) -> Result | None:
    """Return the result of a finished repetition; a warning tells if its model is damaged."""
    path = home / RESULT_FILE
    found = _read_json(path)
    if found is None:
        return None
    result = unseal(found, path)
    name, own = f"test_{training.measure.name}", (repetition, training.seed + repetition)
    if not isinstance(result.get(name), float | int):
        raise GalleryError(f"{path} is damaged: it has no {name}.")
    if (result.get("repetition"), result.get("seed")) != own:
        raise GalleryError(f"{path} is of another training: its seed and repetition differ.")
    if result.get(_SETTINGS_SUM) not in (None, _settings_sum(training)):
        raise GalleryError(f"{path} is of another training: its settings differ.")
    try:
        is_whole = result.get(_MODEL_SUM) in (None, _file_sum(home / MODEL_FILE))
    except OSError:
        is_whole = False
    if not is_whole:
        _log.warning(
            "%s is missing or damaged: remove %s to train it again.", home / MODEL_FILE, home
        )
    return result


def _settings_sum(training: Retraining[Any, Any]) -> str:
    return hashlib.sha256(to_json(training.identity())).hexdigest()


def _file_sum(path: Path) -> str:
    return hashlib.sha256(read_regular(path)).hexdigest()


def _read_json(path: Path) -> dict[str, Any] | None:
    """Read a mapping; None if there is no file."""
    try:
        return as_mapping(read_json(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise GalleryError(f"{path} cannot be read: {error}.") from None
