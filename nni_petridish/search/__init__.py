"""Choice of the next growth: an ask/tell state machine without torch, files or clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nni_petridish._support.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Done": ".records",
        "Growth": ".records",
        "GrowthSettings": ".settings",
        "Limits": ".settings",
        "ModelRecord": ".records",
        "Outcome": ".records",
        "Search": ".search",
        "SearchSettings": ".settings",
        "Wait": ".records",
    },
)

if TYPE_CHECKING:
    from nni_petridish.search.records import Done, Growth, ModelRecord, Outcome, Wait
    from nni_petridish.search.search import Search
    from nni_petridish.search.settings import GrowthSettings, Limits, SearchSettings
