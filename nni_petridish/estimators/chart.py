"""The hull of a fitted estimator as a picture for notebooks."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from nni_petridish.estimators.models import GrownModel, search_of
from nni_petridish.registry import Measure
from nni_petridish.results.report import svg
from nni_petridish.results.report.hull import NARROW, hull_chart


def hull_html(models: Sequence[GrownModel], measure: Measure, complexity: str) -> str:
    """Return an image element; the style of its picture does not reach the page."""
    search = search_of(models, complexity)
    picture = svg.standalone(hull_chart(search, measure, NARROW))
    data = base64.b64encode(picture.encode()).decode()
    alt = f"error versus {search.complexity.title}"
    return f'<img alt="{alt}" src="data:image/svg+xml;base64,{data}"/>'
