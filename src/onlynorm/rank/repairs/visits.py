"""`Route.visit`: one forward pass in which every layer is changed when the signal reaches it for the first time.

A layer is a Linear or a convolution (transposed ones and Hugging Face's Conv1D too) that the model calls as a module;
skips, pooling, hooks and functional calls between layers do not matter. A layer is changed just before it runs, so
later layers receive what they will receive after the repair, and a layer that is called twice is changed once.
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
"""What `coverage.is_layer` accepts: a Module with a weight and a bias, perhaps None."""
MAX_COLUMNS = 4096
"""Of the positions of images, at most so many columns in all are looked at for a rank."""


@dataclass(frozen=True)
class Place:
    """A layer that the model calls: its first name, its place in the order of calls, and the shapes it maps between.

    The weight of a fixed layer is tied to that of another module: it is measured and not changed.
    """

    name: str
    layer: LayerModule
    number: int
    n_layers: int
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    is_fixed: bool = False

    @property
    def weight(self) -> Tensor:
        """The weight as (out, in, kernel...); changing it in place changes the layer."""
        return weight_of(self.layer)

    @property
    def is_first(self) -> bool:
        """Whether it sees the inputs of the model."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether it makes the outputs of the model."""
        return self.number == self.n_layers - 1


Change = Callable[[Place, Tensor], None]
"""What to do with a layer, given what it receives."""


@dataclass(frozen=True)
class Route:
    """The way of a batch through a model: its layers in the order of their first calls, and modules left out."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    places: tuple[Place, ...]
    unseen: tuple[Unseen, ...] = ()

    @property
    def hidden(self) -> tuple[Place, ...]:
        """All layers but the last."""
        return self.places[:-1]

    @property
    def free(self) -> tuple[Place, ...]:
        """The layers that may be changed."""
        return tuple(place for place in self.places if not place.is_fixed)

    def visit(self, change: Change) -> None:
        """Runs the model once and applies `change`, without gradients, to every free layer before its first call."""
        done: set[int] = set()
        hooks = []
        for place in self.free:

            def act(layer: LayerModule, given: tuple[Any, ...], named: dict[str, Any], place: Place = place) -> None:
                if id(layer.weight) not in done:
                    done.add(id(layer.weight))
                    change(place, _received(given, named))

            hooks.append(place.layer.register_forward_pre_hook(act, with_kwargs=True))
        run_hooked(self.model, self.inputs, hooks)


def find_route(model: nn.Module, inputs: tuple[Tensor, ...], *, force: bool = False) -> Route:
    """The layers that the model calls on these inputs and that a repair can see; `force` frees tied weights."""
    shapes: dict[str, tuple[LayerModule, tuple[int, ...], tuple[int, ...]]] = {}
    called: set[nn.Module] = set()
    hooks = []
    for name, module in model.named_modules():
        is_seen = is_layer(module) and isinstance(module._parameters.get("weight"), Tensor)

        def note(
            layer: Any, given: tuple[Any, ...], named: dict[str, Any], output: Any, name: str = name,
            is_seen: bool = is_seen,
        ) -> None:  # fmt: skip
            called.add(layer)
            if is_seen and layer.weight.requires_grad and name not in shapes:
                shapes[name] = (layer, tuple(_received(given, named).shape), tuple(output.shape))

        hooks.append(module.register_forward_hook(note, with_kwargs=True))
    run_hooked(model, inputs, hooks)
    unseen = find_unseen(model, called, force=force)
    fixed = {one.name for one in unseen}
    places = tuple(
        Place(name, layer, k, len(shapes), shape_in, shape_out, is_fixed=name in fixed)
        for k, (name, (layer, shape_in, shape_out)) in enumerate(shapes.items())
    )
    if all(place.is_fixed for place in places):
        got = ", ".join(map(str, unseen[:4])) or f"{type(model).__name__}, which calls none"
        raise ConversionError(
            f"a repair needs Linear or convolutional layers that the model calls as modules and that can be trained; "
            f"got {got}. Pass a model with layers as modules, and unfreeze what should change."
        )
    return Route(model, inputs, places, unseen)


def run_hooked(model: nn.Module, inputs: tuple[Tensor, ...], hooks: list[RemovableHandle]) -> None:
    """Runs the model once without gradients, as in training, and removes the hooks whatever happens."""
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


def signal(layer: LayerModule, output: Tensor) -> Tensor:
    """H, channels x columns, of what a layer gave; of many positions only some, evenly spaced."""
    matrix = as_matrix(output if output.ndim > 1 else output[None], channels=channel_axis(layer))
    return matrix[:, :: -(-matrix.shape[1] // MAX_COLUMNS)]


def channel_axis(layer: LayerModule) -> int:
    """The axis of the channels of a layer's output: last for Linear, second for convolutions."""
    return -1 if isinstance(layer, nn.Linear) or is_conv1d(layer) else 1


def output_with(layer: LayerModule, weight: Tensor, received: Tensor) -> Tensor:
    """What the layer itself, without hooks, makes of its input with another weight (in its own layout)."""
    own = layer._parameters["weight"]
    layer._parameters["weight"] = weight
    try:
        return layer.forward(received)
    finally:
        layer._parameters["weight"] = own


def _received(given: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    received = next(value for value in (*given, *named.values()) if isinstance(value, Tensor))
    return received.detach()
