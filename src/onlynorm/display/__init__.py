"""Figures, tables and pages: what results look like on paper and in a browser.

`figure` has curves in panels, drawn with matplotlib; `table` rows under headings; `page` self-contained HTML pages from
Jinja2 templates. matplotlib and Jinja2 are imported when something is drawn.
"""

from onlynorm.display.figure import Curve, Figure, Panel
from onlynorm.display.table import Table

__all__ = ["Curve", "Figure", "Panel", "Table"]
