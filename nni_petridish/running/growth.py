"""Carry out one growth: parent, weak learning, finalizing, training, and the model saved.

Every front calls this one function. It can be killed at any moment and called again: it goes on
from its checkpoints, and its random numbers depend on the growth's seed alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nni_petridish.core.candidate_cost import candidate_milliseconds, per_millisecond
from nni_petridish.core.eta_start import count_learners, line_search, new_learners, set_eta
from nni_petridish.core.forecast import add_predictions
from nni_petridish.core.genotype import Genotype
from nni_petridish.core.grow import alpha_tables, attach_candidates, finalize_candidates
from nni_petridish.core.halving import halving_period, ranked_last
from nni_petridish.core.held_out import alpha_tables_of
from nni_petridish.core.l1 import LINE, OF_CHILDREN, L1Schedule
from nni_petridish.core.select import Scores, score_named
from nni_petridish.core.selection import count_selections
from nni_petridish.core.shortcut_count import count_shortcuts
from nni_petridish.core.untrained import first_inputs
from nni_petridish.core.weak_learner import WeakLearner, halve_candidates, train_every
from nni_petridish.errors import GalleryError, Interrupted, RejectedError
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.gallery.saved_model import FACTS
from nni_petridish.running.fading import FadeIn, check_fading
from nni_petridish.running.payment import AGE, payment
from nni_petridish.running.siblings import select_new
from nni_petridish.running.sizes import select_within, smallest_child
from nni_petridish.running.trunk import (
    Trunk,
    carry_momenta,
    held_epochs,
    load_trunk,
    save_trunk,
)
from nni_petridish.running.weak_learning import (
    Learned,
    StableSelection,
    restore_learned,
    save_learned,
)
from nni_petridish.running.widening import widen
from nni_petridish.search.complexity import MULTIPLY_ADDS, PARAMETERS
from nni_petridish.search.records import (
    CHOICES,
    FULL,
    LATENCY,
    PAYMENT,
    SMALLEST_CHILD,
    Growth,
    Outcome,
)
from nni_petridish.search.settings import WIDTH, GrowthSettings
from nni_petridish.tasks.sizes import sizes_of
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
    RejectedError
        If the growth would not pay; no model is saved.
    PetridishError
        If the growth fails: a damaged parent, a loss that is not finite, a request to stop.
    """
    if gallery.has_model(growth.id):
        gallery.record_model(growth.id)
        gallery.remove_work(growth.id)
        return Outcome.from_dict(gallery.load_documents(growth.id)["metrics"])
    work = _Work(growth, task, plan, gallery.work_folder(growth.id, growth.attempt), callbacks)
    if growth.parent is None:
        net, diary = work.train_seed()
    elif growth.trains_on:
        net, diary = work.train_on(gallery, growth.parent)
    else:
        net, diary = work.grow(gallery, growth.parent)
    outcome = work.outcome(net, gallery)
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
    save_trunk(gallery, growth.id, work.folder)
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
        if self.plan.eta_fade:
            check_fading(net)
        if self.plan.score in OF_CHILDREN:
            first_inputs(net, self.task.validation_losses)  # raises if it can have no such score
        if self.plan.seed_epochs:
            self._train(net, "seed", self.plan.seed_epochs)
        return net, {}

    def train_on(self, gallery: Gallery, parent: str) -> tuple[nn.Module, dict[str, Any]]:
        """Train the parent on, as a network after a growth is trained."""
        net = load_network(self.task, gallery, parent)
        if self.plan.anneal:
            load_trunk(gallery, parent, net)
        self._randomize("final")
        self._train(net, "final", self.plan.final_epochs)
        return net, {}

    def grow(self, gallery: Gallery, parent: str) -> tuple[nn.Module, dict[str, Any]]:
        """Grow the parent: by one weak learner per site (Algorithms 1 and 2), or in width."""
        self._randomize("weak")  # a network may draw the start of its candidates when it is built
        net = load_network(self.task, gallery, parent)
        if self.plan.anneal:
            load_trunk(gallery, parent, net)
        self._randomize("weak")
        before = count_learners(net)
        if self.plan.grow == WIDTH:
            net, diary = self._widen(gallery, net)
        else:
            diary = self._add_shortcuts(gallery, net)
        self._randomize("final")
        if self.plan.eta_fade and self.plan.grow != WIDTH:
            self._fade_in(net, new_learners(net, before))
        else:
            self._train(net, "final", self.plan.final_epochs)
        return net, diary

    def _fade_in(self, net: nn.Module, learners: list[WeakLearner]) -> None:
        """Train after finalizing, with new weak learners that fade in."""
        check_fading(net)
        phase = self._phase("final", self.plan.final_epochs)
        epochs = self.plan.eta_fade * phase.epochs
        if phase.hold_epochs:  # children grow from a network that has faded in
            epochs = min(epochs, float(phase.hold_epochs))
        assert phase.checkpoint is not None
        fade = FadeIn(learners, epochs, self.task.steps(1), phase.checkpoint)
        self._train(net, "final", phase.epochs, fade.watch(self.callbacks))
        fade.end()

    def _widen(self, gallery: Gallery, net: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
        """Return a wider network that predicts the same, and the diary."""
        before, wide = _genotype(net).width, net

        def select(taken: Sequence[Genotype]) -> Genotype:
            nonlocal wide
            wide = widen(self.task, net, self.plan.widen_by, self.growth.within, taken)
            return _genotype(wide)

        select_new(gallery, self.growth, self.folder, select)
        return wide, {"width": {"before": before, "after": _genotype(wide).width}}

    def _add_shortcuts(self, gallery: Gallery, net: nn.Module) -> dict[str, Any]:
        """Add one weak learner per site; return the diary."""
        attach_candidates(net, self._l1(), weak_learning=self.plan.weak_learning)
        train_every(net, self.plan.weak_every)
        if self.plan.weak_halving:
            halve_candidates(net, self._halving_period(), 2 * self.growth.i_max)
        learned = self._learn_weakly(net) if self.plan.weak_epochs else {}
        scores, before = self._scores(net), count_learners(net)
        i_max = self._i_max(net, scores)
        diary = self._predict(net, {"i_max": i_max, "tables": alpha_tables(net, scores), **learned})
        select_new(
            gallery,
            self.growth,
            self.folder,
            lambda taken: self._select(net, scores, i_max, taken),
        )
        _list_selected_first(diary["tables"], _genotype(net))
        return diary | self._start(net, new_learners(net, before))

    def _select(
        self, net: nn.Module, scores: Scores | None, i_max: int, taken: Sequence[Genotype]
    ) -> Genotype:
        """Finalize the candidates, within the sizes of the growth if it has any."""

        def select(
            net: nn.Module, taken: Sequence[Genotype], other: Mapping[str, Sequence[float]] | None
        ) -> Genotype:
            chosen = scores if other is None else other
            return finalize_candidates(net, i_max, scores=chosen, taken=taken)

        if self.growth.within is None:
            return select(net, taken, None)
        return select_within(self.task, net, self.growth.within, taken, select)

    def _learn_weakly(self, net: nn.Module) -> dict[str, Any]:
        """Train the candidates along with the network; return what the diary shall know of it."""
        if self.plan.weak_patience is None:
            self._train(net, "weak", self.plan.weak_epochs)
            if self.plan.anneal:
                carry_momenta(self.folder / "weak", net)
            return {}
        folder, records = self.folder / "weak", self.history.setdefault("weak", [])
        if (learned := restore_learned(folder, net, self._seed("weak"))) is not None:
            records += learned.records
            return {"weak_steps": learned.steps}
        stable = StableSelection(
            net, self.growth.i_max, self.plan.weak_patience, self.callbacks.should_stop
        )

        def on_epoch(phase: str, record: Record) -> None:
            records.append(record)
            self.callbacks.on_epoch(phase, record)

        callbacks = replace(self.callbacks, on_epoch=on_epoch, should_stop=stable.should_stop)
        try:
            # Without checkpoints: within an epoch there are none, and it is short.
            phase = replace(self._phase("weak", self.plan.weak_epochs), checkpoint=None)
            self.task.train(net, phase, callbacks)
        except Interrupted:
            if not stable.is_stable:
                raise
        save_learned(folder, net, Learned(self._seed("weak"), stable.steps, records))
        return {"weak_steps": stable.steps}

    def _start(self, net: nn.Module, learners: list[WeakLearner]) -> dict[str, Any]:
        """Give the new weak learners their η; return what the diary shall know of it."""
        if self.plan.eta != LINE:
            if self.plan.eta:
                set_eta(learners, float(self.plan.eta))
            return {}
        line = line_search(net, learners, self.task.validation_losses)
        if self.plan.reject and not line.pays:
            raise RejectedError(
                f"the growth of {self.growth.parent} would not pay: with η = {line.size:g} the"
                f" validation loss changes by {line.change:.2g} ± {line.error:.2g}."
            )
        return {"line": line._asdict()}

    def _scores(self, net: nn.Module) -> Scores | None:
        """Return the scores of the candidates; None for |α|, which needs no computation."""
        if self.plan.score == "alpha" and self.plan.score_per is None:
            return None
        scores = score_named(self.plan.score)(net, self.task.validation_losses)
        if self.plan.score_per is not None:
            costs = candidate_milliseconds(net, self.task.validation_losses)
            scores = per_millisecond(scores, costs)
        halvings = {key: table.halving for key, table in alpha_tables_of(net).items()}
        return ranked_last(scores, halvings)

    def _i_max(self, net: nn.Module, scores: Scores | None) -> int:
        """Return the number of shortcuts of each new weak learner."""
        if not self.plan.fewer_shortcuts:
            return self.growth.i_max
        return count_shortcuts(net, self.task.validation_losses, self.growth.i_max, scores)

    def _predict(self, net: nn.Module, diary: dict[str, Any]) -> dict[str, Any]:
        """Add the predicted changes of the loss to the diary, if the task can tell them."""
        if self.plan.weak_learning != "isolated":
            return diary  # joint weak learning has taken its step already
        if self.plan.score != "alpha" or self.plan.score_per is not None:
            return {**diary, "score": self.plan.score}  # the predictions are for the largest |α|
        return add_predictions(diary, net, self.task.validation_losses)

    def outcome(self, net: nn.Module, gallery: Gallery) -> Outcome:
        """Evaluate on the validation set; count multiply-adds and parameters; time if asked to."""
        metrics: dict[str, Any] = dict(self.task.evaluate(net))
        if self.plan.anneal and not self.growth.last:  # which has no part at the full rate
            parent = self.growth.parent and gallery.load_documents(self.growth.parent)
            found = payment(self.history, parent or None, self.plan.anneal)
            # There is nothing to compare training on with: the next growth shall be judged.
            metrics[PAYMENT] = {AGE: found[AGE]} if self.growth.trains_on else found
        choices = count_selections(net, self.growth.i_max)
        if not choices:
            metrics[FULL] = True
        elif choices <= _FEW:
            metrics[CHOICES] = choices
        if self.growth.within is not None:
            names = tuple(self.growth.within)
            metrics[SMALLEST_CHILD] = smallest_child(self.task, net, self.growth.i_max, names)
        sizes = sizes_of(self.task, net, {MULTIPLY_ADDS, PARAMETERS, self.plan.complexity})
        if LATENCY in sizes:
            metrics[LATENCY] = sizes[LATENCY]
        return Outcome(
            id=self.growth.id,
            error=metrics["error"],
            multiply_adds=int(sizes[MULTIPLY_ADDS]),
            parameters=int(sizes[PARAMETERS]),
            epochs=sum(len(records) for records in self.history.values()),
            metrics=metrics,
        )

    def _train(
        self, net: nn.Module, phase: str, epochs: int, callbacks: Callbacks | None = None
    ) -> None:
        training, callbacks = self._phase(phase, epochs), callbacks or self.callbacks
        if training.hold_epochs and phase != "weak":
            trunk = Trunk(self.folder, phase, training.hold_epochs)
            trunk.resume()
            callbacks = trunk.watch(callbacks)
        self.history[phase] = self.task.train(net, training, callbacks)

    def _phase(self, phase: str, epochs: int) -> Phase:
        label, checkpoint = f"{self.growth.id} {phase}", self.folder / phase
        factor = 1.0 if phase == "seed" else self.plan.lr_after_growth
        hold = self._held(phase, epochs) if self.plan.anneal else 0
        return Phase(phase, epochs, self._seed(phase), label, checkpoint, factor, hold)

    def _held(self, phase: str, epochs: int) -> int:
        """Return the epochs at the full learning rate: nobody grows on from a last growth."""
        if phase == "weak":
            return epochs
        return 0 if self.growth.last else held_epochs(epochs, self.plan.anneal)

    def _l1(self) -> float | L1Schedule:
        if self.plan.l1_schedule == "constant" or not self.plan.weak_epochs:
            return self.growth.l1
        steps = self.task.steps(self.plan.weak_epochs)
        return L1Schedule(self.plan.l1_schedule, self.growth.l1, steps)

    def _halving_period(self) -> int:
        steps = self.task.steps(self.plan.weak_epochs)
        return halving_period(self.plan.weak_halving, steps, self.plan.weak_every)

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
