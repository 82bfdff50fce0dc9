"""`onlynorm plan`: predicted width, memory and time of a network or a layer."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from onlynorm.cli.app import AsJson, Excess, FeaturesName, app
from onlynorm.cli.arguments import (
    ActivationName,
    ConstructionName,
    Data,
    Density,
    Fields,
    Seed,
    is_shape,
    need_model_name,
    parse_rebuilding,
    parse_shape,
)
from onlynorm.cli.datasets import find_split
from onlynorm.cli.help import CONSTRUCTION, MODEL_AND_DATA, REBUILD, completing, examples, option
from onlynorm.cli.terminal import make_table, print_facts, print_json, print_plan, screen, spinner
from onlynorm.errors import ShapeError
from onlynorm.features import draw
from onlynorm.memory import memory_budget, readable
from onlynorm.models import BUILT_IN, make_model
from onlynorm.reconstruction import plan
from onlynorm.solvers import choose, need_tolerance, spectrum


@app.command(
    "plan",
    rich_help_panel=REBUILD,
    epilog=examples(
        "onlynorm plan resnet20 --excess 1.1",
        "onlynorm plan 64,64,3,3 --tolerance 1e-12",
        "onlynorm plan onlynorm.models:digits_cnn --input 64 --set width=minimum",
    ),
)
def plan_command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|SHAPE",
            autocompletion=completing(BUILT_IN),
            callback=need_model_name,
            help="A built-in name, package.module:factory, or a shape as in 64,64,3,3.",
        ),
    ],
    data: Data = None,
    input_shape: Annotated[
        str | None, option(MODEL_AND_DATA, "SHAPE", "Shape of one input instead of data, as in 3,224,224.", "--input")
    ] = None,
    calibration: Annotated[
        int, option(MODEL_AND_DATA, "N", "Number of calibration samples, as for reconstruct.", min=1)
    ] = 64,
    features: FeaturesName = "he_normal",
    excess: Excess = None,
    density: Density = None,
    seed: Seed = 0,
    construction: ConstructionName = "wide",
    activation: ActivationName = "relu",
    fields: Fields = None,
    tolerance: Annotated[float | None, option(CONSTRUCTION, "X", "Maximum relative residual (default 1e-10).")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict widths, memory, condition numbers and time for a network or a layer.

    Memory and seconds of a network are those of the whole reconstruction. Exits with 1 if the memory is not sufficient.
    """
    if tolerance is not None:
        need_tolerance(tolerance)
    if is_shape(target):
        _plan_shape(parse_shape(target), features, excess, density, tolerance, as_json)
        return
    how = parse_rebuilding(
        construction, fields, features=features, excess=excess, density=density, activation=activation
    )
    with spinner("plan", hidden=as_json) as status:
        status(target)
        planned = plan(
            make_model(target), _one_input(target, data, input_shape), how.construction, seed=seed,
            tolerance=tolerance, storage=how.storage, n_samples=calibration,
        )  # fmt: skip
    if as_json:
        print_json(planned.as_dict())
    else:
        print_plan(target, planned)
    if not planned.is_feasible:
        raise typer.Exit(1)


def _one_input(model: str, data: str | None, shape: str | None) -> Tensor:
    """A batch of one sample: from the data, or zeros of the given shape."""
    if shape is not None:
        sizes = parse_shape(shape)
        if min(sizes) < 1:
            raise ShapeError(f"--input needs positive sizes, as in 3,224,224; got {shape!r}. Omit the batch dimension.")
        return torch.zeros(1, *sizes)
    if data is None and model in BUILT_IN:
        return torch.zeros(1, *BUILT_IN[model].input_shape)
    return find_split(data, model).train_inputs[:1]


def _plan_shape(
    shape: tuple[int, ...],
    features: str,
    excess: float | None,
    density: float | None,
    tolerance: float | None,
    as_json: bool,
) -> None:
    """Prints the plan of one layer, with the predictions for every method."""
    drawn = draw(features, shape, excess=excess, density=density)
    n_entries = drawn.n_frozen if drawn.name == "kron_normal" else drawn.n_features * (drawn.rows + drawn.cols)
    facts: dict[str, Any] = {
        "features": drawn.name,
        "equations": drawn.equations,
        "n_features": drawn.n_features,
        "excess": drawn.excess,
        "n_norm_parameters": drawn.n_features,
        "n_frozen": n_entries,
        "feature_bytes": 8 * n_entries,
        "dense_matrix_bytes": 8 * drawn.n_features * drawn.equations,
    }
    if drawn.is_structured:
        condition = spectrum.predict_features(drawn).condition if drawn.name == "kron_normal" else 1.0
        facts |= {"method": "closed form", "condition_number": condition, "is_known": True, "reason": "known inverse"}
        options = []
    else:
        prediction = spectrum.predict_features(drawn)
        choice = choose(
            drawn.rows, drawn.cols, drawn.n_features, tolerance=need_tolerance(tolerance), memory=memory_budget(),
            condition=max(1.0, prediction.condition),
        )  # fmt: skip
        facts |= {"method": choice.method, "condition_number": choice.condition, "is_known": prediction.is_known}
        facts |= {"reason": choice.reason}
        options = [o for o in choice.options if o.method != "svd"]
    if as_json:
        print_json(facts | {"options": [option.as_dict() for option in options]})
        return
    print_facts(f"Plan for a layer of shape {tuple(drawn.shape)}", facts)
    if options:
        grid = make_table("method", "predicted seconds", "additional memory", "iterations", "obstacle")
        for o in options:
            grid.add_row(o.method, f"{o.seconds:.2g}", readable(o.memory), str(o.iterations), o.obstacle or "-")
        screen.print(grid)
