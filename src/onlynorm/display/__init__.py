"""Figures, tables and HTML pages of results.

`figure` draws curves in panels with matplotlib. `table` formats tables. `page` renders self-contained HTML pages from
Jinja2 templates. `result` has the base classes of results. matplotlib and Jinja2 are imported on first use.
"""

from onlynorm.display.figure import ENDINGS, Curve, Figure, Panel
from onlynorm.display.page import render, seconds
from onlynorm.display.result import Result, ShownResult, View, write_page
from onlynorm.display.table import Table

__all__ = [
    "ENDINGS",
    "Curve",
    "Figure",
    "Panel",
    "Result",
    "ShownResult",
    "Table",
    "View",
    "render",
    "seconds",
    "write_page",
]
