"""Judge the scores of candidates: train parents, teach their candidates, and keep all scores.

A parent is finished when its result is on the disk.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from nni_petridish._support.reading import as_mapping, read_json
from nni_petridish.core.genotype import Genotype
from nni_petridish.core.grow import attach_candidates, sites
from nni_petridish.errors import ConfigError, Interrupted
from nni_petridish.gallery.files import make_folder, to_json, write_file
from nni_petridish.running.worker_report import STEP, reporting
from nni_petridish.studies.judge.scores import CANDIDATE_SCORES, CHILD_SCORES, Evidence
from nni_petridish.studies.judge.settings import (
    JudgeSettings,
    Parent,
    ancestor,
    choose_parents,
    results_file,
)
from nni_petridish.studies.judge.tables import TruthTable
from nni_petridish.studies.judge.training import (
    DataSet,
    cosine,
    held_out_losses,
    train_steps,
    validation_error,
)
from nni_petridish.studies.runs import Result
from nni_petridish.tasks.task import NO_CALLBACKS, Callbacks, Progress

WORK = "work"
"""The folder of the reports of workers, each in a folder of its own."""
_WEAK = "weak"
_FRESH = "children"
"""The phase in which the children are scored with fresh weights."""
_ZERO_COST_IMAGES = 32


class TableSpace(Protocol):
    """The networks of a table."""

    def genotype(self, code: str) -> Genotype:
        """Return the genotype with this code."""
        ...

    def code(self, genotype: Genotype) -> str:
        """Return the code of a genotype."""
        ...

    def build(self, genotype: Genotype) -> nn.Module:
        """Build the network that was trained for the table, with fresh weights."""
        ...

    def build_grown(self, parent: nn.Module, genotype: Genotype) -> nn.Module:
        """Build a network with the weights of its parent."""
        ...


class Judgement:
    """One table, its networks, the data, and the folder of the results.

    Parameters
    ----------
    table, space
        The table and its networks.
    data
        The images that the table's networks were trained on.
    settings
        The settings; those in the folder must be the same.
    folder
        The folder of results and of parents' weights.
    """

    def __init__(
        self,
        table: TruthTable,
        space: TableSpace,
        data: DataSet,
        settings: JudgeSettings,
        folder: Path,
    ) -> None:
        self.table, self.space, self.data = table, space, data
        self.settings, self.folder = settings, folder
        self.parents = choose_parents(table, settings)

    def prepare(self) -> None:
        """Make the folders; raise `ConfigError` if the folder was made with other settings."""
        for name in ("results", "parents", "children", WORK):
            make_folder(self.folder / name)
        file = self.folder / "settings.json"
        own = {"table": self.table.name, **self.settings.to_dict()}
        if file.is_file():
            before = as_mapping(read_json(file))
            changed = [key for key in own if before.get(key) != own[key]]
            if changed:
                key = changed[0]
                raise ConfigError(
                    f"{self.folder}: was begun with {key}={before.get(key)!r} but got"
                    f" {own[key]!r}; choose another folder."
                )
        else:
            write_file(file, to_json(own))

    def left(self) -> list[Parent]:
        """Return the parents without a result."""
        return [p for p in self.parents if not results_file(self.folder, p).is_file()]

    # One parent.

    def judge(self, parent: Parent, callbacks: Callbacks = NO_CALLBACKS) -> Result:
        """Train a parent and its candidates, and return all scores; the result is kept."""
        folder = self.folder / WORK / parent.name
        folder.mkdir(exist_ok=True)
        with reporting(folder, parent.name, self._phases(parent), callbacks, STEP) as told:
            result = self._judge(parent, told)
        write_file(results_file(self.folder, parent), to_json(result))
        with contextlib.suppress(OSError):
            folder.rmdir()
        return result

    def _judge(self, parent: Parent, callbacks: Callbacks) -> Result:
        start = time.process_time()
        net = self.trained(parent, callbacks)
        error = validation_error(net, self.data)
        trained = time.process_time()
        torch.manual_seed(parent.random_seed("attach"))
        attach_candidates(net, self.settings.l1)
        children = self._children(net)
        found: dict[str, Any] = {}

        tell = _teller(_WEAK, self.settings.checkpoints[-1], callbacks)

        def look(step: int) -> None:
            tell(step)
            if step in self.settings.checkpoints:
                found[str(step)] = self._scores(net, children, callbacks.should_stop)

        train_steps(
            net,
            self.data.train,
            self.settings.checkpoints[-1],
            self.settings,
            parent.random_seed("weak"),
            lr=lambda step: self.settings.lr,
            after=look,
            stop=callbacks.should_stop,
        )
        weak = time.process_time()
        codes = [code for codes in children.values() for code in codes]
        fresh = self._all_fresh_scores(codes, callbacks)
        depth = sum(a != b for a, b in zip(parent.code, self.table.seed, strict=True))
        return {
            "code": parent.code,
            "length": parent.length,
            "repetition": parent.repetition,
            "depth": depth,
            "validation_error": error,
            "children": codes,
            "tables": {key: list(own) for key, own in children.items()},
            "scores": found,
            "fresh": {name: {c: fresh[c][name] for c in codes} for name in CHILD_SCORES},
            "processor_seconds": {
                "parent": trained - start,
                "weak": weak - trained,
                "fresh": time.process_time() - weak,
            },
        }

    def trained(self, parent: Parent, callbacks: Callbacks = NO_CALLBACKS) -> nn.Module:
        """Return a trained parent, from the disk if it is there."""
        genotype = self.space.genotype(parent.code)
        file = self._weights_file(parent)
        if file.is_file():
            net = self.space.build(genotype)
            with contextlib.suppress(SafetensorError, RuntimeError):  # damaged: trained anew
                net.load_state_dict(load(file.read_bytes()))
                return net
        before = ancestor(self.table, parent)
        start = None if before is None else self.trained(before, callbacks)
        torch.manual_seed(parent.random_seed("build"))
        if start is None:
            net = self.space.build(genotype)
        else:
            net = self.space.build_grown(start, genotype)
        steps = self._steps(parent)
        train_steps(
            net,
            self.data.train,
            steps,
            self.settings,
            parent.random_seed("train"),
            lr=cosine(self.settings, steps),
            after=_teller(_training_of(parent), steps, callbacks),
            stop=callbacks.should_stop,
        )
        state = {name: value.contiguous() for name, value in net.state_dict().items()}
        write_file(file, save(state))
        return net

    def _weights_file(self, parent: Parent) -> Path:
        return self.folder / "parents" / f"{parent.name}.safetensors"

    def _steps(self, parent: Parent) -> int:
        """Return the steps of the training of a parent, after its own parent's if it has one."""
        depth = 0 if ancestor(self.table, parent) is None else 1
        return self.settings.steps(parent.length, depth)

    def _phases(self, parent: Parent) -> dict[str, int]:
        """Return the steps of what a parent needs, in order: of its trainings, and its children."""
        chain: list[Parent] = []
        last: Parent | None = parent
        while last is not None and not self._weights_file(last).is_file():
            chain.insert(0, last)
            last = ancestor(self.table, last)
        trainings = {_training_of(one): self._steps(one) for one in chain}
        children = len(self.table.children(parent.code))
        return trainings | {_WEAK: self.settings.checkpoints[-1], _FRESH: children}

    def _children(self, net: nn.Module) -> dict[str, list[str]]:
        """Return the code of the child that each candidate leads to, by key of its table."""
        genotype = net.genotype
        assert isinstance(genotype, Genotype)
        tables = {s.key: s.weak_learner.table for s in sites(net) if s.weak_learner is not None}
        return {
            key: [self.space.code(genotype.grown({key: (one,)})) for one in table.shortcuts]
            for key, table in tables.items()
        }

    def _scores(
        self, net: nn.Module, children: dict[str, list[str]], stop: Callable[[], bool]
    ) -> dict[str, Any]:
        losses = held_out_losses(self.data.validation, self.settings.held_out, stop=stop)
        evidence = Evidence(net, losses)
        found = {}
        for name, score in CANDIDATE_SCORES.items():
            values = score(evidence)
            found[name] = {
                code: value
                for key, codes in children.items()
                for code, value in zip(codes, values[key], strict=True)
            }
        return found

    def _all_fresh_scores(
        self, codes: Sequence[str], callbacks: Callbacks
    ) -> dict[str, dict[str, float]]:
        tell = _teller(_FRESH, len(codes), callbacks)
        found: dict[str, dict[str, float]] = {}
        for code in codes:
            if callbacks.should_stop():
                raise Interrupted("scoring was stopped.")
            tell(len(found))
            found[code] = self._fresh_scores(code)
        return found

    def _fresh_scores(self, code: str) -> dict[str, float]:
        """Return the scores of a child with fresh weights, the same for all its parents."""
        file = self.folder / "children" / f"{code}.json"
        if file.is_file():
            return as_mapping(read_json(file))
        raw, labels = next(iter(self.data.train.batches(_ZERO_COST_IMAGES)))
        images = self.data.train.normalize(raw).contiguous(memory_format=torch.channels_last)
        found = {}
        for name, score in CHILD_SCORES.items():
            torch.manual_seed(0)
            found[name] = score(self.space.build(self.space.genotype(code)), images, labels)
        write_file(file, to_json(found))
        return found


def _training_of(parent: Parent) -> str:
    """Return the name of the phase in which a parent is trained."""
    return f"train {parent.code}"


def _teller(phase: str, steps: int, callbacks: Callbacks) -> Callable[[int], object]:
    """Return a function that tells how many steps of a phase are done."""
    on_progress = callbacks.on_progress
    if on_progress is None:
        return lambda step: None
    return lambda step: on_progress(phase, Progress(steps, step, ""))
