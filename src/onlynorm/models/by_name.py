"""Networks by name: built in, or made by a function of your own, with the weights of a file."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.data import find_data
from onlynorm.data.tensor_files import read_safetensors, read_torch
from onlynorm.errors import ConversionError, FormatError, MissingDataError, UnknownNameError
from onlynorm.models.plain import mlp, vgg
from onlynorm.models.resnet import CifarResNet, ResNet
from onlynorm.models.vit import vit
from onlynorm.modules.validate import need_model
from onlynorm.seeds import own_randomness
from onlynorm.validate import need_path, need_text


@dataclass(frozen=True)
class BuiltIn:
    """A network by name: how to make it, what one input looks like, its usual data set and its trained weights."""

    make: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    data: str
    weights: str = ""


_CIFAR, _IMAGENET = (3, 32, 32), (3, 224, 224)
BUILT_IN: dict[str, BuiltIn] = {
    "mlp": BuiltIn(functools.partial(mlp, (64, 32, 10)), (64,), "digits"),
    "mlp_bn": BuiltIn(functools.partial(mlp, (64, 128, 128, 10), norm="batch"), (64,), "digits"),
    "resnet18": BuiltIn(functools.partial(ResNet, 18), _IMAGENET, "cifar10"),
    "resnet20": BuiltIn(CifarResNet, _CIFAR, "cifar10", "weights/resnet20_cifar10.safetensors"),
    "resnet32": BuiltIn(functools.partial(CifarResNet, 32), _CIFAR, "cifar10"),
    "resnet44": BuiltIn(functools.partial(CifarResNet, 44), _CIFAR, "cifar10"),
    "resnet50": BuiltIn(functools.partial(ResNet, 50), _IMAGENET, "cifar10"),
    "resnet56": BuiltIn(functools.partial(CifarResNet, 56), _CIFAR, "cifar10"),
    "vgg": BuiltIn(vgg, _CIFAR, "cifar10"),
    "vit": BuiltIn(vit, _CIFAR, "cifar10"),
}
"""Networks the command line knows by name."""


def load_model(spec: str, weights: Path | str | None = None) -> nn.Module:
    """The network of `make_model` in evaluation mode with the weights of a file, or its own if it has any.

    Without a file, resnet20 takes its trained weights from the data folder; other built-in networks stay as drawn.
    """
    network = make_model(spec)
    built_in = BUILT_IN.get(spec)
    if weights is None and built_in is not None and built_in.weights:
        weights = find_data(built_in.weights)
    return network if weights is None else load_weights(network, weights).eval()


def make_model(spec: str) -> nn.Module:
    """A network in evaluation mode: a built-in name, or "package.module:factory", which imports and runs that code."""
    need_text("a model", spec, cure="Pass a built-in name, or package.module:factory.")
    if ":" not in spec:
        if spec not in BUILT_IN:
            raise UnknownNameError("model", spec, (*BUILT_IN, "package.module:factory"))
        with own_randomness(0):
            return BUILT_IN[spec].make().eval()
    made = run_factory(spec, what="a model")
    if not isinstance(made, nn.Module):
        what = "no such name" if made is None else f"a {type(made).__name__}"
        raise ConversionError(
            f"a model needs a function without arguments that returns a torch Module; got {what} from {spec}. "
            "Write package.module:factory."
        )
    return made.eval()


def run_factory(spec: str, *, what: str) -> Any:
    """What the code "package.module:factory" makes: the result of a function, or the object of that name, or None.

    The current folder comes first where modules are looked for. `what` is the thing that is needed, for the error.
    """
    what = need_text("what", what, cure="Name the thing that is needed, such as a model.")
    need_text(what, spec, cure="Pass package.module:factory.")
    module_name, _, name = spec.partition(":")
    try:
        with _current_folder_importable():
            found = getattr(importlib.import_module(module_name), name, None)
            return found() if callable(found) and not isinstance(found, nn.Module) else found
    except Exception as error:  # whatever the user's code raises belongs beside the name of that code
        raise ConversionError(
            f"{what} needs code that imports and runs; {spec:.100} gave {type(error).__name__}: {error!s:.500}. "
            "The factory is called without arguments, from the current folder."
        ) from error


def load_weights(network: nn.Module, path: Path | str) -> nn.Module:
    """The network with the weights of a safetensors or PyTorch file, every name matched; nothing in it can run."""
    network = need_model("load_weights", network)
    weights = _read_weights(need_path("load_weights", path))
    own = network.state_dict()
    counters = {name for name in own if name.endswith("num_batches_tracked")}
    missing, unknown = own.keys() - weights.keys() - counters, weights.keys() - own.keys()
    if missing or unknown:
        raise FormatError(
            f"the file needs the network's own tensors; got {len(missing)} missing ({', '.join(sorted(missing)[:3])}), "
            f"{len(unknown)} unknown ({', '.join(sorted(unknown)[:3])}). Is it a file for this architecture?"
        )
    for name, value in weights.items():
        if value.shape != own[name].shape:
            raise FormatError(
                f"the file needs {name} of shape {tuple(own[name].shape)}; got {tuple(value.shape)}. Is it a file for "
                "this architecture?"
            )
        is_alike = value.is_floating_point() == own[name].is_floating_point() and not value.is_complex()
        if not is_alike or value.layout != torch.strided or value.is_meta or value.is_quantized:
            raise FormatError(
                f"the file needs {name} as {own[name].dtype} in ordinary memory; got {value.dtype}, {value.layout} on "
                f"{value.device}. Save network.state_dict()."
            )
    network.load_state_dict(weights, strict=False)
    return network


def _read_weights(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a safetensors file or, with any other ending, of a PyTorch file that holds nothing else."""
    if not path.is_file():
        raise MissingDataError(f"weights need a file; there is none at {path}. Check the path.")
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    found = read_torch(path)
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise FormatError(f"{path.name} needs a state dict of tensors; got others. Save network.state_dict().")
    named = {str(name).removeprefix("module."): value for name, value in found.items()}  # as DataParallel saves it
    if len(named) < len(found):
        raise FormatError(f"{path.name} needs one tensor per name; some are there with and without 'module.' before.")
    return named


@contextlib.contextmanager
def _current_folder_importable() -> Iterator[None]:
    """As with `python -m`, for the console script too."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")
