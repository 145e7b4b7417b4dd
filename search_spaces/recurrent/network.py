"""The networks of the recurrent space: language models whose cell can grow.

A network has an embedding, one recurrent cell, and a decoder that shares its weights with the
embedding. The cell of the seed has a single relu node on s0; every growth adds one node.

The output of a cell is the average of its nodes, ``s_1 + Σ η_i (s_i − s_1)``, where η_i is the
share of node i. With all η_i = 1/n it is the mean, as in DARTS. The share of a new node starts at
0, which preserves the predictions of the parent, and is trained like every other parameter. If only
some nodes are averaged, the first of them takes the part of s_1, and the shares of the rest are 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count, groupby
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nni_petridish.core.genotype import Shortcut
from nni_petridish.core.site import Site
from nni_petridish.core.weak_learner import Candidates, WeakLearner
from nni_petridish.errors import ConfigError
from nni_petridish.kernels.cross_entropy import linear_cross_entropy
from nni_petridish.kernels.fused_recurrence import (
    FusedCell,
    FusedNode,
    can_fuse_nodes,
    differentiable_fused,
    fused_candidates,
    recurrence_applies,
    unroll_fused,
)
from nni_petridish.kernels.gates import ACTIVATION_FUNCTIONS, highways
from nni_petridish.kernels.recurrence import Wiring, differentiable_outputs, unroll_cell
from search_spaces.recurrent.genotype import CELL_KEY, RecurrentGenotype, node_name

if TYPE_CHECKING:
    from search_spaces.recurrent.space import RecurrentSpace

#: As in DARTS, weights start uniform in ±0.04.
INIT_RANGE = 0.04
DROPOUTS = ("words", "inputs", "cell_inputs", "hidden", "outputs")


class Node(nn.Module):
    """A node with predecessor z: ``[c, a] = (m∘z) W``, ``s = z + σ(c)·(f(a) − z)``."""

    def __init__(self, hidden: int, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.weight = _uniform(hidden, 2 * hidden)

    def forward(self, z: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return s."""
        return highway(z, _masked(z, mask) @ self.weight, self.activation)

    def extra_repr(self) -> str:
        """Show the width and the activation."""
        return f"{self.weight.shape[0]}, {self.activation}"


def highway(z: Tensor, gates: Tensor, activation: str) -> Tensor:
    """Return ``z + σ(c)·(f(a) − z)`` for gates = [c, a]."""
    c, a = gates.chunk(2, -1)
    return torch.lerp(z, ACTIVATION_FUNCTIONS[activation](a), torch.sigmoid(c))


class CandidateNode(nn.Module):
    """A candidate node: its state is normalized over all steps, so that |α| is comparable."""

    def __init__(self, hidden: int, activation: str) -> None:
        super().__init__()
        self.node = Node(hidden, activation)
        self.norm = nn.BatchNorm2d(hidden, affine=False)

    def forward(self, z: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return norm(s)."""
        return self.norm(as_images(self.node(z, mask))).view_as(z)


class CandidateNodes(Candidates):
    """The candidate nodes of a cell, with one matrix product for all of the same predecessor.

    States are images of one pixel here, see `as_images`.
    """

    mask: Tensor | None = None

    def ops_with_inputs(
        self, z: Mapping[str, Tensor], present: Sequence[int] | None = None
    ) -> list[tuple[nn.Module, Tensor]]:
        """Return the norm and the unnormalized state of every candidate, or of those present."""
        return [(op.norm, state) for op, state in self._states(z, present)]

    def can_fuse(self, fused: FusedCell) -> bool:
        """Return whether `fused_candidates` supports all candidates."""
        own = [self, *(module for op in self.ops for module in op.modules())]
        return self.training and can_fuse_nodes(fused, own)

    def fused_nodes(self, present: Sequence[int] | None) -> list[FusedNode]:
        """Return all candidates, or those present, as `fused_candidates` takes them."""
        return [
            FusedNode(int(source[1:]), name, op.node.weight, op.norm)
            for (source, name), op in self._pairs(present)
        ]

    def _pairs(self, present: Sequence[int] | None) -> list[tuple[Shortcut, CandidateNode]]:
        indices = range(len(self.ops)) if present is None else present
        return [(self.table.shortcuts[i], cast(CandidateNode, self.ops[i])) for i in indices]

    def _states(
        self, z: Mapping[str, Tensor], present: Sequence[int] | None
    ) -> Iterator[tuple[CandidateNode, Tensor]]:
        """Yield every candidate with its state; those of the same predecessor are adjacent."""
        pairs = self._pairs(present)
        for source, own in groupby(pairs, key=lambda pair: pair[0][0]):
            ops = [op for _, op in own]
            rows = z[source].flatten(1)
            mask = self.mask
            masked = rows if mask is None else (rows.view(-1, *mask.shape) * mask).view_as(rows)
            states = highways(
                rows,
                masked,
                [op.node.activation for op in ops],
                [op.node.weight for op in ops],
            )
            yield from zip(ops, map(as_images, states), strict=True)


def as_images(states: Tensor) -> Tensor:
    """View states, shape (..., hidden), as images of one pixel whose channels are the units."""
    return states.reshape(-1, states.shape[-1], 1, 1)


class OnlyOne(nn.Module):
    """op_merge of a node, which has one input."""

    def forward(self, shortcuts: Sequence[Tensor]) -> Tensor:
        """Return the only shortcut."""
        (only,) = shortcuts
        return only


class RecurrentCell(Site):
    """The cell: a site x_k = h(t), whose weak learners are its nodes after the first.

    Parameters
    ----------
    embedding, hidden
        Width of the input and of the state.
    activation
        Activation of the first node, which reads s0.
    op_names
        The eligible activations.
    max_nodes
        The maximum number of nodes.
    outside
        The numbers of the nodes that are not in the output, from 1.
    """

    candidates_type = CandidateNodes
    fades = False  # η is the share of a node in the output, within the recurrence

    def __init__(
        self,
        embedding: int,
        hidden: int,
        activation: str,
        op_names: Sequence[str],
        max_nodes: int,
        outside: Collection[int] = (),
    ) -> None:
        super().__init__(CELL_KEY, [node_name(0), node_name(1)], op_names)
        self.outside = frozenset(outside)
        # The first node in the output, which takes what the shares of the others leave.
        self.anchor = next(i for i in count(1) if i not in self.outside)
        self.embedding, self.hidden, self.max_nodes = embedding, hidden, max_nodes
        self.weight = _uniform(embedding + hidden, 2 * hidden)
        self.first = Node(hidden, activation)

    def nodes(self) -> list[tuple[str, int]]:
        """Return ``(activation, predecessor)`` of every node."""
        shortcuts = [learner.shortcuts[0] for learner in self._finished()]
        return [(self.first.activation, 0), *((op, int(source[1:])) for source, op in shortcuts)]

    def average(self) -> Tensor:
        """Return the share of every node in the output; the shares sum to 1."""
        nothing = self.weight.new_zeros(())
        shares = dict.fromkeys(range(1, len(self.learners) + 2), nothing) | self._shares()
        shares[self.anchor] = 1 - sum(self._shares().values(), nothing)
        return torch.stack([*shares.values()])

    def _shares(self) -> dict[int, Tensor]:
        """Return η of each node in the output but the anchor, by its number."""
        return {
            i: learner.eta
            for i, learner in enumerate(self._finished(), 2)
            if i != self.anchor and i not in self.outside
        }

    def eligible_shortcuts(self) -> list[Shortcut]:
        """Return every (earlier node, activation); none if the cell has ``max_nodes`` already."""
        n = len(self.learners) + 1
        earlier = range(n + 1) if n < self.max_nodes else ()
        return [(node_name(i), op) for i in earlier for op in self.op_names]

    def make_op(self, source: str, op: str) -> nn.Module:
        """Make a candidate node."""
        return CandidateNode(self.hidden, op)

    def make_merge(self, merge: str, weights: Sequence[float] | None, n: int) -> nn.Module:
        """Make the op_merge of one input."""
        return OnlyOne()

    def finish_op(self, op: nn.Module) -> nn.Module:
        """Return the node without its norm: DARTS's cell has no normalization."""
        return op.node if isinstance(op, CandidateNode) else op

    def add_learner(self, shortcuts: Sequence[Shortcut], merge: str) -> None:
        """Add a node with fresh weights; all nodes in the output then have the same share."""
        super().add_learner(shortcuts, merge)
        inside = [i for i in range(1, len(self.learners) + 2) if i not in self.outside]
        with torch.no_grad():
            for i, other in enumerate(self._finished(), 2):
                other.eta.fill_(1 / len(inside) if i in inside else 0.0)
                if i not in inside or i == self.anchor:
                    other.eta.requires_grad_(False)  # it is not used

    def forward(self, x: Tensor, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return h(t) for all steps, shape (steps, batch, hidden).

        Parameters
        ----------
        x
            Inputs, shape (steps, batch, embedding).
        h
            State before the first step, shape (batch, hidden).
        mask
            Mask of the locked dropout of hidden units, shape (batch, hidden).
        """
        weak = self.weak_learner
        if isinstance(weak, CandidateNodes):
            weak.mask = mask
        is_joint = weak is not None and weak.scale is not None
        weights = [self.first.weight, *(cast(Node, x.ops[0]).weight for x in self._finished())]
        if not is_joint and recurrence_applies(x):
            return self._fused(x, h, mask, weights)
        input_weight, weight_0 = self.weight.split([self.embedding, self.hidden])
        projected = x @ input_weight
        if is_joint:
            return self._step_by_step(projected, h, mask, weight_0)
        wiring = Wiring(self.nodes())
        average = self.average()
        unrolled = unroll_cell(wiring, projected, h, mask, weight_0, weights, average)
        if not torch.is_grad_enabled():
            return unrolled.outputs
        # Candidates do not affect the states (sf, sg), so all states are known before any candidate
        # is evaluated: the candidates of all steps are one batch.
        sf_x_c = None
        if weak is not None:
            states = {node_name(i): unrolled.state(i) for i in range(len(weights) + 1)}
            sf_x_c = self._add_candidates(torch.zeros_like(unrolled.outputs), states)
        return differentiable_outputs(unrolled, sf_x_c, projected, h, weight_0, weights, average)

    def _fused(
        self, x: Tensor, h: Tensor, mask: Tensor | None, weights: Sequence[Tensor]
    ) -> Tensor:
        """Compute all steps in C: the same numbers as in `forward`, faster."""
        average = self.average()
        fused = unroll_fused(self.nodes(), x, h, mask, self.weight, weights, average)
        if not torch.is_grad_enabled():
            return fused.outputs()
        sf_x_c, weak = None, self.weak_learner
        if isinstance(weak, CandidateNodes) and weak.can_fuse(fused):
            present = weak.present()
            sf_x_c = fused_candidates(fused, weak.weights(present), weak.fused_nodes(present))
        elif weak is not None:
            states = {node_name(i): fused.state(i) for i in range(len(weights) + 1)}
            sf_x_c = self._add_candidates(torch.zeros_like(states[node_name(0)]), states)
        return differentiable_fused(fused, sf_x_c, x, h, self.weight, weights, average)

    def boost(self, x_k: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Return the average of the nodes, plus x_c in joint weak learning."""
        return self._boost(x_k, inputs, None)

    def _boost(self, x_k: Tensor, inputs: dict[str, Tensor], mask: Tensor | None) -> Tensor:
        first = x_k
        for i, learner in enumerate(self._finished(), 2):
            state = learner.ops[0](inputs[learner.shortcuts[0][0]], mask)
            inputs[node_name(i)] = state
            if i == self.anchor:
                first = x_k = state
            elif i not in self.outside:
                x_k = x_k + learner.eta * (state - first)
        return self._add_candidates(x_k, inputs)

    def _add_candidates(self, x_k: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        if self.weak_learner is None:
            return x_k
        images = {name: as_images(state) for name, state in inputs.items()}
        result: Tensor = self.weak_learner(as_images(x_k), images)
        return result.view_as(x_k)

    def _step_by_step(
        self, projected: Tensor, h: Tensor, mask: Tensor | None, weight_0: Tensor
    ) -> Tensor:
        """Compute step by step: in joint weak learning, the candidates change the states."""
        outputs = []
        for own in projected.unbind(0):
            s_0 = highway(h, own + _masked(h, mask) @ weight_0, "tanh")
            s_1 = self.first(s_0, mask)
            h = self._boost(s_1, {node_name(0): s_0, node_name(1): s_1}, mask)
            outputs.append(h)
        return torch.stack(outputs)

    def _finished(self) -> list[WeakLearner]:
        return [learner for learner in self.learners if isinstance(learner, WeakLearner)]


class RecurrentNetwork(nn.Module):
    """A language model of the recurrent space, built by `RecurrentSpace.build`."""

    genotype: RecurrentGenotype

    def __init__(
        self, space: RecurrentSpace, genotype: RecurrentGenotype, for_retraining: bool
    ) -> None:
        super().__init__()
        self.genotype = genotype
        self.dropout = dict.fromkeys(DROPOUTS, 0.0)
        self.embedding = _uniform(space.vocabulary, space.embedding)
        self.bias = nn.Parameter(torch.zeros(space.vocabulary))
        (activation, _), *others = genotype.nodes
        hidden = space.hidden or space.embedding
        self.cell = RecurrentCell(
            *(space.embedding, hidden, activation, space.activations(), space.max_nodes),
            outside=set(range(1, len(genotype.nodes) + 1)) - set(genotype.averaged),
        )
        for op, predecessor in others:
            self.cell.add_learner([(node_name(predecessor), op)], "")
        if for_retraining:
            for learner in self.cell.learners:
                cast(WeakLearner, learner).eta.requires_grad_(False)
        self.project = (
            nn.Identity()
            if hidden == space.embedding
            else nn.Linear(hidden, space.embedding, bias=False)
        )

    def set_dropout(self, **rates: float) -> None:
        """Set dropout rates by name, see `DROPOUTS`; the others do not change.

        All are locked (variational): drawn once per sequence, not at every step. ``words`` drops
        whole words of the embedding, ``inputs`` and ``cell_inputs`` drop units of embedded words,
        ``hidden`` drops units of the states that nodes read, and ``outputs`` units of the decoder's
        input.
        """
        for name, rate in rates.items():
            if name not in DROPOUTS:
                raise ConfigError(f"dropout must be one of {', '.join(DROPOUTS)} but got {name!r}.")
            if not 0 <= rate < 1:
                raise ConfigError(f"dropout of {name} must be in [0, 1) but got {rate!r}.")
        self.dropout.update(rates)

    def initial_state(self, batch: int) -> Tensor:
        """Return the state before the first word."""
        return self.embedding.new_zeros(batch, self.cell.hidden)

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the logits of the next word at every position, and the state after the last.

        Parameters
        ----------
        tokens
            Word indices, shape (steps, batch).
        state
            The state to continue from, shape (batch, hidden). By default, the initial state.
        """
        outputs, dropped = self.features(tokens, state)
        return self.decode(dropped), outputs[-1].detach()

    def features(self, tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return h(t) at all steps, without and with the dropout of the decoder's input."""
        batch = tokens.shape[1]
        state = self.initial_state(batch) if state is None else state
        embedded = F.embedding(tokens, self.embedding)
        words = self._mask("words", len(self.embedding), 1)
        if words is not None:
            embedded = embedded * F.embedding(tokens, words)
        width = embedded.shape[-1]
        for name in ("inputs", "cell_inputs"):
            embedded = _masked(embedded, self._mask(name, batch, width))
        outputs = self.cell(embedded, state, self._mask("hidden", batch, self.cell.hidden))
        return outputs, _masked(outputs, self._mask("outputs", batch, self.cell.hidden))

    def decode(self, features: Tensor) -> Tensor:
        """Return the logits for the decoder's input; its weights are those of the embedding."""
        return F.linear(self.project(features), self.embedding, self.bias)

    def loss(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of the target words, for the decoder's input."""
        return linear_cross_entropy(
            self.project(features).flatten(0, 1), self.embedding, self.bias, targets.flatten()
        )

    def multiply_adds(self) -> int:
        """Return the multiply-adds of all matrix products for one word, the decoder's included."""
        nodes = len(self.cell.learners) + 1
        projection = self.project.weight.numel() if isinstance(self.project, nn.Linear) else 0
        own = self.cell.weight.numel() + nodes * self.cell.first.weight.numel()
        return own + projection + self.embedding.numel()

    def _mask(self, name: str, *shape: int) -> Tensor | None:
        rate = self.dropout[name]
        if not self.training or rate == 0:
            return None
        return self.embedding.new_empty(shape).bernoulli_(1 - rate).div_(1 - rate)


def _uniform(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape).uniform_(-INIT_RANGE, INIT_RANGE))


def _masked(value: Tensor, mask: Tensor | None) -> Tensor:
    return value if mask is None else value * mask
