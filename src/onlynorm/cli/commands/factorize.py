"""`onlynorm factorize`: a matrix as many layers near the identity."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from onlynorm.cli.app import AsJson, app, need_folder
from onlynorm.cli.terminal import make_table, print_facts, print_json, screen, spinner
from onlynorm.data.matrices import read_matrix
from onlynorm.errors import ValueRangeError
from onlynorm.identity import factorize, random_matrix, save_factors
from onlynorm.memory import readable


@app.command(
    "factorize",
    epilog="Examples: `onlynorm factorize --random 64 --depth 32`, `onlynorm factorize weight.npy --depth 256 --out "
    "factors.safetensors`, `onlynorm factorize net.safetensors --name layer.weight --method svd --json`",
)
def factorize_command(
    matrix: Annotated[
        Path | None, typer.Argument(metavar="MATRIX", help="A square matrix: .npy, .safetensors or .csv.")
    ] = None,
    random: Annotated[int | None, typer.Option(min=1, help="A random matrix of this size in place of a file.")] = None,
    depth: Annotated[int, typer.Option(min=1, help="Number of layers I + A.")] = 64,
    method: Annotated[
        str, typer.Option(help="auto (smallest norms), root, log, polar, spiral, or svd, which is the paper's.")
    ] = "auto",
    tolerance: Annotated[float | None, typer.Option(help="Relative product error to reach, or else fail.")] = None,
    name: Annotated[str | None, typer.Option(help="Which tensor of a .safetensors file.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random matrix.")] = 0,
    out: Annotated[Path | None, typer.Option(help="File for the factors, sealed safetensors.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a matrix as a product of layers I + A with A small: the deeper, the smaller.

    A negative determinant takes one dimension more from depth 2 on. A singular matrix is refused, and the message
    names the nearest one that is not.
    """
    if (matrix is None) == (random is None):
        raise ValueRangeError(
            f"factorize needs a file or --random D, one of the two; got {'neither' if matrix is None else 'both'}. "
            "Try --random 8."
        )
    if out is not None:
        need_folder(out.parent, what="factors")
    target = random_matrix(random, seed=seed) if random is not None else read_matrix(Path(matrix or ""), name=name)
    what = f"a random matrix, {random} x {random}" if random is not None else str(matrix)
    with spinner("factorize", hidden=as_json) as say:
        say(f"{what} in {depth} layers")
        found = factorize(target, depth, method=method, tolerance=tolerance)
    if out is not None:
        save_factors(found, out)
    if as_json:
        print_json(found.as_dict() | {"out": None if out is None else str(out)})
        return
    print_facts(
        f"{what} as {depth} layers I + A",
        {
            "method": found.method,
            "largest |A|": found.max_norm,
            "the paper's bound" + ("" if found.is_promised else ", for greater depth"): found.bound,
            "none can be below": found.least_norm,
            "largest |log singular value|": found.stretch,
            "relative error of the product": found.product_error,
            "different layers": ", ".join(
                f"{run.count} turning" if run.rotation is not None else f"{run.count} equal" for run in found.runs
            ),
            "in use": found.usage,
            "seconds": found.seconds,
        },
    )
    grid = make_table("method", "largest |A|", "obstacle")
    for option in found.options:
        norm = "-" if option.obstacle else f"{option.max_norm:.4g}"
        grid.add_row(option.method, norm, escape(option.obstacle) or "-")
    screen.print(grid)
    screen.print(escape(found.reason), highlight=False)
    if out is not None:
        screen.print(f"{escape(str(out))} ({readable(out.stat().st_size)}): onlynorm.identity.load_factors reads it.")
