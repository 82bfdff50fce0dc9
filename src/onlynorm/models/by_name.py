"""Networks by name: built-in, or returned by a user function, with weights from a file."""

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

from onlynorm.data import SOURCES, find_data
from onlynorm.data.tensor_files import read_safetensors, read_torch
from onlynorm.errors import ConversionError, FormatError, MissingDataError, UnknownNameError
from onlynorm.models.plain import digits_cnn, mlp, vgg
from onlynorm.models.resnet import CifarResNet, ResNet
from onlynorm.models.vit import vit
from onlynorm.modules.walk import need_model
from onlynorm.seeds import own_randomness
from onlynorm.validate import need_path, need_text


@dataclass(frozen=True)
class BuiltIn:
    """A built-in network: its factory, input shape, default data set and trained weights.

    `shipped` is a file of weights next to this module; `weights` the name by which `get_data` gets them.
    """

    make: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    data: str
    weights: str = ""
    shipped: str = ""

    @property
    def is_trained(self) -> bool:
        """Whether there are trained weights for it, shipped or to download."""
        return bool(self.weights or self.shipped)


_CIFAR, _IMAGENET = (3, 32, 32), (3, 224, 224)
BUILT_IN: dict[str, BuiltIn] = {
    "digits_cnn": BuiltIn(digits_cnn, (64,), "digits", shipped="digits_cnn.safetensors"),
    "mlp": BuiltIn(functools.partial(mlp, (64, 32, 10)), (64,), "digits"),
    "mlp_bn": BuiltIn(functools.partial(mlp, (64, 128, 128, 10), norm="batch"), (64,), "digits"),
    "mlp_deep": BuiltIn(functools.partial(mlp, (64, *(64,) * 30, 10)), (64,), "digits"),
    "resnet18": BuiltIn(functools.partial(ResNet, 18), _IMAGENET, "cifar10"),
    "resnet20": BuiltIn(CifarResNet, _CIFAR, "cifar10", "resnet20"),
    "resnet32": BuiltIn(functools.partial(CifarResNet, 32), _CIFAR, "cifar10"),
    "resnet44": BuiltIn(functools.partial(CifarResNet, 44), _CIFAR, "cifar10"),
    "resnet50": BuiltIn(functools.partial(ResNet, 50), _IMAGENET, "cifar10"),
    "resnet56": BuiltIn(functools.partial(CifarResNet, 56), _CIFAR, "cifar10"),
    "vgg": BuiltIn(vgg, _CIFAR, "cifar10"),
    "vit": BuiltIn(vit, _CIFAR, "cifar10"),
}
"""Built-in networks by name."""


def load_model(spec: str, weights: Path | str | None = None) -> nn.Module:
    """The network of `make_model` in evaluation mode with weights from a file.

    Without a file, digits_cnn has the weights shipped with this library and resnet20 those of the data folder; other
    built-in networks have random weights.

    Examples:
        >>> from onlynorm.data import digits
        >>> from onlynorm.models import load_model
        >>> model, data = load_model("digits_cnn"), digits()
        >>> (model(data.test_inputs).argmax(1) == data.test_labels).float().mean().item() > 0.95
        True
    """
    network = make_model(spec)
    built_in = BUILT_IN.get(spec)
    if weights is None and built_in is not None and built_in.is_trained:
        weights = Path(__file__).with_name(built_in.shipped) if built_in.shipped else _find_weights(built_in.weights)
    return network if weights is None else load_weights(network, weights).eval()


def _find_weights(name: str) -> Path:
    """The file that `get_data` gets, or another one with the same weights."""
    source = SOURCES[name]
    own = f"{source.folder}/{source.files[0].name}"
    for file in (own, *source.others):
        with contextlib.suppress(MissingDataError):
            return find_data(file)
    return find_data(own, get=name)


def make_model(spec: str) -> nn.Module:
    """A network in evaluation mode, by built-in name or by "package.module:factory", which imports and runs code.

    Examples:
        >>> from onlynorm.models import make_model
        >>> make_model("torch.nn:ReLU")
        ReLU()
    """
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
    """The result of the function "package.module:factory", or the object of that name; None if it does not exist.

    The current folder is first on the import path. `what` names the needed object in errors.

    Examples:
        >>> from onlynorm.models import run_factory
        >>> run_factory("torch.nn:ReLU", what="a model")
        ReLU()
    """
    what = need_text("what", what, cure="Pass the name of the needed object, such as a model.")
    need_text(what, spec, cure="Pass package.module:factory.")
    module_name, _, name = spec.partition(":")
    try:
        with _current_folder_importable():
            found = getattr(importlib.import_module(module_name), name, None)
            return found() if callable(found) and not isinstance(found, nn.Module) else found
    except Exception as error:  # user code may raise anything
        raise ConversionError(
            f"{what} needs code that imports and runs; {spec:.100} gave {type(error).__name__}: {error!s:.500}. "
            "The factory is called without arguments, from the current folder."
        ) from error


def load_weights(model: nn.Module, path: Path | str) -> nn.Module:
    """Loads the weights of a safetensors or PyTorch file with matching names, without executing code.

    Examples:
        >>> import torch
        >>> from onlynorm.models import load_weights, mlp
        >>> torch.save(mlp((8, 4), seed=1).state_dict(), "weights.pt")
        >>> model = load_weights(mlp((8, 4)), "weights.pt")
        >>> torch.equal(model[0].weight, mlp((8, 4), seed=1)[0].weight)
        True
    """
    model = need_model("load_weights", model)
    weights = _read_weights(need_path("load_weights", path))
    own = model.state_dict()
    counters = {name for name in own if name.endswith("num_batches_tracked")}
    missing, unknown = own.keys() - weights.keys() - counters, weights.keys() - own.keys()
    if missing or unknown:
        raise FormatError(
            f"the file needs the network's tensors; got {len(missing)} missing ({', '.join(sorted(missing)[:3])}), "
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
                f"the file needs {name} as a dense {own[name].dtype} tensor; got {value.dtype}, {value.layout} on "
                f"{value.device}. Save network.state_dict()."
            )
    model.load_state_dict(weights, strict=False)
    return model


def _read_weights(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a safetensors file or, with any other extension, of a PyTorch state dict."""
    if not path.is_file():
        raise MissingDataError(f"weights need a file; got none at {path}. Check the path.")
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    found = read_torch(path)
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise FormatError(f"{path.name} needs a state dict of tensors; got others. Save network.state_dict().")
    named = {str(name).removeprefix("module."): value for name, value in found.items()}  # as DataParallel saves it
    if len(named) < len(found):
        raise FormatError(f"{path.name} needs one tensor per name; some exist with and without the prefix 'module.'.")
    return named


@contextlib.contextmanager
def _current_folder_importable() -> Iterator[None]:
    """Adds the current folder to the import path, as `python -m` does."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")
