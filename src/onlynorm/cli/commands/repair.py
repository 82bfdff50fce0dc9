"""`onlynorm repair`: repairs the initial weights of a deep network that cannot be trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
from rich.markup import escape
from torch import Tensor, nn

from onlynorm.cli.app import AsJson, app, need_folder
from onlynorm.cli.arguments import ModelName, Weights
from onlynorm.cli.datasets import AnyData, find_batch
from onlynorm.cli.help import METHOD, MODEL_AND_DATA, OUTPUT, TRAIN, examples, flag, option
from onlynorm.cli.terminal import WIDE, make_table, percent, print_json, screen, spinner
from onlynorm.errors import ShapeError, StorageError
from onlynorm.files import save
from onlynorm.models import load_model
from onlynorm.rank import MAX_RATIO, METHODS, repair


@app.command(
    "repair",
    rich_help_panel=TRAIN,
    epilog=examples(
        "onlynorm repair mlp_deep --out repaired.safetensors",
        "onlynorm repair mlp_deep --method paper --steps 75",
        "onlynorm repair vgg --method lsuv --json",
        note="The last one needs `onlynorm data get cifar10` first.",
    ),
)
def repair_command(
    model: ModelName,
    data: AnyData = None,
    weights: Weights = None,
    batch: Annotated[int, option(MODEL_AND_DATA, "N", "Number of random training samples.", min=2)] = 256,
    method: Annotated[
        str,
        option(
            METHOD,
            "NAME",
            f"auto (mirrored or rank, if needed), {', '.join(METHODS)}.",
            choices=("auto", *METHODS),
        ),
    ] = "auto",
    steps: Annotated[
        int | None, option(METHOD, "N", "Steps of a rank ascent per layer; the default depends on the method.", min=0)
    ] = None,
    target_rank: Annotated[
        float | None,
        option(METHOD, "X", "Target rank of the methods rank and whole (default: square root of the width)."),
    ] = None,
    max_ratio: Annotated[
        float, option(METHOD, "X", "Maximum growth of gradients from the last hidden layer to the first.")
    ] = MAX_RATIO,
    seed: Annotated[int, option(METHOD, "N", "Seed of the samples and of new weights.", min=0)] = 0,
    force: Annotated[
        bool, flag(METHOD, "Also change tied weights, and a network that looks trained.", "--force")
    ] = False,
    out: Annotated[Path | None, option(OUTPUT, "FILE", "Write the repaired weights to this .safetensors file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Repair the initial weights of a deep network, and show rank, scale and gradient of every layer before and after.

    Run this before training: a network that looks trained is not changed without --force. Layers that cannot be
    repaired are listed with their fraction of the parameters. Load the file of --out with onlynorm.load(file,
    like=model).
    """
    if out is not None:
        if out.is_dir():
            raise StorageError(f"--out needs a file name; {out} is a folder. Try {out / 'repaired.safetensors'}.")
        need_folder(out.parent, what="weights")
    with spinner("repair", hidden=as_json) as status:
        status("loading model and data")
        network = load_model(model, weights)
        inputs, targets = find_batch(data, model, n_samples=batch, seed=seed)
        _need_run(network, inputs, model)
        status(f"{model} on {len(inputs)} samples")
        result = repair(
            network, inputs, targets, method=method, n_steps=steps, target_rank=target_rank,
            max_ratio=max_ratio, seed=seed, force=force,
        )  # fmt: skip
    if out is not None:
        save(result, out)
    if as_json:
        print_json({"model": model, **result.as_dict(), **({} if out is None else {"file": str(out)})})
        return
    grid = make_table(*result.columns)
    grid.columns[0].no_wrap = True
    if screen.width < WIDE:
        grid.padding = (0, 1, 0, 0)
    for row in result.rows():
        grid.add_row(*map(escape, row))
    screen.print(grid)
    screen.print(escape(str(result)), highlight=False)
    for one in result.unseen:
        fraction = one.n_parameters / max(result.n_parameters, 1)
        screen.print(f"not seen: {escape(str(one))}, {percent(fraction)} of the parameters", highlight=False)
    if out is not None:
        is_structural = result.method in METHODS and METHODS[result.method].is_structural
        use = "load it with onlynorm.load(file, like=model)" if is_structural else "pass it as --weights"
        screen.print(f"{escape(str(out))} is written: {use}.", highlight=False)


@torch.no_grad()
def _need_run(network: nn.Module, inputs: Tensor, model: str) -> None:
    """Raises unless the model accepts the samples."""
    try:
        network(inputs[:2])
    except Exception as error:  # whatever the model raises is shown with the shape of the samples
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ShapeError(
            f"{model} needs samples of a fitting shape; got {tuple(inputs.shape[1:])} ({reason}). Pass other --data."
        ) from error
