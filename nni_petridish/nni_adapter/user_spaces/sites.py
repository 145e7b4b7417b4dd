"""NNI's cells and choices as sites x_k.

The value of a site is that of its stand-ins plus Σ η h. Its decision lists the candidates.

A candidate is normalized by the moments of the batch while it learns, so that values of |α| are
comparable. Since sf hides its value, these moments matter in training only. When a candidate is
selected, its norm is replaced by a constant scale. What remains is NNI's own operation, in a
weighted sum as in NNI's own cells. η starts at 0, so no prediction changes.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nni_petridish.core.genotype import Learner, Shortcut
from nni_petridish.core.site import Site
from nni_petridish.core.weak_learner import WeakLearner
from nni_petridish.errors import GrowthError
from nni_petridish.nni_adapter.user_spaces.decisions import (
    IDENTITY,
    INPUT,
    CellDecision,
    Decision,
    DepthDecision,
    InputDecision,
    LayerDecision,
)

_MOMENTUM = 0.1


class NormalizedOp(nn.Module):
    """An operation with zero mean and unit variance in every channel (dimension 1).

    Parameters
    ----------
    op
        The operation.
    """

    variance: Tensor

    def __init__(self, op: nn.Module) -> None:
        super().__init__()
        self.op = without_inplace(op)
        self.register_buffer("variance", torch.ones(()))

    def forward(self, z: Tensor) -> Tensor:
        """Return norm(op(z))."""
        u: Tensor = self.op(z)
        if u.ndim < 2 or u.numel() <= u.shape[1]:
            return u  # one number per channel has no variance
        if self.training:
            self._observe(u.detach())
        return F.batch_norm(u, None, None, training=True)

    @torch.no_grad()
    def _observe(self, u: Tensor) -> None:
        others = [d for d in range(u.ndim) if d != 1]
        wide = torch.promote_types(u.dtype, torch.float32)
        variance = u.to(wide).var(others, correction=0).mean()
        self.variance.lerp_(variance.to(self.variance.dtype), _MOMENTUM)


class ScaledOp(nn.Module):
    """A selected operation, divided by the last known standard deviation of its output."""

    scale: Tensor

    def __init__(self, candidate: NormalizedOp) -> None:
        super().__init__()
        self.op = candidate.op
        self.register_buffer("scale", (candidate.variance + 1e-5).rsqrt())

    def forward(self, z: Tensor) -> Tensor:
        """Return op(z)/σ."""
        result: Tensor = self.op(z) * self.scale.to(z.dtype)
        return result


class UserSite(Site):
    """A site of a user's space, which grows by a decision.

    Parameters
    ----------
    decision
        The decision.
    sources, op_names
        As `Site` has them.
    """

    place: Tensor

    def __init__(self, decision: Decision, sources: Sequence[str], op_names: Sequence[str]) -> None:
        super().__init__(decision.label, sources, op_names)
        self.decision = decision
        self.pool = decision.pool
        # Gives the device and the precision of a site without parameters.
        self.register_buffer("place", torch.empty(0), persistent=False)

    def chosen(self) -> list[Learner]:
        """Return the shortcuts of every finished weak learner."""
        return [learner.shortcuts for learner in self.finished()]

    def finished(self) -> list[WeakLearner]:
        """Return the finished weak learners."""
        return [learner for learner in self.learners if isinstance(learner, WeakLearner)]

    def eligible_shortcuts(self) -> list[Shortcut]:
        """Return the remaining candidates of the decision."""
        return self.decision.eligible(self.chosen())

    def room(self) -> int:
        """Return the largest number of shortcuts of the next weak learner."""
        return self.decision.room(self.chosen())

    @abstractmethod
    def make_raw_op(self, source: str, op: str) -> nn.Module:
        """Make the operation as NNI does."""

    def make_op(self, source: str, op: str) -> nn.Module:
        """Make a candidate."""
        return NormalizedOp(self.make_raw_op(source, op))

    def finish_op(self, op: nn.Module) -> nn.Module:
        """Return the operation without its norm."""
        assert isinstance(op, NormalizedOp)
        return ScaledOp(op)


class LayerSite(UserSite):
    """The site of a layer: the stand-in, until a layer is chosen.

    Parameters
    ----------
    decision
        The decision.
    layers
        All layers, by name.
    """

    decision: LayerDecision

    def __init__(self, decision: LayerDecision, layers: Mapping[str, nn.Module]) -> None:
        super().__init__(decision, [INPUT], [str(name) for name in decision.names])
        self.stand_in = layers[str(decision.stand_in)]
        # A plain dict, because layers that are not chosen are not part of the network.
        self.layers = {name: m for name, m in layers.items() if name != str(decision.stand_in)}

    def make_raw_op(self, source: str, op: str) -> nn.Module:
        """Return a copy of the layer."""
        return copy.deepcopy(self.layers[op])

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """Return the output of the stand-in plus that of the weak learners."""
        if len(inputs) != 1 or options or not isinstance(inputs[0], Tensor):
            raise GrowthError(
                f"a LayerChoice must have one tensor as its input but {self.key!r} got"
                f" {len(inputs) + len(options)} arguments; name it in fixed to leave it as it is."
            )
        (x,) = inputs
        return self.boost(self.stand_in(x), {INPUT: x})


class InputSite(UserSite):
    """The site of inputs: at first only the stand-in.

    Parameters
    ----------
    decision
        The decision.
    as_list
        Whether to return a list, as with NNI's reduction ``"none"``.
    """

    decision: InputDecision

    def __init__(self, decision: InputDecision, as_list: bool) -> None:
        super().__init__(decision, [str(i) for i in range(decision.inputs)], [IDENTITY])
        self.as_list = as_list

    def make_raw_op(self, source: str, op: str) -> nn.Module:
        """Return the identity."""
        return nn.Identity()

    def forward(self, inputs: Sequence[Tensor]) -> Tensor | list[Tensor]:
        """Return the sum of the chosen inputs."""
        named = {str(i): value for i, value in enumerate(inputs)}
        x_k = self.boost(named[str(self.decision.stand_in)], named)
        return [x_k] if self.as_list else x_k


class DepthSite(UserSite):
    """The site of repeated blocks: each growth adds blocks at the end.

    Parameters
    ----------
    decision
        The decision.
    blocks
        The blocks of the largest depth.
    """

    decision: DepthDecision

    def __init__(self, decision: DepthDecision, blocks: Sequence[nn.Module]) -> None:
        super().__init__(decision, [INPUT], [str(depth) for depth in decision.depths])
        self.stand_in = nn.Sequential(*blocks[: decision.stand_in])
        # A submodule until `hide_unused_blocks`, so that the sites in the blocks are found.
        self.further: Any = nn.ModuleList(blocks[decision.stand_in :])

    def hide_unused_blocks(self) -> None:
        """Take the blocks that are not used yet out of the module tree."""
        if isinstance(self.further, nn.ModuleList):
            blocks = list(self.further)
            del self.further
            self.further = blocks

    def make_raw_op(self, source: str, op: str) -> nn.Module:
        """Return the blocks between the present depth and the given one."""
        reached = [self.decision.stand_in, *(int(op) for ((_, op),) in self.chosen())][-1]
        begin, end = reached - self.decision.stand_in, int(op) - self.decision.stand_in
        return nn.Sequential(*copy.deepcopy(list(self.further)[begin:end]))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the first blocks, then each weak learner to the output before it."""
        x = self.stand_in(x)
        for learner in self.finished():
            x = x + learner.step(learner({INPUT: x}, self.drop))
        return x if self.weak_learner is None else self.weak_learner(x, {INPUT: x})


class CellSite(UserSite):
    """The site of a cell of NNI, whose weak learners are operators of its nodes.

    Parameters
    ----------
    decision
        The decision of the cells with this label.
    cell
        NNI's cell of the architecture that growth starts from.
    make
        Factory of NNI's operations, a function of (node, operator, input, name) with NNI's numbers.
    """

    decision: CellDecision

    def __init__(self, decision: CellDecision, cell: Any, make: Any) -> None:
        super().__init__(decision, [str(i) for i in range(decision.predecessors)], decision.ops)
        self.preprocessor, self.postprocessor = cell.preprocessor, cell.postprocessor
        self.output_node_indices = list(cell.output_node_indices)
        self.concat_dim = cell.concat_dim
        self._make = make
        self.stand_ins = nn.ModuleList()
        self.stand_in_inputs: list[list[int]] = []
        for ops, inputs, slots in zip(cell.ops, cell.inputs, decision.slots, strict=True):
            # The fixed operators, else one stand-in: two of the same would only double the scale.
            given = [k for k in range(len(ops)) if k not in slots] or [0]
            self.stand_ins.append(nn.ModuleList(without_inplace(ops[k]) for k in given))
            self.stand_in_inputs.append([inputs[k].chosen[0] for k in given])

    def make_raw_op(self, source: str, op: str) -> nn.Module:
        """Let NNI's factory make the operation."""
        place = self.decision.next_place(self.chosen())
        node = self.decision.predecessors + place.node
        made: nn.Module = self._make(node, place.slots[0], int(source), op)
        return made

    def forward(self, *inputs: Any) -> Any:
        """Compute the nodes one by one, as NNI's cell does."""
        given = list(inputs[0]) if isinstance(inputs[0], list | tuple) else list(inputs)
        states: list[Tensor] = list(self.preprocessor(given))
        places = self.decision.places(self.chosen())
        growing = self.decision.next_place(self.chosen()).node
        for node in range(len(self.stand_ins)):
            x_k = self._stand_in(node, states)
            named = {str(i): state for i, state in enumerate(states)}
            for learner, place in zip(self.finished(), places, strict=True):
                if place.node == node:
                    x_k = x_k + learner.step(learner(named, self.drop))
            if node == growing and self.weak_learner is not None:
                x_k = self.weak_learner(x_k, named)
            states.append(x_k)
        outputs = [states[i] for i in self.output_node_indices]
        return self.postprocessor(torch.cat(outputs, self.concat_dim), given)

    def _stand_in(self, node: int, states: Sequence[Tensor]) -> Tensor:
        ops: Any = self.stand_ins[node]
        values = [op(states[i]) for op, i in zip(ops, self.stand_in_inputs[node], strict=True)]
        return values[0] if len(values) == 1 else torch.stack(values).sum(0)


def without_inplace(op: nn.Module) -> nn.Module:
    """Switch off in-place layers, which would overwrite an input that others read too."""
    for module in op.modules():
        if getattr(module, "inplace", False) is True:  # ReLU, Dropout and others of torch
            module.inplace = False  # type: ignore[assignment]
    return op
