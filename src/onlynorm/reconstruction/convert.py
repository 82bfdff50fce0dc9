"""`reconstruct`: a trained network -> the same function from frozen random layers whose norms were chosen.

Each Linear and Conv layer is swapped in place for a block with the same signature; everything between them stays. The
target is never modified: the work is done on a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, ValueRangeError
from onlynorm.reconstruction.blocks import NormOnlyBlock, affine
from onlynorm.reconstruction.target import CONVOLUTIONS, Left, TargetLayer, find_layers
from onlynorm.reconstruction.wide import rebuild
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

    def __str__(self) -> str:
        return (
            f"{self.name} {self.shape}: {self.n_features} features by {self.method}, residual {self.residual:.1e}, "
            f"window {self.window_error:.1e}, {self.seconds:.2g} s"
        )


@dataclass(frozen=True)
class Reconstruction:
    """The rebuilt network, the evidence layer by layer, and what was left as it is."""

    network: nn.Module
    layers: tuple[LayerResult, ...]
    left: tuple[Left, ...]
    seed: int
    features: str

    @property
    def n_norm_parameters(self) -> int:
        """Parameters of the norms that were chosen: all that has to be kept beside the seed."""
        return sum(p.numel() for m in self.network.modules() if isinstance(m, NormOnlyBlock) for p in m.parameters())

    def __str__(self) -> str:
        kept = readable(4 * self.n_norm_parameters)
        head = (
            f"{len(self.layers)} layers from {self.features} features, seed {self.seed}: "
            f"{self.n_norm_parameters:,} norm parameters ({kept} in float32)"
        )
        return "\n".join([head, *(f"  {layer}" for layer in self.layers), *(f"  left: {item}" for item in self.left)])


def reconstruct(
    network: nn.Module,
    *,
    inputs: Tensor,
    features: str = "he_normal",
    excess: float | None = None,
    seed: int = 0,
    activation: nn.Module | None = None,
    kernel: str = "first",
    storage: str = "dense",
    tolerance: float | None = None,
    strict: bool = False,
    step: Step | None = None,
) -> Reconstruction:
    """The network rebuilt from frozen random features; `inputs` is a batch that calibrates ranges and statistics.

    `activation` stands between the two frozen layers of every block (None: linear). The result has the precision of the
    target and is in evaluation mode. Theory: giannou2023:thm-1, burkholz2024:thm-2.3, burkholz2024:composition
    """
    _need_ready(network, inputs)
    found = find_layers(network, strict=strict)
    dtype = next(network.parameters()).dtype
    rebuilt = copy.deepcopy(network).double().eval()
    seen = _record_inputs(rebuilt, found.layers, inputs.double())
    results = []
    for description in found.layers:
        if description.name not in seen:
            raise ConversionError(
                f"a layer needs to be called by the network to be calibrated; {description.name!r} was not on this "
                "batch. Remove the unused layer, or pass inputs that reach it."
            )
        say = None if step is None else _teller(step, description.name)
        layer = rebuilt.get_submodule(description.name)
        block, solutions, window = rebuild(
            description, layer, seen.pop(description.name), features=features, excess=excess, seed=seed,
            activation=activation, kernel=kernel, storage=storage, tolerance=tolerance, progress=say,
        )  # fmt: skip
        for name in description.names:
            _swap(rebuilt, name, block)
        results.append(
            LayerResult(
                description.name, description.shape, block.first_norm.num_features, solutions[0].method,
                max(s.residual for s in solutions), float(window.error_in_input.max()),
                sum(s.seconds for s in solutions),
            )
        )  # fmt: skip
    return Reconstruction(rebuilt.to(dtype).eval(), tuple(results), found.left, seed, features)


def collapse(network: nn.Module) -> nn.Module:
    """A copy in which every block is an ordinary layer again, with the weights that its norms encode."""
    plain = copy.deepcopy(network)
    blocks = {name: m for name, m in plain.named_modules(remove_duplicate=False) if isinstance(m, NormOnlyBlock)}
    made: dict[int, nn.Module] = {}
    for name, block in blocks.items():
        if id(block) not in made:
            made[id(block)] = _plain_layer(block)
        _swap(plain, name, made[id(block)])
    return plain


@torch.no_grad()
def _plain_layer(block: NormOnlyBlock) -> nn.Module:
    """W = diag(scale2) left diag(slope scale1) right and what the shifts add."""
    scale, shift = (values.double() for values in affine(block.first_norm))
    out_scale, out_shift = (values.double() for values in affine(block.second_norm))
    slope, offset = block.slope.double(), block.offset.double()
    weights, added = [], []
    for group, one in enumerate(block.features):
        which = block.where(group, 0, one.n_features)
        matrix = torch.zeros(one.rows, one.cols, dtype=torch.float64)
        constant = torch.zeros(one.rows, dtype=torch.float64)
        gamma, beta = (slope * scale)[which], (slope * shift + offset)[which]
        chunk = max(1, 2**22 // (one.rows + one.cols))
        for start in range(0, one.n_features, chunk):
            part = slice(start, min(start + chunk, one.n_features))
            left = one.left(part.start, part.stop).double()
            matrix += (left * gamma[part]) @ one.right(part.start, part.stop).double()
            constant += left @ beta[part]
        weights.append(one.as_weight(matrix))
        added.append(constant.reshape(one.shape[0], -1).sum(1))
    weight = torch.cat(weights)
    weight *= out_scale.reshape(-1, *(1,) * (weight.ndim - 1))
    bias = out_shift + out_scale * torch.cat(added)
    layer: nn.Module
    if not block.axes:
        layer = nn.Linear(weight.shape[1], weight.shape[0])
    else:
        channels = weight.shape[1] * len(block.features)
        layer = CONVOLUTIONS[block.axes - 1](channels, weight.shape[0], **block.options)
    layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
    return layer.to(block.first_norm.weight.device, block.first_norm.weight.dtype)


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


def _swap(network: nn.Module, name: str, module: nn.Module) -> None:
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
