"""Drawings of cells: inputs, operations, and the growths that added them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from nni_petridish.core.diagram import CellDiagram, DiagramPart
from nni_petridish.core.genotype import Genotype
from nni_petridish.results.report import svg

_ROW, _GAP, _HEAD = 30, 10, 18
_INPUT, _OP, _NODE, _SPACE = 76, 112, 34, 46
_LETTER = 7.0
"""Width of a letter, about."""

Authors = Mapping[str, Sequence[str]]
"""For each α table, the ids of the growths that added its weak learners, in their order."""
Point = tuple[float, float]


def draw_cells(genotype: Genotype, authors: Authors) -> dict[str, Markup]:
    """Draw every cell of a genotype, by α table."""
    return {
        key: _Drawing(diagram, authors.get(key, ())).picture(f"the {key} cell")
        for key, diagram in genotype.cell_diagrams().items()
    }


@dataclass
class _Drawing:
    """A cell as boxes and edges; edges lie below boxes, in whatever order they are added.

    Inputs are at the left, the output at the right. Parts lie below each other, each in the column
    to the right of the parts that it reads.
    """

    diagram: CellDiagram
    authors: Sequence[str]
    edges: list[str] = field(default_factory=list)
    boxes: list[str] = field(default_factory=list)

    def picture(self, label: str) -> Markup:
        """Return the drawing."""
        parts, columns = self.diagram.parts, _columns(self.diagram)
        op_width = _width((_label(part, op) for part in parts for _, op in part.shortcuts), _OP)
        left = 4 + _width(self.diagram.inputs, _INPUT)
        has_nodes = any(part.name and not _is_one_box(part) for part in parts)
        step = op_width + _SPACE + (_NODE + _SPACE if has_nodes else 0)
        right = left + _SPACE + step * (1 + max(columns, default=0))
        tall = sum(_HEAD + _ROW * len(part.shortcuts) + _GAP for part in parts) + 8
        height = float(max(tall, _ROW * len(self.diagram.inputs)))
        ends, output = self._draw_inputs(left, height), (right, height / 2)
        y = 4.0
        for part, column in zip(parts, columns, strict=True):
            x = left + _SPACE + step * column
            y = self._draw_part(part, (x, y), op_width, ends, output)
        width = _width([self.diagram.output], 62)
        self._box(*output, width, self.diagram.output, "plain-s")
        return svg.picture(right + width + 4, height, [*self.edges, *self.boxes], label)

    def _draw_inputs(self, left: float, height: float) -> dict[str, Point]:
        """Draw the inputs around the middle; return where the edges from them start."""
        inputs = self.diagram.inputs
        apart = min(80.0, (height - 28) / max(1, len(inputs) - 1))
        top = height / 2 - apart * (len(inputs) - 1) / 2
        ends = {name: (left, top + apart * i) for i, name in enumerate(inputs)}
        for name, (_, y) in ends.items():
            self._box(4, y, left - 4, name, "plain-s")
        return ends

    def _draw_part(
        self, part: DiagramPart, at: Point, op_width: float, ends: dict[str, Point], output: Point
    ) -> float:
        """Draw a part with its upper left corner at a point; return where the next one begins."""
        (x, y), hue = at, _hue(part)
        self.boxes.append(svg.text(x, y + 12, self._title(part), "soft halo"))
        bottom = y + _HEAD + _ROW * len(part.shortcuts)
        middle = (y + _HEAD + bottom) / 2
        node = (x + op_width + _SPACE, middle) if part.name and not _is_one_box(part) else None
        for row, (source, op) in enumerate(part.shortcuts):
            center = y + _HEAD + _ROW * (row + 0.5)
            self._box(x, center, op_width, _label(part, op), hue)
            self._edge(ends[source], (x, center), hue)
            if node is not None:
                self._edge((x + op_width, center), node, hue)
            elif part.feeds_output:
                self._edge((x + op_width, center), output, hue)
        if part.name is not None:
            ends[part.name] = (x + op_width, middle)
        if part.name is not None and node is not None:
            self._box(*node, _NODE, part.name, hue)
            ends[part.name] = (node[0] + _NODE, middle)
            if part.feeds_output:
                self._edge(ends[part.name], output, hue)
        return bottom + _GAP

    def _title(self, part: DiagramPart) -> str:
        if part.growth is None:
            return "seed"
        known = part.growth < len(self.authors)
        return f"growth {part.growth + 1}" + (f" · {self.authors[part.growth]}" if known else "")

    def _box(self, x: float, y: float, width: float, label: str, hue: str) -> None:
        """Draw a box whose left end is at (x, y)."""
        self.boxes.append(svg.box(x, y - 11, width, 22, f"box {hue}"))
        self.boxes.append(svg.text(x + width / 2, y + 4, label, "", "middle"))

    def _edge(self, start: Point, end: Point, hue: str) -> None:
        self.edges.append(svg.curve(*start, *end, f"edge {hue}"))


def _columns(diagram: CellDiagram) -> list[int]:
    """Return the column of each part: to the right of all parts whose sum it reads."""
    columns: list[int] = []
    named: dict[str, int] = {}
    for part in diagram.parts:
        read = [named[source] for source, _ in part.shortcuts if source in named]
        columns.append(max((column + 1 for column in read), default=0))
        if part.name is not None:
            named[part.name] = columns[-1]
    return columns


def _is_one_box(part: DiagramPart) -> bool:
    """Return whether a part is a single operation, whose box has its name too."""
    return part.name is not None and len(part.shortcuts) == 1


def _label(part: DiagramPart, op: str) -> str:
    return f"{part.name}: {op}" if _is_one_box(part) else op


def _width(labels: Iterable[str], least: float) -> float:
    return max([least, *(_LETTER * len(label) + 10 for label in labels)])


def _hue(part: DiagramPart) -> str:
    return "plain-s" if part.growth is None else f"s{part.growth % svg.HUES}"
