"""Decisions of a space of NNI that can grow, as plain data: cells, and choices outside of cells.

Given the finished weak learners, a decision returns the candidates that are left and the values in
NNI's sample. A choice that has not been made has its simplest value, the stand-in, so that every
list of weak learners is a member of the space.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nni_petridish.core.genotype import Learner, Shortcut
from nni_petridish.errors import GenotypeError

#: The only input of a layer or of repeated blocks.
INPUT = "x"
#: The operation on a chosen input.
IDENTITY = "identity"
#: The pool of choices outside of cells, which compete: a growth makes I_max of them.
CHOICES = "choices"

Sample = dict[str, Any]


class Decision(Protocol):
    """The growth of one label of a space."""

    @property
    def label(self) -> str:
        """Key of its α table."""
        ...

    @property
    def pool(self) -> str | None:
        """Name shared by the α tables that compete with each other; None if there are none."""
        ...

    def eligible(self, learners: Sequence[Learner]) -> list[Shortcut]:
        """Return the candidates of the next weak learner; none if the limit is reached."""
        ...

    def room(self, learners: Sequence[Learner]) -> int:
        """Return the largest number of shortcuts of the next weak learner."""
        ...

    def sample(self, learners: Sequence[Learner]) -> Sample:
        """Return the entries of NNI's sample for what has grown."""
        ...


@dataclass(frozen=True)
class Place:
    """Place of a weak learner in a cell: its node, and the operators of the node that it takes."""

    node: int
    slots: tuple[int, ...]


@dataclass(frozen=True)
class CellDecision:
    """Cells that share a label: a growth fills operators of the first node with free ones.

    Parameters
    ----------
    label
        Label of the cells.
    predecessors
        Number of inputs of a cell. Inputs are numbered from 0, and nodes after them.
    ops
        Names of the operations.
    slots
        The numbers of the operators that can be chosen, for each node.
    labels
        NNI's labels of the operation and of the input, for each node and operator.
    stand_ins
        Source and operation of operators that are not chosen yet, for each node.
    """

    label: str
    predecessors: int
    ops: tuple[str, ...]
    slots: tuple[tuple[int, ...], ...]
    labels: tuple[tuple[tuple[str, str], ...], ...]
    stand_ins: tuple[Shortcut, ...]

    pool = None

    def places(self, learners: Sequence[Learner]) -> list[Place]:
        """Return the place of each weak learner."""
        result, node, taken = [], 0, 0
        for learner in learners:
            while node < len(self.slots) and taken == len(self.slots[node]):
                node, taken = node + 1, 0
            slots = self.slots[node][taken : taken + len(learner)] if node < len(self.slots) else ()
            if len(slots) < len(learner):
                raise GenotypeError(f"choices.{self.label}: has no room for {learner!r}.")
            result.append(Place(node, slots))
            taken += len(learner)
        return result

    def next_place(self, learners: Sequence[Learner]) -> Place:
        """Return the first node with free operators; node number ``len(slots)`` if none has any."""
        places = self.places(learners)
        node = places[-1].node if places else 0
        taken = sum(len(place.slots) for place in places if place.node == node)
        while node < len(self.slots) and taken == len(self.slots[node]):
            node, taken = node + 1, 0
        return Place(node, self.slots[node][taken:] if node < len(self.slots) else ())

    def eligible(self, learners: Sequence[Learner]) -> list[Shortcut]:
        """Return every (cell input or earlier node, operation) except the stand-in."""
        place = self.next_place(learners)
        if not place.slots:
            return []
        sources = map(str, range(self.predecessors + place.node))
        pairs = [(source, op) for source in sources for op in self.ops]
        return [pair for pair in pairs if pair != self.stand_ins[place.node]]

    def room(self, learners: Sequence[Learner]) -> int:
        """Return the number of free operators of the next node."""
        return len(self.next_place(learners).slots)

    def sample(self, learners: Sequence[Learner]) -> Sample:
        """Return operation and input of every chosen operator."""
        result: Sample = {}
        for learner, place in zip(learners, self.places(learners), strict=True):
            for (source, op), slot in zip(learner, place.slots, strict=True):
                op_label, input_label = self.labels[place.node][slot]
                result |= {op_label: op, input_label: [int(source)]}
        return result


@dataclass(frozen=True)
class LayerDecision:
    """A layer, chosen once.

    Parameters
    ----------
    label
        Label of the choice.
    names
        Names that NNI gives the layers, strings or numbers.
    stand_in
        The layer in use until one is chosen.
    """

    label: str
    names: tuple[Any, ...]
    stand_in: Any

    pool = CHOICES

    def eligible(self, learners: Sequence[Learner]) -> list[Shortcut]:
        """Return all layers except the stand-in."""
        if learners:
            return []
        return [(INPUT, str(name)) for name in self.names if name != self.stand_in]

    def room(self, learners: Sequence[Learner]) -> int:
        """Return 1 until a layer is chosen."""
        return 0 if learners else 1

    def sample(self, learners: Sequence[Learner]) -> Sample:
        """Return the chosen layer."""
        names = {str(name): name for name in self.names}
        return {self.label: names[learners[0][0][1]]} if learners else {}


@dataclass(frozen=True)
class InputDecision:
    """Inputs: one, chosen once, or several, added one by one.

    Parameters
    ----------
    label
        Label of the choice.
    inputs
        Number of inputs.
    many
        Whether any number of inputs can be taken.
    stand_in
        The input in use from the start.
    """

    label: str
    inputs: int
    many: bool
    stand_in: int

    pool = CHOICES

    def eligible(self, learners: Sequence[Learner]) -> list[Shortcut]:
        """Return the inputs that are not taken yet."""
        if learners and not self.many:
            return []
        taken = {str(self.stand_in), *(source for ((source, _),) in learners)}
        return [(str(i), IDENTITY) for i in range(self.inputs) if str(i) not in taken]

    def room(self, learners: Sequence[Learner]) -> int:
        """Return 1 while there are inputs to take."""
        return min(1, len(self.eligible(learners)))

    def sample(self, learners: Sequence[Learner]) -> Sample:
        """Return the inputs that are taken."""
        if not learners:
            return {}
        taken = [int(source) for ((source, _),) in learners]
        return {self.label: sorted([self.stand_in, *taken]) if self.many else taken}


@dataclass(frozen=True)
class DepthDecision:
    """The depth of repeated blocks: a growth moves to the next one.

    Parameters
    ----------
    label
        Label of the choice.
    depths
        The depths beyond the first, ascending.
    stand_in
        The first depth.
    """

    label: str
    depths: tuple[int, ...]
    stand_in: int

    pool = CHOICES

    def eligible(self, learners: Sequence[Learner]) -> list[Shortcut]:
        """Return the next depth."""
        return [(INPUT, str(depth)) for depth in self.depths[len(learners) :][:1]]

    def room(self, learners: Sequence[Learner]) -> int:
        """Return 1 until the largest depth is reached."""
        return len(self.eligible(learners))

    def sample(self, learners: Sequence[Learner]) -> Sample:
        """Return the depth reached so far."""
        return {self.label: int(learners[-1][0][1])} if learners else {}
