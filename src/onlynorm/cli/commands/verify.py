"""`onlynorm verify`: compares a rebuilt network in a file with its target model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onlynorm.cli.app import AsJson, app
from onlynorm.cli.arguments import Data, Weights
from onlynorm.cli.commands.reconstruct import (
    SAME,
    Dtype,
    comparison_facts,
    exit_unless_same,
    first_samples,
    load_target,
    parse_dtype,
)
from onlynorm.cli.datasets import find_split
from onlynorm.cli.terminal import counter, print_facts, print_json, spinner
from onlynorm.files import load
from onlynorm.models import make_model
from onlynorm.reconstruction import collapse, compare
from onlynorm.solvers import need_tolerance


@app.command(
    "verify",
    epilog="Examples: `onlynorm reconstruct digits_cnn --out net.safetensors`, then "
    "`onlynorm verify net.safetensors --model digits_cnn` and "
    "`onlynorm verify net.safetensors --model digits_cnn --dtype float64 --collapsed`",
)
def verify_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file written by `onlynorm reconstruct`.")],
    model: Annotated[str, typer.Option(help="The target: a built-in name, or package.module:factory.")],
    weights: Weights = None,
    data: Data = None,
    images: Annotated[int | None, typer.Option(min=1, help="Number of test samples (default: up to 500).")] = None,
    dtype: Dtype = "float32",
    collapsed: Annotated[bool, typer.Option("--collapsed", help="Convert blocks to ordinary layers first.")] = False,
    tolerance: Annotated[
        float | None, typer.Option(help="Maximum relative error (default 1e-2 in float32, 1e-8 in float64).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check that the network in a file computes the same function as the target; exits with 1 if not."""
    kind = parse_dtype(dtype)
    wanted = SAME[dtype] if tolerance is None else need_tolerance(tolerance)
    target = load_target(model, weights).to(kind)
    split = find_split(data, model)
    test = first_samples(split.test_inputs, images, default=500)
    with spinner("verify", hidden=as_json) as status:
        status("generating the frozen weights")
        network = load(file, like=make_model(model))
        network = (collapse(network) if collapsed else network).to(kind).eval()
    with counter("verifying", hidden=as_json) as progress:
        comparison = compare(target, network, test, labels=split.test_labels[: len(test)], progress=progress)
    facts = comparison_facts(comparison, wanted)
    if as_json:
        print_json(facts)
    else:
        print_facts(f"{file} compared with {model}, {'collapsed, ' if collapsed else ''}in {dtype}", facts)
    exit_unless_same(comparison, wanted, as_json)
