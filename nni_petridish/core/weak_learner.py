"""The weak learner of a layer x_k, while it learns and once it is finished.

While it learns (Algorithm 1) it is the union of all candidate shortcuts,

    x_c = Σ_i Σ_j α_ij · op_j(sg(z_i))          (Eq. 5)
    x_k ← x_k + sf(x_c)

and its parameters θ see the gradient ∇_θ ⟨∇_{x_k} L, x_c⟩ (Eq. 7) while nothing else in the network
notices. Once finished (Algorithm 2) it is h = op_merge of the few selected shortcuts, added as
x_k ← x_k + η h.

Everything here holds for any network; what the shortcuts are is the business of a `Site`.
"""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nni_petridish.core.genotype import Shortcut, learner_name
from nni_petridish.core.named_modules import NamedModules
from nni_petridish.kernels.deferred import add_hidden_sum
from nni_petridish.kernels.switch import fast_kernels_enabled

Schedule = Callable[[int], float]
"""λ as a function of the number of backward passes since the candidates were attached."""


def stop_gradient(x: Tensor) -> Tensor:
    """sg(x): equal to x, but no gradient flows back (none is even computed)."""
    return x.detach()


def stop_forward(x: Tensor) -> Tensor:
    """sf(x) = x − sg(x): zero in the forward pass, the identity in the backward pass."""
    return x - stop_gradient(x)


class _L1(torch.autograd.Function):
    """λ‖α‖₁ (Eq. 6) that tells its table when its gradient has been delivered."""

    @staticmethod
    def forward(ctx: Any, alpha: Tensor, l1: float, table: AlphaTable) -> Tensor:
        ctx.save_for_backward(alpha)
        ctx.l1, ctx.table = l1, table
        return l1 * alpha.abs().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (alpha,) = ctx.saved_tensors
        ctx.table.l1_came_with_loss = True
        return grads[0] * ctx.l1 * alpha.sign(), None, None


class AlphaTable(nn.Module):
    """The weights α_ij of all candidate shortcuts, shared by every site of one key.

    The L1 term reaches α without touching anybody's loss: a hook adds its subgradient λ·sign(α)
    once per backward pass, however many sites share the table. Who scales the loss may instead
    add `extra_loss` to it; the hook then notices and adds nothing, so the term counts exactly once
    either way.

    Parameters
    ----------
    shortcuts
        The ``(source, op)`` pair of each candidate.
    l1
        λ, or a schedule: a function from the number of backward passes to λ.
    competitors
        How many candidates the table and those that it competes with have together; its own by
        default.
    """

    backward_passes: Tensor
    no_weight_decay = ("alpha",)  # L1 alone decides on α

    def __init__(
        self, shortcuts: Sequence[Shortcut], l1: float | Schedule, competitors: int | None = None
    ) -> None:
        super().__init__()
        self.shortcuts = tuple(shortcuts)
        self.l1 = l1
        self.l1_came_with_loss = False
        # 1/(I·J): the joint weak learner starts as the mean of its candidates.
        start = 1.0 / (competitors or len(shortcuts))
        self.alpha = nn.Parameter(torch.full((len(shortcuts),), start))
        self.register_buffer("backward_passes", torch.zeros((), dtype=torch.int64))
        self._watch_alpha()

    def current_l1(self) -> float:
        """Return λ at this moment of its schedule."""
        return self.l1(int(self.backward_passes)) if callable(self.l1) else self.l1

    def extra_loss(self) -> Tensor:
        """Return λ Σ|α_ij| (Eq. 6), differentiable."""
        result: Tensor = _L1.apply(self.alpha, self.current_l1(), self)
        return result

    def top(self, i_max: int) -> list[int]:
        """Return the indices of the i_max largest |α|, largest first, ties in table order."""
        order = torch.sort(self.alpha.detach().abs(), descending=True, stable=True).indices
        return [int(i) for i in order[:i_max]]

    def extra_repr(self) -> str:
        """Show the size and λ."""
        return f"shortcuts={len(self.shortcuts)}, l1={self.l1}"

    def _watch_alpha(self) -> None:
        self.alpha.register_hook(self._add_l1)

    def _add_l1(self, gradient: Tensor) -> Tensor:
        l1 = self.current_l1()
        came_with_loss, self.l1_came_with_loss = self.l1_came_with_loss, False
        self.backward_passes += 1
        return gradient if came_with_loss else gradient + l1 * self.alpha.detach().sign()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Copies and unpickled tables get a new α tensor, which does not bring its hook along.
        super().__setstate__(state)
        self._watch_alpha()


class WeightedSum(nn.Module):
    """op_merge = Σ w_c u_c, the ablation's alternative to concatenation and projection.

    Parameters
    ----------
    weights
        Where the w_c start, usually the α_c learned.
    """

    no_weight_decay = ("weight",)

    def __init__(self, weights: Sequence[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([float(w) for w in weights]))

    def forward(self, shortcuts: Sequence[Tensor]) -> Tensor:
        """Return the weighted sum."""
        weights = self.weight.unbind()
        total = weights[0] * shortcuts[0]
        for weight, shortcut in zip(weights[1:], shortcuts[1:], strict=True):
            total = total + weight * shortcut
        return total

    def extra_repr(self) -> str:
        """Show the number of shortcuts."""
        return f"shortcuts={self.weight.numel()}"


class WeakLearner(nn.Module):
    """A finished weak learner h = op_merge(op_1(z_1), ..., op_{I_max}(z_{I_max})) with its step η.

    Parameters
    ----------
    shortcuts
        The ``(source, op)`` pairs, in order of |α|.
    ops
        The module of each shortcut.
    merge
        op_merge: a module from the list of shortcut outputs to a tensor of x_k's shape.
    eta
        Where η starts: 0 when a trained parent grows, so that nothing changes at that moment.
    """

    no_weight_decay = ("eta",)

    def __init__(
        self,
        shortcuts: Sequence[Shortcut],
        ops: Sequence[nn.Module],
        merge: nn.Module,
        eta: float = 0.0,
    ) -> None:
        super().__init__()
        self.shortcuts = tuple(shortcuts)
        self.ops = nn.ModuleList(ops)
        self.merge = merge
        self.eta = nn.Parameter(torch.tensor(float(eta)))

    def forward(
        self, inputs: Mapping[str, Tensor], drop: Callable[[Shortcut, Tensor], Tensor]
    ) -> Tensor:
        """Return h; ``drop`` is the site's drop-path."""
        return self.merge(
            [
                drop(shortcut, op(inputs[shortcut[0]]))
                for shortcut, op in zip(self.shortcuts, self.ops, strict=True)
            ]
        )

    def extra_repr(self) -> str:
        """Show the shortcuts."""
        return ", ".join(f"{op}({source})" for source, op in self.shortcuts)


class JointWeakLearner(nn.Module):
    """The union x_c of all candidate shortcuts of one site, while they learn.

    Parameters
    ----------
    table
        The α table of the site's key.
    ops
        The module of each shortcut in the table.
    adapters
        What brings a raw input to the shape that the ops expect, for inputs that the network
        itself did not need yet.
    weak_learning
        ``"isolated"``: sg on the inputs, sf on x_c (the paper's algorithm). ``"joint"``: neither;
        x_c is scaled by a scalar that starts at 0 and learns along (appendix B.4).
    """

    no_weight_decay = ("scale",)

    def __init__(
        self,
        table: AlphaTable,
        ops: Sequence[nn.Module],
        adapters: Mapping[str, nn.Module],
        weak_learning: str = "isolated",
    ) -> None:
        super().__init__()
        self.table = table
        self.ops = nn.ModuleList(ops)
        self.adapters = NamedModules(dict(adapters))
        self.weak_learning = weak_learning
        self.scale = nn.Parameter(torch.zeros(())) if weak_learning == "joint" else None

    def forward(self, x_k: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return ``x_k + sf(x_c)``, or ``x_k + scale·x_c`` in joint weak learning."""
        if self.scale is not None:
            return x_k + self.scale * self.x_c(inputs)
        if not self.training and not torch.is_grad_enabled():
            return x_k  # sf hides the value of x_c, and nobody asks for its gradient
        z = {source: stop_gradient(value) for source, value in inputs.items()}
        if not fast_kernels_enabled():
            return x_k + stop_forward(self.x_c(z))
        return add_hidden_sum(x_k, self.table.alpha, self.candidates(z))  # the same numbers, faster

    def x_c(self, z: Mapping[str, Tensor]) -> Tensor:
        """Return Σ α_ij·op_j(z_i) (Eq. 5)."""
        pairs = zip(self.table.alpha.unbind(), self.candidates(z), strict=True)
        return functools.reduce(operator.add, (alpha * op(z_i) for alpha, (op, z_i) in pairs))

    def candidates(self, z: Mapping[str, Tensor]) -> list[tuple[nn.Module, Tensor]]:
        """Return op_j and the (adapted) z_i of every candidate, in the order of the table."""
        adapted = self._adapted(z)
        return [
            (op, adapted[source])
            for (source, _), op in zip(self.table.shortcuts, self.ops, strict=True)
        ]

    def weighted_sum(self, inputs: Mapping[str, Tensor], indices: Sequence[int]) -> Tensor:
        """Return Σ α_ij·op_j(z_i) over some of the candidates, those of the table's indices."""
        adapted, shortcuts = self._adapted(inputs), self.table.shortcuts
        chosen = [self.table.alpha[i] * self.ops[i](adapted[shortcuts[i][0]]) for i in indices]
        return torch.stack(chosen).sum(0)

    def _adapted(self, z: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            source: self.adapters[source](value) if source in self.adapters else value
            for source, value in z.items()
        }

    def extra_repr(self) -> str:
        """Show the variant."""
        return f"weak_learning={self.weak_learning!r}"


class Site(nn.Module, ABC):
    """A layer x_k that can grow: the one protocol between the algorithm and a network.

    A subclass computes x_k from its inputs and ends its forward pass with
    ``return self.boost(x_k, self.adapt(inputs))``. It says which α table it shares (``key``), which
    inputs it has (``sources``) and which operations apply to them, and makes the modules for them.

    Parameters
    ----------
    key
        The α table that this site shares with all sites of the same key.
    sources
        In(x_k) before any growth: the names of the inputs.
    op_names
        Op, the eligible unary operations; a layer without any cannot grow.

    Attributes
    ----------
    pool
        α tables of one pool compete: only the I_max of them with the largest |α| are finalised.
    """

    pool: str | None = None

    def __init__(self, key: str, sources: Sequence[str], op_names: Sequence[str]) -> None:
        super().__init__()
        self.key = key
        self.sources = tuple(sources)
        self.op_names = tuple(op_names)
        self.adapters = NamedModules()
        self.learners = nn.ModuleList()
        self.weak_learner: JointWeakLearner | None = None

    @abstractmethod
    def make_op(self, source: str, op: str) -> nn.Module:
        """Make op from the (adapted) source to x_k's shape, with zero mean and unit variance."""

    def make_adapter(self, source: str) -> nn.Module | None:
        """Make what brings a raw source to the shape that `make_op` expects; None if it has it."""
        return None

    def make_merge(self, merge: str, weights: Sequence[float] | None, n: int) -> nn.Module:
        """Make op_merge of n shortcuts; it starts as their sum weighted by ``weights`` if given."""
        return WeightedSum(weights if weights is not None else [1.0 / n] * n)

    def make_weak_learner(
        self,
        table: AlphaTable,
        ops: Sequence[nn.Module],
        adapters: Mapping[str, nn.Module],
        weak_learning: str,
    ) -> JointWeakLearner:
        """Make the union of the candidates; overridden where they can be computed together."""
        return JointWeakLearner(table, ops, adapters, weak_learning)

    def finish_op(self, op: nn.Module) -> nn.Module:
        """Return what stays of a candidate's op once it is selected; by default all of it."""
        return op

    def drop(self, shortcut: Shortcut, value: Tensor) -> Tensor:
        """Apply drop-path to the output of a finished shortcut; none by default."""
        return value

    def eligible_shortcuts(self) -> list[Shortcut]:
        """Return all (z_i, op_j), earlier weak learners' outputs h among the z_i."""
        earlier = [learner_name(i) for i in range(len(self.learners))]
        return [(source, op) for source in (*self.sources, *earlier) for op in self.op_names]

    def room(self) -> int | None:
        """Return how many shortcuts the next weak learner may have, if not I_max alone decides."""
        return None

    def adapt(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Bring the raw inputs to the shape that ops expect, where the network needs that."""
        return {
            source: self.adapters[source](value) if source in self.adapters else value
            for source, value in inputs.items()
        }

    def boost(self, x_k: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Return x_k + Σ η h, and + sf(x_c) while candidates are attached."""
        for i, learner in enumerate(self.learners):
            h = learner(inputs, self.drop)
            inputs[learner_name(i)] = h
            x_k = x_k + learner.eta * h
        return x_k if self.weak_learner is None else self.weak_learner(x_k, inputs)

    def need_adapter(self, source: str) -> None:
        """Make sure that the network has the adapter for a source that something consumes."""
        if source in self.sources and source not in self.adapters:
            adapter = self.make_adapter(source)
            if adapter is not None:
                self.adapters[source] = adapter

    def add_learner(self, shortcuts: Sequence[Shortcut], merge: str) -> None:
        """Add a finished weak learner with fresh weights, as a genotype describes it.

        η starts at 1: a network built from scratch has no parent whose function it must preserve.
        """
        for source, _ in shortcuts:
            self.need_adapter(source)
        ops = [self.finish_op(self.make_op(source, op)) for source, op in shortcuts]
        merged = self.make_merge(merge, None, len(ops))
        self.learners.append(WeakLearner(shortcuts, ops, merged, eta=1.0))
