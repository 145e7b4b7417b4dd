"""Reports of a search: tables for a terminal, and a page with pictures that works offline."""

from __future__ import annotations

from nni_petridish.results.report.page import REPORT_FILE, write_report
from nni_petridish.results.report.pictures import PICTURE_FILE, PICTURES
from nni_petridish.results.report.tables import hull_rows, hull_table, lineage_table

__all__ = [
    "PICTURES",
    "PICTURE_FILE",
    "REPORT_FILE",
    "hull_rows",
    "hull_table",
    "lineage_table",
    "write_report",
]
