"""The vision space with one switch for every shortcut, for NNI's one-shot strategies.

A weak learner is the sum of the shortcuts that are on, out of a fixed set of candidates. Each
shortcut is a `LayerChoice` between nothing and its operation, which DARTS can relax. A sample can
be converted to a genotype, and freezing it builds the network that Petridish builds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nni_petridish.core.genotype import Learner, Shortcut, learner_name
from nni_petridish.errors import ConfigError
from nni_petridish.nni_adapter.compat.nas import LayerChoice, ModelSpace
from search_spaces import VisionSpace
from search_spaces.vision.genotype import VisionGenotype

__all__ = ["SwitchSpace"]

_OFF, _ON = "off", "on"


class SwitchSpace(ModelSpace):
    """A `VisionSpace` whose weak learners are switched on shortcut by shortcut.

    Parameters
    ----------
    space
        The space. Its merge must be ``"weighted_sum"``: one-shot strategies relax sums.
    max_learners
        Largest number of weak learners of a cell.

    Examples
    --------
    ::

        space = VisionSpace((1, 8, 8), 10, merge="weighted_sum")
        experiment = NasExperiment(SwitchSpace(space), evaluator, nni.nas.strategy.DARTS())
        experiment.run()
        (sample,) = experiment.export_top_models(formatter="dict")
        genotype = SwitchSpace(space).genotype(sample)
    """

    def __init__(self, space: VisionSpace, max_learners: int = 1) -> None:
        super().__init__()
        if space.merge != "weighted_sum":
            raise ConfigError(f"merge must be weighted_sum for switches but got {space.merge!r}.")
        self.space, self.max_learners = space, max_learners
        net = space.build(space.seed())
        net.cells = nn.ModuleList(_SwitchedCell(cell, max_learners) for cell in net.cells)
        self.net = net

    @classmethod
    def create_fixed_module(
        cls, sample: Mapping[str, Any], space: VisionSpace, max_learners: int = 1
    ) -> nn.Module:
        """Build the network of a sample; NNI calls this in a trial."""
        return space.build(to_genotype(space, sample, max_learners))

    def freeze(self, sample: dict[str, Any]) -> nn.Module:
        """Build the network of a sample."""
        self.validate(sample)
        return self.space.build(self.genotype(sample))

    def genotype(self, sample: Mapping[str, Any]) -> VisionGenotype:
        """Return the genotype of a sample."""
        return to_genotype(self.space, sample, self.max_learners)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.net(images)
        return logits


def to_genotype(space: VisionSpace, sample: Mapping[str, Any], max_learners: int) -> VisionGenotype:
    """Return the genotype of the shortcuts that are on, without empty weak learners."""
    genotype = space.seed()
    for key in genotype.cells:
        names: dict[str, str] = {}  # new names of the weak learners that have shortcuts
        learners: list[Learner] = []
        for index in range(max_learners):
            on = [
                (names.get(source, source), op)
                for source, op in _candidates(space.ops, index)
                if sample[_label(key, index, (source, op))] == _ON
                and (source in names or not source.startswith("h"))
            ]
            if on:
                names[learner_name(index)] = learner_name(len(learners))
                learners.append(tuple(on))
        for learner in learners:
            genotype = genotype.grown({key: learner})
    return space.check(genotype)


class _SwitchedCell(nn.Module):
    def __init__(self, cell: Any, max_learners: int) -> None:
        super().__init__()
        self.cell = cell
        cell.need_adapter("prev_prev")
        self.shortcuts: list[list[Shortcut]] = []
        self.switches: Any = nn.ModuleList()
        for index in range(max_learners):
            found = _candidates(cell.op_names, index)
            self.shortcuts.append(found)
            self.switches.append(nn.ModuleList(self._switch(index, pair) for pair in found))

    def _switch(self, index: int, shortcut: Shortcut) -> nn.Module:
        source, op = shortcut
        made = self.cell.make_op(source, op)
        off = _Off(
            2 if source in self.cell.sources and self.cell.out.level > self.cell.level else 1
        )
        label = _label(self.cell.key, index, shortcut)
        choice: nn.Module = LayerChoice({_OFF: off, _ON: made}, label=label)
        return choice

    def forward(self, prev_prev: Tensor, prev: Tensor) -> Tensor:
        z = self.cell.adapt({"prev_prev": prev_prev, "prev": prev})
        x_k = self.cell.seed(z["prev"]) + self.cell.skip(z["prev"])
        for index, (shortcuts, switches) in enumerate(
            zip(self.shortcuts, self.switches, strict=True)
        ):
            outputs = [
                switch(z[source]) for (source, _), switch in zip(shortcuts, switches, strict=True)
            ]
            z[learner_name(index)] = h = torch.stack(outputs).sum(0)
            x_k = x_k + h
        result: Tensor = x_k
        return result


class _Off(nn.Module):
    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x[:, :, :: self.stride, :: self.stride])


def _candidates(ops: Any, index: int) -> list[Shortcut]:
    sources = ("prev_prev", "prev", *(learner_name(i) for i in range(index)))
    return [(source, op) for source in sources for op in ops]


def _label(key: str, index: int, shortcut: Shortcut) -> str:
    return ".".join((key, learner_name(index), *shortcut))  # NNI reserves slashes
