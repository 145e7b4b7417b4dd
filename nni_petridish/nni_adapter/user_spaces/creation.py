"""Networks of a user's space as NNI builds them, but with sites for the decisions that can grow.

Under `model_context`, NNI replaces its choices by frozen modules through the class method
``create_fixed_module``. While a network is built, that method is patched for cells and choices.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from nni.mutable import Mutable
from torch import nn

from nni_petridish.errors import GrowthError
from nni_petridish.nni_adapter.compat.nas import (
    Cell,
    ChosenInputs,
    InputChoice,
    LayerChoice,
    Repeat,
    create_cell_op_candidates,
    model_context,
)
from nni_petridish.nni_adapter.compat.patches import creating
from nni_petridish.nni_adapter.user_spaces.decisions import (
    CellDecision,
    Decision,
    DepthDecision,
    InputDecision,
    LayerDecision,
    Sample,
)
from nni_petridish.nni_adapter.user_spaces.reading import can_add_inputs, depth_choice
from nni_petridish.nni_adapter.user_spaces.sites import CellSite, DepthSite, InputSite, LayerSite

Decisions = Mapping[str, Decision]


def build_growable(make: Callable[[], nn.Module], decisions: Decisions, base: Sample) -> nn.Module:
    """Build a network whose cells and choices are sites, if they have a decision.

    Parameters
    ----------
    make
        Factory of the user's model space.
    decisions
        The decisions that can grow, by label.
    base
        The sample of the network.
    """
    ours: dict[Any, Callable[..., nn.Module]] = {
        Cell: _cell,
        LayerChoice: _layer,
        InputChoice: _input,
        Repeat: _repeat,
    }
    with ExitStack() as stack:
        for kind, create in ours.items():
            stack.enter_context(creating(kind, functools.partial(create, decisions)))
        stack.enter_context(model_context(base))
        return make()


def _cell(decisions: Decisions, cls: Any, sample: Sample, *args: Any, **kwargs: Any) -> nn.Module:
    cell = nn.Module.__new__(cls)
    cell.__init__(*args, **kwargs)
    decision = decisions.get(cell.label)
    if not isinstance(decision, CellDecision):
        return cell
    bound = inspect.signature(cls.__init__).bind(cell, *args, **kwargs)
    candidates = bound.arguments["op_candidates"]

    return CellSite(decision, cell, _CellOps(candidates, sample))


class _CellOps:
    """Factory of NNI's operations for a cell.

    Candidates are usually lambdas, which cannot be pickled. A network that is sent to another
    process, for example by ``strategy="ddp_spawn"``, trains there without them.
    """

    def __init__(self, candidates: Any, sample: Sample) -> None:
        pairs = enumerate(candidates) if isinstance(candidates, list) else candidates.items()
        self.named = {str(key): op for key, op in pairs}
        self.sample = sample

    def __call__(self, node: int, slot: int, source: int, name: str) -> nn.Module:
        if name not in self.named:
            raise GrowthError("a network of NNI's cells cannot grow once it was pickled.")
        with model_context(self.sample):  # widths may be choices too
            made = create_cell_op_candidates({name: self.named[name]}, node, slot, source)
        op: nn.Module = made[0][name]
        return op

    def __deepcopy__(self, memo: object) -> _CellOps:
        return self  # as functions do

    def __reduce__(self) -> tuple[type[_CellOps], tuple[dict[str, Any], Sample]]:
        return _CellOps, ({}, self.sample)


def _layer(
    decisions: Decisions,
    cls: Any,
    sample: Sample,
    candidates: Any,
    *,
    weights: Any = None,
    label: str | None = None,
) -> nn.Module:
    names, modules = cls._init_names(candidates)
    choice = cls._inner_choice(names, weights, label)
    layers = {str(name): module for name, module in zip(names, modules, strict=True)}
    decision = decisions.get(choice.label)
    if isinstance(decision, LayerDecision):
        return LayerSite(decision, layers)
    return layers[str(choice.freeze(sample))]


def _input(
    decisions: Decisions,
    cls: Any,
    sample: Sample,
    n_candidates: int,
    n_chosen: int | None = 1,
    reduction: str = "sum",
    *,
    weights: Any = None,
    label: str | None = None,
    **kwargs: Any,
) -> nn.Module:
    choice = cls._inner_choice(n_candidates, n_chosen, weights, label)
    decision = decisions.get(choice.label)
    if isinstance(decision, InputDecision) and can_add_inputs(n_chosen, reduction):
        return InputSite(decision, as_list=reduction == "none")
    return ChosenInputs(choice.freeze(sample), reduction=reduction)


def _repeat(
    decisions: Decisions,
    cls: Any,
    sample: Sample,
    blocks: Any,
    depth: Any,
    *,
    label: str | None = None,
) -> nn.Module:
    depth = cls._canonicalize_depth(depth, label)
    choice = depth_choice(depth)
    decision = decisions.get(choice.label) if choice is not None else None
    if isinstance(decision, DepthDecision):
        deepest = max(decision.stand_in, *decision.depths, 0)
        return DepthSite(decision, cls._replicate_and_instantiate(blocks, deepest))
    frozen = depth.freeze(sample) if isinstance(depth, Mutable) else depth
    return nn.Sequential(*cls._replicate_and_instantiate(blocks, frozen))
