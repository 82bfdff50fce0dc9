"""`onlynorm memorize`: a network that fits every training point exactly, built and not trained."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from onlynorm.cli.app import AsJson, app, need_folder
from onlynorm.cli.memorize_data import ToMemorize, find_sample
from onlynorm.cli.terminal import counter, errors, make_table, print_facts, print_json, screen
from onlynorm.data import DATA_SETS
from onlynorm.display import Curve, Figure, Panel
from onlynorm.display.figure import ENDINGS
from onlynorm.errors import StorageError, UnknownNameError, ValueRangeError
from onlynorm.identity.memorization.generalization import SIZES, OffSample, measure_off_sample
from onlynorm.identity.memorization.memorize import PROJECTIONS, memorize
from onlynorm.identity.memorization.memorizer import Memorizer, save_memorizer
from onlynorm.identity.memorization.points import REAL_LIMIT, relative_errors


@app.command(
    "memorize",
    epilog="Examples: `onlynorm memorize digits`, `onlynorm memorize fashion_mnist --points 10000 --projection "
    "principal --out fashion.safetensors --figure noise.png`, "
    "`onlynorm memorize own.npz --noise 0.001 --noise 0.01 --json`",
)
def memorize_command(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help=f"{', '.join(DATA_SETS)}, or a .npz or .safetensors file with inputs and labels (whole "
            "numbers) or targets (real numbers).",
        ),
    ] = "digits",
    points: Annotated[int | None, typer.Option(min=1, help="So many training points; all if left out.")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the blocks; 4 log n if left out.")] = None,
    projection: Annotated[
        str, typer.Option(help=f"{' or '.join(PROJECTIONS)}: the latter leaves larger class radii.")
    ] = "random",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the projection, the class vectors and the noise.")] = 0,
    noise: Annotated[
        list[float] | None,
        typer.Option(help="Size of noise to try, over the median distance from the mean; several may be given."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The network as a sealed .safetensors file.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Draw the answers under noise: .png, .pdf or .svg.")] = None,
    as_json: AsJson = False,
) -> None:
    """Build a residual network that fits every training point exactly, and measure what it does anywhere else.

    Nothing is trained. The network is evaluated at every training point: a wrong class, or a real output that is off by
    more than 1e-6 of the largest target, is an error with exit code 1.
    """
    for file in (out, figure):
        _need_file(file)
    if figure is not None and figure.suffix.lower().removeprefix(".") not in ENDINGS:
        raise UnknownNameError("ending of a figure", figure.suffix or figure.name, [f".{one}" for one in ENDINGS])
    sample = find_sample(data, points)
    if sample.is_real and (noise or figure):
        raise ValueRangeError("--noise and --figure need classes; got real targets. Leave them out.")
    with counter("thresholds", hidden=as_json) as step:
        network = memorize(
            sample.inputs, sample.targets, n_classes=sample.n_classes, width=width, projection=projection, seed=seed,
            progress=step,
        )  # fmt: skip
    started = time.perf_counter()
    facts = _facts(sample, network)
    facts["seconds of checking"] = time.perf_counter() - started
    measured = None if sample.is_real else _measure(network, sample, noise, seed, hidden=as_json)
    if out is not None:
        save_memorizer(network, out)
        facts |= {"file": str(out), "bytes": out.stat().st_size}
    if figure is not None and measured is not None:
        _draw(measured).save(figure)
        facts["figure"] = str(figure)
    if as_json:
        print_json(facts | ({} if measured is None else {"off the sample": dataclasses.asdict(measured)}))
    else:
        print_facts(f"{sample.name}, memorized", facts)
        if measured is not None:
            _print_measured(measured)
    if not facts["all training points right"]:
        errors.print("A training point is wrong: try a larger --width, and inputs scaled to about one.")
        raise typer.Exit(1)


def _need_file(path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir():
        raise StorageError(f"a file needs a name; {path} is a folder. Try {path / 'memorizer.safetensors'}.")
    need_folder(path.parent, what="files")


def _facts(sample: ToMemorize, network: Memorizer) -> dict[str, Any]:
    """What was built, checked at every training point."""
    made = network.facts
    assert made is not None
    facts: dict[str, Any] = {
        "points": made.n_points, "repeated ones merged": made.n_merged, "inputs": network.n_inputs,
        "outputs": made.n_outputs, "width": made.width, "blocks": made.n_blocks, "parameters": made.n_parameters,
        "parameters over n log n + r^2": made.constant, "smallest gap": made.smallest_gap,
        "directions tilted apart": made.n_tilted, "rounding may cost": made.rounding, "projection": made.projection,
        "seed": made.seed, "seconds of building": made.seconds,
    }  # fmt: skip
    if sample.is_real:
        with torch.no_grad():
            outputs = network(sample.inputs)
        wanted = sample.targets.double().reshape(len(sample.targets), -1)
        relative = float(relative_errors(outputs, wanted).amax())
        return facts | {
            "largest error": float((outputs - wanted).abs().amax()), "over the largest target": relative,
            "all training points right": relative <= REAL_LIMIT,
        }  # fmt: skip
    wrong = int((network.classify(sample.inputs) != sample.targets).sum())
    return facts | {"wrong training points": wrong, "all training points right": not wrong}


def _measure(
    network: Memorizer, sample: ToMemorize, noise: list[float] | None, seed: int, *, hidden: bool
) -> OffSample:
    with counter("off the sample", hidden=hidden) as step:
        return measure_off_sample(
            network, sample.inputs, labels=sample.targets, held_out=sample.held_out, sizes=noise or SIZES, seed=seed,
            progress=step,
        )  # fmt: skip


def _print_measured(measured: OffSample) -> None:
    grid = make_table("off the sample", "right %", "silent %", "wrong %")
    rows = [(f"noise of size {size:g}", answers) for size, answers in measured.noise]
    if measured.held_out is not None:
        rows.append((f"{measured.n_held_out:,} held-out samples", measured.held_out))
    for name, answers in rows:
        grid.add_row(escape(name), *(f"{100 * fraction:.2f}" for fraction in dataclasses.astuple(answers)))
    screen.print()
    screen.print(grid)
    notes = [
        f"{what}: at least {low:.1e}, median {middle:.1e}."
        for what, (low, middle, _) in (
            ("Radius within which a training point certainly keeps its class", measured.class_radius),
            ("Distance of a training point from the nearest activation boundary", measured.activation_distance),
        )
    ]
    if measured.held_out is not None:
        notes.append(f"The most frequent class alone would be {100 * measured.chance:.2f} % right on held-out samples.")
    notes.append("Sizes and distances are over the median distance of a point from the mean. Silent: all outputs zero.")
    for note in notes:
        screen.print(note, highlight=False)


def _draw(measured: OffSample) -> Figure:
    """The answers under noise, with the class radii of the training points."""
    rows = sorted((size, answers) for size, answers in measured.noise if size > 0.0)
    if not rows:
        raise ValueRangeError("--figure needs noise above zero to draw; got none. Pass --noise 0.01, or leave it out.")
    sizes = [size for size, _ in rows]
    curves = [
        Curve(name, sizes, [getattr(answers, name) for _, answers in rows], "line+points")
        for name in ("right", "silent", "wrong")
    ]
    low, middle, _ = measured.class_radius
    for radius, name in ((middle, "median class radius"), (low, "smallest class radius")):
        if 0.0 < radius < math.inf:
            curves.append(Curve(name, (radius, radius), (0.0, 1.0), style="law"))
    if measured.held_out is not None:
        level = measured.held_out.right
        curves.append(Curve("right on held-out samples", (sizes[0], sizes[-1]), (level, level), style="law"))
    x_label, y_label = "length of the noise over the median distance from the mean", "fraction of the inputs"
    return Figure(curves, [Panel("", "A memorizer off its sample", x_label, y_label, x_log=True)])
