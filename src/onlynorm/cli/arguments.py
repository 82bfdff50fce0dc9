"""Arguments of commands about networks: the model, the data, and the recipe."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from onlynorm.data import DATA_SETS
from onlynorm.errors import ShapeError, UnknownNameError, ValueRangeError
from onlynorm.models import ACTIVATIONS
from onlynorm.reconstruction import Recipe, constructions

Weights = Annotated[
    Path | None, typer.Option(help="File with the model's weights: .safetensors, or a PyTorch state dict.")
]
Data = Annotated[
    str | None,
    typer.Option(help=f"{', '.join(DATA_SETS)}, or a .safetensors or .npy file; the model's own if left out."),
]
Density = Annotated[
    float | None, typer.Option(help="Share of the weights that sparse features keep (0.5 if left out; id_cond: all).")
]
Seed = Annotated[int, typer.Option(help="Seed of the frozen weights.")]
ActivationName = Annotated[
    str, typer.Option(help=f"What stands between the frozen layers: {', '.join(ACTIVATIONS)} or none.")
]
ConstructionName = Annotated[str, typer.Option(help=f"How layers are rebuilt: {', '.join(sorted(constructions()))}.")]
Fields = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any other field of the recipe, as in --set kernel=second."),
]


def recipe_choices(fields: Iterable[str] | None, *, activation: str, **choices: Any) -> dict[str, Any]:
    """The fields of a recipe as `reconstruct` and `plan` take them; what was left out keeps its default."""
    made = {name: value for name, value in choices.items() if value is not None}
    if activation != "none":
        if activation not in ACTIVATIONS:
            raise UnknownNameError("activation", activation, (*ACTIVATIONS, "none"))
        made["activation"] = ACTIVATIONS[activation]()
    for field in fields or ():
        name, equals, text = field.partition("=")
        if not equals or name in ("activation", *choices):
            raise ValueRangeError(
                f"--set needs NAME=VALUE with a field that has no option of its own; got {field!r}. Write --set "
                "kernel=second."
            )
        made[name] = _value(name, text)
    return made


def _value(name: str, text: str) -> Any:
    """A number, a list or a word, as the field of that name takes it; other names are left to the recipe to refuse."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    value = tuple(value) if isinstance(value, list) else value
    hint = typing.get_type_hints(Recipe).get(name, object)
    kinds = typing.get_args(hint) or (hint,)
    fits = any(isinstance(value, (typing.get_origin(kind) or kind, *((int,) * (kind is float)))) for kind in kinds)
    if isinstance(value, bool) or not fits:
        words = str(hint).removeprefix("<class '").removesuffix("'>")
        raise ValueRangeError(f"--set {name} needs {words}; got {text!r}. Write a number, or a list such as [5,5].")
    return value


def is_shape(text: str) -> bool:
    """Whether the text is meant as a shape: no name of a model begins with a digit, a sign or a separator."""
    return not text or text[0] in "0123456789+-.,"


def parse_shape(text: str) -> tuple[int, ...]:
    """The whole numbers of a shape such as 64,64,3,3 or 512x512."""
    try:
        shape = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        raise ShapeError(
            f"a shape needs whole numbers as in 64,64,3,3; got {text!r}. Separate them by commas."
        ) from None
    if max(shape) >= 2**31:
        raise ShapeError(f"a shape needs sizes below 2^31; got {text!r}. No layer is larger.")
    return shape
