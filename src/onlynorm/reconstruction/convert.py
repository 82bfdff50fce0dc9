"""`reconstruct`: a trained network -> the same function from frozen random layers whose norms were chosen.

Each Linear and Conv layer is swapped in place for a block with the same signature; everything between them stays. The
target is never modified: the work is done on a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, ValueRangeError
from onlynorm.reconstruction.blocks import Block
from onlynorm.reconstruction.ranges import Seen
from onlynorm.reconstruction.recipe import Recipe, make_recipe
from onlynorm.reconstruction.target import Left, TargetLayer, find_layers
from onlynorm.solvers.memory import readable

Step = Callable[[str, int, float], None]
"""Called with (layer, iterations so far, relative residual)."""


@dataclass(frozen=True)
class LayerResult:
    """The evidence for one rebuilt layer."""

    name: str
    shape: tuple[int, ...]
    n_features: int
    method: str
    residual: float
    window_error: float
    seconds: float
    shortfall: str = ""

    def __str__(self) -> str:
        return (
            f"{self.name} {self.shape}: {self.n_features} features by {self.method}, residual {self.residual:.1e}, "
            f"window {self.window_error:.1e}, {self.seconds:.2g} s" + (f"; {self.shortfall}" if self.shortfall else "")
        )


@dataclass(frozen=True)
class Reconstruction:
    """The rebuilt network, the evidence layer by layer, and what was left as it is."""

    network: nn.Module
    layers: tuple[LayerResult, ...]
    left: tuple[Left, ...]
    recipe: Recipe

    @property
    def n_norm_parameters(self) -> int:
        """Parameters of the norms that were chosen: all that has to be kept beside the seed."""
        return sum(p.numel() for m in self.network.modules() if isinstance(m, Block) for p in m.parameters())

    def __str__(self) -> str:
        kept = readable(4 * self.n_norm_parameters)
        head = (
            f"{len(self.layers)} layers from {self.recipe.features} features, seed {self.recipe.seed}: "
            f"{self.n_norm_parameters:,} norm parameters ({kept} in float32)"
        )
        return "\n".join([head, *(f"  {layer}" for layer in self.layers), *(f"  left: {item}" for item in self.left)])


def reconstruct(
    network: nn.Module,
    *,
    inputs: Tensor,
    strict: bool = False,
    in_place: bool = False,
    step: Step | None = None,
    **choices: Any,
) -> Reconstruction:
    """The network rebuilt from frozen random features; `inputs` is a batch that calibrates ranges and statistics.

    `choices` are the fields of a `Recipe`: `features`, `excess`, `seed`, `activation`, `construction` and so on. The
    result has the precision of the target and is in evaluation mode. The target itself is rebuilt only if `in_place`.

    Theory: giannou2023:thm-1, burkholz2024:thm-2.3, burkholz2024:composition
    """
    recipe, construction = make_recipe(**choices)
    _need_ready(network, inputs)
    found = find_layers(network, strict=strict)
    dtype = next(network.parameters()).dtype
    rebuilt = copy.deepcopy(network).double().eval()
    seen = _record_inputs(rebuilt, found.layers, inputs.double())
    results = []
    for target in found.layers:
        if target.name not in seen:
            raise ConversionError(
                f"a layer needs to be called by the network to be calibrated; {target.name!r} was not on this "
                "batch. Remove the unused layer, or pass inputs that reach it."
            )
        say = None if step is None else _teller(step, target.name)
        layer = rebuilt.get_submodule(target.name)
        made = construction.build(target, layer, Seen(seen.pop(target.name)), recipe, say)
        for name in target.names:
            swap(rebuilt, name, made.block)
        results.append(
            LayerResult(
                target.name, target.shape, made.block.n_features, made.method, made.residual, made.window_error,
                made.seconds, made.shortfall,
            )
        )  # fmt: skip
    rebuilt = rebuilt.to(dtype)
    if in_place:
        _take_over(network, rebuilt, found.layers)
        rebuilt = network
    return Reconstruction(rebuilt.eval(), tuple(results), found.left, recipe)


def _take_over(network: nn.Module, rebuilt: nn.Module, layers: tuple[TargetLayer, ...]) -> None:
    """Puts the finished blocks into the target itself, once all of them exist."""
    for layer in layers:
        for name in layer.names:
            swap(network, name, rebuilt.get_submodule(name))


def collapse(network: nn.Module) -> nn.Module:
    """A copy in which every block is an ordinary layer again, with the weights that its norms encode."""
    plain = copy.deepcopy(network)
    blocks = {name: m for name, m in plain.named_modules(remove_duplicate=False) if isinstance(m, Block)}
    made: dict[int, nn.Module] = {}
    for name, block in blocks.items():
        if id(block) not in made:
            made[id(block)] = block.to_plain()
        swap(plain, name, made[id(block)])
    return plain


@torch.no_grad()
def _record_inputs(network: nn.Module, layers: tuple[TargetLayer, ...], inputs: Tensor) -> dict[str, Tensor]:
    """What each layer receives on the batch; the calls of a layer that is used several times are joined."""
    seen: dict[str, list[Tensor]] = {}
    hooks = []
    for layer in layers:

        def keep(_: nn.Module, args: tuple[Tensor, ...], name: str = layer.name) -> None:
            seen.setdefault(name, []).append(args[0].detach())

        hooks.append(network.get_submodule(layer.name).register_forward_pre_hook(keep))
    try:
        network(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: calls[0] if len(calls) == 1 else torch.cat(calls) for name, calls in seen.items()}


def swap(network: nn.Module, name: str, module: nn.Module) -> None:
    """Puts a module at this place of the network."""
    parent, _, child = name.rpartition(".")
    setattr(network.get_submodule(parent), child, module)


def _teller(step: Step, name: str) -> Callable[[int, float], None]:
    return lambda iterations, residual: step(name, iterations, residual)


def _need_ready(network: nn.Module, inputs: Tensor) -> None:
    norms = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    if any(m.training for m in network.modules() if isinstance(m, norms)):
        raise ValueRangeError(
            "a reconstruction needs a target in evaluation mode; got norms or dropout in training mode, whose output "
            "depends on the rest of the batch or on chance. Call network.eval() first."
        )
    dtypes = {p.dtype for p in network.parameters()}
    if not dtypes or not dtypes <= {torch.float32, torch.float64}:
        got = ", ".join(sorted(str(d) for d in dtypes)) or "no parameters"
        raise ConversionError(f"a reconstruction needs a float32 or float64 network; got {got}. Call network.float().")
    if not inputs.numel() or not bool(torch.isfinite(inputs).all()):
        raise ValueRangeError(
            f"calibration needs a batch of finite inputs; got shape {tuple(inputs.shape)}, empty or with NaN or "
            "infinity. Pass a few dozen real samples."
        )
