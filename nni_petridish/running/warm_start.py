"""Start a search from a model that exists already, instead of the space's seed.

A growth without a parent asks its task for the seed and builds it: a warm task answers with the
architecture and the weights of a given model. Nothing else in a search changes. The data may be
other data of the same shape; if the number of classes differs, the head is new.

The model is described by plain data, ``{"from": PATH, "model": ID, "weights": CHECKSUM}``, and
read when a seed is trained: a search that has its seed needs it no more.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nni_petridish.core.genotype import Genotype
from nni_petridish.errors import ConfigError, GalleryError, GenotypeError
from nni_petridish.gallery.saved_model import SavedModel, from_gallery, read_header, read_model
from nni_petridish.gallery.select import open_search, select_model
from nni_petridish.registry import Measure, kind_names, kind_of
from nni_petridish.tasks.task import NO_CALLBACKS, Callbacks, Phase, Record, Task, require_widening

if TYPE_CHECKING:
    from torch import Tensor, nn

_HEADS = ("classifier.", "auxiliary.")
#: Options that the data decide, and options of new growths only.
_MAY_DIFFER = ("image_shape", "num_classes", "vocabulary", "ops", "max_nodes")


def warm_start(task: Task, path: str | os.PathLike[str], id: str | None = None) -> Task:
    """Return the task with a model in place of its seed.

    Parameters
    ----------
    task
        The task of the new search.
    path
        A gallery, or a file that ``nni-petridish export --format state_dict`` wrote.
    id
        The id of a model of the gallery; the most accurate one by default.

    Raises
    ------
    GalleryError
        If the model is not of the task's space: all but the head must fit.
    """
    warm = warm_task(task, {"from": str(path), "model": id})
    warm.build(warm.seed())  # raise now if it does not fit, not in the first worker
    return warm


def warm_task(task: Task, start: Mapping[str, Any]) -> Task:
    """Return the task with a model in place of its seed; the model is read when it is needed."""
    return _WarmTask(task, start)


def find_start(
    path: Path, id: str | None, space: Mapping[str, Any], data: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Find the model to start from and check that it fits a search, without torch.

    Parameters
    ----------
    path, id
        See `warm_start`.
    space, data
        The space of the search (``space``, the kind, with its options) and its data.
    """
    if path.is_dir():
        gallery, search = open_search(path)
        record = select_model(search, id)
        start: dict[str, Any] = {"from": str(path), "model": record.id}
        start["weights"] = gallery.checksum(record.id)
        given = _full(gallery.space, gallery.settings.get("data") or {})
    elif id is not None:
        raise GalleryError(f"{path} is not a gallery: a model id means nothing there.")
    else:
        header, checksum = read_header(path)
        start = {"from": str(path), "model": None, "weights": checksum}
        given = header["space"]
    _check_space(_full(space, data or {}), given)
    return start


def identity_of(start: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the part of a start that a resumed search must share: all but its path."""
    return {} if start is None else {"start": {k: v for k, v in start.items() if k != "from"}}


def read_start(start: Mapping[str, Any]) -> SavedModel:
    """Read the model to start from."""
    path = Path(start["from"])
    return from_gallery(path, start["model"]) if path.is_dir() else read_model(path)


def _full(space: Mapping[str, Any], data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return all options of a space, as far as they are known without a kind."""
    return kind_of(space).full_space(space, data) if space.get("space") in kind_names() else space


def _check_space(space: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise unless the weights of a model of the given space fit a network of the search's."""
    for name, value in space.items():
        if name not in _MAY_DIFFER and given.get(name, value) != value:
            raise ConfigError(
                f"the model is of another space: its {name} is {given[name]!r} but the search's"
                f" {value!r}."
            )
    wanted, known = (described.get("image_shape") for described in (space, given))
    if wanted and known and wanted[0] != known[0]:
        raise ConfigError(
            f"the model takes images of {known[0]} channels but the data have {wanted[0]}."
        )


class _WarmTask:
    """A task whose seed is a given model; the rest is delegated to another task."""

    def __init__(self, task: Task, start: Mapping[str, Any]) -> None:
        self._task, self._start = task, dict(start)
        self._model: SavedModel | None = None

    @property
    def measure(self) -> Measure:
        """Name and form of the error."""
        return self._task.measure

    def seed(self) -> Genotype:
        """Return the given architecture."""
        if self._model is None:
            self._model = read_start(self._start)
        return self._model.genotype

    def build(self, genotype: Genotype) -> nn.Module:
        """Build a network: the one to start from with its weights, others with fresh ones."""
        try:
            net = self._task.build(genotype)
        except GenotypeError as error:
            raise GalleryError(f"The model to start from is of another space: {error}") from None
        # A growth with a parent never asks for the seed: its weights come from the gallery.
        if self._model is not None and genotype == self._model.genotype:
            self._load(net, self._model)
        return net

    def train(
        self, net: nn.Module, phase: Phase, callbacks: Callbacks = NO_CALLBACKS
    ) -> list[Record]:
        """Train in place."""
        return self._task.train(net, phase, callbacks)

    def steps(self, epochs: int) -> int:
        """Return the number of steps in so many epochs."""
        return self._task.steps(epochs)

    def evaluate(self, net: nn.Module) -> Record:
        """Measure on the validation set."""
        return self._task.evaluate(net)

    def validation_losses(self, net: nn.Module) -> Iterable[Tensor]:
        """Yield differentiable parts of the validation loss."""
        return self._task.validation_losses(net)

    def data_facts(self) -> dict[str, Any]:
        """Return what a user of a model must know of the data."""
        return self._task.data_facts()

    def size(self, net: nn.Module) -> tuple[int, int]:
        """Return (multiply-adds, parameters)."""
        return self._task.size(net)

    def example(self, net: nn.Module) -> tuple[Tensor, ...]:
        """Return inputs of a network for one example."""
        return self._task.example(net)

    def widened(self, genotype: Genotype, factor: float) -> Genotype:
        """Return an architecture with so many times the channels."""
        return require_widening(self._task).widened(genotype, factor)

    def widen(self, net: nn.Module, genotype: Genotype) -> nn.Module:
        """Return a wider network that predicts the same."""
        return require_widening(self._task).widen(net, genotype)

    def _load(self, net: nn.Module, model: SavedModel) -> None:
        own, given = net.state_dict(), model.weights
        fitting = {k: w for k, w in given.items() if k in own and own[k].shape == w.shape}
        for name in dict.fromkeys([*own, *given]):
            if name not in fitting and not name.startswith(_HEADS):
                sizes = [
                    list(state[name].shape) if name in state else None for state in (own, given)
                ]
                raise GalleryError(
                    f"The model to start from is of another space: {name} must have the shape"
                    f" {sizes[0]} but has {sizes[1]}."
                )
        net.load_state_dict(fitting, strict=False)
