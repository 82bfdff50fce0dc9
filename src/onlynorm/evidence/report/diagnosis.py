"""A diagnosis as a figure over depth, and as one self-contained HTML page without scripts."""

from __future__ import annotations

import base64
import math
import tempfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from onlynorm.errors import ValueRangeError
from onlynorm.evidence.records import Curve, Panel, Record, Verdict
from onlynorm.evidence.report.figure import write_figure
from onlynorm.evidence.report.markup import chip, definitions, escape, table
from onlynorm.rank.diagnosis.result import COLUMNS, Diagnosis
from onlynorm.rank.diagnosis.signals import Layer
from onlynorm.storage import write_atomically

ENDINGS = ("svg", "png")
TONES = {"healthy": ("good", "✓"), "suspect": ("warn", "~"), "unhealthy": ("bad", "✕")}
_PANELS = (
    Panel("rank", "How many directions the signal has", "layers with weights so far", "", y_log=True),
    Panel("spread", "Share that differs between samples", "layers with weights so far", "", y_log=True),
    Panel("scale", "Scale of the signal (rms)", "layers with weights so far", "", y_log=True),
    Panel("gradient", "Norms of gradients", "layers with weights so far", "", y_log=True),
    Panel("dead", "Share of dead units", "layers with weights so far", ""),
)
_Value = Callable[[Layer], "float | None"]


def draw_diagnosis(diagnosis: Diagnosis, *, ending: str = "svg") -> bytes:
    """The figure as SVG or PNG: rank, spread, scale, gradients and dead units over depth."""
    if ending not in ENDINGS:
        raise ValueRangeError(f"a figure needs svg or png; got {ending!r}. Name the file diagnosis.svg.")
    with tempfile.TemporaryDirectory() as folder:
        paths = write_figure(_as_record(diagnosis), Path(folder))
        return next(path for path in paths if path.suffix == f".{ending}").read_bytes()


def plot_diagnosis(diagnosis: Diagnosis, path: Path | str) -> Path:
    """The path of the figure, written as the ending of its name says."""
    write_atomically(Path(path), draw_diagnosis(diagnosis, ending=Path(path).suffix.removeprefix(".")))
    return Path(path)


def write_diagnosis(diagnosis: Diagnosis, path: Path | str, *, title: str = "a network") -> Path:
    """The path of a self-contained HTML page: verdict, figure, table, thresholds."""
    write_atomically(Path(path), render_diagnosis(diagnosis, title=title).encode())
    return Path(path)


def render_diagnosis(diagnosis: Diagnosis, *, title: str = "a network") -> str:
    """The page as text. It may load nothing and run nothing."""
    verdict = diagnosis.verdict
    figure = base64.b64encode(draw_diagnosis(diagnosis)).decode()
    css = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    findings = "".join(f"<li>{escape(finding)}</li>" for finding in verdict.findings)
    notes = "".join(f"<li>{escape(note)}</li>" for note in diagnosis.notes())
    rows = [[escape(cell) for cell in row] for row in diagnosis.rows()]
    numeric = [place for place, name in enumerate(COLUMNS) if name not in ("signal", "kind")]
    parts = {name: f"{value:.3g}" for name, value in verdict.parts.items()}
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>onlynorm: diagnosis of {escape(title)}</title>
<link rel="icon" href="data:,">
<style>{css}
img {{ width: 100%; background: #fff; border: 1px solid var(--line); border-radius: .6rem; }}</style>
</head>
<body>
<header><div class="mark"><span>onlynorm</span></div><h1>Diagnosis of {escape(title)}</h1>
<p>{chip(verdict.word, TONES)} score {verdict.score:.2f} of 1</p></header>
<main>
<ul>{findings}</ul>
<p><b>{escape(verdict.advice)}</b></p>
<img alt="rank, spread, scale, gradients and dead units over depth" src="data:image/svg+xml;base64,{figure}">
<h2>Gradients of the last layer</h2><ul class="reasons">{notes}</ul>
<h2>Signals</h2>{table(COLUMNS, rows, numeric=numeric)}
<details><summary>Parts of the score, and thresholds</summary>
{definitions(parts)}{definitions(vars(verdict.thresholds))}</details>
</main>
</body>
</html>
"""


def _as_record(diagnosis: Diagnosis) -> Record:
    """The curves in the form in which all our figures are drawn."""
    return Record(
        "diagnosis", "diagnosis", diagnosis.verdict.word, "figure", "", Verdict.CAVEAT, (), (), {}, {}, (),
        curves=tuple(_curves(diagnosis)), panels=_PANELS,
    )  # fmt: skip


def _curves(diagnosis: Diagnosis) -> list[Curve]:
    weighted = [layer for layer in diagnosis.layers if layer.has_weights]
    others = [layer for layer in diagnosis.layers if not layer.has_weights]
    wanted: list[tuple[str, str, list[Layer], _Value]] = [
        ("rank", "r", weighted, lambda layer: layer.r),
        ("rank", "soft rank", weighted, lambda layer: float(layer.soft_rank)),
        ("rank", "r of norms, activations, blocks", others, lambda layer: layer.r),
        ("spread", "layers with weights", weighted, lambda layer: layer.spread),
        ("spread", "norms, activations, blocks", others, lambda layer: layer.spread),
        ("scale", "layers with weights", weighted, lambda layer: layer.scale),
        ("scale", "norms, activations, blocks", others, lambda layer: layer.scale),
        ("gradient", "of the weights", weighted, lambda layer: layer.gradient),
        ("gradient", "of the signal", weighted, lambda layer: layer.signal_gradient),
        ("dead", "layers with weights", weighted, lambda layer: layer.dead),
        ("dead", "norms, activations, blocks", others, lambda layer: layer.dead),
    ]
    drawn = []
    for panel, label, layers, value in wanted:
        found = [(layer.depth, value(layer)) for layer in layers]
        points = [(x, y) for x, y in found if y is not None and math.isfinite(y) and (y > 0 or panel == "dead")]
        if points:
            xs, ys = zip(*points, strict=True)
            drawn.append(Curve(label, xs, ys, "line+points" if layers is weighted else "points", panel))
    return drawn
