"""The protocol between the algorithm and a network: a layer x_k that can grow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor, nn

from nni_petridish.core.genotype import Shortcut, learner_name
from nni_petridish.core.named_modules import NamedModules
from nni_petridish.core.weak_learner import Candidates, WeakLearner, WeightedSum, adapt
from nni_petridish.kernels.switch import fast_kernels_enabled


class Site(nn.Module, ABC):
    """A layer x_k that can grow.

    A subclass computes x_k from its inputs and ends its forward pass with
    ``return self.boost(x_k, self.adapt(inputs))``. It names its α table (``key``), its inputs
    (``sources``) and the operations on them (``op_names``), and makes the modules of operations.

    Parameters
    ----------
    key
        The key of the α table. Sites with the same key share the table.
    sources
        In(x_k) before any growth: the names of the inputs.
    op_names
        Op: the names of the eligible unary operations. A site without any cannot grow.

    Attributes
    ----------
    pool
        The name of a group of α tables that compete: only the I_max tables with the largest |α|
        are finalized. None if the table of this site does not compete.
    candidates_type
        The class of the attached candidates. A subclass can set one that computes them together.
    fades
        Whether finished weak learners are added by `WeakLearner.step`, so that they can fade in.
    learners
        The finished weak learners, in the order of growth.
    weak_learner
        The candidates while they are attached, else None.
    """

    pool: str | None = None
    candidates_type: ClassVar[type[Candidates]] = Candidates
    fades: ClassVar[bool] = True

    def __init__(self, key: str, sources: Sequence[str], op_names: Sequence[str]) -> None:
        super().__init__()
        self.key = key
        self.sources = tuple(sources)
        self.op_names = tuple(op_names)
        self.adapters = NamedModules()
        self.learners = nn.ModuleList()
        self.weak_learner: Candidates | None = None

    @abstractmethod
    def make_op(self, source: str, op: str) -> nn.Module:
        """Make an op that maps the adapted source to x_k's shape, with zero mean and variance 1."""

    def make_adapter(self, source: str) -> nn.Module | None:
        """Make a module that brings a source to the shape that ops expect; None if not needed."""
        return None

    def make_merge(self, merge: str, weights: Sequence[float] | None, n: int) -> nn.Module:
        """Make op_merge of n shortcuts; if ``weights`` are given, it starts as a weighted sum."""
        return WeightedSum(weights if weights is not None else [1.0 / n] * n)

    def finish_op(self, op: nn.Module) -> nn.Module:
        """Return the part of a candidate's op to keep when it is selected; by default all of it."""
        return op

    def drop(self, shortcut: Shortcut, value: Tensor) -> Tensor:
        """Apply drop-path to the output of a finished shortcut."""
        factors = self.drop_factors(shortcut, value)
        return value if factors is None else value * factors

    def drop_factors(self, shortcut: Shortcut, value: Tensor) -> Tensor | None:
        """Return the factors of drop-path, shape (N, 1, 1, 1); None, the default, without any."""
        return None

    def eligible_shortcuts(self) -> list[Shortcut]:
        """Return all (z_i, op_j); the outputs h of earlier weak learners are among the z_i."""
        earlier = [learner_name(i) for i in range(len(self.learners))]
        return [(source, op) for source in (*self.sources, *earlier) for op in self.op_names]

    def room(self) -> int | None:
        """Return the maximum number of shortcuts of the next weak learner; None for I_max."""
        return None

    def adapt(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Bring the raw inputs to the shape that ops expect, where the network has an adapter."""
        return adapt(self.adapters, inputs)

    def boost(self, x_k: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Return x_k + Σ η h, plus sf(x_c) while candidates are attached."""
        learners = [learner for learner in self.learners if isinstance(learner, WeakLearner)]
        for i, learner in enumerate(learners):
            name = learner_name(i)
            wants_h = self.weak_learner is not None or _is_read(name, learners[i + 1 :])
            boosted = self._boost_in_one_pass(learner, x_k, inputs, wants_h)
            if boosted is None:
                inputs[name] = learner(inputs, self.drop)
                x_k = x_k + learner.step(inputs[name])
            else:
                x_k, h = boosted
                if h is not None:
                    inputs[name] = h
        return x_k if self.weak_learner is None else self.weak_learner(x_k, inputs)

    def _boost_in_one_pass(
        self, learner: WeakLearner, x_k: Tensor, inputs: Mapping[str, Tensor], wants_h: bool
    ) -> tuple[Tensor, Tensor | None] | None:
        """Return x_k + η h, and h if wanted; None if the kernels do not apply."""
        if not fast_kernels_enabled() or type(self).drop is not Site.drop:
            return None
        return learner.boost(x_k, inputs, self.drop_factors, wants_h)

    def need_adapter(self, source: str) -> None:
        """Make the adapter of a source unless it exists or is not needed."""
        if source in self.sources and source not in self.adapters:
            adapter = self.make_adapter(source)
            if adapter is not None:
                self.adapters[source] = adapter

    def add_learner(self, shortcuts: Sequence[Shortcut], merge: str) -> None:
        """Add a finished weak learner with fresh weights, as described by a genotype.

        η starts at 1: a network built from scratch has no parent whose predictions to preserve.
        """
        for source, _ in shortcuts:
            self.need_adapter(source)
        ops = [self.finish_op(self.make_op(source, op)) for source, op in shortcuts]
        merged = self.make_merge(merge, None, len(ops))
        self.learners.append(WeakLearner(shortcuts, ops, merged, eta=1.0))


def sites(net: nn.Module) -> list[Site]:
    """Return the sites x_k of a network that have eligible operations, in module order."""
    return [module for module in net.modules() if isinstance(module, Site) and module.op_names]


def _is_read(name: str, learners: Sequence[WeakLearner]) -> bool:
    """Return whether a shortcut of these weak learners starts at an input of this name."""
    return any(source == name for learner in learners for source, _ in learner.shortcuts)
