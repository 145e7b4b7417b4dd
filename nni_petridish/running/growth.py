"""Carry out one growth: parent, weak learning, finalizing, training, and the model saved.

Every front calls this one function. It can be killed at any moment and called again: it goes on
from its checkpoints, and its random numbers depend on the growth's seed alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from nni_petridish.core.forecast import add_predictions
from nni_petridish.core.genotype import Genotype
from nni_petridish.core.grow import alpha_tables, attach_candidates, finalize_candidates
from nni_petridish.core.l1 import L1Schedule
from nni_petridish.core.select import Scores, score_named
from nni_petridish.core.selection import count_selections
from nni_petridish.errors import GalleryError
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.gallery.saved_model import FACTS
from nni_petridish.running.siblings import select_new
from nni_petridish.search.records import CHOICES, FULL, Growth, Outcome
from nni_petridish.search.settings import GrowthSettings
from nni_petridish.tasks.task import NO_CALLBACKS, PHASES, Callbacks, Phase, Record, Task

_FEW = 64
"""The largest number of possible children that is recorded: others are never used up."""


def run_growth(
    growth: Growth,
    task: Task,
    plan: GrowthSettings,
    gallery: Gallery,
    callbacks: Callbacks = NO_CALLBACKS,
) -> Outcome:
    """Carry out a growth and save its model; if it is there already, return its outcome.

    Raises
    ------
    PetridishError
        If the growth fails: a damaged parent, a loss that is not finite, a request to stop.
    """
    if gallery.has_model(growth.id):
        gallery.record_model(growth.id)
        gallery.remove_work(growth.id)
        return Outcome.from_dict(gallery.load_documents(growth.id)["metrics"])
    work = _Work(growth, task, plan, gallery.work_folder(growth.id, growth.attempt), callbacks)
    net, diary = work.train_seed() if growth.parent is None else work.grow(gallery, growth.parent)
    outcome = work.outcome(net)
    genotype = net.genotype
    assert isinstance(genotype, Genotype)
    documents: dict[str, Any] = {
        "genotype": genotype.to_dict(),
        "metrics": outcome.to_dict(),
        "lineage": growth.to_dict(),
        "alphas": diary,
        "history": work.history,
        "settings": plan.to_dict(),
    }
    if facts := task.data_facts():
        documents[FACTS] = facts
    gallery.save_model(growth.id, net.state_dict(), documents)
    gallery.remove_work(growth.id)
    return outcome


def load_network(task: Task, gallery: Gallery, id: str) -> nn.Module:
    """Build a model of the gallery and give it its weights."""
    weights, documents = gallery.load_model(id)
    net = task.build(Genotype.from_dict(documents["genotype"]))
    try:
        net.load_state_dict(weights)
    except RuntimeError as error:
        first = str(error).splitlines()[-1].strip()
        raise GalleryError(f"The weights of model {id} do not fit its genotype: {first}") from None
    return net


class _Work:
    """One growth under way."""

    def __init__(
        self, growth: Growth, task: Task, plan: GrowthSettings, folder: Path, callbacks: Callbacks
    ) -> None:
        self.growth, self.task, self.plan, self.folder = growth, task, plan, folder
        self.callbacks = callbacks
        self.history: dict[str, list[Record]] = {}

    def train_seed(self) -> tuple[nn.Module, dict[str, Any]]:
        """Train a seed model from scratch, or from the weights that the task's seed has."""
        self._randomize("seed")
        net = self.task.build(self.task.seed())
        if self.plan.seed_epochs:
            self._train(net, "seed", self.plan.seed_epochs)
        return net, {}

    def grow(self, gallery: Gallery, parent: str) -> tuple[nn.Module, dict[str, Any]]:
        """Grow the parent by one weak learner per site (Algorithms 1 and 2)."""
        self._randomize("weak")  # a network may draw the start of its candidates when it is built
        net = load_network(self.task, gallery, parent)
        self._randomize("weak")
        attach_candidates(net, self._l1(), weak_learning=self.plan.weak_learning)
        if self.plan.weak_epochs:
            self._train(net, "weak", self.plan.weak_epochs)
        scores = self._scores(net)
        diary = self._predict(
            net, {"i_max": self.growth.i_max, "tables": alpha_tables(net, scores)}
        )
        select_new(
            gallery,
            self.growth,
            self.folder,
            lambda taken: finalize_candidates(net, self.growth.i_max, scores=scores, taken=taken),
        )
        _list_selected_first(diary["tables"], _genotype(net))
        self._randomize("final")
        self._train(net, "final", self.plan.final_epochs)
        return net, diary

    def _scores(self, net: nn.Module) -> Scores | None:
        """Return the scores of the candidates; None for |α|, which needs no computation."""
        if self.plan.score == "alpha":
            return None
        return score_named(self.plan.score)(net, self.task.validation_losses)

    def _predict(self, net: nn.Module, diary: dict[str, Any]) -> dict[str, Any]:
        """Add the predicted changes of the loss to the diary, if the task can tell them."""
        if self.plan.weak_learning != "isolated":
            return diary  # joint weak learning has taken its step already
        if self.plan.score != "alpha":
            return {**diary, "score": self.plan.score}  # the predictions are for the largest |α|
        return add_predictions(diary, net, self.task.validation_losses)

    def outcome(self, net: nn.Module) -> Outcome:
        """Evaluate on the validation set; count multiply-adds and parameters."""
        metrics: dict[str, Any] = dict(self.task.evaluate(net))
        choices = count_selections(net, self.growth.i_max)
        if not choices:
            metrics[FULL] = True
        elif choices <= _FEW:
            metrics[CHOICES] = choices
        multiply_adds, parameters = self.task.size(net)
        return Outcome(
            id=self.growth.id,
            error=metrics["error"],
            multiply_adds=multiply_adds,
            parameters=parameters,
            epochs=sum(len(records) for records in self.history.values()),
            metrics=metrics,
        )

    def _train(self, net: nn.Module, phase: str, epochs: int) -> None:
        label, checkpoint = f"{self.growth.id} {phase}", self.folder / phase
        self.history[phase] = self.task.train(
            net, Phase(phase, epochs, self._seed(phase), label, checkpoint), self.callbacks
        )

    def _l1(self) -> float | L1Schedule:
        if self.plan.l1_schedule == "constant" or not self.plan.weak_epochs:
            return self.growth.l1
        steps = self.task.steps(self.plan.weak_epochs)
        return L1Schedule(self.plan.l1_schedule, self.growth.l1, steps)

    def _seed(self, phase: str) -> int:
        # Growth seeds are below 2³¹; distinct phases of distinct growths get distinct seeds.
        return self.growth.seed * len(PHASES) + PHASES.index(phase)

    def _randomize(self, phase: str) -> None:
        torch.manual_seed(self._seed(phase))


def _genotype(net: nn.Module) -> Genotype:
    genotype = net.genotype
    assert isinstance(genotype, Genotype)
    return genotype


def _list_selected_first(tables: dict[str, list[dict[str, Any]]], genotype: Genotype) -> None:
    """Move the selected candidates to the front, unless they are there: by |α| they usually are."""
    for key, learners in genotype.learners_by_key().items():
        if key in tables and learners:
            selected = set(learners[-1])
            tables[key].sort(key=lambda row: (row["source"], row["op"]) not in selected)
