"""`onlynorm repair`: new initial weights for a deep network that cannot be trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape
from torch import Tensor, nn

from onlynorm.cli.app import AsJson, app, need_folder
from onlynorm.cli.arguments import Weights
from onlynorm.cli.datasets import AnyData, find_batch
from onlynorm.cli.terminal import make_table, print_json, screen, spinner
from onlynorm.errors import ShapeError, StorageError
from onlynorm.models import load_model
from onlynorm.rank.repairs.repair import MAX_RATIO, METHODS, Repaired, repair
from onlynorm.storage import write_tensors

KIND, FORMAT = "onlynorm-repaired", 1
COLUMNS = ("layer", "rank before", "after", "scale before", "after", "gradient before", "after")


@app.command(
    "repair",
    epilog="Examples: `onlynorm repair my.models:deep --data fashion_mnist --out repaired.safetensors`, "
    "`onlynorm repair vgg --method lsuv --json`, "
    "`onlynorm repair my.models:deep --data fashion_mnist --method paper --steps 75`",
)
def repair_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A built-in name such as vgg, or package.module:factory.")
    ],
    data: AnyData = None,
    weights: Weights = None,
    method: Annotated[str, typer.Option(help=f"auto (mirrored or rank, if needed), {', '.join(METHODS)}.")] = "auto",
    batch: Annotated[int, typer.Option(min=2, help="Number of training samples, drawn by seed.")] = 256,
    steps: Annotated[
        int | None, typer.Option(min=0, help="Steps of a rank ascent per layer; by default that of the method.")
    ] = None,
    target_rank: Annotated[
        float | None, typer.Option(help="Target of rank and whole; by default the square root of the width.")
    ] = None,
    max_ratio: Annotated[
        float, typer.Option(help="Largest growth of gradients from the last hidden layer to the first.")
    ] = MAX_RATIO,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples and of weights that are drawn.")] = 0,
    force: Annotated[
        bool, typer.Option("--force", help="Also change tied weights, and a network that looks trained.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the repaired weights to this .safetensors file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Repair the initial weights of a deep network, and show rank, scale and gradient of every layer before and after.

    Run this before training: a network that looks trained is not changed without --force. Layers that no repair can
    change are listed with their fraction of the parameters. The file holds the tensors of the network
    under their names; after batch_norm and residual those of the network with the inserted modules.
    """
    if out is not None:
        if out.is_dir():
            raise StorageError(
                f"--out needs the name of a file; {out} is a folder. Try {out / 'repaired.safetensors'}."
            )
        need_folder(out.parent, what="weights")
    network = load_model(model, weights)
    inputs, targets = find_batch(data, model, n_samples=batch, seed=seed)
    _need_run(network, inputs, model)
    with spinner("repair", hidden=as_json) as say:
        say(f"{model} on {len(inputs)} samples")
        result = repair(
            network, inputs, targets, method=method, n_steps=steps, target_rank=target_rank,
            max_ratio=max_ratio, seed=seed, force=force,
        )  # fmt: skip
    if out is not None:
        _write(result, out, model)
    if as_json:
        print_json({"model": model, **result.as_dict(), **({} if out is None else {"file": str(out)})})
        return
    grid = make_table(*COLUMNS)
    for row in result.rows():
        grid.add_row(*map(escape, row))
    screen.print(grid)
    screen.print(escape(str(result)), highlight=False)
    for one in result.unseen:
        fraction = one.n_parameters / max(result.n_parameters, 1)
        screen.print(f"not seen: {escape(str(one))}, {fraction:.1%} of the parameters", highlight=False)
    if out is not None:
        screen.print(f"{escape(str(out))} is written: pass it as --weights.", highlight=False)


@torch.no_grad()
def _need_run(network: nn.Module, inputs: Tensor, model: str) -> None:
    """Raises unless the model accepts the samples."""
    try:
        network(inputs[:2])
    except Exception as error:  # whatever the model raises is shown with the shape of the samples
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ShapeError(
            f"{model} needs samples it can take; got {tuple(inputs.shape[1:])} ({reason}). Pass other --data."
        ) from error


def _write(result: Repaired, out: Path, model: str) -> None:
    tensors = {name: value.detach().cpu().clone() for name, value in result.model.state_dict().items()}
    write_tensors(out, tensors, kind=KIND, format=FORMAT, document={"model": model, **result.as_dict()})
