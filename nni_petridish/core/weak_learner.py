"""The weak learner of a layer x_k: Algorithm 1 while it learns, h once it is finished.

While it learns (Algorithm 1) it is the weighted sum of all candidate shortcuts,

    x_c = Σ_i Σ_j α_ij · op_j(sg(z_i))          (Eq. 5)
    x_k ← x_k + sf(x_c)

Its parameters θ receive the gradient ∇_θ ⟨∇_{x_k} L, x_c⟩ (Eq. 7), and nothing else in the network
changes: `Candidates`. Once finished (Algorithm 2) it is h = op_merge of the selected shortcuts,
added as x_k ← x_k + η h: `WeakLearner`.

Both work in any network. A `nni_petridish.core.site.Site` provides the shortcuts.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from nni_petridish.core.alpha_table import AlphaTable
from nni_petridish.core.fade import faded_input, faded_step
from nni_petridish.core.genotype import Shortcut
from nni_petridish.core.named_modules import NamedModules
from nni_petridish.kernels.deferred import add_deferred_sum
from nni_petridish.kernels.merging import (
    ConcatConvNorm,
    can_evaluate,
    can_merge,
    dropped,
    evaluate_into,
    merge_into,
    prepare_shortcut,
    shortcut_term,
)
from nni_petridish.kernels.moments import has_hooks
from nni_petridish.kernels.prepared import SharedInput
from nni_petridish.kernels.switch import fast_kernels_enabled


def stop_gradient(x: Tensor) -> Tensor:
    """sg(x): the identity in the forward pass, no gradient in the backward pass."""
    return x.detach()


def stop_forward(x: Tensor) -> Tensor:
    """sf(x) = x − sg(x): zero in the forward pass, the identity in the backward pass."""
    return x - stop_gradient(x)


class Candidates(nn.Module):
    """All candidate shortcuts of one site, while they learn (Algorithm 1).

    Parameters
    ----------
    table
        The α table of the site's key.
    ops
        The module of each shortcut in the table.
    adapters
        Modules that bring raw inputs to the shape that the ops expect, by source. Only those that
        the network does not have itself.
    weak_learning
        ``"isolated"``: sg on the inputs, sf on x_c (the paper's algorithm). ``"joint"``: neither;
        x_c is scaled by a parameter that starts at 0 (appendix B.4).
    """

    no_weight_decay = ("scale",)
    steps: Tensor | None
    """Training steps so far, if the candidates take part in some of them only."""

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
        self.every = 1
        self.register_buffer("steps", None)

    def forward(self, x_k: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return ``x_k + sf(x_c)``, or ``x_k + scale·x_c`` in joint weak learning."""
        if self.scale is not None:
            return x_k + self.scale * self.x_c(inputs)
        if not self.training and not torch.is_grad_enabled():
            return x_k  # sf(x_c) is zero, and there is no backward pass
        if self.training and self._rests():
            return x_k  # without the gradient of sf(x_c) nothing of the candidates is trained
        z = {source: stop_gradient(value) for source, value in inputs.items()}
        present = self.present()
        if fast_kernels_enabled():  # the same numbers as below, faster
            return add_deferred_sum(x_k, self.weights(present), self.ops_with_inputs(z, present))
        return x_k + stop_forward(self.x_c(z, present))

    def _rests(self) -> bool:
        """Count a training step, and return whether the candidates sit it out."""
        if self.steps is None:
            return False
        self.steps += 1
        return int(self.steps - 1) % self.every != 0

    def present(self) -> list[int] | None:
        """Return the indices of the candidates of this step; None for all, as in evaluation."""
        return self.table.present() if self.training else None

    def weights(self, present: Sequence[int] | None) -> Tensor:
        """Return α of the candidates with these indices, None for all."""
        return self.table.alpha if present is None else self.table.alpha[present]

    def x_c(self, z: Mapping[str, Tensor], present: Sequence[int] | None = None) -> Tensor:
        """Return Σ α_ij·op_j(z_i) (Eq. 5), over the candidates with these indices if given."""
        weights = self.weights(present).unbind()
        pairs = zip(weights, self.ops_with_inputs(z, present), strict=True)
        return functools.reduce(operator.add, (alpha * op(z_i) for alpha, (op, z_i) in pairs))

    def ops_with_inputs(
        self, z: Mapping[str, Tensor], present: Sequence[int] | None = None
    ) -> list[tuple[nn.Module, Tensor]]:
        """Return op_j and the adapted z_i of every candidate, in the order of the α table.

        ``present`` are the indices of those that are wanted; None for all.
        """
        sources = [source for source, _ in self.table.shortcuts]
        wanted = list(zip(sources, self.ops, strict=True))
        if present is not None:
            wanted = [wanted[i] for i in present]
            read = {source for source, _ in wanted}
            z = {source: value for source, value in z.items() if source in read}
        adapted = adapt(self.adapters, z)
        return [(op, adapted[source]) for source, op in wanted]

    def weighted_sum(self, inputs: Mapping[str, Tensor], indices: Sequence[int]) -> Tensor:
        """Return Σ α_ij·op_j(z_i) over the candidates with these indices in the α table."""
        adapted, shortcuts = adapt(self.adapters, inputs), self.table.shortcuts
        chosen = [self.table.alpha[i] * self.ops[i](adapted[shortcuts[i][0]]) for i in indices]
        return torch.stack(chosen).sum(0)

    def extra_repr(self) -> str:
        """Show the variant."""
        return f"weak_learning={self.weak_learning!r}"


def train_every(net: nn.Module, every: int) -> None:
    """Let the candidates of a network take part in every so many training steps only.

    In the steps between, the network is trained as if there were none. A step of weak learning
    costs several steps of the network, and the candidates of a large share of the batches select
    much the same.
    """
    for module in net.modules():
        if isinstance(module, Candidates) and every > 1:
            module.every = every
            # A buffer, so that a training that is continued goes on in the same rhythm.
            module.steps = torch.zeros((), dtype=torch.long)


def halve_candidates(net: nn.Module, period: int, least: int) -> None:
    """Let the worse half of the candidates of each α table leave every so many backward passes.

    At least so many stay. Those that leave cost nothing in training from then on, and are selected
    only if no other selection is left.
    """
    for module in net.modules():
        if isinstance(module, AlphaTable):
            module.halve(period, least)


def adapt(adapters: NamedModules, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs, those that have an adapter passed through it."""
    return {
        source: adapters[source](value) if source in adapters else value
        for source, value in inputs.items()
    }


class WeakLearner(nn.Module):
    """A finished weak learner h = op_merge(op_1(z_1), ..., op_{I_max}(z_{I_max})) with its step η.

    Parameters
    ----------
    shortcuts
        The ``(source, op)`` pairs, in order of |α|.
    ops
        The module of each shortcut.
    merge
        op_merge: a module that maps the list of shortcut outputs to a tensor of x_k's shape.
    eta
        The initial η. 0 preserves the predictions of a trained parent.

    Attributes
    ----------
    fade
        The share of the step that is held back in the forward pass; see `nni_petridish.core.fade`.
    """

    no_weight_decay = ("eta",)
    fade: float = 0.0

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

    def step(self, h: Tensor) -> Tensor:
        """Return η·h, the step that is added to x_k."""
        c = self.eta * h
        return faded_step(c, self.fade) if self.fade else c

    def forward(
        self, inputs: Mapping[str, Tensor], drop: Callable[[Shortcut, Tensor], Tensor]
    ) -> Tensor:
        """Return h, with ``drop``, the drop-path of the site, applied to every shortcut."""
        if self.fade:
            read = {source for source, _ in self.shortcuts}
            inputs = {source: faded_input(inputs[source], self.fade) for source in read}
        return self.merge(
            [
                drop(shortcut, op(inputs[shortcut[0]]))
                for shortcut, op in zip(self.shortcuts, self.ops, strict=True)
            ]
        )

    def boost(
        self,
        x_k: Tensor,
        inputs: Mapping[str, Tensor],
        drop_factors: Callable[[Shortcut, Tensor], Tensor | None],
        wants_h: bool,
    ) -> tuple[Tensor, Tensor | None] | None:
        """Return ``x_k + η h``, and h if wanted, in one pass; None if the kernels do not apply.

        ``drop_factors`` is the drop-path of the site.
        """
        if self.fade or has_hooks(self):
            return None
        if can_evaluate(x_k, self.merge, len(self.ops)):
            return self._evaluate(x_k, inputs, drop_factors, wants_h)
        if not can_merge(x_k, self.merge, len(self.ops)):
            return None
        assert isinstance(self.merge, ConcatConvNorm)
        prepared = []
        for shortcut, op in zip(self.shortcuts, self.ops, strict=True):
            one = prepare_shortcut(op, SharedInput(inputs[shortcut[0]]))
            prepared.append(one._replace(factors=drop_factors(shortcut, one.before.value)))
        return merge_into(x_k, self.eta, self.merge, prepared, wants_h)

    def _evaluate(
        self,
        x_k: Tensor,
        inputs: Mapping[str, Tensor],
        drop_factors: Callable[[Shortcut, Tensor], Tensor | None],
        wants_h: bool,
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(self.merge, ConcatConvNorm)
        terms = [
            dropped(shortcut_term(op, inputs[shortcut[0]]), drop_factors(shortcut, x_k))
            for shortcut, op in zip(self.shortcuts, self.ops, strict=True)
        ]
        return evaluate_into(x_k, self.eta, self.merge, terms, wants_h)

    def extra_repr(self) -> str:
        """Show the shortcuts."""
        return ", ".join(f"{op}({source})" for source, op in self.shortcuts)


class WeightedSum(nn.Module):
    """op_merge = Σ w_c u_c, the alternative to concatenation and projection in the ablations.

    Parameters
    ----------
    weights
        The initial w_c, usually the learned α_c.
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
