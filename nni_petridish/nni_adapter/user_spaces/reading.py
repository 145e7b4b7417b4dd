"""Decisions of a user's space that can grow, and the sample that growth starts from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nni.mutable import Categorical, SampleValidationError
from torch import nn

from nni_petridish.errors import ConfigError
from nni_petridish.nni_adapter.compat.nas import (
    Cell,
    InputChoice,
    LayerChoice,
    ModelSpace,
    MutableModule,
    Repeat,
)
from nni_petridish.nni_adapter.user_spaces.decisions import (
    CellDecision,
    Decision,
    DepthDecision,
    InputDecision,
    LayerDecision,
    Sample,
)

LOOKED_FOR = (
    "a Cell, a LayerChoice, an InputChoice of one or of any number of inputs, or a Repeat of"
    " variable depth (nni.nas.nn.pytorch)"
)
_SUMS = ("sum", "mean")


def read_decisions(space: ModelSpace, fixed: Mapping[str, Any]) -> dict[str, Decision]:
    """Return the decisions that can grow, by label: all except those in ``fixed``."""
    decisions: dict[str, Decision] = {}
    for module in _choices(space):
        decision = _decision(module, fixed)
        if decision is not None:
            decisions.setdefault(decision.label, decision)
    if not any(decision.eligible(()) for decision in decisions.values()):
        labels = ", ".join(space.simplify()) or "none"
        raise ConfigError(
            f"Petridish found nothing to grow in {type(space).__name__}: it looks for {LOOKED_FOR}"
            f" that is not fixed; the labels of the space are: {labels}."
        )
    return decisions


def read_base(
    space: ModelSpace, decisions: Mapping[str, Decision], fixed: Mapping[str, Any]
) -> Sample:
    """Return the sample that growth starts from: what is fixed, and the simplest for the rest.

    Choices that cannot grow, such as widths, have NNI's default, the first value.
    """
    mutables = space.simplify()
    for label in fixed:
        if label not in mutables:
            raise ConfigError(
                f"fixed must have labels of the space, {', '.join(mutables)}, but got {label!r}."
            )
    base: Sample = dict(fixed)
    for decision in decisions.values():
        for label, value in _stand_ins(decision).items():
            base.setdefault(label, value)
    try:
        for mutable in mutables.values():
            mutable.default(base)
        space.validate(base)
    except SampleValidationError as problem:
        reason = " ".join(str(problem).split())
        raise ConfigError(f"fixed must be of the space {type(space).__name__}: {reason}.") from None
    return {label: base[label] for label in mutables}


def same_creation(kind: type, like: type) -> bool:
    """Return whether NNI creates frozen modules of two classes by the same method."""
    made, known = kind.create_fixed_module, like.create_fixed_module  # type: ignore[attr-defined]
    return getattr(made, "__func__", made) is getattr(known, "__func__", known)


def depth_choice(depth: Any) -> Any:
    """Return the choice of a depth, None if the depth is computed from other choices."""
    return depth if isinstance(depth, Categorical) else None


def can_add_inputs(n_chosen: int | None, reduction: str) -> bool:
    """Return whether inputs can be added one by one."""
    return n_chosen == 1 or (n_chosen is None and reduction in _SUMS)


def _choices(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the cells and choices of a module, without those inside cells."""
    for child in module.children():
        if isinstance(child, Cell | LayerChoice | InputChoice | Repeat):
            yield child
        if not isinstance(child, Cell) and not _is_made_by_itself(child):
            yield from _choices(child)


def _is_made_by_itself(module: nn.Module) -> bool:
    """Return whether NNI makes the frozen module, such as a NasBench101Cell, from a sample.

    The choices within are never made one by one, so they cannot grow.
    """
    if isinstance(module, LayerChoice | InputChoice | Repeat):
        return False
    return isinstance(module, MutableModule) and type(module).should_invoke_fixed_module()


def _decision(module: nn.Module, fixed: Mapping[str, Any]) -> Decision | None:
    if isinstance(module, Cell):
        # Operations have numbers as names if they are given in NNI's old, deprecated way.
        is_old = any(isinstance(name, int) for name in module.ops[0][0].names)
        return None if is_old else _cell_decision(module, fixed)
    if module.label in fixed:
        return None
    if isinstance(module, LayerChoice) and same_creation(type(module), LayerChoice):
        candidates = {str(name): module[name] for name in module.names}
        simplest = _simplest(candidates)
        names = {str(name): name for name in module.names}
        return LayerDecision(module.label, tuple(module.names), names[simplest])
    if (
        isinstance(module, InputChoice)
        and same_creation(type(module), InputChoice)
        and can_add_inputs(module.n_chosen, module.reduction)
    ):
        return InputDecision(module.label, module.n_candidates, module.n_chosen is None, 0)
    if isinstance(module, Repeat) and same_creation(type(module), Repeat):
        depth = depth_choice(module.depth_choice)
        if depth is not None:
            first, *others = sorted(depth.values)
            return DepthDecision(depth.label, tuple(others), first)
    return None


def _cell_decision(cell: Any, fixed: Mapping[str, Any]) -> CellDecision:
    labels = tuple(
        tuple((op.label, chosen.label) for op, chosen in zip(ops, inputs, strict=True))
        for ops, inputs in zip(cell.ops, cell.inputs, strict=True)
    )
    for pair in (pair for node in labels for pair in node):
        if len([label for label in pair if label in fixed]) == 1:
            raise ConfigError(f"fixed must have both or none of {pair[0]!r} and {pair[1]!r}.")
    slots = tuple(
        tuple(k for k, (label, _) in enumerate(node) if label not in fixed) for node in labels
    )
    candidates = {str(name): cell.ops[0][0][name] for name in cell.ops[0][0].names}
    # The nodes take turns, so that every input is used and its preprocessing is trained. The last
    # input, the output of the previous cell, comes first.
    inputs, simplest = cell.num_predecessors, _simplest(candidates)
    stand_ins = tuple((str(inputs - 1 - i % inputs), simplest) for i in range(len(labels)))
    return CellDecision(cell.label, inputs, tuple(candidates), slots, labels, stand_ins)


def _simplest(candidates: Mapping[str, nn.Module]) -> str:
    """Return the identity if there is one, else the candidate with the fewest parameters."""

    def cost(name: str) -> tuple[bool, int]:
        op = candidates[name]
        return not isinstance(op, nn.Identity), sum(p.numel() for p in op.parameters())

    return min(candidates, key=cost)


def _stand_ins(decision: Decision) -> Sample:
    if isinstance(decision, CellDecision):
        result: Sample = {}
        for (source, op), labels, slots in zip(
            decision.stand_ins, decision.labels, decision.slots, strict=True
        ):
            for op_label, input_label in (labels[k] for k in slots):
                result |= {op_label: op, input_label: [int(source)]}
        return result
    assert isinstance(decision, LayerDecision | InputDecision | DepthDecision)
    return {
        decision.label: [decision.stand_in]
        if isinstance(decision, InputDecision)
        else decision.stand_in
    }
