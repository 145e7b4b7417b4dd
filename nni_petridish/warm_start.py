"""Start a search from a model that exists already, instead of the space's seed.

A growth with no parent asks its task for the seed and builds it: a warm task answers with the
architecture and the weights of a given model. Nothing else of a search has to know. The data may be
others of the same shape; where the number of classes differs, the head is new.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nni_petridish.errors import GalleryError, GenotypeError
from nni_petridish.export import SavedModel, from_gallery, read_model
from nni_petridish.genotype import Genotype

if TYPE_CHECKING:
    from torch import nn

    from nni_petridish.task import Task

_HEADS = ("classifier.", "auxiliary.")


def warm_start(task: Task, path: str | os.PathLike[str], id: str | None = None) -> Task:
    """Return the task with a model in place of its seed.

    Parameters
    ----------
    task
        The task of the new search.
    path
        A gallery, or a file that ``nni-petridish export --format state_dict`` wrote.
    id
        Which model of the gallery; the most accurate by default.

    Raises
    ------
    GalleryError
        If the model is not of the task's space: all but the head must fit.
    """
    folder = Path(path)
    model = from_gallery(folder, id) if folder.is_dir() else read_model(folder)
    warm = _WarmTask(task, model)
    warm.build(model.genotype)  # what does not fit is said now, not by the first worker
    return cast("Task", warm)


class _WarmTask:
    def __init__(self, task: Task, model: SavedModel) -> None:
        self._task, self._model = task, model

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # copies ask for these before there is a task
        return getattr(self._task, name)

    def seed(self) -> Genotype:
        """Return the given architecture."""
        return self._model.genotype

    def build(self, genotype: Genotype) -> nn.Module:
        """Build a network: of the given architecture with its weights, else with fresh ones."""
        try:
            net = self._task.build(genotype)
        except GenotypeError as error:
            raise GalleryError(f"The model to start from is of another space: {error}") from None
        if genotype == self._model.genotype:
            self._load(net)
        return net

    def _load(self, net: nn.Module) -> None:
        own, given = net.state_dict(), self._model.weights
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
