"""`onlynorm verify`: compares a rebuilt network in a file with its target model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onlynorm.cli.app import AsJson, app
from onlynorm.cli.arguments import Data, Weights, need_model_name
from onlynorm.cli.commands.reconstruct import (
    SAME,
    Dtype,
    comparison_facts,
    exit_unless_same,
    first_samples,
    load_target,
    parse_dtype,
    print_rounding,
)
from onlynorm.cli.datasets import find_split
from onlynorm.cli.help import MODEL_AND_DATA, REBUILD, RUN, examples, flag, option
from onlynorm.cli.terminal import counter, print_facts, print_json, spinner
from onlynorm.files import load
from onlynorm.models import BUILT_IN, make_model
from onlynorm.reconstruction import collapse, compare
from onlynorm.solvers import need_tolerance


@app.command(
    "verify",
    rich_help_panel=REBUILD,
    epilog=examples(
        "onlynorm reconstruct digits_cnn --out net.safetensors",
        "onlynorm verify net.safetensors --model digits_cnn",
        "onlynorm verify net.safetensors --model digits_cnn --dtype float64 --collapsed",
    ),
)
def verify_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file written by `onlynorm reconstruct`.")],
    model: Annotated[
        str,
        option(
            MODEL_AND_DATA,
            "MODEL",
            "The target: a built-in name, or package.module:factory.",
            choices=BUILT_IN,
            callback=need_model_name,
        ),
    ],
    weights: Weights = None,
    data: Data = None,
    images: Annotated[
        int | None, option(MODEL_AND_DATA, "N", "Number of test samples (default: up to 500).", min=1)
    ] = None,
    dtype: Dtype = "float32",
    collapsed: Annotated[bool, flag(RUN, "Convert blocks to ordinary layers first.", "--collapsed")] = False,
    tolerance: Annotated[
        float | None, option(RUN, "X", "Maximum relative error (default 1e-2 in float32, 1e-8 in float64).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check that the network in a file computes the same function as the target; exits with 1 if not."""
    kind = parse_dtype(dtype)
    wanted = SAME[dtype] if tolerance is None else need_tolerance(tolerance)
    with spinner("verify", hidden=as_json) as status:
        status("loading model and data")
        target = load_target(model, weights).to(kind)
        split = find_split(data, model)
        test = first_samples(split.test_inputs, images, default=500, option="--images")
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
        print_rounding(comparison, dtype)
    exit_unless_same(comparison, wanted, as_json)
