"""The diary of a growth: α of every candidate, the selection, and the change of the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from nni_petridish.results.report import svg

_ROW, _REACH = 19, 70
"""Height of a row, and length of the longest bar."""
_LETTER, _BOLD = 6.4, 7.4
"""Widths of a letter, about."""


def alpha_chart(key: str, rows: Sequence[Mapping[str, Any]], i_max: int) -> Markup:
    """Draw the |α| of one table as bars, the ``i_max`` selected candidates first."""
    largest = max((abs(_number(row.get("alpha")) or 0.0) for row in rows), default=0.0) or 1.0
    with_slopes = any(_number(row.get("slope")) is not None for row in rows)
    left = 24 + max((_width(row, i < i_max) for i, row in enumerate(rows)), default=0.0)
    at_alpha, at_slope = left + _REACH + 54, left + _REACH + 126
    parts = [
        svg.text(8, 16, key, "bold"),
        svg.text(at_alpha, 16, "α", "soft", "end"),
        svg.line(left, 22, left, 26 + _ROW * len(rows), "kin"),
    ]
    if with_slopes:
        parts.append(svg.text(at_slope, 16, "slope", "soft", "end"))
    for i, row in enumerate(rows):
        alpha = _number(row.get("alpha"))
        y, selected = 26 + _ROW * i, i < i_max
        length = max(abs(alpha or 0.0) / largest * _REACH, 0.5)
        css = "bold" if selected else "soft"
        parts.append(svg.text(8, y + 13, ("✓ " if selected else "") + _label(row), css))
        parts.append(svg.box(left, y + 3, length, 12, "f0" if selected else "muted-f", 2))
        parts.append(svg.text(at_alpha, y + 13, _signed(alpha), css, "end"))
        if with_slopes:
            slope = _signed(_number(row.get("slope")), 5)
            parts.append(svg.text(at_slope, y + 13, slope, css, "end"))
    # The key may be longer than everything below it.
    width = max(at_slope if with_slopes else at_alpha, _BOLD * len(key)) + 8
    return svg.picture(width, 32 + _ROW * len(rows), parts, f"α of the candidates of {key}")


def predicted_change(alphas: Mapping[str, Any]) -> float | None:
    """Return the change of the loss by the best step along the selected shortcuts, if known."""
    return _number((alphas.get("step") or {}).get("change"))


def loss_at_selection_and_end(
    history: Mapping[str, Sequence[Mapping[str, Any]]],
) -> tuple[float, float] | None:
    """Return the validation loss at selection and after the training that follows, if known."""
    ends = [history[phase][-1] for phase in ("weak", "final") if history.get(phase)]
    losses = [_number(record.get("validation_loss")) for record in ends]
    if len(losses) == 2 and losses[0] is not None and losses[1] is not None:
        return losses[0], losses[1]
    return None


def selected_shortcuts(alphas: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the selected shortcuts of each α table, as op(source)."""
    return {
        key: [_name(row) for row in rows[: alphas.get("i_max", 0)]]
        for key, rows in alphas.get("tables", {}).items()
    }


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['op']}({row['source']})"


def _label(row: Mapping[str, Any]) -> str:
    """Return the name, and when the candidate left, if it did."""
    left = f", left after {row['left']}" if "left" in row else ""
    return _name(row) + left


def _width(row: Mapping[str, Any], selected: bool) -> float:
    return _BOLD * (len(_label(row)) + 2) if selected else _LETTER * len(_label(row))


def _number(value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def _signed(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:+.{digits}f}".replace("-", "−")
