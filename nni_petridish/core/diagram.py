"""Diagrams of cells as plain data: what a report draws, whatever the space."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DiagramPart:
    """Operations that were added together: those of the seed, or of one weak learner.

    Parameters
    ----------
    shortcuts
        ``(source, op)`` of each operation; a source is an input or the name of an earlier part.
    name
        The name of their sum as a source of later parts; None if it is no source.
    growth
        The index of the growth that added them, from 0; None for the seed.
    feeds_output
        Whether their sum is an input of the output.
    """

    shortcuts: Sequence[tuple[str, str]]
    name: str | None = None
    growth: int | None = None
    feeds_output: bool = True


@dataclass(frozen=True)
class CellDiagram:
    """A cell from its inputs to its output.

    Parameters
    ----------
    inputs
        Names of the inputs.
    parts
        The operations, each part after those that it reads.
    output
        The formula of the output.
    """

    inputs: Sequence[str]
    parts: Sequence[DiagramPart]
    output: str = "Σ = x_k"


Learners = Sequence[Sequence[tuple[str, str]]]
"""The shortcuts of each weak learner of an α table."""
Name = Callable[[int], str]
"""The name of the i-th weak learner as a source."""


def learner_parts(learners: Learners, name: Name) -> list[DiagramPart]:
    """Return the weak learners of one α table as parts."""
    return [DiagramPart(learner, name(i), growth=i) for i, learner in enumerate(learners)]


def diagrams_of_learners(tables: Mapping[str, Learners], name: Name) -> dict[str, CellDiagram]:
    """Return a diagram for each α table that has weak learners, its inputs read off them."""
    diagrams = {}
    for key, learners in tables.items():
        parts = learner_parts(learners, name)
        names = {part.name for part in parts}
        sources = dict.fromkeys(source for learner in learners for source, _ in learner)
        if parts:
            diagrams[key] = CellDiagram([s for s in sources if s not in names], parts)
    return diagrams
