"""The number that a search minimizes: its name, and the form in which it is shown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """Name and form of the ``error`` of a model.

    Parameters
    ----------
    name
        The field's word for it.
    is_share
        Whether it lies between 0 and 1 and is shown in percent.
    """

    name: str
    is_share: bool

    @property
    def unit(self) -> str:
        """The unit of its shown form, for the end of a label; empty for a plain number."""
        return " (%)" if self.is_share else ""

    @property
    def scale(self) -> float:
        """The factor between the number and its shown form."""
        return 100.0 if self.is_share else 1.0


ERROR = Measure("error", is_share=True)
PERPLEXITY = Measure("perplexity", is_share=False)
