"""Figures: curves in panels, as PNG, as SVG, and as inline SVG that follows the colours of its page."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args
from xml.etree import ElementTree

from onlynorm.errors import ValueRangeError, shown, visible
from onlynorm.storage import write_atomically
from onlynorm.validate import as_real, need_items, need_path, need_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

CurveKind = Literal["line", "points", "line+points", "histogram"]
ENDINGS = ("svg", "png", "pdf")
# Okabe and Ito's colours: distinguishable with any kind of colour vision.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6d31", "#7f7f7f")
INK = "#222222"
"""Text, axes and the first law; in a page they have the colour of its text."""
LAW_COLOURS = (INK, "#c0392b", "#7d8a99")
LAW_DASHES = ("-", "--", ":")
STYLE: Any = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10, "axes.linewidth": 0.8,
    "legend.frameon": False, "legend.fontsize": 8, "svg.fonttype": "none",
    "svg.hashsalt": "onlynorm",  # equal figures give equal files
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}  # fmt: skip
MAX_HOVERED = 400
"""Points of a curve that show their values on hover; curves with more points show none."""
_SVG = "http://www.w3.org/2000/svg"
_NOT_XML = re.compile("[\ufffe\uffff]")


@dataclass(frozen=True)
class Curve:
    """One curve of a figure. A histogram has one more x (the bin edges) than y (the heights).

    `style` is "data" for what was measured and "law" for what theory or a paper predicts. `y_error` has half the height
    of an error bar for every point, or is empty.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    kind: CurveKind = "line"
    panel: str = ""
    style: Literal["data", "law"] = "data"
    y_error: Sequence[float] = ()

    def __post_init__(self) -> None:
        names = [value if isinstance(value, str) else None for value in (self.kind, self.style)]
        if names[0] not in get_args(CurveKind) or names[1] not in ("data", "law"):
            raise ValueRangeError(
                f"curve {shown(self.label)} needs kind in {get_args(CurveKind)} and style data or law; "
                f"got {shown(self.kind)} and {shown(self.style)}."
            )
        for axis in ("x", "y", "y_error"):
            values = as_real(f"{axis} of curve {shown(self.label)}", getattr(self, axis), ndim=1, cure="Pass a list.")
            object.__setattr__(self, axis, tuple(float(value) for value in values.tolist()))
        extra = 1 if self.kind == "histogram" else 0
        if len(self.x) != len(self.y) + extra:
            raise ValueRangeError(
                f"curve {shown(self.label)} of kind {self.kind!r} needs {len(self.y) + extra} x for its "
                f"{len(self.y)} y; got {len(self.x)}."
            )
        if self.y_error and len(self.y_error) != len(self.y):
            raise ValueRangeError(
                f"curve {shown(self.label)} needs {len(self.y)} y_error, or none; got {len(self.y_error)}."
            )

    def points(self) -> Iterable[tuple[float, float]]:
        """Where values can be read off: the points, or the middle of every bin."""
        if self.kind == "histogram":
            return [((left + right) / 2, y) for left, right, y in zip(self.x, self.x[1:], self.y, strict=False)]
        return zip(self.x, self.y, strict=True)


@dataclass(frozen=True)
class Panel:
    """One pair of axes; curves name the panel they belong to.

    `x_names` stand at 1, 2, 3 and so on instead of numbers.
    """

    name: str = ""
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    x_log: bool = False
    y_log: bool = False
    x_names: Sequence[str] = ()

    def __post_init__(self) -> None:
        names = need_items("x_names", self.x_names, cure="Pass a list of texts.")
        object.__setattr__(self, "x_names", tuple(names))


@dataclass(frozen=True)
class Figure:
    """Curves and the panels they are drawn in; a label looks the same in every panel."""

    curves: Sequence[Curve] = ()
    panels: Sequence[Panel] = ()

    @property
    def used_panels(self) -> tuple[Panel, ...]:
        """The panels that have curves, with a plain one for curves that name a panel nobody described."""
        known = {panel.name: panel for panel in self.panels}
        for curve in self.curves:
            known.setdefault(curve.panel, Panel(name=curve.panel, title=curve.panel))
        used = {curve.panel for curve in self.curves}
        return tuple(panel for panel in known.values() if panel.name in used)

    def draw(self) -> Drawing:
        """The matplotlib figure: one pair of axes per panel, one legend for all."""
        return _draw(self)[0]

    def to_bytes(self, ending: str = "svg") -> bytes:
        """The figure as the content of an SVG, PNG or PDF file; equal figures give equal bytes."""
        if not isinstance(ending, str) or ending not in ENDINGS:
            raise ValueRangeError(f"a figure needs svg, png or pdf; got {shown(ending)}. Name the file figure.svg.")
        dates: Any = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
        return _saved(self.draw(), format=ending, dpi=160, metadata=dates.get(ending))

    def save(self, path: Path | str) -> Path:
        """The path of the file, written as the ending of its name says."""
        path = need_path("save", path)
        write_atomically(path, self.to_bytes(path.suffix.lower().removeprefix(".")))
        return path

    def write(self, folder: Path, name: str = "figure") -> tuple[Path, ...]:
        """The paths of `name.png` and `name.svg` in the folder; a figure without curves writes nothing."""
        folder, name = need_path("folder", folder), need_text("name", name, cure="Pass the name without its ending.")
        return tuple(self.save(folder / f"{name}.{ending}") for ending in ("png", "svg")) if self.curves else ()

    def inline_svg(self) -> str:
        """SVG to be put into a page: no background, ink in the page's colour, and values shown on hover."""
        drawing, hovered = _draw(self, is_hovered=True)
        return _inline(_saved(drawing, format="svg", transparent=True, metadata={"Date": None}).decode(), hovered)

    def _repr_html_(self) -> str:
        return self.inline_svg()


def _draw(figure: Figure, *, is_hovered: bool = False) -> tuple[Drawing, dict[str, list[str]]]:
    """The drawing, and the texts of the points that are hovered over by the ids of their groups."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Drawing

    panels = figure.used_panels
    n_columns = max(1, min(3, len(panels)))
    n_rows = max(1, -(-len(panels) // n_columns))
    hovered: dict[str, list[str]] = {}
    with matplotlib.rc_context(STYLE):
        drawing = Drawing(figsize=(4.6 * n_columns, 3.4 * n_rows + 0.7), layout="constrained")
        FigureCanvasAgg(drawing)
        styles, named = _styles(figure.curves), dict[str, Any]()
        grid = drawing.subplots(n_rows, n_columns, squeeze=False)
        for place, axes in enumerate(grid.flat):
            if place >= len(panels):
                axes.set_visible(False)
                continue
            panel = panels[place]
            for curve in figure.curves:
                if curve.panel == panel.name:
                    named.setdefault(curve.label, _draw_curve(axes, curve, styles[curve.label]))
                    if is_hovered:
                        hovered |= _add_hover(axes, curve, panel, f"hover-{len(hovered)}")
            _set_axes(axes, panel)
        _add_legend(drawing, named)
    return drawing, hovered


def _saved(drawing: Drawing, **options: Any) -> bytes:
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # labels that leave no room, or are of letters the font lacks
        drawing.savefig(buffer, **options)
    return buffer.getvalue()


def _set_axes(axes: Axes, panel: Panel) -> None:
    axes.set(title=_plain(panel.title), xlabel=_plain(panel.x_label), ylabel=_plain(panel.y_label))
    axes.set_xscale("log" if panel.x_log else "linear")
    axes.set_yscale("log" if panel.y_log else "linear")
    if panel.x_names:
        places = range(1, len(panel.x_names) + 1)
        axes.set_xticks(places, [_plain(name) for name in panel.x_names], rotation=30, ha="right")


def _add_legend(drawing: Drawing, named: dict[str, Any]) -> None:
    """One legend below all panels, in as many columns, four at most, as fit into the figure."""
    labels = [_plain(label) for label in named]
    for n_columns in range(min(4, len(named)), 0, -1):
        legend = drawing.legend(list(named.values()), labels, loc="outside lower center", ncols=n_columns)
        if legend.get_window_extent().width <= drawing.bbox.width or n_columns == 1:
            return
        legend.remove()


def _styles(curves: Sequence[Curve]) -> dict[str, int]:
    """A number per label, counted within data and within laws."""
    styles: dict[str, int] = {}
    for wanted in ("data", "law"):
        labels = dict.fromkeys(curve.label for curve in curves if curve.style == wanted)
        styles.update({label: place for place, label in enumerate(labels) if label not in styles})
    return styles


def _draw_curve(axes: Axes, curve: Curve, number: int) -> Any:
    look: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "linewidth": 1.1, "alpha": 0.9}
    if curve.style == "law":
        place = number % len(LAW_COLOURS)
        look = {"color": LAW_COLOURS[place], "linestyle": LAW_DASHES[place], "linewidth": 1.4, "zorder": 3}
    if curve.kind == "histogram":
        if curve.style == "data" and number == 0:
            axes.stairs(curve.y, curve.x, fill=True, color=look["color"], alpha=0.14)
        return axes.stairs(curve.y, curve.x, **look)
    if curve.kind in ("points", "line+points"):
        look |= {"marker": "o", "markersize": 3.5}
    if curve.kind == "points":
        look |= {"linestyle": "none"}
    if curve.y_error:
        halves = [half if math.isfinite(half) else 0.0 for half in curve.y_error]
        return axes.errorbar(curve.x, curve.y, halves, capsize=2.5, **look)
    return axes.plot(curve.x, curve.y, **look)[0]


def _add_hover(axes: Axes, curve: Curve, panel: Panel, name: str) -> dict[str, list[str]]:
    """Invisible points over the curve, in a group of this name, and the text of each."""
    is_shown = [
        (x, y) for x, y in curve.points()
        if math.isfinite(x) and math.isfinite(y) and (x > 0 or not panel.x_log) and (y > 0 or not panel.y_log)
    ]  # fmt: skip
    if not 0 < len(is_shown) <= MAX_HOVERED:
        return {}
    places: dict[float, str] = dict(enumerate(panel.x_names, start=1))
    x, y = zip(*is_shown, strict=True)
    axes.plot(x, y, linestyle="none", marker="o", markersize=8, alpha=0.0, zorder=10, gid=name)
    return {name: [f"{curve.label}: {places.get(a, f'{a:.4g}')}, {b:.4g}" for a, b in is_shown]}


def _inline(text: str, hovered: dict[str, list[str]]) -> str:
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ElementTree.fromstring(text)
    for meta in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(meta)
    groups = {group.get("id"): group for group in root.iter(f"{{{_SVG}}}g")}
    for name, texts in hovered.items():
        uses = list(groups[name].iter(f"{{{_SVG}}}use")) if name in groups else []
        for use, words in zip(uses, texts, strict=False):
            ElementTree.SubElement(use, f"{{{_SVG}}}title").text = _without_controls(words)
    for group in groups.values():  # ids of several figures on a page would be the same
        group.attrib.pop("id", None)
    root.set("role", "img")
    return ElementTree.tostring(root, encoding="unicode").replace(INK, "currentColor")


def _without_controls(text: str) -> str:
    return _NOT_XML.sub("?", visible(text))


def _plain(text: str) -> str:
    """Dollar signs start formulas in matplotlib; in a label they are dollars."""
    return _without_controls(text).replace("$", r"\$")
