"""What may grow in a space of NNI, as plain data: its cells, and its choices outside of cells.

A plan says for a list of finished weak learners which candidates are left, and how they are written
in NNI's sample. What is not chosen yet stands at its simplest value, its stand-in, so that every
list of weak learners is a member of the space.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nni_petridish.core.genotype import Learner, Shortcut
from nni_petridish.errors import GenotypeError

#: The one input of a layer or of repeated blocks.
INPUT = "x"
#: What is done to an input that is chosen.
IDENTITY = "identity"
#: Choices outside of cells compete with each other: a growth makes I_max of them.
CHOICES = "choices"

Sample = dict[str, Any]


class Plan(Protocol):
    """How one label of a space may grow."""

    @property
    def label(self) -> str:
        """Key of its α table."""
        ...

    @property
    def pool(self) -> str | None:
        """Which other tables it competes with; None for none."""
        ...

    def eligible(self, learners: Sequence[Learner]) -> list[Shortcut]:
        """Return the candidates of the next weak learner; none if the limit is reached."""
        ...

    def room(self, learners: Sequence[Learner]) -> int:
        """Return how many shortcuts the next weak learner may have."""
        ...

    def sample(self, learners: Sequence[Learner]) -> Sample:
        """Return NNI's way to say what has grown."""
        ...


@dataclass(frozen=True)
class Place:
    """Where a weak learner of a cell is: its node, and which of the node's operators it takes."""

    node: int
    slots: tuple[int, ...]


@dataclass(frozen=True)
class CellPlan:
    """The cells of one label: a growth fills operators of the first node that has some left.

    Parameters
    ----------
    label
        Of the cells.
    predecessors
        How many inputs a cell has; they are numbered from 0, and the nodes after them.
    ops
        Names of the operations.
    slots
        For each node its operators that may be chosen, by their numbers.
    labels
        For each node and operator, NNI's labels of its operation and of its input.
    stand_ins
        For each node, source and operation of what is not chosen yet.
    """

    label: str
    predecessors: int
    ops: tuple[str, ...]
    slots: tuple[tuple[int, ...], ...]
    labels: tuple[tuple[tuple[str, str], ...], ...]
    stand_ins: tuple[Shortcut, ...]

    pool = None

    def places(self, learners: Sequence[Learner]) -> list[Place]:
        """Return where each weak learner is."""
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
        """Return the first node with operators to choose; node number ``len(slots)`` if none is."""
        places = self.places(learners)
        node = places[-1].node if places else 0
        taken = sum(len(place.slots) for place in places if place.node == node)
        while node < len(self.slots) and taken == len(self.slots[node]):
            node, taken = node + 1, 0
        return Place(node, self.slots[node][taken:] if node < len(self.slots) else ())

    def eligible(self, learners: Sequence[Learner]) -> list[Shortcut]:
        """Return every (cell input or earlier node, operation) but the stand-in."""
        place = self.next_place(learners)
        if not place.slots:
            return []
        sources = map(str, range(self.predecessors + place.node))
        pairs = [(source, op) for source in sources for op in self.ops]
        return [pair for pair in pairs if pair != self.stand_ins[place.node]]

    def room(self, learners: Sequence[Learner]) -> int:
        """Return how many operators of the next node may be chosen."""
        return len(self.next_place(learners).slots)

    def sample(self, learners: Sequence[Learner]) -> Sample:
        """Return operation and input of every operator that was chosen."""
        result: Sample = {}
        for learner, place in zip(learners, self.places(learners), strict=True):
            for (source, op), slot in zip(learner, place.slots, strict=True):
                op_label, input_label = self.labels[place.node][slot]
                result |= {op_label: op, input_label: [int(source)]}
        return result


@dataclass(frozen=True)
class LayerPlan:
    """A layer to choose, once.

    Parameters
    ----------
    label
        Of the choice.
    names
        NNI's names of the layers, strings or numbers.
    stand_in
        The layer that is there until one is chosen.
    """

    label: str
    names: tuple[Any, ...]
    stand_in: Any

    pool = CHOICES

    def eligible(self, learners: Sequence[Learner]) -> list[Shortcut]:
        """Return all layers but the stand-in."""
        if learners:
            return []
        return [(INPUT, str(name)) for name in self.names if name != self.stand_in]

    def room(self, learners: Sequence[Learner]) -> int:
        """Return 1 until a layer is chosen."""
        return 0 if learners else 1

    def sample(self, learners: Sequence[Learner]) -> Sample:
        """Return the layer that was chosen."""
        names = {str(name): name for name in self.names}
        return {self.label: names[learners[0][0][1]]} if learners else {}


@dataclass(frozen=True)
class InputPlan:
    """Inputs to choose: one, once, or one after the other until all are taken.

    Parameters
    ----------
    label
        Of the choice.
    inputs
        How many there are.
    many
        Whether any number of them may be taken.
    stand_in
        The input that is there from the beginning.
    """

    label: str
    inputs: int
    many: bool
    stand_in: int

    pool = CHOICES

    def eligible(self, learners: Sequence[Learner]) -> list[Shortcut]:
        """Return the inputs that were not taken yet."""
        if learners and not self.many:
            return []
        taken = {str(self.stand_in), *(source for ((source, _),) in learners)}
        return [(str(i), IDENTITY) for i in range(self.inputs) if str(i) not in taken]

    def room(self, learners: Sequence[Learner]) -> int:
        """Return 1 as long as there are inputs to take."""
        return min(1, len(self.eligible(learners)))

    def sample(self, learners: Sequence[Learner]) -> Sample:
        """Return the inputs that were taken."""
        if not learners:
            return {}
        taken = [int(source) for ((source, _),) in learners]
        return {self.label: sorted([self.stand_in, *taken]) if self.many else taken}


@dataclass(frozen=True)
class DepthPlan:
    """Blocks that repeat: a growth goes on to the next depth.

    Parameters
    ----------
    label
        Of the choice.
    depths
        The depths that may be chosen beyond the first, ascending.
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
        """Return the depth that was reached."""
        return {self.label: int(learners[-1][0][1])} if learners else {}
