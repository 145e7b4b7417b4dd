"""Cells in the form in which the authors of Petridish released theirs: JSON lists of layers.

A ``net_info`` of petridishnn has three lists: ``master``, the skeleton, which belongs to the space
here, and the layers of the cells ``normal`` and ``reduction``. A layer is
``{"id": 3, "inputs": [1, 1], "operations": [30, 9, 22]}``: an operation on each input, then the
merge. Layers 0 and 1 are the outputs of the previous two cells, the last one is the cell's output.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nni_petridish._support.reading import parse_json
from nni_petridish.core.genotype import MAX_BYTES, Learner, as_list, learner_name, one_of, show
from nni_petridish.errors import GenotypeError

_OPS = {
    1: "identity",
    8: "max_pool_3x3",
    9: "avg_pool_3x3",
    23: "sep_conv_3x3",
    24: "sep_conv_5x5",
    30: "dil_conv_3x3",
    31: "dil_conv_5x5",
}
_MERGES = {22: "concat_project", 28: "weighted_sum"}
_SUM, _GATE = 11, 14
_SEED = [(1, 1), (1, 23)]
"""(Input, operation) of the seed's cell, ``sep_conv_3x3(prev) + skip(prev)``."""
_KEYS = {"normal": "normal", "reduce": "reduction"}
"""The names of the cells here and there."""
_SOURCES = ("prev_prev", "prev")


def read_net_info(text: str | bytes) -> tuple[dict[str, tuple[Learner, ...]], str]:
    """Return the weak learners of each cell and the op_merge that all of them have.

    Raises
    ------
    GenotypeError
        If a cell is not one of the vision space, with the place.
    """
    try:
        if len(text) > MAX_BYTES:
            raise GenotypeError(f"net_info: must have at most {MAX_BYTES:,} bytes.")
        data = parse_json(text)
    except (TypeError, ValueError) as error:
        raise GenotypeError(f"net_info: not JSON ({error}).") from None
    if not isinstance(data, Mapping):
        raise GenotypeError(
            "net_info: must be an object with the cells normal and reduction; the single list of a"
            f" macro search is not read; got {show(data)}."
        )
    cells, merges = {}, dict[str, None]()
    for key, theirs in _KEYS.items():
        if theirs not in data:
            raise GenotypeError(f"{theirs}: is missing in the net_info.")
        cells[key] = _read_cell(theirs, data[theirs], merges)
    if len(merges) > 1:
        raise GenotypeError(f"net_info: all layers must merge alike but got {', '.join(merges)}.")
    return cells, next(iter(merges), "concat_project")


def write_net_info(
    cells: Mapping[str, Sequence[Learner]], merge: str, cells_per_stage: int, stages: int
) -> str:
    """Return a net_info of cells of the vision space.

    Parameters
    ----------
    cells
        The weak learners of ``normal`` and ``reduce``.
    merge
        op_merge of all weak learners.
    cells_per_stage, stages
        The skeleton, ``master``.
    """
    kinds = (["normal"] * cells_per_stage + ["reduction"]) * stages
    master = [_layer(0), _layer(1)]
    for i, kind in enumerate(kinds[:-1], start=2):
        master.append(_layer(i, [i - 2, i - 1], [1, 1, kind], down_sampling=int(kind != "normal")))
    master[-1]["aux_weight"] = 1.0
    written = {theirs: _write_cell(key, cells[key], merge) for key, theirs in _KEYS.items()}
    return json.dumps({"master": master, **written})


def _read_cell(place: str, layers: object, merges: dict[str, None]) -> tuple[Learner, ...]:
    """Return the weak learners of a cell; their op_merge is added to ``merges``."""
    listed = as_list(layers)
    if listed is None or len(listed) < 3:
        raise GenotypeError(
            f"{place}: must be a list of two inputs, layers and an output but got {show(layers)}."
        )
    names: dict[int, str] = {}
    learners: list[Learner] = []
    for i, layer in enumerate(listed):
        number, inputs, operations = _read_layer(f"{place}[{i}]", layer, is_input=i < 2)
        if number in names:
            raise GenotypeError(f"{place}[{i}]: id {number} stands twice.")
        pairs = list(zip(inputs, operations, strict=False))
        if i < 2:
            names[number] = _SOURCES[i]
        elif i == len(listed) - 1:
            _check_output(f"{place}[{i}]", pairs, operations[-1], names)
        else:
            if operations[-1] not in _MERGES:
                known = one_of([f"{merge} ({name})" for merge, name in _MERGES.items()])
                raise GenotypeError(
                    f"{place}[{i}]: the merge must be {known} but got {show(operations[-1])}."
                )
            merges[_MERGES[operations[-1]]] = None
            learners.append(_read_learner(f"{place}[{i}]", pairs, names))
            names[number] = learner_name(i - 2)
    return tuple(learners)


def _read_layer(
    place: str, layer: object, is_input: bool
) -> tuple[int, Sequence[Any], Sequence[Any]]:
    """Return the id, the inputs and the operations of a layer."""
    if not isinstance(layer, Mapping):
        raise GenotypeError(f"{place}: must be an object but got {show(layer)}.")
    inputs, operations = as_list(layer.get("inputs")), as_list(layer.get("operations"))
    if not _is_whole(layer.get("id")) or inputs is None or operations is None:
        raise GenotypeError(f"{place}: must have id, inputs and operations but got {show(layer)}.")
    if is_input != (not inputs) or len(operations) != (0 if is_input else len(inputs) + 1):
        wanted = "no input" if is_input else "an operation on each input, and a merge"
        raise GenotypeError(f"{place}: must have {wanted} but got {show(layer)}.")
    if not all(map(_is_whole, [*inputs, *operations])):
        raise GenotypeError(f"{place}: must have whole numbers but got {show(layer)}.")
    for key in ("down_sampling", "stop_gradient", "is_candidate"):
        if layer.get(key, 0) != 0:
            raise GenotypeError(f"{place}: {key} must be 0 in a cell but got {show(layer[key])}.")
    return int(layer["id"]), inputs, operations


def _read_learner(
    place: str, pairs: Iterable[tuple[int, int]], names: Mapping[int, str]
) -> Learner:
    shortcuts = []
    for source, op in pairs:
        if op not in _OPS:
            known = one_of([f"{number} ({name})" for number, name in _OPS.items()])
            raise GenotypeError(f"{place}: an operation must be {known} but got {op}.")
        if source not in names:
            raise GenotypeError(f"{place}: has no layer {source} before it.")
        shortcuts.append((names[source], _OPS[op]))
    return tuple(shortcuts)


def _check_output(
    place: str, pairs: Sequence[tuple[int, int]], merge: int, names: Mapping[int, str]
) -> None:
    """Refuse an output other than ``sep_conv_3x3(prev) + skip(prev)`` and all learners, gated."""
    sources = {name: number for number, name in names.items()}
    learners = [number for name, number in sources.items() if name not in _SOURCES]
    seed = [(sources["prev"], op) for _, op in _SEED]
    if merge != _SUM or sorted(pairs) != sorted([*seed, *((n, _GATE) for n in learners)]):
        raise GenotypeError(
            f"{place}: a cell of the vision space must end in the sum ({_SUM}) of 23 and 1 on"
            f" layer {sources['prev']} and {_GATE} on each other layer but got {show(pairs)},"
            f" {merge}."
        )


def _write_cell(key: str, learners: Sequence[Learner], merge: str) -> list[dict[str, Any]]:
    merges = {name: number for number, name in _MERGES.items()}
    ops = {name: number for number, name in _OPS.items()}
    numbers = {"prev_prev": 0, "prev": 1}
    layers = [_layer(0), _layer(1)]
    for i, learner in enumerate(learners):
        for _, op in learner:
            if op not in ops:
                raise GenotypeError(
                    f"cells.{key}[{i}]: petridishnn has no number for {op!r}, only for"
                    f" {', '.join(ops)}."
                )
        inputs = [numbers[source] for source, _ in learner]
        operations = [*(ops[op] for _, op in learner), merges[merge]]
        numbers[learner_name(i)] = i + 3
        layers.append(_layer(i + 3, inputs, operations))
    added = [layer["id"] for layer in layers[2:]]
    layers.append(_layer(2, [1, 1, *added], [23, 1, *[_GATE] * len(added), _SUM]))
    return layers


def _layer(
    number: int,
    inputs: Sequence[int] = (),
    operations: Sequence[int | str] = (),
    down_sampling: int = 0,
) -> dict[str, Any]:
    return {
        "id": number,
        "inputs": list(inputs),
        "operations": list(operations),
        "down_sampling": down_sampling,
        "stop_gradient": 0,
        "aux_weight": 0,
        "is_candidate": 0,
    }


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
