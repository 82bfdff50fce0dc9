"""`onlynorm factorize`: a matrix as a product of layers near the identity."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from onlynorm.cli.app import AsJson, app, need_folder
from onlynorm.cli.help import CONSTRUCT, DATA, METHOD, OUTPUT, examples, option
from onlynorm.cli.terminal import make_table, print_facts, print_json, screen, spinner
from onlynorm.data import matrices
from onlynorm.errors import ValueRangeError
from onlynorm.files import save
from onlynorm.identity import factorize, random_matrix
from onlynorm.memory import readable

NAMES = ("auto", "root", "log", "polar", "spiral", "svd")
"""Names of the methods."""


@app.command(
    "factorize",
    rich_help_panel=CONSTRUCT,
    epilog=examples(
        "onlynorm factorize --random 64 --depth 32",
        "onlynorm factorize --random 8 --depth 256 --method svd --out factors.safetensors --json",
        note="A matrix of your own is a file: weight.npy, or net.safetensors with --name.",
    ),
)
def factorize_command(
    matrix: Annotated[
        Path | None, typer.Argument(metavar="MATRIX", help="A square matrix: .npy, .safetensors or .csv.")
    ] = None,
    random: Annotated[
        int | None, option(DATA, "N", "Use a random matrix of this size instead of a file.", min=1)
    ] = None,
    seed: Annotated[int, option(DATA, "N", "Seed of the random matrix.")] = 0,
    name: Annotated[str | None, option(DATA, "NAME", "Name of the tensor in a .safetensors file.")] = None,
    depth: Annotated[int, option(METHOD, "N", "Number of layers I + A.", min=1)] = 64,
    method: Annotated[
        str,
        option(
            METHOD,
            "NAME",
            "auto (smallest norms), root, log, polar, spiral, or svd (the paper's).",
            choices=NAMES,
        ),
    ] = "auto",
    tolerance: Annotated[
        float | None, option(METHOD, "X", "Maximum relative error of the product; fails if it is larger.")
    ] = None,
    out: Annotated[Path | None, option(OUTPUT, "FILE", "Save the factors to this .safetensors file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Factorize a matrix into layers I + A with small A; A decreases with depth.

    A negative determinant needs one more dimension from depth 2. For a singular matrix the error names the nearest
    invertible one.
    """
    if (matrix is None) == (random is None):
        raise ValueRangeError(
            f"factorize needs either a file or --random D; got {'neither' if matrix is None else 'both'}. "
            "Try --random 8."
        )
    if out is not None:
        need_folder(out.parent, what="factors")
    target = (
        random_matrix(random, seed=seed) if random is not None else matrices.read_matrix(Path(matrix or ""), name=name)
    )
    what = f"a random matrix, {random} x {random}" if random is not None else str(matrix)
    with spinner("factorize", hidden=as_json) as status:
        status(f"{what} in {depth} layers")
        found = factorize(target, depth, method=method, tolerance=tolerance)
    if out is not None:
        save(found, out)
    if as_json:
        print_json(found.as_dict() | {"out": None if out is None else str(out)})
        return
    print_facts(
        f"{what} as {depth} layers I + A",
        {
            "method": found.method,
            "largest |A|": found.max_norm,
            "the paper's bound" + ("" if found.is_promised else ", for greater depth"): found.bound,
            "lower bound": found.least_norm,
            "largest |log singular value|": found.stretch,
            "relative error of the product": found.product_error,
            "different layers": ", ".join(
                f"{run.count} rotated" if run.rotation is not None else f"{run.count} equal" for run in found.runs
            ),
            "usage": found.usage,
            "seconds": found.seconds,
        },
    )
    grid = make_table("method", "largest |A|", "obstacle")
    for one in found.options:
        norm = "-" if one.obstacle else f"{one.max_norm:.4g}"
        grid.add_row(one.method, norm, escape(one.obstacle) or "-")
    screen.print(grid)
    screen.print(escape(found.reason), highlight=False)
    if out is not None:
        screen.print(f"{escape(str(out))} ({readable(out.stat().st_size)}): onlynorm.load reads it.")
