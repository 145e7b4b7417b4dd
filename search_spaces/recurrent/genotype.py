"""Recurrent cells as lists of nodes, in JSON and in the form published by DARTS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from nni_petridish.core.diagram import CellDiagram, DiagramPart
from nni_petridish.core.genotype import Genotype, Learner, as_list, one_of, show
from nni_petridish.errors import GenotypeError
from search_spaces.darts_text import TEXT_FIELDS, check_concat, concat_text, darts_fields

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
    the cell's output is the average of its nodes, or of some of them.

    Parameters
    ----------
    nodes
        ``(activation, predecessor)`` of each node, in the order of growth.
    concat
        The numbers of the nodes that are averaged, from 1; None, which is not written to JSON, is
        all of them.

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
    concat: Sequence[int] | None = None

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
        if self.concat is not None:
            everything = range(1, len(nodes) + 1)
            concat = check_concat("concat", self.concat, everything, noun="nodes")
            object.__setattr__(self, "concat", None if len(concat) == len(nodes) else concat)

    @property
    def averaged(self) -> tuple[int, ...]:
        """The numbers of the nodes whose average is the output, from 1."""
        return tuple(self.concat or range(1, len(self.nodes) + 1))

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
        added = range(len(self.nodes) + 1, len(nodes) + 1)
        return RecurrentGenotype(nodes, self.concat and (*self.concat, *added))

    def cell_diagrams(self) -> dict[str, CellDiagram]:
        """Return the diagram of the cell: s0, the nodes, and their average."""
        first = DiagramPart([("x(t), h(t−1)", "tanh")], node_name(0), feeds_output=False)
        nodes = [
            DiagramPart(
                [(node_name(source), activation)],
                node_name(i),
                i - 2 if i > 1 else None,
                feeds_output=i in self.averaged,
            )
            for i, (activation, source) in enumerate(self.nodes, start=1)
        ]
        return {CELL_KEY: CellDiagram(["x(t), h(t−1)"], [first, *nodes], "average = h(t)")}

    @classmethod
    def from_darts(cls, text: str) -> RecurrentGenotype:
        """Read DARTS's form, ``Genotype(recurrent=[('relu', 0), ...], concat=range(1, 9))``.

        An assignment ``NAME = Genotype(...)`` is accepted too. Nothing is executed.
        """
        fields = darts_fields(text, TEXT_FIELDS)
        return cls(fields["recurrent"], fields["concat"])

    def to_darts(self) -> str:
        """Return the genotype in the form of DARTS's genotypes.py."""
        nodes = list(self.nodes)
        return f"Genotype(recurrent={nodes!r}, concat={concat_text(self.averaged)})"


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
