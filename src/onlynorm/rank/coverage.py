"""The layers of a network that a repair can change, and those that it cannot, with the reason.

A repair can change linear layers and convolutions that the model calls as modules and whose weights are trainable
parameters. Weights shared by several modules, such as that of a token embedding, are not changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.display import Result
from onlynorm.modules.norms import norm_kind
from onlynorm.rank.trained import find_training

PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
WHOLE = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
"""Modules that use several weights, or those of their children, without calling them."""
MAX_UNSEEN = 0.1
"""`diagnose` recommends a repair only if at most this fraction of the parameters in use cannot be changed."""


@dataclass(frozen=True)
class Unseen(Result):
    """A module with weights that a repair does not change, and why."""

    name: str
    kind: str
    n_parameters: int
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.name!r} ({self.kind}: {self.reason})"


def is_layer(module: nn.Module) -> bool:
    """Whether a repair can change modules of this kind: linear layers, convolutions, Hugging Face's Conv1D."""
    return isinstance(module, PLAIN) or is_conv1d(module) or (isinstance(module, TRANSPOSED) and module.groups == 1)


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is the linear layer of Hugging Face's GPT-2, whose weight is (in, out)."""
    return any(c.__name__ == "Conv1D" and c.__module__.startswith("transformers.") for c in type(module).__mro__)


def weight_of(layer: nn.Module) -> Tensor:
    """The weight as (out, in, kernel...), a view: changing it in place changes the layer."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight.transpose(0, 1) if is_conv1d(layer) or isinstance(layer, TRANSPOSED) else weight


def find_unseen(model: nn.Module, called: Collection[nn.Module], *, force: bool = False) -> tuple[Unseen, ...]:
    """Modules with weights that a repair does not change, largest first; `force` lets it change tied weights."""
    tied = find_tied(model)
    found = []
    for name, module, parameters in _owners(model):
        reason = _reason(module, called, tied={} if force else tied, name=name)
        if reason:
            n_parameters = sum(p.numel() for p in parameters)
            found.append(Unseen(name or type(module).__name__, type(module).__name__, n_parameters, reason))
    return tuple(sorted(found, key=lambda one: -one.n_parameters))


def can_repair(
    model: nn.Module, called: Collection[nn.Module], *, unused: Collection[nn.Parameter] = frozenset()
) -> bool:
    """Whether a repair can change nearly all weights in use, and the network does not look trained.

    `unused` are the parameters that the loss does not depend on; others count even if their module is not called, since
    the model may use them in functions. Embeddings and tied heads do not count.
    """
    tied = find_tied(model)
    seen, unseen = 0, 0
    layers: list[tuple[str, nn.Module]] = []
    for name, module, parameters in _owners(model):
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        size = sum(p.numel() for p in parameters if p not in unused)
        if not _reason(module, called, tied=tied, name=name):
            seen += size
            layers.append((name, module))
        elif not any(_memory(p) in tied for p in parameters):  # a tied head needs no repair
            unseen += size
    if not layers or unseen > MAX_UNSEEN * (seen + unseen):
        return False
    weights = ((name, layer, weight_of(layer), layer is layers[-1][1]) for name, layer in layers)
    return not find_training(model, weights)


def find_tied(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """The names of the modules that share a parameter, or the memory of one, by that memory."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(_memory(parameter), []).append(name)
    return {key: tuple(names) for key, names in owners.items() if len(names) > 1}


def tie_like(model: nn.Module, source: nn.Module) -> None:
    """Makes parameters of a copy share memory where those of its source do."""
    first: dict[tuple[int, int], nn.Parameter] = {}
    for own, old in zip(model.parameters(), source.parameters(), strict=True):
        shared = first.setdefault((_memory(old), old.numel()), own)
        if shared is not own:
            own.data = torch.as_strided(shared.data, old.shape, old.stride())


def _memory(parameter: Tensor) -> int:
    """The address of the entries: `head.weight.data = tokens.weight.data` ties two parameters too."""
    return parameter.data_ptr() or id(parameter)


def _reason(module: nn.Module, called: Collection[nn.Module], *, tied: dict[int, tuple[str, ...]], name: str) -> str:
    """Why a repair does not change the module; "" if it does."""
    weight = module._parameters.get("weight")
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "embeddings are not changed"
    if isinstance(module, TRANSPOSED) and module.groups > 1:
        return "transposed and with groups"
    if not is_layer(module):
        return "no repair for this kind of module"
    if weight is None:
        return "its weight is computed from other parameters"
    if module not in called:
        return "not called as a module on these inputs"
    if not weight.requires_grad:
        return "frozen"
    shared = [other for p in module.parameters() for other in tied.get(_memory(p), ()) if other != name]
    return f"its weight is tied to that of {shared[0]!r}" if shared else ""


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[nn.Parameter]]]:
    """(name, module, its parameters) of every module that holds matrices, each parameter with its first owner."""
    counted: set[int] = set()
    within: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in within if outer) or norm_kind(module) is not None:
            continue
        is_whole = isinstance(module, WHOLE) or "parametrizations" in module._modules
        if is_whole:
            within.append(name)
        own = list(module.parameters(recurse=is_whole))
        if any(p.ndim > 1 for p in own):
            yield name, module, [p for p in own if id(p) not in counted]
            counted.update(map(id, own))
