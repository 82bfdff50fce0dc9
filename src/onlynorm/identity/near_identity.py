"""`near_identity_`: initialize the residual blocks of any network close to the identity.

A block x + f(x) is close to its shortcut if the last layer of the branch f is small. Branches are found in the autograd
graph of one forward pass: at a sum of terms with a common ancestor, the terms with the fewest layers are shortcuts
and the others are branches. The graph is a directed acyclic graph of functions; a layer in it is a function that
receives a parameter.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, OnlynormError, UnknownNameError
from onlynorm.modules import find_norms
from onlynorm.modules.norms import NormLayer, norm_kind, plain_name, scale_at_zero
from onlynorm.modules.untouched import failed_on, full_precision, need_layers, untouched
from onlynorm.modules.walk import as_inputs, outputs_of
from onlynorm.seeds import seeded
from onlynorm.validate import need_flag, need_items, need_seed

LAYERS = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
"""Layers with weights that are drawn; norms are set to zero."""
_VIEWS = ("T", "Transpose", "Permute", "View", "ReshapeAlias", "UnsafeView", "Expand", "Unsqueeze", "Squeeze", "Repeat",
          "ToCopy", "Clone", "Alias")  # fmt: skip
"""Functions between a parameter and the layer that receives it, without "Backward0"."""


def small_deviation(kernel_size: Iterable[int], out_channels: int) -> float:
    """1 / (k^2 c), the standard deviation of a k x k convolution with c output channels near the identity.

    The usual one is 1 / (k sqrt(c)). A linear layer has k = 1.
    """
    return 1.0 / (math.prod(kernel_size) * out_channels)


def near_identity_(
    model: nn.Module,
    inputs: Any = None,
    *,
    which: Iterable[str] | str | None = None,
    zero: bool = False,
    seed: int = 0,
) -> tuple[str, ...]:
    """Initializes residual blocks near the identity, in place; returns the places of the layers that were changed.

    In every residual branch of `model` the last layer is made small: the weights of a linear or convolutional layer are
    drawn from a normal distribution with standard deviation 1 / (k^2 c), for kernel size k and c output channels, and
    its bias is set to zero; of a norm, scale and shift are set to zero. `zero=True` sets the weights to zero too: every
    block is then exactly its shortcut.

    Branches are found by one forward pass of `inputs` (a batch, or a tuple of batches). For branches that end in
    something else, such as a gate, pass `which`, patterns of the layers to change, such as "blocks.*.conv2"; `inputs`
    are then not needed.

    Theory: hardt_ma2017:thm-2.2

    Examples:
        >>> import torch
        >>> from onlynorm.identity import near_identity_
        >>> from onlynorm.models import cifar_resnet
        >>> near_identity_(cifar_resnet(8), torch.rand(4, 3, 32, 32))
        ('layer1.0.bn2', 'layer2.0.bn2', 'layer3.0.bn2')
    """
    network = need_layers("near_identity_", model)
    zero, seed = need_flag("zero", zero), need_seed(seed)
    norms = {network.get_submodule(norm.name): norm for norm in find_norms(network).norms}
    if which is not None:
        places = _named(network, which)
    elif inputs is None:
        raise ConversionError(
            "near_identity_ needs inputs, to find the residual branches, or which=, the layers to change; got neither. "
            "Pass a batch, or which='blocks.*.conv2'."
        )
    else:
        places = _last_layers(network, as_inputs("near_identity_", inputs))
    generator = seeded(seed)
    with torch.no_grad():
        for place in places:
            layer = network.get_submodule(place)
            _shrink(layer, norms.get(layer), zero=zero, generator=generator)
    return places


def _shrink(layer: nn.Module, norm: NormLayer | None, *, zero: bool, generator: torch.Generator) -> None:
    if norm is not None:
        offset = scale_at_zero(layer, norm)  # of norms that multiply by 1 + weight
        for name in norm.tensors:
            getattr(layer, name).fill_(0.0 if name == norm.shift else -offset)
        return
    assert isinstance(layer, LAYERS)
    weight = layer.weight
    if isinstance(layer, nn.Linear):
        deviation = small_deviation((), layer.out_features)
    else:
        deviation = small_deviation(layer.kernel_size, layer.out_channels)
    drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    weight.copy_((0.0 if zero else deviation) * drawn)
    if layer.bias is not None:
        layer.bias.zero_()


def _named(network: nn.Module, which: Iterable[str] | str) -> tuple[str, ...]:
    """The places of the layers and norms that the patterns match."""
    cure = "Write which='blocks.*.conv2'."
    known = {plain_name(name): name for name, module in network.named_modules() if _is_supported(module)}
    found: dict[str, None] = {}
    for pattern in [which] if isinstance(which, str) else need_items("which", which, cure=cure):
        if not isinstance(pattern, str):
            raise ConversionError(f"which needs names of layers; got a {type(pattern).__name__}. {cure}")
        matches = [place for name, place in known.items() if fnmatch.fnmatchcase(name, pattern)]
        if not matches:
            raise UnknownNameError("layer of which=", pattern, known)
        found.update(dict.fromkeys(matches))
    return tuple(found)


def _is_supported(module: nn.Module) -> bool:
    """Whether the weight of this layer, or the scale of this norm, can be set."""
    if isinstance(module, LAYERS):
        return module._parameters.get("weight") is not None
    return norm_kind(module) is not None and any(True for _ in module.parameters(recurse=False))


# ------------------------------------------------------------------------------- branches in the autograd graph


def _last_layers(network: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[str, ...]:
    """The places of the last layers of all residual branches, in the order of the forward pass."""
    changed = next((name for name, module in network.named_modules() if hasattr(module, "parametrizations")), None)
    if changed is not None:
        raise ConversionError(
            f"near_identity_ needs plain weights to find residual branches; got a parametrized one at {changed!r}. "
            "Pass the layers to change as which=, or call it before the parametrization."
        )
    parameters = list(network.parameters())
    before = [parameter.requires_grad for parameter in parameters]
    try:
        with full_precision(), untouched(network, is_training=False, tensors=inputs):
            for parameter in parameters:
                parameter.requires_grad_(parameter.is_floating_point())
            given = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
            roots = _called(network, given)
            found = _Graph(network, roots).last_layers()
    finally:
        for parameter, flag in zip(parameters, before, strict=True):
            parameter.requires_grad_(flag)
    if not found:
        raise ConversionError(
            f"near_identity_ needs a model with residual branches x + f(x) of layers; got a {type(network).__name__}, "
            "in whose forward pass none was found. Pass the last layers of its branches as which=."
        )
    return found


def _called(network: nn.Module, inputs: list[Tensor]) -> list[Any]:
    """The autograd functions of the outputs."""
    try:
        returned = network(*inputs)
    except OnlynormError:
        raise
    except (RuntimeError, TypeError, IndexError, ValueError, AttributeError) as error:
        raise failed_on("near_identity_", network, inputs, error) from error
    return [tensor.grad_fn for tensor in outputs_of(returned) if tensor.grad_fn is not None]


class _Graph:
    """The functions of an autograd graph, with their ancestors and layers as bits of integers."""

    def __init__(self, network: nn.Module, roots: list[Any]) -> None:
        self.places = {
            parameter: (name, module)
            for name, module in network.named_modules()
            for parameter in module.parameters(recurse=False)
        }
        self.order = _in_order(roots)
        self.bits: dict[Any, int] = {}
        self.ancestors: dict[Any, int] = {}
        self.layers = 0
        for number, node in enumerate(self.order):
            if self.parameter(node) is not None:
                continue  # shared weights are no common ancestor
            self.bits[node] = 1 << number
            ancestors = self.bits[node]
            for operand in _operands(node):
                ancestors |= self.ancestors.get(operand, 0)
            self.ancestors[node] = ancestors
            if any(True for _ in self.owners(node)):
                self.layers |= self.bits[node]

    def parameter(self, node: Any) -> Tensor | None:
        """The parameter that this function only reads or reshapes."""
        while node is not None:
            variable = getattr(node, "variable", None)
            if variable is not None:
                return variable if variable in self.places else None
            operands = _operands(node)
            if node.name().removesuffix("0").removesuffix("Backward") not in _VIEWS or len(operands) != 1:
                return None
            node = operands[0]
        return None

    def owners(self, node: Any) -> Iterator[tuple[str, nn.Module]]:
        """The modules whose parameters this function receives."""
        for operand in _operands(node):
            if (parameter := self.parameter(operand)) is not None:
                yield self.places[parameter]

    def last_layers(self) -> tuple[str, ...]:
        """The places of the last layers of the branches of all sums."""
        found: dict[str, None] = {}
        for node in self.order:
            terms = list(self.terms(node)) if _is_sum(node) else []
            for branch, own in self.branches(terms):
                if place := self.last_layer(branch, own):
                    found[place] = None
        return tuple(found)

    def terms(self, node: Any) -> Iterator[Any]:
        """The terms of a sum, those of sums in it included; constants and parameters are none."""
        waiting = [node]
        while waiting:
            node = waiting.pop()
            operands = [operand for operand in _operands(node) if operand in self.ancestors]
            if _is_sum(node) and len(operands) == 2:
                waiting += operands
            elif node in self.ancestors:
                yield node

    def branches(self, terms: list[Any]) -> Iterator[tuple[Any, int]]:
        """(term, functions after the common ancestors) of the terms that are residual branches."""
        if len(terms) < 2:
            return
        common = -1
        for term in terms:
            common &= self.ancestors[term]
        if not common:
            return
        own = [self.ancestors[term] & ~common for term in terms]
        counts = [(bits & self.layers).bit_count() for bits in own]
        for term, bits, count in zip(terms, own, counts, strict=True):
            if count > min(counts):
                yield term, bits

    def last_layer(self, branch: Any, own: int) -> str:
        """The place of the last layer of a branch whose functions are `own`."""
        found: dict[str, None] = {}
        waiting, seen = [branch], {branch}
        while waiting:
            node = waiting.pop()
            supported = [name for name, module in self.owners(node) if _is_supported(module)]
            found.update(dict.fromkeys(supported))
            if not supported and "Norm" in node.name() and not any(True for _ in self.owners(node)):
                raise ConversionError(
                    "near_identity_ needs branches whose last layer has a scale; got one that ends in a norm without "
                    "parameters, which undoes the scale of all layers before it. Create that norm with affine=True."
                )
            operands = [] if supported else [one for one in _operands(node) if self.bits.get(one, 0) & own]
            waiting += [one for one in operands if one not in seen]
            seen.update(operands)
        if len(found) > 1:
            raise ConversionError(
                f"near_identity_ needs branches with one last layer; got one that ends in {' and '.join(found)}, as "
                "with a gate. Pass the layers to change as which=."
            )
        return next(iter(found), "")


def _is_sum(node: Any) -> bool:
    return bool(node.name() == "AddBackward0")


def _operands(node: Any) -> list[Any]:
    return [operand for operand, _ in node.next_functions if operand is not None]


def _in_order(roots: list[Any]) -> list[Any]:
    """All functions of the graph, operands first."""
    order: list[Any] = []
    seen: set[Any] = set()
    waiting = [(root, False) for root in reversed(roots)]
    while waiting:
        node, is_done = waiting.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting += [(operand, False) for operand in reversed(_operands(node)) if operand not in seen]
    return order
