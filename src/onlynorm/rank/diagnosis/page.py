"""A diagnosis as a figure over depth, and as one self-contained HTML page without scripts."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from onlynorm.display import Curve, Figure, Panel
from onlynorm.display.page import render
from onlynorm.rank.diagnosis.result import COLUMNS, Diagnosis
from onlynorm.rank.diagnosis.signals import Layer
from onlynorm.storage import write_atomically

TONES = {"healthy": ("good", "✓"), "suspect": ("warn", "~"), "unhealthy": ("bad", "✕")}
_PANELS = (
    Panel("rank", "How many directions the signal has", "layers with weights so far", "", y_log=True),
    Panel("spread", "Share that differs between samples", "layers with weights so far", "", y_log=True),
    Panel("scale", "Scale of the signal (rms)", "layers with weights so far", "", y_log=True),
    Panel("gradient", "Norms of gradients", "layers with weights so far", "", y_log=True),
    Panel("dead", "Share of dead units", "layers with weights so far", ""),
)
_Value = Callable[[Layer], "float | None"]


def plot_diagnosis(diagnosis: Diagnosis) -> Figure:
    """The figure: rank, spread, scale, gradients and dead units over depth."""
    return Figure(tuple(_curves(diagnosis)), _PANELS)


def write_diagnosis(diagnosis: Diagnosis, path: Path | str, *, title: str = "a network") -> Path:
    """The path of a self-contained HTML page: verdict, figure, table, thresholds."""
    write_atomically(Path(path), render_diagnosis(diagnosis, title=title).encode())
    return Path(path)


def render_diagnosis(diagnosis: Diagnosis, *, title: str = "a network") -> str:
    """The page as text. It may load nothing and run nothing."""
    verdict = diagnosis.verdict
    return render(
        "rank/diagnosis/diagnosis.html", title=f"diagnosis of {title}", model=title, verdict=verdict, tones=TONES,
        score=f"{verdict.score:.2f}", figure=plot_diagnosis(diagnosis).inline_svg(), notes=diagnosis.notes(),
        columns=COLUMNS, rows=diagnosis.rows(), parts={name: f"{value:.3g}" for name, value in verdict.parts.items()},
        numeric=[place for place, name in enumerate(COLUMNS) if name not in ("signal", "kind")],
        thresholds=vars(verdict.thresholds),
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
