"""`onlynorm verify`: compares a rebuilt network in a file with its target."""

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
from onlynorm.models import make_model
from onlynorm.reconstruction import collapse, load
from onlynorm.reconstruction.verify import compare
from onlynorm.solvers.prepare import need_tolerance


@app.command(
    "verify",
    epilog="Examples: `onlynorm verify net.safetensors --model resnet20`, "
    "`onlynorm verify net.safetensors --model mlp --weights mlp.pt --dtype float64 --collapsed`",
)
def verify_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file that `onlynorm reconstruct` wrote.")],
    model: Annotated[str, typer.Option(help="The target: a built-in name, or package.module:factory.")],
    weights: Weights = None,
    data: Data = None,
    images: Annotated[
        int | None, typer.Option(min=1, help="Test samples to compare on (up to 500 if left out).")
    ] = None,
    dtype: Dtype = "float32",
    collapsed: Annotated[bool, typer.Option("--collapsed", help="Turn blocks back into ordinary layers.")] = False,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest relative error (1e-2 in float32, 1e-8 in float64 if left out).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Do the target and the network in a file compute the same function? Exits with 1 if they do not."""
    kind = parse_dtype(dtype)
    wanted = SAME[dtype] if tolerance is None else need_tolerance(tolerance)
    target = load_target(model, weights).to(kind)
    split = find_split(data, model)
    test = first_samples(split.test_inputs, images, usual=500)
    with spinner("verify", hidden=as_json) as say:
        say("making the frozen weights from the seed")
        network = load(file, into=make_model(model))
        network = (collapse(network) if collapsed else network).to(kind).eval()
    with counter("verifying", hidden=as_json) as step:
        comparison = compare(target, network, inputs=test, labels=split.test_labels[: len(test)], step=step)
    facts = comparison_facts(comparison, wanted)
    if as_json:
        print_json(facts)
    else:
        print_facts(f"{file} beside {model}, {'collapsed, ' if collapsed else ''}in {dtype}", facts)
    exit_unless_same(comparison, wanted, as_json)
