"""`onlynorm diagnose`: signals and gradients in every layer, and whether plain SGD is likely to train the network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from torch import Tensor, nn

from onlynorm.cli.app import AsJson, app, need_folder
from onlynorm.cli.arguments import ModelName, Weights
from onlynorm.cli.datasets import AnyData, ImageSize, find_batch
from onlynorm.cli.help import MODEL_AND_DATA, OUTPUT, RUN, TRAIN, examples, option
from onlynorm.cli.terminal import make_table, print_json, screen, spinner
from onlynorm.display import ENDINGS
from onlynorm.errors import ConversionError, OnlynormError, ShapeError, StorageError, ValueRangeError
from onlynorm.models import load_model
from onlynorm.rank import MODES, Diagnosis, diagnose

TONES = {"healthy": "green", "suspect": "yellow", "unhealthy": "red"}
SPARED = ("of signal", "units", "soft rank", "dead")
"""Columns that are omitted first on a narrow terminal."""


@app.command(
    "diagnose",
    rich_help_panel=TRAIN,
    epilog=examples(
        "onlynorm diagnose mlp_deep --html diagnosis.html",
        "onlynorm diagnose digits_cnn --batch 32 --plot depth.svg --json",
        "onlynorm diagnose resnet20",
        note="The last one needs `onlynorm data get resnet20 cifar10` first.",
    ),
)
def diagnose_command(
    model: ModelName,
    data: AnyData = None,
    weights: Weights = None,
    batch: Annotated[int, option(MODEL_AND_DATA, "N", "Number of random samples.", min=2)] = 128,
    image_size: ImageSize = None,
    mode: Annotated[
        str,
        option(RUN, "NAME", f"{' or '.join(MODES)}: which statistics batch norms use.", choices=MODES),
    ] = "train",
    seed: Annotated[int, option(RUN, "N", "Seed of the samples and of random inputs.", min=0)] = 0,
    html: Annotated[Path | None, option(OUTPUT, "FILE", "Write a self-contained HTML page to this file.")] = None,
    plot: Annotated[Path | None, option(OUTPUT, "FILE", "Write the figure to this file, .svg or .png.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the signal and its gradients in every layer, and whether plain SGD is likely to train the network.

    Runs one forward and backward pass; the network is not changed. Exits with 1 if the score is below one half: plain
    SGD is then unlikely to train the network, Adam may.
    """
    _need_files(html, plot)
    with spinner("diagnose", hidden=as_json) as status:
        status("loading model and data")
        network = load_model(model, weights)
        inputs, targets = find_batch(data, model, n_samples=batch, image_size=image_size, seed=seed)
        status(f"{model} on {len(inputs)} samples")
        found = _diagnose(network, inputs, targets, model=model, mode=mode, seed=seed)
    if html is not None:
        found.to_html(html, title=f"Diagnosis of {model}")
    if plot is not None:
        found.plot().save(plot)
    written = {name: str(path) for name, path in (("html", html), ("plot", plot)) if path is not None}
    if as_json:
        print_json({"model": model} | found.as_dict() | written)
    else:
        _print(found)
        for path in written.values():
            screen.print(f"{escape(path)} is written.", highlight=False)
    if not found.is_trainable:
        raise typer.Exit(1)


def _diagnose(
    network: nn.Module, inputs: Tensor, targets: Tensor | None, *, model: str, mode: str, seed: int
) -> Diagnosis:
    try:
        return diagnose(network, inputs, targets, mode=mode, seed=seed)
    except ConversionError as error:
        cause = error.__cause__  # what the model itself raised
        if cause is None or isinstance(cause, OnlynormError):
            raise
        first = str(cause).partition("\n")[0] or type(cause).__name__
        raise ShapeError(
            f"{model} needs samples and labels that fit; got samples of shape {tuple(inputs.shape[1:])} ({first}). "
            "Pass other --data, or another --image-size."
        ) from error


def _need_files(html: Path | None, plot: Path | None) -> None:
    """Raises unless the files can be written; called before a computation starts."""
    for name, path in (("--html", html), ("--plot", plot)):
        if path is None:
            continue
        if path.is_dir():
            raise StorageError(f"{name} needs a file name; {path} is a folder. Try {path / 'diagnosis.html'}.")
        need_folder(path.parent, what="diagnoses", option=name)
    if plot is not None and plot.suffix.removeprefix(".") not in ENDINGS:
        raise ValueRangeError(f"--plot needs a name that ends in .svg, .png or .pdf; got {plot}. Try depth.svg.")


def _print(found: Diagnosis) -> None:
    verdict = found.verdict
    tone = TONES[verdict.word]
    screen.print(f"[bold {tone}]{verdict.word}[/], score {verdict.score:.2f} of 1", highlight=False)
    for finding in verdict.findings:
        screen.print(f"- {escape(finding)}", highlight=False)
    if verdict.advice:
        screen.print(escape(verdict.advice), highlight=False)
    shown = _fitting(found.rows(), screen.width)
    grid = make_table(*(Diagnosis.columns[index] for index in shown))
    for index, column in zip(shown, grid.columns, strict=True):
        column.justify = "left" if Diagnosis.columns[index] in ("signal", "kind") else "right"
    for row in found.rows():
        grid.add_row(*(escape(row[index]) for index in shown))
    screen.print(grid)
    if len(shown) < len(Diagnosis.columns):
        omitted = [name for index, name in enumerate(Diagnosis.columns) if index not in shown]
        screen.print(f"columns omitted on a narrow terminal: {', '.join(omitted)}; see --html", highlight=False)
    for note in found.notes():
        screen.print(escape(note), highlight=False)


def _fitting(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Indices of the columns that fit into the width; columns in `SPARED` are omitted first."""
    wide = [2 + max(map(len, column)) for column in zip(Diagnosis.columns, *rows, strict=True)]
    shown = list(range(len(Diagnosis.columns)))
    for name in SPARED:
        if sum(wide[index] for index in shown) > width:
            shown.remove(Diagnosis.columns.index(name))
    return shown
