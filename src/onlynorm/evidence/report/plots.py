"""Interactive plots of a record, as plain plotly figures: one per panel."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from onlynorm.evidence.records import Curve, Panel, Record
from onlynorm.evidence.report.figure import COLOURS, curve_styles, panels_of

# The page replaces these words by the colours of its light or dark theme.
LAW_COLOURS = ("@ink", "@bad", "@muted")
LAW_DASHES = ("solid", "dash", "dot")


def plot_panels(record: Record) -> list[dict[str, Any]]:
    """One `{"data", "layout"}` per panel, ready for JSON; text is escaped for plotly's small markup."""
    styles = curve_styles(record)
    return [
        {
            "data": [_trace(curve, styles[curve.label]) for curve in record.curves if curve.panel == panel.name],
            "layout": _layout(panel),
        }
        for panel in panels_of(record)
    ]


def _trace(curve: Curve, number: int) -> dict[str, Any]:
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": {"points": "markers", "line+points": "lines+markers"}.get(curve.kind, "lines"),
        "name": html.escape(curve.label),
        "x": _numbers(curve.x),
        "y": _numbers(curve.y),
        "hovertemplate": "%{x:.4g}, %{y:.4g}",
    }
    if curve.style == "law":
        place = number % len(LAW_COLOURS)
        trace["line"] = {"color": LAW_COLOURS[place], "dash": LAW_DASHES[place], "width": 2}
        trace["marker"] = {"color": LAW_COLOURS[place]}
    else:
        colour = COLOURS[number % len(COLOURS)]
        trace["line"] = {"color": colour, "width": 1.6}
        trace["marker"] = {"color": colour, "size": 6}
    if curve.kind == "histogram":
        # A step to the right of each edge; the last height is repeated so that the last bin gets its width.
        trace["y"] = _numbers([*curve.y, *curve.y[-1:]])
        trace["line"]["shape"] = "hv"
        if curve.style == "data" and number == 0:
            trace |= {"fill": "tozeroy", "fillcolor": trace["line"]["color"] + "22"}
    return trace


def _layout(panel: Panel) -> dict[str, Any]:
    x_axis: dict[str, Any] = {"title": {"text": html.escape(panel.x_label)}, "type": "log" if panel.x_log else "linear"}
    if panel.x_names:
        names = [html.escape(name) for name in panel.x_names]
        x_axis |= {"tickmode": "array", "tickvals": list(range(1, len(names) + 1)), "ticktext": names}
    return {
        "xaxis": x_axis,
        "yaxis": {"title": {"text": html.escape(panel.y_label)}, "type": "log" if panel.y_log else "linear"},
    }


def _numbers(values: Sequence[float]) -> list[float | None]:
    """JSON has no NaN: a gap in the curve says the same."""
    return [value if math.isfinite(value) else None for value in values]
