"""Recurrent cells as lists of nodes, in JSON and in the form published by DARTS."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from nni_petridish.core.diagram import CellDiagram, DiagramPart
from nni_petridish.core.genotype import Genotype, Learner, as_list, one_of, show
from nni_petridish.errors import GenotypeError

#: The paper's five primitives; ``none``, no connection, is never added to a cell.
RECURRENT_PRIMITIVES = ("sigmoid", "relu", "tanh", "identity", "none")
#: The activations of nodes, in the order of the α table.
ACTIVATIONS = RECURRENT_PRIMITIVES[:-1]
#: The only α table: all steps in time share one cell, so cell-search is macro-search here.
CELL_KEY = "cell"

Node = tuple[str, int]
"""``(activation, predecessor)``: predecessor 0 is s0, 1 the first node."""


def node_name(index: int) -> str:
    """Return the name of a node as an input of others: ``s0``, ``s1``, ..."""
    return f"s{index}"


@dataclass(frozen=True)
class RecurrentGenotype(Genotype):
    """A recurrent cell of DARTS's space.

    ``[c0, h0] = [x, h] W0`` and ``s0 = h + σ(c0)·(tanh(h0) − h)`` are implied; node i with
    activation f and predecessor j is ``[c, h] = s_j W_i``, ``s_i = s_j + σ(c)·(f(h) − s_j)``, and
    the cell's output is the average of its nodes.

    Parameters
    ----------
    nodes
        ``(activation, predecessor)`` of each node, in the order of growth.

    Examples
    --------
    >>> genotype = RecurrentGenotype.seed().grown({"cell": (("s1", "tanh"),)})
    >>> genotype.to_json()
    '{"version": 1, "space": "recurrent", "nodes": [["relu", 0], ["tanh", 1]]}'
    >>> genotype.to_darts()
    "Genotype(recurrent=[('relu', 0), ('tanh', 1)], concat=range(1, 3))"
    >>> RecurrentGenotype.from_darts(genotype.to_darts()) == genotype
    True
    """

    nodes: Sequence[Node]

    space: ClassVar[str] = "recurrent"
    table: ClassVar[str] = "nodes"

    def __post_init__(self) -> None:
        listed = as_list(self.nodes)
        if not listed:
            raise GenotypeError(
                "nodes: must be a list of at least one [activation, predecessor] but got"
                f" {show(self.nodes)}."
            )
        nodes = tuple(_check_node(i, node) for i, node in enumerate(listed))
        object.__setattr__(self, "nodes", nodes)

    @classmethod
    def seed(cls, activation: str = "relu") -> RecurrentGenotype:
        """Return the cell with one node on s0, where growth starts."""
        return cls(((activation, 0),))

    def learners_by_key(self) -> Mapping[str, Sequence[Learner]]:
        """Return the nodes after the first, each as a weak learner."""
        added = self.nodes[1:]
        return {CELL_KEY: [((node_name(source), activation),) for activation, source in added]}

    def _with_learners(
        self, learners: Mapping[str, Sequence[Learner]], merge: str | None
    ) -> RecurrentGenotype:
        """Return the cell with these weak learners as its nodes after the first."""
        nodes = list(self.nodes[:1])
        for learner in learners[CELL_KEY]:
            if len(learner) != 1:
                raise GenotypeError(
                    "a recurrent cell grows by one node at a time: i_max must be 1 but got"
                    f" {len(learner)}."
                )
            ((source, activation),) = learner
            known = [node_name(i) for i in range(len(nodes) + 1)]
            if source not in known:
                raise GenotypeError(f"nodes: source must be {one_of(known)} but got {source!r}.")
            nodes.append((activation, known.index(source)))
        return RecurrentGenotype(nodes)

    def cell_diagrams(self) -> dict[str, CellDiagram]:
        """Return the diagram of the cell: s0, the nodes, and their average."""
        first = DiagramPart([("x(t), h(t−1)", "tanh")], node_name(0), feeds_output=False)
        nodes = [
            DiagramPart([(node_name(source), activation)], node_name(i), i - 2 if i > 1 else None)
            for i, (activation, source) in enumerate(self.nodes, start=1)
        ]
        return {CELL_KEY: CellDiagram(["x(t), h(t−1)"], [first, *nodes], "average = h(t)")}

    @classmethod
    def from_darts(cls, text: str) -> RecurrentGenotype:
        """Read DARTS's form, ``Genotype(recurrent=[('relu', 0), ...], concat=range(1, 9))``.

        An assignment ``NAME = Genotype(...)`` is accepted too. Nothing is executed. ``concat`` must
        contain all nodes, as in every cell published by DARTS.
        """
        fields = _darts_fields(text)
        for name in ("recurrent", "concat"):
            if name not in fields:
                raise GenotypeError(f"{name}: is missing in {show(text)}.")
        genotype = cls(fields["recurrent"])
        everything = list(range(1, len(genotype.nodes) + 1))
        concat = as_list(fields["concat"])
        if concat is None or sorted(concat) != everything:
            raise GenotypeError(
                f"concat: must be all nodes, 1 to {everything[-1]}, but got"
                f" {show(fields['concat'])}."
            )
        return genotype

    def to_darts(self) -> str:
        """Return the genotype in the form of DARTS's genotypes.py."""
        return f"Genotype(recurrent={list(self.nodes)!r}, concat=range(1, {len(self.nodes) + 1}))"


def _check_node(index: int, node: object) -> Node:
    place = f"nodes[{index}]"
    pair = as_list(node)
    if pair is None or len(pair) != 2:
        raise GenotypeError(f"{place}: must be [activation, predecessor] but got {show(node)}.")
    activation, predecessor = pair
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        why = " (no connection is no node)" if activation == "none" else ""
        raise GenotypeError(
            f"{place}: activation must be {one_of(ACTIVATIONS)} but got {show(activation)}{why}."
        )
    whole = isinstance(predecessor, int) and not isinstance(predecessor, bool)
    if not whole or not 0 <= predecessor <= index:
        raise GenotypeError(
            f"{place}: predecessor must be a whole number from 0 to {index} but got"
            f" {show(predecessor)}."
        )
    return activation, predecessor


def _darts_fields(text: str) -> dict[str, Any]:
    problem = GenotypeError(
        "DARTS's form must be Genotype(recurrent=[(activation, predecessor), ...],"
        f" concat=range(1, n)) but got {show(text)}."
    )
    try:
        (statement,) = ast.parse(text.strip()).body
    except (SyntaxError, ValueError, AttributeError, MemoryError, RecursionError):
        raise problem from None
    call = getattr(statement, "value", None)
    if not isinstance(call, ast.Call) or getattr(call.func, "id", None) != "Genotype" or call.args:
        raise problem
    try:
        return {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
    except (ValueError, TypeError):
        raise problem from None


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal, or ``range(...)`` of literals as a list."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "range":
        bounds = [ast.literal_eval(argument) for argument in node.args]
        if any(abs(bound) > 1000 for bound in bounds):
            raise ValueError("range out of bounds")
        return list(range(*bounds))
    return ast.literal_eval(node)
