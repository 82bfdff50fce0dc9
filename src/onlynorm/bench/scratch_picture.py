"""The picture of training from scratch: accuracy against features per weight, on gamma and on the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from onlynorm.bench.scratch_results import ABOVE, BOUND, ORDINARY, SHARES, ScratchBench, followed, plain
from onlynorm.report.figure import COLOURS, write_pictures

_NAMES: dict[str, Callable[[float], str]] = {
    "he_normal, steps on weights": followed,
    "he_normal, steps on gamma": plain,
}


def write_shares(bench: ScratchBench, folder: Path) -> Path:
    """The path of the picture as PNG, a panel for every data set; the same as SVG lies beside it.

    It is named for its data sets, so that runs of one each do not overwrite each other's.
    """
    figure = Figure(figsize=(5.2 * len(bench.data), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, data in zip(figure.subplots(1, len(bench.data), squeeze=False).flat, bench.data, strict=True):
        _draw(axes, bench, data)
    return write_pictures(figure, folder, "-".join(("shares", *bench.data)))[0]


def _draw(axes: Axes, bench: ScratchBench, data: str) -> None:
    places = (*SHARES, BOUND, ABOVE)
    ordinary = bench.accuracy(data, ORDINARY)
    axes.axhline(100 * ordinary.mean, color="#222222", linewidth=1.2, label=ORDINARY)
    if ordinary.n > 1:
        low, high = ordinary.mean - ordinary.half, ordinary.mean + ordinary.half
        axes.axhspan(100 * low, 100 * high, color="#222222", alpha=0.12, linewidth=0)
    for index, (label, name) in enumerate(_NAMES.items()):
        found = [bench.accuracy(data, name(place)) for place in places]
        halves = [100 * np.nan_to_num(one.half) for one in found]
        axes.errorbar(
            places, [100 * one.mean for one in found], yerr=halves, marker="o", markersize=4, linewidth=1.2,
            capsize=3, color=COLOURS[index], label=label,
        )  # fmt: skip
    axes.axvline(BOUND, color="#7f7f7f", linewidth=0.8, linestyle=":")
    axes.set(title=data, xlabel="features per weight", ylabel="test accuracy, %")
    axes.legend(frameon=False, fontsize=8)
