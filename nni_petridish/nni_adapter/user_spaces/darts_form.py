"""DARTS's cells for images, ``Genotype(normal=..., ...)``, as samples of NNI's spaces and back.

NNI's spaces of two cells, such as ``DARTS``, ``NASNet`` and ``AmoebaNet`` of ``nni.nas.hub``,
express them exactly: a node is the sum of two operations, the output concatenates nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from nni_petridish.core.genotype import as_list, one_of, show
from nni_petridish.errors import ConfigError, GenotypeError
from nni_petridish.nni_adapter.compat.nas import Cell
from nni_petridish.nni_adapter.user_spaces.decisions import Sample
from search_spaces.darts_text import IMAGE_FIELDS, check_concat, concat_text, darts_fields

__all__ = ["read_darts", "write_darts"]

_KINDS = IMAGE_FIELDS[::2]
_INPUTS = 2


def read_darts(text: str, space: nn.Module) -> Sample:
    """Read DARTS's form as a sample of one of NNI's spaces; nothing is executed.

    Parameters
    ----------
    text
        ``Genotype(normal=[(op, state), ...], normal_concat=[...], reduce=..., reduce_concat=...)``
        or an assignment of that.
    space
        A space with one kind of cell labeled ``normal`` and one labeled ``reduce``.

    Returns
    -------
    The operations and inputs of both cells, for ``nni.nas.space.model_context`` or
    ``Petridish(fixed=...)``.

    Raises
    ------
    GenotypeError
        If the text is something else, or the space does not have such a cell.

    Examples
    --------
    ::

        sample = read_darts(DARTS_V2, DartsSpace(width=16, num_cells=8, dataset="cifar"))
        with model_context(sample):
            net = DartsSpace(width=16, num_cells=8, dataset="cifar")
    """
    fields = darts_fields(text, IMAGE_FIELDS)
    sample: Sample = {}
    for kind, cell in _cells(space).items():
        sample |= _read_cell(kind, cell, fields[kind], fields[f"{kind}_concat"])
    return sample


def write_darts(sample: Mapping[str, Any], space: nn.Module) -> str:
    """Return a sample of one of NNI's spaces in DARTS's form.

    Parameters
    ----------
    sample
        A sample, such as ``NasExperiment.export_top_models(formatter="dict")`` has.
    space
        The space that it is of.
    """
    written = []
    for kind, cell in _cells(space).items():
        pairs = []
        for op_label, input_label in _slots(cell):
            for label in (op_label, input_label):
                if label not in sample:
                    raise GenotypeError(f"{label}: is missing in the sample.")
            chosen = as_list(sample[input_label])
            pairs.append((sample[op_label], chosen[0] if chosen else sample[input_label]))
        _check_pairs(kind, cell, pairs)
        written += [f"{kind}={pairs!r}", f"{kind}_concat={concat_text(_concat(cell, pairs))}"]
    return f"Genotype({', '.join(written)})"


def _cells(space: nn.Module) -> dict[str, Any]:
    """Return the first cell of each kind."""
    found: dict[str, Any] = {}
    for module in space.modules():
        if isinstance(module, Cell):
            found.setdefault(str(module.label), module)
    if set(found) != set(_KINDS):
        raise ConfigError(
            f"space must have cells labeled normal and reduce but {type(space).__name__} has"
            f" {', '.join(found) or 'none'}."
        )
    for label, cell in found.items():
        if (cell.num_ops_per_node, cell.num_predecessors) != (2, _INPUTS):
            raise ConfigError(
                f"{label}: DARTS's cells have 2 inputs, and 2 operations in each node, but got"
                f" {cell.num_predecessors} and {cell.num_ops_per_node}."
            )
    return {kind: found[kind] for kind in _KINDS}


def _slots(cell: Any) -> list[tuple[str, str]]:
    """Return the labels of the operations and of their inputs, node by node."""
    return [
        (op.label, chosen.label)
        for ops, inputs in zip(cell.ops, cell.inputs, strict=True)
        for op, chosen in zip(ops, inputs, strict=True)
    ]


def _read_cell(kind: str, cell: Any, given: object, concat: object) -> Sample:
    pairs, slots = as_list(given), _slots(cell)
    if pairs is None or len(pairs) != len(slots):
        raise GenotypeError(
            f"{kind}: the space's cell has {cell.num_nodes} nodes, {len(slots)} pairs (op, state),"
            f" but got {show(given) if pairs is None else len(pairs)}."
        )
    _check_pairs(kind, cell, pairs)
    nodes = range(_INPUTS, _INPUTS + cell.num_nodes)
    wanted = _concat(cell, pairs)
    if check_concat(f"{kind}_concat", concat, nodes, noun="nodes") != wanted:
        rule = "all nodes" if cell.merge_op == "all" else "the nodes that no other one uses"
        raise GenotypeError(
            f"{kind}_concat: the space concatenates {rule}, {[*wanted]}, but got {show(concat)}."
        )
    sample: Sample = {}
    for (op, state), (op_label, input_label) in zip(pairs, slots, strict=True):
        sample |= {op_label: op, input_label: [state]}
    return sample


def _check_pairs(kind: str, cell: Any, pairs: Any) -> None:
    names = [str(name) for name in cell.ops[0][0].names]
    for i, pair in enumerate(pairs):
        place, states = f"{kind}[{i}]", _INPUTS + i // 2
        listed = as_list(pair)
        if listed is None or len(listed) != 2:
            raise GenotypeError(f"{place}: must be (op, state) but got {show(pair)}.")
        op, state = listed
        if not isinstance(op, str) or op not in names:
            raise GenotypeError(f"{place}: op must be {one_of(names)} but got {show(op)}.")
        if not isinstance(state, int) or isinstance(state, bool) or not 0 <= state < states:
            raise GenotypeError(
                f"{place}: state must be a whole number from 0 to {states - 1} but got"
                f" {show(state)}."
            )


def _concat(cell: Any, pairs: Any) -> tuple[int, ...]:
    """Return the nodes that the space concatenates: all, or those that no other one uses."""
    used = set() if cell.merge_op == "all" else {state for _, state in pairs}
    return tuple(i for i in range(_INPUTS, _INPUTS + cell.num_nodes) if i not in used)
