"""The still figure of a record: PNG and SVG, drawn from its curves."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from onlynorm.evidence.records import Curve, Panel, Record
from onlynorm.storage import write_atomically

# Okabe and Ito's colours: told apart with any kind of colour vision.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6d31", "#7f7f7f")
LAW_COLOURS = ("#222222", "#c0392b", "#7d8a99")
LAW_DASHES = ("-", "--", ":")
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.hashsalt": "onlynorm",  # the same record gives the same file
    "svg.fonttype": "none",
}


def panels_of(record: Record) -> tuple[Panel, ...]:
    """The record's panels, with a plain one for curves that name a panel nobody described."""
    known = {panel.name: panel for panel in record.panels}
    for curve in record.curves:
        known.setdefault(curve.panel, Panel(name=curve.panel, title=curve.panel))
    used = {curve.panel for curve in record.curves}
    return tuple(panel for panel in known.values() if panel.name in used)


def write_figure(record: Record, folder: Path) -> tuple[Path, ...]:
    """Write `figure.png` and `figure.svg` into `folder`; a record without curves gives nothing."""
    if not record.curves:
        return ()
    with matplotlib.rc_context(STYLE):
        return write_pictures(draw_figure(record), folder, "figure")


def write_pictures(figure: Figure, folder: Path, name: str) -> tuple[Path, Path]:
    """The paths of `name.png` and `name.svg` in `folder`, each whole or not there; equal figures, equal files."""
    paths = folder / f"{name}.png", folder / f"{name}.svg"
    options: tuple[dict[str, Any], ...] = ({"dpi": 160}, {"metadata": {"Date": None}})
    for path, chosen in zip(paths, options, strict=True):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=path.suffix[1:], **chosen)
        write_atomically(path, buffer.getvalue())
    return paths


def draw_figure(record: Record) -> Figure:
    """The figure itself: one pair of axes per panel, one legend for all."""
    panels = panels_of(record)
    n_columns = min(3, len(panels))
    n_rows = -(-len(panels) // n_columns)
    figure = Figure(figsize=(4.6 * n_columns, 3.4 * n_rows + 0.7), layout="constrained")
    FigureCanvasAgg(figure)
    styles = curve_styles(record)
    named: dict[str, Any] = {}
    grid = figure.subplots(n_rows, n_columns, squeeze=False)
    for place, axes in enumerate(grid.flat):
        if place >= len(panels):
            axes.set_visible(False)
            continue
        panel = panels[place]
        for curve in record.curves:
            if curve.panel == panel.name:
                named.setdefault(curve.label, _draw_curve(axes, curve, styles[curve.label]))
        axes.set(title=_plain(panel.title), xlabel=_plain(panel.x_label), ylabel=_plain(panel.y_label))
        axes.set_xscale("log" if panel.x_log else "linear")
        axes.set_yscale("log" if panel.y_log else "linear")
        if panel.x_names:
            places = range(1, len(panel.x_names) + 1)
            axes.set_xticks(places, [_plain(name) for name in panel.x_names], rotation=30, ha="right")
    _add_legend(figure, named)
    return figure


def _add_legend(figure: Figure, named: dict[str, Any]) -> None:
    """One legend below all panels, in as many columns, four at most, as fit into the figure."""
    labels = [_plain(label) for label in named]
    for n_columns in range(min(4, len(named)), 0, -1):
        legend = figure.legend(list(named.values()), labels, loc="outside lower center", ncols=n_columns)
        if legend.get_window_extent().width <= figure.bbox.width or n_columns == 1:
            return
        legend.remove()


def curve_styles(record: Record) -> dict[str, int]:
    """A number per label, counted within data and within laws: a label looks the same in every panel."""
    styles: dict[str, int] = {}
    for wanted in ("data", "law"):
        labels = dict.fromkeys(curve.label for curve in record.curves if curve.style == wanted)
        styles.update({label: place for place, label in enumerate(labels) if label not in styles})
    return styles


def _draw_curve(axes: Axes, curve: Curve, number: int) -> Any:
    if curve.style == "law":
        look: dict[str, Any] = {
            "color": LAW_COLOURS[number % len(LAW_COLOURS)],
            "linestyle": LAW_DASHES[number % len(LAW_DASHES)],
            "linewidth": 1.4,
            "zorder": 3,
        }
    else:
        look = {"color": COLOURS[number % len(COLOURS)], "linewidth": 1.1, "alpha": 0.9}
    if curve.kind == "histogram":
        if curve.style == "data" and number == 0:
            axes.stairs(curve.y, curve.x, fill=True, color=look["color"], alpha=0.14)
        return axes.stairs(curve.y, curve.x, **look)
    if curve.kind in ("points", "line+points"):
        look |= {"marker": "o", "markersize": 3.5}
    if curve.kind == "points":
        look |= {"linestyle": "none"}
    return axes.plot(curve.x, curve.y, **look)[0]


def _plain(text: str) -> str:
    """Dollar signs start formulas in matplotlib; in a record they are dollars."""
    return text.replace("$", r"\$")
