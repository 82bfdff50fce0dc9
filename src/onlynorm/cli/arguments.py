"""Shared arguments of commands: model, data and construction."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from onlynorm.cli import messages
from onlynorm.cli.help import CONSTRUCTION, FEATURES, MODEL_AND_DATA, completing, option
from onlynorm.data import DATA_SETS
from onlynorm.errors import MissingDataError, ShapeError, UnknownNameError, ValueRangeError
from onlynorm.frozen import FrozenOptions
from onlynorm.models import ACTIVATIONS, BUILT_IN
from onlynorm.reconstruction import Construction, Deep, LowRank, Multilayer, Ranges, Residual, Wide
from onlynorm.validate import need_choice

CONSTRUCTIONS: dict[str, type[Construction]] = {kind.name: kind for kind in (Deep, LowRank, Multilayer, Residual, Wide)}
FLAGS = ("construction", "features", "excess", "density", "seed", "activation", "tolerance")
"""Fields with an option of their own, which `--set` does not accept."""
RANGES = ("window", "margin", "precision")
Weights = Annotated[
    Path | None,
    option(MODEL_AND_DATA, "FILE", "File with the weights of the model: .safetensors, or a PyTorch state dict."),
]
Data = Annotated[
    str | None,
    option(
        MODEL_AND_DATA,
        "DATA",
        f"{', '.join(DATA_SETS)}, or a .safetensors or .npy file; default: that of the model.",
        choices=DATA_SETS,
    ),
]
Density = Annotated[
    float | None, option(FEATURES, "X", "Fraction of nonzero weights of sparse features (default 0.5; id_cond: all).")
]
Seed = Annotated[int, option(FEATURES, "N", "Seed of the frozen weights.")]
ActivationName = Annotated[
    str,
    option(
        CONSTRUCTION,
        "NAME",
        f"Activation between the frozen layers: {', '.join(ACTIVATIONS)} or none.",
        choices=(*ACTIVATIONS, "none"),
    ),
]
ConstructionName = Annotated[
    str,
    option(
        CONSTRUCTION,
        "NAME",
        f"How layers are rebuilt: {', '.join(CONSTRUCTIONS)}.",
        choices=CONSTRUCTIONS,
    ),
]
Fields = Annotated[
    list[str] | None,
    option(
        CONSTRUCTION,
        "NAME=VALUE",
        "Any other option of the construction or of the ranges, as in --set kernel=second.",
        "--set",
    ),
]


def need_model_name(spec: str) -> str:
    """Returns what is given as a model, unless it is the path of a file or folder, existing or not."""
    path = Path(spec)
    if spec in BUILT_IN or ":" in spec or is_shape(spec):
        return spec
    usual = "a built-in name such as resnet20, or package.module:factory"
    if path.suffix == ".py":
        there = "" if path.is_file() else ", and there is no such file"
        raise ValueRangeError(
            f"MODEL needs {usual}; got {spec}{there}. Write {path.stem}:NAME for a function NAME in {path.name}."
        )
    if path.is_dir():
        raise ValueRangeError(f"MODEL needs {usual}; got the folder {spec}. Data is passed as --data {spec}.")
    if path.is_file():
        raise ValueRangeError(f"MODEL needs {usual}; got the file {spec}. Weights are passed as --weights {spec}.")
    if path.suffix or path.name != spec:
        raise MissingDataError(
            f"MODEL needs {usual}; got {spec}, and there is no such file. A file of weights is passed as "
            "--weights FILE."
        )
    return spec


ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        autocompletion=completing(BUILT_IN),
        callback=need_model_name,
        help="A built-in name such as resnet20, or package.module:factory.",
    ),
]


@dataclass(frozen=True)
class Rebuilding:
    """The construction, ranges and storage selected by the options of a command."""

    construction: Construction
    ranges: Ranges
    storage: str


def parse_rebuilding(
    construction: str,
    fields: Iterable[str] | None,
    *,
    features: str,
    excess: float | None,
    density: float | None,
    activation: str,
) -> Rebuilding:
    """The construction with its options; omitted ones have their defaults."""
    kind = CONSTRUCTIONS[need_choice("construction", construction, CONSTRUCTIONS)]
    if activation not in (*ACTIVATIONS, "none"):
        raise UnknownNameError("activation", activation, (*ACTIVATIONS, "none"))
    made = None if activation == "none" else ACTIVATIONS[activation]()
    own = _set_fields(kind)
    given: dict[str, Any] = {}
    for field in fields or ():
        name, equals, text = field.partition("=")
        if not equals or name in FLAGS:
            raise ValueRangeError(
                f"--set needs NAME=VALUE with a field that has no option of its own; got {field!r}. Write --set "
                "kernel=second."
            )
        users = [other for other, one in CONSTRUCTIONS.items() if name in _set_fields(one)]
        if not users:
            raise UnknownNameError("field of --set", name, sorted(own))
        if name not in own:
            raise ValueRangeError(
                f"--set {name} needs --construction {' or '.join(users)}; got --construction {construction}. Omit "
                f"--set {name}."
            )
        given[name] = _value(name, text, own[name])
    ranges = Ranges(**{name: given.pop(name) for name in RANGES if name in given})
    storage = given.pop("storage", "dense")
    chosen = kind(features=features, excess=excess, density=density, activation=made, **given)
    return Rebuilding(chosen, ranges, storage)


def _set_fields(kind: type[Construction]) -> dict[str, Any]:
    """The type of every field that --set accepts for this construction."""
    own, ranges = typing.get_type_hints(kind), typing.get_type_hints(Ranges)
    without = (*FLAGS, *(field.name for field in dataclasses.fields(FrozenOptions)))
    names = [field.name for field in dataclasses.fields(kind) if field.name not in without]
    return {name: own[name] for name in names} | {name: ranges[name] for name in RANGES} | {"storage": str}


for _kind in CONSTRUCTIONS.values():
    messages.FIELDS.update(_set_fields(_kind))


def _value(name: str, text: str, hint: Any) -> Any:
    """The text as a number, a tuple or a string; raises unless it has the type of the field."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    value = tuple(value) if isinstance(value, list) else value
    kinds = typing.get_args(hint) or (hint,)
    fits = any(isinstance(value, (typing.get_origin(kind) or kind, *((int,) * (kind is float)))) for kind in kinds)
    if isinstance(value, bool) or not fits:
        words = str(hint).removeprefix("<class '").removesuffix("'>")
        raise ValueRangeError(f"--set {name} needs {words}; got {text!r}. Write a number, or a list such as [5,5].")
    return value


def is_shape(text: str) -> bool:
    """Whether the text is a shape: names of models do not start with a digit, a sign or a separator."""
    return not text or text[0] in "0123456789+-.,"


def parse_shape(text: str) -> tuple[int, ...]:
    """The sizes of a shape such as 64,64,3,3 or 512x512."""
    try:
        shape = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        raise ShapeError(f"a shape needs integers as in 64,64,3,3; got {text!r}. Separate them by commas.") from None
    if max(shape) >= 2**31:
        raise ShapeError(f"a shape needs sizes below 2^31; got {text!r}. Pass the shape of a weight.")
    return shape
