"""From the hull of a search to a model in hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nni_petridish._support.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "export_model": ".export",
        "write_report": ".report",
    },
)

if TYPE_CHECKING:
    from nni_petridish.results.export import export_model
    from nni_petridish.results.report.page import write_report
