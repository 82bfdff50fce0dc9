"""`onlynorm spectrum`: the singular values of features beside their law, and the condition number over the excess."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from onlynorm.cli.app import AsJson, Excess, FeaturesName, app, need_folder
from onlynorm.cli.arguments import Density, Seed, parse_shape
from onlynorm.cli.terminal import bar, make_table, print_facts, print_json, screen
from onlynorm.display import Curve, Figure, Panel
from onlynorm.features import Features, draw
from onlynorm.memory import memory_limit, need_memory
from onlynorm.solvers.spectrum import EXCESSES, Descent, Spectrum, measure_spectrum, sweep_excess

N_BINS = 12
FINE_BINS = 48
N_COPIES = 3
"""How often all numbers of the features are held at one time."""


@app.command(
    "spectrum",
    epilog="Examples: `onlynorm spectrum 24,24`, `onlynorm spectrum 16,16,3,3 --features er_sign --excess 1.1 --out "
    "figures`, `onlynorm spectrum 30,30 --features ortho_cond --json`",
)
def spectrum_command(
    shape: Annotated[
        str, typer.Argument(metavar="SHAPE", help="Shape of the target's weight, as in 24,24 or 16,16,3,3.")
    ],
    features: FeaturesName = "he_normal",
    excess: Excess = None,
    density: Density = None,
    seed: Seed = 0,
    seeds: Annotated[int, typer.Option(min=1, help="Draws at each excess of the sweep.")] = 3,
    unit_length: Annotated[
        bool, typer.Option("--unit-length/--as-drawn", help="Divide every feature by its length first, as solvers do.")
    ] = True,
    sweep: Annotated[bool, typer.Option(help="Measure the condition number over the excess too.")] = True,
    out: Annotated[Path | None, typer.Option(help="Folder for the figure, as SVG and PNG.")] = None,
    as_json: AsJson = False,
) -> None:
    """Singular values of features beside their law, and the double descent of the condition number."""
    if out is not None:
        need_folder(out, what="figures")
    drawn = draw(features, parse_shape(shape), excess=excess, density=density, seed=seed)
    _need_room(drawn)
    sweeps = sweep and not drawn.is_structured
    # Of a tiny layer several excesses come to the same number of features: one of them is enough.
    counts = {draw(features, drawn.shape, excess=e, density=density).n_features: e for e in EXCESSES if sweeps}
    with bar("spectrum", 1 + len(counts), hidden=as_json) as step:
        step(drawn.name)
        found = measure_spectrum(drawn, unit_length=unit_length)
        descent = None
        if sweeps:
            chosen = range(seed, seed + seeds)
            descent = sweep_excess(
                features, drawn.shape, excesses=tuple(counts.values()), seeds=chosen, density=density,
                unit_length=unit_length, progress=step,
            )  # fmt: skip
    files = [] if out is None else [str(path) for path in plot_spectrum(found, descent).write(out)]
    if as_json:
        swept = None if descent is None else {
            "excess": list(descent.excesses), "condition number": [list(row) for row in descent.measured],
            "median": list(descent.medians),
            "law": [None if math.isnan(one) else one for one in descent.law], "peak": descent.peak,
        }  # fmt: skip
        print_json(found.as_dict() | {"sweep": swept, "files": files})
        return
    _print_spectrum(found)
    if descent is not None:
        _print_descent(descent)
    for file in files:
        screen.print(f"figure: {escape(file)}", highlight=False)


def _need_room(features: Features) -> None:
    """Raises where the frozen weights themselves do not fit; how much the Gram matrix takes is asked for later."""
    numbers = features.n_features * (1 if features.is_structured else features.rows + features.cols)
    need_memory(
        f"{features.n_features:,} {features.name} features",
        N_COPIES * 8 * numbers,
        memory_limit(),
        "Take a smaller layer or less excess.",
    )


def _print_spectrum(found: Spectrum) -> None:
    facts = found.as_dict()
    histogram, law = facts.pop("histogram"), facts.pop("law", {})
    facts["shape"] = ",".join(map(str, facts["shape"]))
    facts |= {f"law: {name}": value for name, value in law.items()}
    scaled = "of unit length" if found.is_unit_length else "as drawn"
    if law and not found.prediction.is_known:
        facts["law: condition number"] = f"unknown, at least {found.law_condition:.4g}"
    if law and found.follows_law is None:
        facts["law: follows"] = "too few singular values for a test"
    print_facts(f"Spectrum of {facts['features']} features {scaled}, entries of variance 1/equations", facts)
    bins, shares, expected = found.histogram(N_BINS)
    grid = make_table("singular values", "share", "law" if "law" in histogram else "", "")
    widest = max(shares.max(), 1e-12)
    for place, share in enumerate(shares):
        ruler = "#" * round(30 * share / widest)
        predicted = f"{expected[place]:.4f}" if found.is_random else ""
        grid.add_row(f"{bins[place]:.3f} to {bins[place + 1]:.3f}", f"{share:.4f}", predicted, ruler)
    screen.print(grid)


def _print_descent(descent: Descent) -> None:
    grid = make_table("excess", "features", "condition number (median)", "lowest", "highest", "law")
    for row in zip(descent.excesses, descent.n_features, descent.medians, descent.measured, descent.law, strict=True):
        excess, n_features, median, all_seeds, law = row
        grid.add_row(
            f"{excess:.4g}", f"{n_features:,}", f"{median:.4g}", f"{min(all_seeds):.4g}", f"{max(all_seeds):.4g}",
            "unknown" if math.isnan(law) else f"{law:.4g}",
        )  # fmt: skip
    screen.print(grid)
    screen.print(f"the condition number peaks at excess {descent.peak:.4g}", highlight=False)


def plot_spectrum(found: Spectrum, descent: Descent | None) -> Figure:
    """The histogram beside its law, and condition numbers over the excess."""
    features = found.features
    bins, shares, _ = found.histogram(FINE_BINS)
    heights = shares / (bins[1] - bins[0])
    curves = [Curve(features.name, bins.tolist(), heights.tolist(), kind="histogram", panel="spectrum")]
    panels = [Panel("spectrum", f"{features.equations} equations, {features.n_features} features", "singular value",
                    "density")]  # fmt: skip
    if found.is_random:
        x, y = found.law_curve(300)
        curves.append(Curve("law", x.tolist(), y.tolist(), panel="spectrum", style="law"))
    if descent is not None:
        panels.append(Panel("descent", "condition number over the excess", "features per equation",
                            "condition number", x_log=True, y_log=True))  # fmt: skip
        curves.append(Curve(features.name, descent.excesses, descent.medians, kind="line+points", panel="descent"))
        known = [(x, y) for x, y in zip(descent.excesses, descent.law, strict=True) if not math.isnan(y)]
        if known:
            x_known, y_known = zip(*known, strict=True)
            curves.append(Curve("law", x_known, y_known, panel="descent", style="law"))
    return Figure(tuple(curves), tuple(panels))
