"""`Route.visit`: one forward pass in which every layer is changed when the signal reaches it for the first time.

A layer is a Linear or a convolution that the model calls as a module, wherever it sits; skips, pooling and functional
calls between layers do not matter. The pass goes on with the output of the changed layer, so later layers see what
they will see after the repair, and a layer that is called twice is changed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onlynorm.errors import ConversionError
from onlynorm.rank.measures import as_matrix
from onlynorm.rank.untouched import untouched
from onlynorm.reconstruction.calls import run

LayerModule: TypeAlias = "nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d"
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
MAX_COLUMNS = 4096
"""Of the positions of images, at most so many columns in all are looked at for a rank."""


@dataclass(frozen=True)
class Place:
    """A layer that the model calls: its first name, its place in the order of calls, and the shapes it maps between."""

    name: str
    layer: LayerModule
    number: int
    n_layers: int
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]

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
    """The way of a batch through a model: its layers in the order of their first calls."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    places: tuple[Place, ...]

    @property
    def hidden(self) -> tuple[Place, ...]:
        """All layers but the last."""
        return self.places[:-1]

    def visit(self, change: Change) -> None:
        """Runs the model once and applies `change`, without gradients, to every layer when the signal reaches it."""
        done: set[str] = set()
        hooks = []
        for place in self.places:

            def act(
                layer: LayerModule, given: tuple[Tensor, ...], named: dict[str, Any], output: Tensor,
                place: Place = place,
            ) -> Tensor:  # fmt: skip
                if place.name in done:
                    return output
                done.add(place.name)
                received = _received(given, named)
                change(place, received)
                changed: Tensor = layer.forward(received)
                return changed

            hooks.append(place.layer.register_forward_hook(act, with_kwargs=True))
        run_hooked(self.model, self.inputs, hooks)


def find_route(model: nn.Module, inputs: tuple[Tensor, ...]) -> Route:
    """The layers with weights of their own, not frozen, that the model calls on these inputs."""
    shapes: dict[str, tuple[LayerModule, tuple[int, ...], tuple[int, ...]]] = {}
    hooks = []
    for name, layer in _layers(model):

        def note(
            layer: LayerModule, given: tuple[Tensor, ...], named: dict[str, Any], output: Tensor, name: str = name
        ) -> None:
            if name not in shapes:
                shapes[name] = (layer, tuple(_received(given, named).shape), tuple(output.shape))

        hooks.append(layer.register_forward_hook(note, with_kwargs=True))
    run_hooked(model, inputs, hooks)
    if not shapes:
        raise ConversionError(
            f"a repair needs Linear or convolutional layers that can be trained; {type(model).__name__} calls none on "
            "these inputs. Pass a model with layers as modules, and unfreeze what should change."
        )
    places = (Place(name, layer, k, len(shapes), *ends) for k, (name, (layer, *ends)) in enumerate(shapes.items()))
    return Route(model, inputs, tuple(places))


def run_hooked(model: nn.Module, inputs: tuple[Tensor, ...], hooks: list[RemovableHandle]) -> None:
    """Runs the model once without gradients, as in training, and removes the hooks whatever happens."""
    try:
        with as_trained(model, inputs), torch.no_grad():
            run(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def as_trained(model: nn.Module, inputs: tuple[Tensor, ...]) -> Iterator[None]:
    """Inside, the model runs as in training, but without dropout; afterwards modes and statistics are as before."""
    with untouched(model, is_training=True, tensors=inputs):
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.training = False  # noise has full rank: it would hide a collapse
        yield


def signal(layer: LayerModule, output: Tensor) -> Tensor:
    """H, channels x columns, of what a layer gave; of many positions only some, evenly spaced."""
    matrix = as_matrix(output if output.ndim > 1 else output[None], channels=channel_axis(layer))
    return matrix[:, :: -(-matrix.shape[1] // MAX_COLUMNS)]


def channel_axis(layer: LayerModule) -> int:
    """Where the output of a layer has its channels: last for Linear, second for convolutions."""
    return -1 if isinstance(layer, nn.Linear) else 1


def _layers(model: nn.Module) -> Iterator[tuple[str, LayerModule]]:
    for name, module in model.named_modules():
        weight = module._parameters.get("weight") if isinstance(module, LAYERS) else None
        if isinstance(module, LAYERS) and weight is not None and weight.requires_grad:  # not parametrized, not frozen
            yield name, module


def _received(given: tuple[Tensor, ...], named: dict[str, Any]) -> Tensor:
    received: Tensor = given[0] if given else named["input"]
    return received.detach()
