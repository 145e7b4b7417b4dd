"""Drawings of cells: nodes, operations, and the growths that added them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from nni_petridish.core.genotype import Genotype, Learner, learner_name
from nni_petridish.results.report import svg
from search_spaces.recurrent.genotype import RecurrentGenotype, node_name
from search_spaces.vision.genotype import VISION_SOURCES, VisionGenotype

_ROW, _GAP, _HEAD = 30, 10, 18
_OP, _NODE, _SPACE = 112, 34, 46

Authors = Mapping[str, Sequence[str]]
"""For each α table, the ids of the growths that added its weak learners, in their order."""


def draw_cells(genotype: Genotype, authors: Authors) -> dict[str, Markup]:
    """Draw every kind of cell of a genotype; empty for genotypes without cells."""
    if isinstance(genotype, VisionGenotype):
        return {
            key: _vision_cell(key, learners, authors.get(key, ()))
            for key, learners in genotype.cells.items()
        }
    if isinstance(genotype, RecurrentGenotype):
        return {"cell": _recurrent_cell(genotype, authors.get("cell", ()))}
    return {}


@dataclass
class _Drawing:
    """Boxes and edges of a cell; edges lie below boxes, in whatever order they are added."""

    edges: list[str] = field(default_factory=list)
    boxes: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, label: str, hue: str) -> None:
        """Draw a box whose left end is at (x, y)."""
        self.boxes.append(svg.box(x, y - 11, width, 22, f"box {hue}"))
        self.boxes.append(svg.text(x + width / 2, y + 4, label, "", "middle"))

    def edge(self, start: tuple[float, float], end: tuple[float, float], hue: str) -> None:
        self.edges.append(svg.curve(*start, *end, f"edge {hue}"))


def _hue(index: int) -> str:
    return f"s{index % svg.HUES}"


def _author(authors: Sequence[str], index: int) -> str:
    added_by = f" · {authors[index]}" if index < len(authors) else ""
    return f"growth {index + 1}{added_by}"


def _vision_cell(key: str, learners: Sequence[Learner], authors: Sequence[str]) -> Markup:
    drawing = _Drawing()
    left = 80.0  # of the first column of ops
    column = _columns(learners)
    step = _OP + _SPACE + _NODE + _SPACE

    def x_of(i: int) -> float:
        return left + _SPACE + step * column[i]

    right = left + _SPACE + step * (1 + max(column, default=0))
    blocks = [2, *(len(learner) for learner in learners)]
    height = sum(_HEAD + _ROW * rows + _GAP for rows in blocks) + 8
    middle = height / 2
    apart = min(40.0, middle - 14)
    ends = {"prev_prev": (left, middle - apart), "prev": (left, middle + apart)}
    for name in VISION_SOURCES:
        drawing.box(4, ends[name][1], left - 4, name, "plain-s")
    out = (right, middle)
    seed = (("prev", "sep_conv_3x3"), ("prev", "skip"))
    y = _block(drawing, left + _SPACE, 4.0, "seed", seed, ends, out, "plain-s")
    for i, learner in enumerate(learners):
        x, top = x_of(i), y
        node = (x + _OP + _SPACE, top + _HEAD + _ROW * len(learner) / 2)
        y = _block(drawing, x, top, _author(authors, i), learner, ends, node, _hue(i))
        drawing.box(node[0], node[1], _NODE, learner_name(i), _hue(i))
        ends[learner_name(i)] = (node[0] + _NODE, node[1])
        drawing.edge(ends[learner_name(i)], out, _hue(i))
    drawing.box(*out, 62, "Σ = x_k", "plain-s")
    parts = [*drawing.edges, *drawing.boxes]
    return svg.picture(right + 66, height, parts, f"the {key} cell")


def _columns(learners: Sequence[Learner]) -> list[int]:
    """Return the column of each learner: to the right of all learners whose output it reads."""
    columns: list[int] = []
    names = [learner_name(i) for i in range(len(learners))]
    for learner in learners:
        read = [names.index(source) for source, _ in learner if source in names]
        columns.append(max((columns[i] + 1 for i in read), default=0))
    return columns


def _block(
    drawing: _Drawing,
    x: float,
    y: float,
    title: str,
    shortcuts: Sequence[tuple[str, str]],
    ends: Mapping[str, tuple[float, float]],
    target: tuple[float, float],
    hue: str,
) -> float:
    """Draw the ops of one growth below each other; return where the next block starts."""
    drawing.boxes.append(svg.text(x, y + 12, title, "soft halo"))
    for row, (source, op) in enumerate(shortcuts):
        middle = y + _HEAD + _ROW * (row + 0.5)
        drawing.box(x, middle, _OP, op, hue)
        drawing.edge(ends[source], (x, middle), hue)
        drawing.edge((x + _OP, middle), target, hue)
    return y + _HEAD + _ROW * len(shortcuts) + _GAP


def _recurrent_cell(genotype: RecurrentGenotype, authors: Sequence[str]) -> Markup:
    drawing = _Drawing()
    depth = [0]
    for _, predecessor in genotype.nodes:
        depth.append(depth[predecessor] + 1)
    row = 46
    height = row * (len(genotype.nodes) + 1) + 12
    right = 90.0 + (_OP + _SPACE) * (max(depth) + 1)
    places = [(90.0 + (_OP + _SPACE) * d, 30.0 + row * i) for i, d in enumerate(depth)]
    drawing.box(4, 18, 50, "x(t)", "plain-s")
    drawing.box(4, 46, 50, "h(t−1)", "plain-s")
    for y in (18.0, 46.0):
        drawing.edge((54, y), places[0], "plain-s")
    drawing.box(*places[0], _OP, f"{node_name(0)}: tanh", "plain-s")
    out = (right, height / 2)
    for i, (activation, predecessor) in enumerate(genotype.nodes):
        x, y = places[i + 1]
        hue = "plain-s" if i == 0 else _hue(i - 1)
        title = "seed" if i == 0 else _author(authors, i - 1)
        drawing.boxes.append(svg.text(x, y - 15, title, "soft halo"))
        drawing.box(x, y, _OP, f"{node_name(i + 1)}: {activation}", hue)
        drawing.edge((places[predecessor][0] + _OP, places[predecessor][1]), (x, y), hue)
        drawing.edge((x + _OP, y), out, hue)
    drawing.box(*out, 100, "average = h(t)", "plain-s")
    return svg.picture(right + 106, height, [*drawing.edges, *drawing.boxes], "the recurrent cell")
