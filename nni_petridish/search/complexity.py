"""Complexity of a model: what the hull goes by besides the error."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nni_petridish.search.records import LATENCY, Outcome

MULTIPLY_ADDS, PARAMETERS = "multiply_adds", "parameters"


@dataclass(frozen=True)
class Complexity:
    """A quantity of a model that a search trades against its error.

    Parameters
    ----------
    name
        The value of the setting ``complexity``.
    title
        The words for it in tables and charts.
    """

    name: str
    title: str

    @property
    def is_count(self) -> bool:
        """Whether its values are whole numbers."""
        return self.name != LATENCY

    def of(self, outcome: Outcome) -> float:
        """Return the complexity of a model; NaN if it was not measured.

        >>> COMPLEXITIES["parameters"].of(Outcome("g00000", 0.3, multiply_adds=90, parameters=10))
        10
        """
        if self.name == MULTIPLY_ADDS:
            return outcome.multiply_adds
        if self.name == PARAMETERS:
            return outcome.parameters
        measured = outcome.metrics.get(LATENCY)
        return measured if isinstance(measured, int | float) else math.nan

    def text(self, value: float) -> str:
        """Return a value in full, for tables.

        >>> COMPLEXITIES["multiply_adds"].text(12345), COMPLEXITIES["latency"].text(0.51234)
        ('12,345', '0.512')
        """
        return f"{value:,.0f}" if self.is_count else f"{value:.3g}"

    def phrase(self, text: str) -> str:
        """Return a value, as a text, in words.

        >>> COMPLEXITIES["latency"].phrase("0.51"), COMPLEXITIES["parameters"].phrase("12k")
        ('0.51 ms', '12k parameters')
        """
        return f"{text} {self.title}" if self.is_count else f"{text} ms"


COMPLEXITIES = {
    one.name: one
    for one in (
        Complexity(MULTIPLY_ADDS, "multiply-adds"),
        Complexity(PARAMETERS, "parameters"),
        Complexity(LATENCY, "latency (ms)"),
    )
}
"""The complexities by name; the first is the paper's."""
