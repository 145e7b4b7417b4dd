"""One search, from its configuration file to its last model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nni_petridish._support.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "Coordinator": ".coordinator",
        "SearchConfig": ".config",
        "load_network": ".growth",
        "run_growth": ".growth",
        "run_search": ".runner",
    },
)

if TYPE_CHECKING:
    from nni_petridish.running.config import SearchConfig
    from nni_petridish.running.coordinator import Coordinator
    from nni_petridish.running.growth import load_network, run_growth
    from nni_petridish.running.runner import run_search
