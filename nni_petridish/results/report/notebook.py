"""The report inside of a notebook."""

from __future__ import annotations

from pathlib import Path

from markupsafe import escape

from nni_petridish.gallery.select import open_search
from nni_petridish.results.report.page import report_html

_HEIGHT = 640


def notebook_html(folder: Path) -> str:
    """Return the report of a gallery as a frame of its own, with the hull's models in detail.

    The frame keeps the styles of the page and of the notebook apart. It may run our script but has
    no access to the notebook.
    """
    _, search = open_search(folder)
    page = report_html(search, folder, detailed={record.id for record in search.hull()})
    return (
        f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts" title="Petridish report"'
        f' style="width: 100%; height: {_HEIGHT}px; border: 0"></iframe>'
    )
