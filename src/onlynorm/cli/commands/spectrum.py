"""`onlynorm spectrum`: singular values of features compared with their law, and condition numbers over the excess."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from onlynorm.cli.app import AsJson, Excess, FeaturesName, app, need_folder
from onlynorm.cli.arguments import Density, Seed, parse_shape
from onlynorm.cli.help import FEATURES, OUTPUT, REBUILD, RUN, examples, flag, option
from onlynorm.cli.terminal import bar, make_table, print_facts, print_json, screen
from onlynorm.display import Figure
from onlynorm.features import Features, draw
from onlynorm.memory import memory_limit, need_memory
from onlynorm.solvers import spectrum

N_BINS = 12
N_COPIES = 3
"""Number of copies of the features in memory at once."""


@app.command(
    "spectrum",
    rich_help_panel=REBUILD,
    epilog=examples(
        "onlynorm spectrum 24,24",
        "onlynorm spectrum 16,16,3,3 --features er_sign --excess 1.1 --out figures",
        "onlynorm spectrum 30,30 --features ortho_cond --json",
    ),
)
def spectrum_command(
    shape: Annotated[
        str, typer.Argument(metavar="SHAPE", help="Shape of the target weight, as in 24,24 or 16,16,3,3.")
    ],
    features: FeaturesName = "he_normal",
    excess: Excess = None,
    density: Density = None,
    seed: Seed = 0,
    unit_length: Annotated[
        bool, flag(FEATURES, "Scale every feature to unit length first, as in solve.", "--unit-length/--as-drawn")
    ] = True,
    sweep: Annotated[bool, flag(RUN, "Also measure the condition number over the excess.")] = True,
    seeds: Annotated[int, option(RUN, "N", "Number of seeds at each excess of the sweep.", min=1, max=10_000)] = 3,
    out: Annotated[Path | None, option(OUTPUT, "FOLDER", "Folder for the figure, as SVG and PNG.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare singular values of features with their law, and show the double descent of the condition number."""
    if out is not None:
        need_folder(out, what="figures")
    drawn = draw(features, parse_shape(shape), excess=excess, density=density, seed=seed)
    _need_room(drawn)
    is_product = drawn.name == "kron_normal"
    excesses = [e for e in spectrum.EXCESSES if sweep and (e >= 1.0 if is_product else not drawn.is_structured)]
    # For a tiny layer several excesses give the same number of features: measure it once.
    counts = {draw(features, drawn.shape, excess=e, density=density).n_features: e for e in excesses}
    with bar("spectrum", 1 + len(counts), hidden=as_json) as step:
        step(drawn.name)
        found = spectrum.measure_spectrum(drawn, unit_length=unit_length)
        descent = None
        if excesses:
            chosen = range(seed, seed + seeds)
            descent = spectrum.sweep_excess(
                features, drawn.shape, excesses=tuple(counts.values()), seeds=chosen, density=density,
                unit_length=unit_length, progress=lambda done, total, message: step(message),
            )  # fmt: skip
    files = [] if out is None else [str(path) for path in _figure(found, descent).write(out)]
    if as_json:
        swept = None if descent is None else descent.as_dict()
        print_json(found.as_dict() | {"sweep": swept, "files": files})
        return
    _print_spectrum(found)
    if descent is not None:
        _print_descent(descent)
    for file in files:
        screen.print(f"figure: {escape(file)}", highlight=False)


def _need_room(features: Features) -> None:
    """Raises unless the frozen weights fit into memory; the Gram matrix is checked separately."""
    each = 1 if features.is_structured else features.rows + features.cols
    n_entries = features.n_features * each + (features.n_frozen if features.name == "kron_normal" else 0)
    need_memory(
        f"{features.n_features:,} {features.name} features",
        N_COPIES * 8 * n_entries,
        memory_limit(),
        "Use a smaller layer or a smaller excess.",
    )


def _print_spectrum(found: spectrum.Spectrum) -> None:
    facts = found.as_dict()
    histogram, law = facts.pop("histogram"), facts.pop("law", {})
    facts["shape"] = ",".join(map(str, facts["shape"]))
    facts |= {f"law_{name}": value for name, value in law.items()}
    scaled = "of unit length" if found.is_unit_length else "as drawn"
    if law and not found.prediction.is_known:
        facts["law_condition_number"] = f"unknown, at least {found.law_condition:.4g}"
    if law and found.follows_law is None:
        facts["law_follows"] = "too few singular values for a test"
    print_facts(f"Spectrum of {facts['features']} features {scaled}, entries of variance 1/equations", facts)
    bins, fractions, expected = found.histogram(N_BINS)
    grid = make_table("singular values", "fraction", "law" if "law" in histogram else "", "")
    widest = max(fractions.max(), 1e-12)
    for i, fraction in enumerate(fractions):
        bar_text = "#" * round(30 * fraction / widest)
        predicted = f"{100 * expected[i]:.1f} %" if found.has_law else ""
        grid.add_row(f"{bins[i]:.3f} to {bins[i + 1]:.3f}", f"{100 * fraction:.1f} %", predicted, bar_text)
    for column in grid.columns[1:3]:
        column.justify = "right"
    screen.print(grid)


def _print_descent(descent: spectrum.ExcessSweep) -> None:
    grid = make_table("excess", "features", "condition number (median)", "lowest", "highest", "law")
    for row in zip(descent.excesses, descent.n_features, descent.medians, descent.measured, descent.law, strict=True):
        excess, n_features, median, all_seeds, law = row
        grid.add_row(
            f"{excess:.4g}", f"{n_features:,}", f"{median:.4g}", f"{min(all_seeds):.4g}", f"{max(all_seeds):.4g}",
            "unknown" if math.isnan(law) else f"{law:.4g}",
        )  # fmt: skip
    screen.print(grid)
    screen.print(f"the condition number peaks at excess {descent.peak:.4g}", highlight=False)


def _figure(found: spectrum.Spectrum, descent: spectrum.ExcessSweep | None) -> Figure:
    """The histogram with the law, and condition numbers over the excess."""
    parts = [one.plot() for one in (found, descent) if one is not None]
    return Figure(
        [curve for part in parts for curve in part.curves], [panel for part in parts for panel in part.panels]
    )
