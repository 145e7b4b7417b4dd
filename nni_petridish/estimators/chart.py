"""The hull of a fitted estimator as a picture for notebooks."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from nni_petridish.estimators.models import GrownModel, search_of
from nni_petridish.registry import Measure
from nni_petridish.results.report import svg
from nni_petridish.results.report.hull import NARROW, hull_chart


def hull_html(models: Sequence[GrownModel], measure: Measure) -> str:
    """Return an image element; the style of its picture does not reach the page."""
    picture = svg.standalone(hull_chart(search_of(models), measure, NARROW))
    data = base64.b64encode(picture.encode()).decode()
    return f'<img alt="error versus multiply-adds" src="data:image/svg+xml;base64,{data}"/>'
