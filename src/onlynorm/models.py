"""Reference networks, and networks by name: built in, or made by a function of your own."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.data import find_data, seeded
from onlynorm.errors import ConversionError, FormatError, MissingDataError, ShapeError, UnknownNameError

VGG_STAGES = ((64,) * 2, (64,) * 2, (64,) * 4, (64,) * 4, (64,) * 5)
"""17 convolutions of 64 channels, the size of the targets of burkholz2024, which does not say where they pool."""


def mlp(widths: Sequence[int], *, activation: Callable[[], nn.Module] = nn.ReLU, seed: int = 0) -> nn.Sequential:
    """A fully connected network through the given widths, inputs first, with activations in between."""
    if len(widths) < 2 or min(widths) < 1:
        raise ShapeError(f"mlp needs at least two widths, all positive; got {tuple(widths)}. Try (64, 32, 10).")
    layers: list[nn.Module] = []
    with own_randomness(seed):
        for n_in, n_out in itertools.pairwise(widths):
            layers += [nn.Linear(n_in, n_out), activation()]
    return nn.Sequential(*layers[:-1])


def vgg(
    stages: Sequence[Sequence[int]] = VGG_STAGES,
    *,
    activation: Callable[[], nn.Module] = nn.ReLU,
    norm: bool = True,
    n_classes: int = 10,
    in_channels: int = 3,
    image_size: int = 32,
    seed: int = 0,
) -> nn.Sequential:
    """A plain convolutional network: 3 x 3 convolutions through the widths of each stage, images halved in between.

    Every convolution is followed by a batch norm (unless `norm` is false) and the activation; the last stage by the
    mean over positions and one linear layer.
    """
    widths = [width for stage in stages for width in stage]
    if not stages or not all(stages) or min(*widths, n_classes, in_channels) < 1:
        raise ShapeError(
            f"vgg needs stages of positive widths, with positive in_channels and n_classes; got {tuple(stages)}, "
            f"{in_channels} and {n_classes}. Try [[8, 8], [16, 16]]."
        )
    if image_size < 2 ** (len(stages) - 1):
        raise ShapeError(
            f"vgg halves its images {len(stages) - 1} times and needs {2 ** (len(stages) - 1)} pixels or more; got "
            f"image_size={image_size}. Take fewer stages."
        )
    layers: list[nn.Module] = []
    n_in = in_channels
    with own_randomness(seed):
        for place, stage in enumerate(stages):
            layers += [nn.MaxPool2d(2)] if place else []
            for n_out in stage:
                layers += [nn.Conv2d(n_in, n_out, 3, padding=1, bias=not norm)]
                layers += [nn.BatchNorm2d(n_out), activation()] if norm else [activation()]
                n_in = n_out
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_in, n_classes)]
    return nn.Sequential(*layers)


class CifarBlock(nn.Module):
    """Two 3 x 3 convolutions with norms; the shortcut drops every second pixel and pads new channels with zeros."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_out)
        self.stride, self.new_channels = stride, n_out - n_in

    def forward(self, x: Tensor) -> Tensor:
        """The block's output for a batch of images."""
        made = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        if self.new_channels:
            half = self.new_channels // 2
            x = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, self.new_channels - half))
        return torch.relu(made + x)


class CifarResNet(nn.Module):
    """The residual network for 32 x 32 images with 6 n + 2 layers in three stages of width, 2 width and 4 width."""

    def __init__(self, depth: int = 20, *, n_classes: int = 10, width: int = 16) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ShapeError(f"a CIFAR ResNet needs a depth of 6 n + 2; got {depth}. Try 20, 32, 44 or 56.")
        n_blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(
                CifarBlock(n_in, n_out, 1 if n_in == n_out else 2),
                *(CifarBlock(n_out, n_out, 1) for _ in range(n_blocks - 1)),
            )
            for n_in, n_out in ((width, width), (width, 2 * width), (2 * width, 4 * width))
        )
        self.linear = nn.Linear(4 * width, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images (n, 3, 32, 32)."""
        x = torch.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "celu": nn.CELU, "elu": nn.ELU, "gelu": nn.GELU, "hardsigmoid": nn.Hardsigmoid, "hardswish": nn.Hardswish,
    "hardtanh": nn.Hardtanh, "leaky_relu": nn.LeakyReLU, "logsigmoid": nn.LogSigmoid, "mish": nn.Mish,
    "relu": nn.ReLU, "relu6": nn.ReLU6, "selu": nn.SELU, "sigmoid": nn.Sigmoid, "silu": nn.SiLU,
    "softplus": nn.Softplus, "tanh": nn.Tanh,
}  # fmt: skip
"""Activations by name."""


@dataclass(frozen=True)
class BuiltIn:
    """A network by name: how to make it, what one input looks like, its usual data set and its trained weights."""

    make: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    data: str
    weights: str = ""


BUILT_IN: dict[str, BuiltIn] = {
    "mlp": BuiltIn(functools.partial(mlp, (64, 32, 10)), (64,), "digits"),
    "resnet20": BuiltIn(CifarResNet, (3, 32, 32), "cifar10", "weights/resnet20_cifar10.safetensors"),
    "resnet32": BuiltIn(functools.partial(CifarResNet, 32), (3, 32, 32), "cifar10"),
    "resnet44": BuiltIn(functools.partial(CifarResNet, 44), (3, 32, 32), "cifar10"),
    "resnet56": BuiltIn(functools.partial(CifarResNet, 56), (3, 32, 32), "cifar10"),
    "vgg": BuiltIn(vgg, (3, 32, 32), "cifar10"),
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
    if ":" not in spec:
        if spec not in BUILT_IN:
            raise UnknownNameError("model", spec, (*BUILT_IN, "package.module:factory"))
        with own_randomness(0):
            return BUILT_IN[spec].make().eval()
    module_name, _, name = spec.partition(":")
    try:
        with _current_folder_importable():
            found = getattr(importlib.import_module(module_name), name, None)
            made = found() if callable(found) and not isinstance(found, nn.Module) else found
    except Exception as error:  # whatever the user's code raises belongs beside the name of that code
        raise ConversionError(
            f"a model needs code that imports and runs; {spec} gave {type(error).__name__}: {error}. "
            "The factory is called without arguments, from the current folder."
        ) from error
    if not isinstance(made, nn.Module):
        what = "no such name" if found is None else f"a {type(made).__name__}"
        raise ConversionError(
            f"a model needs a function without arguments that returns a torch Module; got {what} from {spec}. "
            "Write package.module:factory."
        )
    return made.eval()


def load_weights(network: nn.Module, path: Path | str) -> nn.Module:
    """The network with the weights of a safetensors or PyTorch file, every name matched; nothing in it can run."""
    weights = _read_weights(Path(path))
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
    network.load_state_dict(weights, strict=False)
    return network


def _read_weights(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a safetensors file or, with any other ending, of a PyTorch file that holds nothing else."""
    if not path.is_file():
        raise MissingDataError(f"weights need a file; there is none at {path}. Check the path.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, ValueError, EOFError, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else "no more"
        raise FormatError(
            f"{path.name} needs to be a whole file of tensors; got {type(error).__name__}: {first}. Save "
            "network.state_dict(): whole pickled networks are not read, because they could run code."
        ) from error
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise FormatError(f"{path.name} needs a state dict of tensors; got others. Save network.state_dict().")
    return {str(name).removeprefix("module."): value for name, value in found.items()}  # as DataParallel saves it


@contextlib.contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Inside, torch draws from this seed; outside, the global generator has not moved."""
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(seeded(seed).get_state())  # torch.manual_seed would reach the generators of GPUs too
        yield


@contextlib.contextmanager
def _current_folder_importable() -> Iterator[None]:
    """As with `python -m`, for the console script too."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")
