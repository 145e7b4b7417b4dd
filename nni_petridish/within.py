"""What a search found within a limit of multiply-adds, as the paper's ablations judge searches.

Appendix B.5 takes "the most accurate models that take under 60 million multi-adds". That is more
than the hull has to offer: a model within the limit may lie above the line to a larger one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from nni_petridish.errors import ConfigError, SearchError
from nni_petridish.records import ModelRecord

if TYPE_CHECKING:
    from nni_petridish.config import SearchConfig
    from nni_petridish.search import Search


def best_within(records: Iterable[ModelRecord], limit: float | None) -> ModelRecord | None:
    """Return the most accurate model within a limit, the cheapest of several; None without any."""
    inside = [
        record
        for record in records
        if math.isfinite(record.error) and (limit is None or record.multiply_adds <= limit)
    ]
    return min(inside, key=lambda record: (record.error, record.multiply_adds), default=None)


def found_within(search: Search, limit: float | None, where: str) -> ModelRecord:
    """Return the most accurate model within a limit, or raise with the reason why there is none."""
    best = best_within(search.models(), limit)
    if best is None:
        failures = list(search.dropped().values())
        reason = failures[-1] if failures else f"no model has at most {limit} multiply-adds"
        raise SearchError(f"the search in {where} found nothing: {reason.removesuffix('.')}.")
    return best


def check_limit(config: SearchConfig, limit: float | None, place: str) -> None:
    """Raise if not even the seed model is within the limit: then nothing could be found."""
    if limit is None:
        return
    task = config.load_task()
    smallest, _ = task.size(task.build(task.seed()))
    if smallest > limit:
        raise ConfigError(
            f"{place} must be at least {smallest}, the seed model's, but got {limit!r}."
        )
