"""Figures: curves in panels, as PNG, SVG or PDF, and as inline SVG in the colours of the page."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from onlynorm.errors import ValueRangeError, shown, visible
from onlynorm.storage import write_atomically
from onlynorm.validate import as_real, need_integer, need_items, need_path, need_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as Drawing

CurveKind = Literal["line", "points", "line+points", "histogram", "bars"]
ENDINGS = ("svg", "png", "pdf")
# The colour-blind safe palette of Okabe and Ito.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6d31", "#7f7f7f")
INK = "#222222"
"""Colour of text, axes and the first law; replaced by the text colour in a page."""
LAW_COLOURS = (INK, "#c0392b", "#7d8a99")
LAW_DASHES = ("-", "--", ":")
STYLE: Any = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10, "axes.linewidth": 0.8,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": INK, "grid.alpha": 0.1, "grid.linewidth": 0.6,
    "axes.titlelocation": "left", "legend.frameon": False,
    "legend.fontsize": 8, "svg.fonttype": "none",
    "svg.hashsalt": "onlynorm",  # equal figures give equal files
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}  # fmt: skip
MAX_HOVERED = 400
"""Maximum number of points of a curve that shows values on hover."""
SHORT = 150.0
"""Logarithmic axes that span less than this factor have labels without exponents."""
MAX_LETTERS = 60
"""Maximum total length of the tick labels of an axis that are not rotated."""
MAX_NAMES = 24
"""Maximum number of tick labels of an axis; of more names, every n-th is shown."""
LARGEST = 1.7
"""Maximum pixels per point of a figure in a page."""
WIDE, NARROW = (4.6, 3.4), (3.9, 2.9)
"""Width and height of a panel in inches: side by side, and below each other on a phone."""
_SVG = "http://www.w3.org/2000/svg"
_NOT_XML = re.compile("[\ufffe\uffff]")


@dataclass(frozen=True)
class Curve:
    """One curve of a figure. A histogram has one more x (bin edges) than y (heights).

    `style` is "data" for measurements and "law" for predictions of theory or of a paper. `y_error` contains half the
    height of each error bar, or is empty. A curve with an empty label is not in the legend.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    kind: CurveKind = "line"
    panel: str = ""
    style: Literal["data", "law"] = "data"
    y_error: Sequence[float] = ()

    def __post_init__(self) -> None:
        kind, style = (value if isinstance(value, str) else None for value in (self.kind, self.style))
        if kind not in get_args(CurveKind) or style not in ("data", "law"):
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

    def __repr__(self) -> str:
        return f"Curve({self.label!r}, {self.kind} of {len(self.y)} values, panel={self.panel!r}, style={self.style!r})"

    def points(self) -> Iterable[tuple[float, float]]:
        """The points (x, y); for a histogram, the centre of each bin."""
        if self.kind == "histogram":
            return [((left + right) / 2, y) for left, right, y in zip(self.x, self.x[1:], self.y, strict=False)]
        return zip(self.x, self.y, strict=True)


@dataclass(frozen=True)
class Panel:
    """One pair of axes; curves refer to it by name.

    `x_names` are the tick labels at x = 1, 2, 3, ...
    """

    name: str = ""
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    x_log: bool = False
    y_log: bool = False
    x_names: Sequence[str] = ()

    def __post_init__(self) -> None:
        names = need_items("x_names", self.x_names, cure="Pass a list of strings.")
        object.__setattr__(self, "x_names", tuple(names))


@dataclass(frozen=True)
class Figure:
    """Curves and panels; curves with the same label have the same style in all panels."""

    curves: Sequence[Curve] = ()
    panels: Sequence[Panel] = ()

    def __repr__(self) -> str:
        panels = "; ".join(panel.title or panel.name for panel in self.used_panels if panel.title or panel.name)
        n_curves, n_panels = len(self.curves), len(self.used_panels)
        return f"Figure({n_curves} curves in {n_panels} panels{': ' * bool(panels)}{panels}). Save it with save(path)."

    @property
    def used_panels(self) -> tuple[Panel, ...]:
        """The panels with curves, including a default panel for each name not in `panels`."""
        known = {panel.name: panel for panel in self.panels}
        for curve in self.curves:
            known.setdefault(curve.panel, Panel(name=curve.panel, title=curve.panel))
        used = {curve.panel for curve in self.curves}
        return tuple(panel for panel in known.values() if panel.name in used)

    def draw(self) -> Drawing:
        """The matplotlib figure, with one pair of axes per panel and a common legend."""
        return _draw(self)[0]

    def to_bytes(self, ending: str = "svg", *, n_columns: int = 3) -> bytes:
        """The bytes of an SVG, PNG or PDF file; equal figures give equal bytes. `n_columns` is the maximum of panels in
        a row: 1 is for phones.
        """
        if not isinstance(ending, str) or ending not in ENDINGS:
            raise ValueRangeError(f"a figure needs svg, png or pdf; got {shown(ending)}. Name the file figure.svg.")
        n_columns = need_integer("n_columns", n_columns, low=1, high=3, cure="Leave it out for at most three.")
        dates: Any = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
        return _saved(_draw(self, n_columns=n_columns)[0], format=ending, dpi=160, metadata=dates.get(ending))

    def save(self, path: Path | str, *, n_columns: int = 3) -> Path:
        """Saves the figure in the format of the file extension and returns the path; `n_columns` as in `to_bytes`."""
        path = need_path("save", path)
        write_atomically(path, self.to_bytes(path.suffix.lower().removeprefix("."), n_columns=n_columns))
        return path

    def write(self, folder: Path, name: str = "figure") -> tuple[Path, ...]:
        """Saves `name.png` and `name.svg` in the folder and returns their paths; none if there are no curves."""
        folder, name = need_path("folder", folder), need_text("name", name, cure="Pass the name without extension.")
        return tuple(self.save(folder / f"{name}.{ending}") for ending in ("png", "svg")) if self.curves else ()

    def inline_svg(self) -> str:
        """SVG for embedding in a page: no background, the text colour of the page, and values on hover."""
        drawing, hovered = _draw(self, is_hovered=True)
        return _inline(_saved(drawing, format="svg", transparent=True, metadata={"Date": None}).decode(), hovered)

    def responsive_svg(self) -> str:
        """Inline SVG; of several panels also one with all below each other, which style sheets show on a phone."""
        wide = self.inline_svg()
        if len(self.used_panels) < 2:
            return wide
        drawing, _ = _draw(self, n_columns=1)
        salt = f"{STYLE['svg.hashsalt']}, narrow"  # ids differ from those of the wide one
        drawn = _saved(drawing, salt=salt, format="svg", transparent=True, metadata={"Date": None}).decode()
        narrow = _inline(drawn, {})
        narrow = narrow.replace('style="max-width', 'class="narrow" style="display: none; max-width', 1)
        return wide.replace('style="max-width', 'class="wide" style="max-width', 1) + narrow

    def _repr_html_(self) -> str:
        return self.responsive_svg()


def _draw(figure: Figure, *, is_hovered: bool = False, n_columns: int = 3) -> tuple[Drawing, dict[str, list[str]]]:
    """The drawing, and the hover texts of points by the id of their group."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Drawing
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    panels = figure.used_panels
    width, height = NARROW if n_columns < min(3, len(panels)) else WIDE
    n_columns = max(1, min(n_columns, len(panels)))
    n_rows = max(1, -(-len(panels) // n_columns))
    hovered: dict[str, list[str]] = {}
    with matplotlib.rc_context(STYLE):
        size = (width * n_columns, height * n_rows + 0.7)
        layout = ConstrainedLayoutEngine(hspace=0.06)  # between the label of an axis and the title below it
        drawing = Drawing(figsize=size, layout=layout)
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
                    drawn = _draw_curve(axes, curve, styles[curve.label])
                    if curve.label:
                        named.setdefault(curve.label, drawn)
                    if is_hovered:
                        hovered |= _add_hover(axes, curve, panel, f"hover-{len(hovered)}")
            _set_axes(axes, panel, [curve for curve in figure.curves if curve.panel == panel.name])
        _add_legend(drawing, named)
    return drawing, hovered


def _saved(drawing: Drawing, *, salt: str = STYLE["svg.hashsalt"], **options: Any) -> bytes:
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": salt}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # labels without space, or missing glyphs
        drawing.savefig(buffer, **options)
    return buffer.getvalue()


def _set_axes(axes: Axes, panel: Panel, curves: Sequence[Curve]) -> None:
    axes.set(title=_plain(panel.title), xlabel=_plain(panel.x_label), ylabel=_plain(panel.y_label))
    axes.set_xscale("log" if panel.x_log else "linear")
    axes.set_yscale("log" if panel.y_log else "linear")
    for axis, is_log in ((axes.xaxis, panel.x_log), (axes.yaxis, panel.y_log)):
        if is_log:
            _set_log_ticks(axis)
    if not panel.x_log and all(x.is_integer() for curve in curves for x in curve.x if curve.style == "data"):
        axes.locator_params(axis="x", integer=True)
    has_points = any(curve.kind in ("points", "line+points") for curve in curves)
    if not panel.y_log and has_points and min((y for curve in curves for y in curve.y), default=1.0) == 0.0:
        axes.set_ylim(bottom=-0.02 * axes.get_ylim()[1])  # room for markers at zero
    if panel.x_names:
        step = -(-len(panel.x_names) // MAX_NAMES)
        names = {place: _plain(name) for place, name in enumerate(panel.x_names, start=1)}
        shown = [place for place in names if (place - 1) % step == 0]
        is_level = sum(len(names[place]) + 2 for place in shown) < MAX_LETTERS
        rotated: dict[str, Any] = {} if is_level else {"rotation": 30 if len(shown) < 8 else 60, "ha": "right"}
        axes.set_xticks(shown, [names[place] for place in shown], **rotated)
        axes.tick_params(axis="x", labelsize=8 if is_level else 7)
        axes.grid(visible=False, axis="x")
        axes.set_xlim(0.4, len(names) + 0.6)


def _set_log_ticks(axis: Axis) -> None:
    """Makes a logarithmic axis span at least a factor of ten; short ones get labels at 1, 2 and 5 times 10^n."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = (float(end) for end in axis.get_view_interval())
    if not 0 < low < high < math.inf:
        return
    if high / low < 10.0:
        grow = math.sqrt(10.0 * low / high)
        axis.set_view_interval(low / grow, high * grow, ignore=True)
    if high / low < SHORT:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        axis.set_minor_formatter(NullFormatter())


def _add_legend(drawing: Drawing, named: dict[str, Any]) -> None:
    """Adds one legend below all panels, with up to four columns."""
    labels = [_plain(label) for label in named]
    for n_columns in range(min(4, len(named)), 0, -1):
        legend = drawing.legend(list(named.values()), labels, loc="outside lower center", ncols=n_columns)
        if legend.get_window_extent().width <= drawing.bbox.width or n_columns == 1:
            return
        legend.remove()


def _styles(curves: Sequence[Curve]) -> dict[str, int]:
    """The index of the style of each label, counted separately for data and laws."""
    styles: dict[str, int] = {}
    for wanted in ("data", "law"):
        labels = dict.fromkeys(curve.label for curve in curves if curve.style == wanted)
        styles.update({label: place for place, label in enumerate(labels) if label not in styles})
    return styles


def _draw_curve(axes: Axes, curve: Curve, number: int) -> Any:
    style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "linewidth": 1.1, "alpha": 0.9}
    if curve.style == "law":
        place = number % len(LAW_COLOURS)
        style = {"color": LAW_COLOURS[place], "linestyle": LAW_DASHES[place], "linewidth": 1.4, "zorder": 3}
    if curve.kind == "histogram":
        if curve.style == "data" and number == 0:
            axes.stairs(curve.y, curve.x, fill=True, color=style["color"], alpha=0.14)
        return axes.stairs(curve.y, curve.x, **style)
    if curve.kind == "bars":
        return axes.bar(curve.x, curve.y, width=0.75, color=style["color"], alpha=0.85)
    if curve.kind in ("points", "line+points"):
        style |= {"marker": "o", "markersize": 3.5}
    if curve.kind == "points":
        style |= {"linestyle": "none"}
    if curve.y_error:
        halves = [half if math.isfinite(half) else 0.0 for half in curve.y_error]
        return axes.errorbar(curve.x, curve.y, halves, capsize=2.5, **style)
    return axes.plot(curve.x, curve.y, **style)[0]


def _add_hover(axes: Axes, curve: Curve, panel: Panel, name: str) -> dict[str, list[str]]:
    """Adds invisible points on the curve, in a group of this name, and returns their texts."""
    visible_points = [
        (x, y) for x, y in curve.points()
        if math.isfinite(x) and math.isfinite(y) and (x > 0 or not panel.x_log) and (y > 0 or not panel.y_log)
    ]  # fmt: skip
    if not 0 < len(visible_points) <= MAX_HOVERED:
        return {}
    places: dict[float, str] = dict(enumerate(panel.x_names, start=1))
    x, y = zip(*visible_points, strict=True)
    axes.plot(x, y, linestyle="none", marker="o", markersize=8, alpha=0.0, zorder=10, gid=name)
    label = f"{curve.label}: " if curve.label else ""
    return {name: [f"{label}{places.get(a, f'{a:.4g}')}, {b:.4g}" for a, b in visible_points]}


def _inline(text: str, hovered: dict[str, list[str]]) -> str:
    from xml.etree import ElementTree

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
    for group in groups.values():  # ids must be unique in a page with several figures
        group.attrib.pop("id", None)
    root.set("role", "img")
    width = float(root.get("width", "0pt").removesuffix("pt"))
    root.set("style", f"max-width: {LARGEST * width:.0f}px")
    svg = ElementTree.tostring(root, encoding="unicode").replace(INK, "currentColor")
    for name, colours in (("curve", COLOURS), ("law", LAW_COLOURS)):
        for number, colour in enumerate(colours):  # the dark mode of a page has lighter colours
            svg = svg.replace(colour, f"var(--{name}-{number}, {colour})")
    return svg


def _without_controls(text: str) -> str:
    return _NOT_XML.sub("?", visible(text))


def _plain(text: str) -> str:
    """Escapes dollar signs, which matplotlib would parse as formulas."""
    return _without_controls(text).replace("$", r"\$")
