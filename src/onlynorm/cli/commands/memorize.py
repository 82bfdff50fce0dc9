"""`onlynorm memorize`: builds a network that fits every training point exactly, without training."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from onlynorm.cli.app import AsJson, app, need_folder
from onlynorm.cli.help import CONSTRUCT, DATA, NETWORK, OUTPUT, completing, examples, option
from onlynorm.cli.memorize_data import ToMemorize, find_sample
from onlynorm.cli.terminal import counter, errors, make_table, print_facts, print_json, screen, spinner
from onlynorm.data import DATA_SETS
from onlynorm.display import ENDINGS, Figure
from onlynorm.errors import StorageError, UnknownNameError, ValueRangeError
from onlynorm.files import save
from onlynorm.identity import (
    PROJECTIONS,
    REAL_LIMIT,
    SIZES,
    Memorizer,
    OffSample,
    measure_off_sample,
    memorize,
    relative_errors,
)


@app.command(
    "memorize",
    rich_help_panel=CONSTRUCT,
    epilog=examples(
        "onlynorm memorize digits",
        "onlynorm memorize digits --points 500 --projection principal --noise 0.001 --noise 0.01 "
        "--out digits.safetensors --figure noise.png",
        "onlynorm memorize table.csv --labels species",
        "onlynorm memorize fashion_mnist --points 10000 --json",
        note="`table.csv` is a table of your own, with a column `species`. The last one needs "
        "`onlynorm data get fashion_mnist` first.",
    ),
)
def memorize_command(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            autocompletion=completing(DATA_SETS),
            help=f"{', '.join(DATA_SETS)}, or a file: .csv, .npy (with --labels), or .npz or .safetensors with inputs "
            "and labels (integers) or targets (real numbers).",
        ),
    ] = "digits",
    labels: Annotated[
        str | None,
        option(
            DATA,
            "NAME",
            "Label column of a .csv file (default: the last one), or the .npy file with the labels.",
        ),
    ] = None,
    points: Annotated[int | None, option(DATA, "N", "Number of training points; all by default.", min=1)] = None,
    noise: Annotated[
        list[float] | None,
        option(DATA, "X", "Noise level relative to the median distance from the mean; can be repeated."),
    ] = None,
    width: Annotated[int | None, option(NETWORK, "N", "Width of the blocks (default 4 log n).")] = None,
    projection: Annotated[
        str,
        option(
            NETWORK,
            "NAME",
            f"{' or '.join(PROJECTIONS)}; principal gives larger class radii.",
            choices=PROJECTIONS,
        ),
    ] = "random",
    seed: Annotated[int, option(NETWORK, "N", "Seed of the projection, the class vectors and the noise.", min=0)] = 0,
    out: Annotated[Path | None, option(OUTPUT, "FILE", "Save the network to this .safetensors file.")] = None,
    figure: Annotated[
        Path | None, option(OUTPUT, "FILE", "Plot the accuracy under noise to this .png, .pdf or .svg file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Build a residual network that fits every training point exactly, and evaluate it on other inputs.

    Nothing is trained. The network is evaluated at every training point. Exits with 1 if a class is wrong, or if a real
    output differs by more than 1e-6 of the largest target.
    """
    for name, file in (("--out", out), ("--figure", figure)):
        _need_file(name, file)
    if figure is not None and figure.suffix.lower().removeprefix(".") not in ENDINGS:
        raise UnknownNameError("ending of a figure", figure.suffix or figure.name, [f".{one}" for one in ENDINGS])
    with spinner("memorize", hidden=as_json) as status:
        status(f"loading {data}")
        sample = find_sample(data, points, labels)
    if sample.is_real and (noise or figure):
        raise ValueRangeError("--noise and --figure need class labels; got real targets. Omit them.")
    with counter("thresholds", hidden=as_json) as progress:
        network = memorize(
            sample.inputs, sample.targets, n_classes=sample.n_classes, width=width, projection=projection, seed=seed,
            progress=progress,
        )  # fmt: skip
    started = time.perf_counter()
    with spinner("memorize", hidden=as_json) as status:
        status(f"evaluating {len(sample.inputs):,} training points")
        facts = _facts(sample, network)
    facts["check_seconds"] = time.perf_counter() - started
    measured = None if sample.is_real else _measure(network, sample, noise, seed, hidden=as_json)
    if out is not None:
        save(network, out)
        facts |= {"file": str(out), "bytes": out.stat().st_size}
    if figure is not None and measured is not None:
        _figure(measured).save(figure)
        facts["figure"] = str(figure)
    if as_json:
        print_json(facts | ({} if measured is None else {"off_sample": measured.as_dict()}))
    else:
        print_facts(f"{sample.name}, memorized", facts)
        if measured is not None:
            _print_measured(measured)
    if not facts["is_fitted"]:
        errors.print("A training point is wrong: try a larger --width, and inputs scaled to about one.")
        raise typer.Exit(1)


def _need_file(option: str, path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir():
        raise StorageError(f"{option} needs a file name; {path} is a folder. Try {path / 'memorizer.safetensors'}.")
    need_folder(path.parent, what="files", option=option)


def _facts(sample: ToMemorize, network: Memorizer) -> dict[str, Any]:
    """The properties of the network and its errors on the training points."""
    made = network.facts
    assert made is not None
    facts: dict[str, Any] = {
        "n_points": made.n_points, "n_merged": made.n_merged, "n_inputs": network.n_inputs,
        "n_outputs": made.n_outputs, "width": made.width, "n_blocks": made.n_blocks, "n_parameters": made.n_parameters,
        "constant": made.constant, "smallest_gap": made.smallest_gap,
        "n_tilted": made.n_tilted, "rounding": made.rounding, "projection": made.projection,
        "seed": made.seed, "build_seconds": made.seconds,
    }  # fmt: skip
    if sample.is_real:
        with torch.no_grad():
            outputs = network(sample.inputs)
        wanted = sample.targets.double().reshape(len(sample.targets), -1)
        relative = float(relative_errors(outputs, wanted).amax())
        return facts | {
            "max_error": float((outputs - wanted).abs().amax()), "relative_error": relative,
            "is_fitted": relative <= REAL_LIMIT,
        }  # fmt: skip
    wrong = int((network.classify(sample.inputs) != sample.targets).sum())
    return facts | {"n_wrong": wrong, "is_fitted": not wrong}


def _measure(
    network: Memorizer, sample: ToMemorize, noise: list[float] | None, seed: int, *, hidden: bool
) -> OffSample:
    with counter("off the sample", hidden=hidden) as progress:
        return measure_off_sample(
            network, sample.inputs, sample.targets, held_out=sample.held_out, sizes=noise or SIZES, seed=seed,
            progress=progress,
        )  # fmt: skip


def _print_measured(measured: OffSample) -> None:
    grid = make_table("other inputs", "correct %", "silent %", "wrong %")
    rows = [(f"noise level {size:g}", answers) for size, answers in measured.noise]
    if measured.held_out is not None:
        rows.append((f"{measured.n_held_out:,} held-out samples", measured.held_out))
    for name, answers in rows:
        grid.add_row(escape(name), *(f"{100 * fraction:.2f}" for fraction in dataclasses.astuple(answers)))
    screen.print()
    screen.print(grid)
    notes = [
        f"{what}: at least {low:.1e}, median {middle:.1e}."
        for what, (low, middle, _) in (
            ("Certified radius within which the class of a training point is constant", measured.class_radius),
            ("Distance of a training point to the nearest activation boundary", measured.activation_distance),
        )
    ]
    if measured.held_out is not None:
        notes.append(f"Held-out accuracy of always predicting the most frequent class: {100 * measured.chance:.2f} %.")
    notes.append("Levels and distances are relative to the median distance from the mean. Silent: all outputs zero.")
    for note in notes:
        screen.print(note, highlight=False)


def _figure(measured: OffSample) -> Figure:
    drawn = measured.plot()
    if not drawn.curves:
        raise ValueRangeError("--figure needs a noise level above zero; got none. Pass --noise 0.01, or omit it.")
    return drawn
