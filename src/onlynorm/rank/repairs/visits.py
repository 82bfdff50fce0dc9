"""`Route.visit`: one forward pass in which every layer is changed just before its first call.

A layer is a Linear or a convolution (including transposed ones and Hugging Face's Conv1D) that the model calls as a
module, with any operations between layers. Later layers receive the outputs of changed layers, and a layer that is
called twice is changed once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onlynorm.errors import ConversionError, OnlynormError
from onlynorm.modules.untouched import failed_on, untouched
from onlynorm.rank.coverage import Unseen, find_unseen, is_conv1d, is_layer, weight_of
from onlynorm.rank.measures import as_matrix

LayerModule: TypeAlias = Any
"""A module for which `coverage.is_layer` is True: it has a weight, and a bias that may be None."""
MAX_COLUMNS = 4096
"""Maximum number of columns for computing a rank; of more, evenly spaced ones are used."""


@dataclass(frozen=True)
class RouteLayer:
    """A layer that the model calls: its first name, its index in the order of calls, and its shapes.

    A fixed layer is not changed, because its weight is tied to that of another module.
    """

    name: str
    module: LayerModule
    number: int
    n_layers: int
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    is_fixed: bool = False

    @property
    def weight(self) -> Tensor:
        """The weight as (out, in, kernel...); changing it in place changes the layer."""
        return weight_of(self.module)

    @property
    def is_first(self) -> bool:
        """Whether it is the first layer."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether it is the last layer."""
        return self.number == self.n_layers - 1


Change = Callable[[RouteLayer, Tensor], None]
"""Changes a layer in place, given its input."""


@dataclass(frozen=True)
class Route:
    """The layers of a model in the order of their first calls on a batch, and the modules that cannot be changed."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    layers: tuple[RouteLayer, ...]
    unseen: tuple[Unseen, ...] = ()

    @property
    def hidden(self) -> tuple[RouteLayer, ...]:
        """All layers except the last."""
        return self.layers[:-1]

    @property
    def free(self) -> tuple[RouteLayer, ...]:
        """The layers that may be changed."""
        return tuple(layer for layer in self.layers if not layer.is_fixed)

    def visit(self, change: Change) -> None:
        """Runs the model once and applies `change`, without gradients, to every free layer before its first call."""
        done: set[int] = set()
        hooks = []
        for layer in self.free:

            def apply(
                module: LayerModule, given: tuple[Any, ...], named: dict[str, Any], layer: RouteLayer = layer
            ) -> None:
                if id(module.weight) not in done:
                    done.add(id(module.weight))
                    change(layer, _received(given, named))

            hooks.append(layer.module.register_forward_pre_hook(apply, with_kwargs=True))
        run_hooked(self.model, self.inputs, hooks)


def find_route(model: nn.Module, inputs: tuple[Tensor, ...], *, force: bool = False) -> Route:
    """The layers that the model calls on these inputs and a repair can change; `force` includes tied weights."""
    shapes: dict[str, tuple[LayerModule, tuple[int, ...], tuple[int, ...]]] = {}
    called: set[nn.Module] = set()
    hooks = []
    for name, module in model.named_modules():
        is_usable = is_layer(module) and isinstance(module._parameters.get("weight"), Tensor)

        def record(
            module: Any, given: tuple[Any, ...], named: dict[str, Any], output: Any, name: str = name,
            is_usable: bool = is_usable,
        ) -> None:  # fmt: skip
            called.add(module)
            if is_usable and module.weight.requires_grad and name not in shapes:
                shapes[name] = (module, tuple(_received(given, named).shape), tuple(output.shape))

        hooks.append(module.register_forward_hook(record, with_kwargs=True))
    run_hooked(model, inputs, hooks)
    unseen = find_unseen(model, called, force=force)
    fixed = {one.name for one in unseen}
    layers = tuple(
        RouteLayer(name, module, k, len(shapes), shape_in, shape_out, is_fixed=name in fixed)
        for k, (name, (module, shape_in, shape_out)) in enumerate(shapes.items())
    )
    if all(layer.is_fixed for layer in layers):
        got = ", ".join(map(str, unseen[:4])) or f"{type(model).__name__}, which calls none"
        raise ConversionError(
            f"a repair needs Linear or convolutional layers that the model calls as modules and that can be trained; "
            f"got {got}. Pass a model with layers as modules, and unfreeze the layers to repair."
        )
    return Route(model, inputs, layers, unseen)


def run_hooked(model: nn.Module, inputs: tuple[Tensor, ...], hooks: list[RemovableHandle]) -> None:
    """Runs the model once in training mode without gradients, and removes the hooks."""
    try:
        with untouched(model, is_training=True, tensors=inputs), torch.no_grad():
            model(*inputs)
    except (OnlynormError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise failed_on("repair", model, inputs, error) from error
    finally:
        for hook in hooks:
            hook.remove()


def signal(module: LayerModule, output: Tensor) -> Tensor:
    """The output of a layer as a matrix H, channels x columns, with at most `MAX_COLUMNS` evenly spaced columns."""
    matrix = as_matrix(output if output.ndim > 1 else output[None], channels=channel_axis(module))
    return matrix[:, :: -(-matrix.shape[1] // MAX_COLUMNS)]


def channel_axis(module: LayerModule) -> int:
    """The channel axis of a layer's output: last for Linear, second for convolutions."""
    return -1 if isinstance(module, nn.Linear) or is_conv1d(module) else 1


def output_with(module: LayerModule, weight: Tensor, received: Tensor) -> Tensor:
    """The output of the layer, without hooks, for another weight in the same layout."""
    own = module._parameters["weight"]
    module._parameters["weight"] = weight
    try:
        return module.forward(received)
    finally:
        module._parameters["weight"] = own


def _received(given: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    received = next(value for value in (*given, *named.values()) if isinstance(value, Tensor))
    return received.detach()
