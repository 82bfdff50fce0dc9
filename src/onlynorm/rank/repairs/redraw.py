"""Repairs that draw new weights: orthogonal, near the identity, and mirrored, for an initially linear network.

Mirrored weights (Balduzzi et al., 2017, "looks linear"): half of the channels are u, the other half -u. Since
phi(u) - phi(-u) = u for ReLU, GELU and SiLU, a layer [[V, -V], [-V, V]] after them gives (V u, -V u): with V
orthogonal the rank of the signal and the norm of the gradient are preserved through any number of layers. For odd
activations such as tanh it is 2 phi(u), which is nearly linear for small u; `mirrored` chooses the scale by the
gradient ratio.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from onlynorm.rank.coverage import TRANSPOSED, is_conv1d, weight_of
from onlynorm.rank.repairs.rescale import clear_bias, draw_orthogonal, root_mean_square, set_scale
from onlynorm.rank.repairs.visits import LayerModule, Route, RouteLayer, channel_axis
from onlynorm.seeds import seeded

NOISE = 0.1
"""Distance of near-identity weights from the identity, relative to a random matrix of unit scale."""
MIRRORED_SCALES = (1.0, 0.5, 0.25, 0.125)
_CANCELLED = 1e-3


def orthogonal(route: Route, *, seed: int) -> None:
    """Draws orthogonal weights and zero biases, scaled by the gain of the second layer on the batch.

    That gain is sqrt(2) for ReLU on centred signals. It is the same for all layers, while LSUV has one per layer.
    """
    generator = seeded(seed)
    gains: list[float] = []

    def change(layer: RouteLayer, received: Tensor) -> None:
        draw_orthogonal(layer.weight, generator)
        clear_bias(layer.module)
        if len(gains) < 2:
            before = float(torch.linalg.vector_norm(layer.weight))
            set_scale(layer, received)
            gains.append(float(torch.linalg.vector_norm(layer.weight)) / before)
        else:
            layer.weight.mul_(gains[1])

    route.visit(change)


def near_identity(route: Route, *, seed: int) -> None:
    """Sets layers with equal numbers of channels to the identity plus noise; draws orthogonal weights for others.

    The identity of a convolution is at the middle of the kernel. Only the other layers are scaled to unit output.
    """
    generator = seeded(seed)

    def change(layer: RouteLayer, received: Tensor) -> None:
        weight = layer.weight
        clear_bias(layer.module)
        is_square = weight.shape[0] == weight.shape[1] and _groups(layer.module) == 1 and not _spreads(layer.module)
        if layer.is_first or layer.is_last or not is_square:
            draw_orthogonal(weight, generator)
            set_scale(layer, received)
            return
        noise = torch.randn(weight.shape, generator=generator) * (NOISE / math.sqrt(weight[0].numel()))
        weight.copy_(noise)
        _centre(weight).add_(torch.eye(weight.shape[0]).to(weight))

    route.visit(change)


def mirrored(route: Route, *, seed: int, ratio: Callable[[], float]) -> tuple[float, float]:
    """(scale, gradient ratio): the signal scale at which mirrored orthogonal weights have a gradient ratio nearest one.

    Scales are tried from one downwards; with ReLU, GELU and SiLU the first is used. `ratio` measures the ratio.
    """
    tried: dict[float, float] = {}
    for scale in MIRRORED_SCALES:
        draw_mirrored(route, seed=seed, scale=scale)
        tried[scale] = ratio()
        if abs(_log(tried[scale])) < math.log(1.25):
            break
    best = min(tried, key=lambda scale: abs(_log(tried[scale])))
    if best != scale:
        draw_mirrored(route, seed=seed, scale=best)
    return best, tried[best]


def draw_mirrored(route: Route, *, seed: int, scale: float) -> None:
    """Draws mirrored orthogonal weights and zero biases; hidden outputs have this root mean square, the last one."""
    generator = seeded(seed)

    def change(layer: RouteLayer, received: Tensor) -> None:
        module = layer.module
        clear_bias(module)
        _fill_mirrored(
            module, generator, is_mirrored=not layer.is_first and _differs(received, module), is_last=layer.is_last
        )
        set_scale(layer, received, scale=1.0 if layer.is_last else scale)

    route.visit(change)


def _fill_mirrored(module: LayerModule, generator: torch.Generator, *, is_mirrored: bool, is_last: bool) -> None:
    """Draws the weight; `is_mirrored` for an input of mirrored halves. Odd and grouped sides are not split."""
    weight = weight_of(module)
    n_out, n_in = weight.shape[0], weight.shape[1]
    rows = n_out // 2 if not is_last and n_out % 2 == 0 and _groups(module) == 1 else n_out
    columns = n_in // 2 if is_mirrored and n_in % 2 == 0 and _groups(module) == 1 else n_in
    if is_mirrored and _overlaps(module):
        weight.zero_()
        block = torch.empty(rows, columns)
        inner = _centre(weight)
    else:  # the first layer, and patches that do not overlap, need all positions
        block = torch.empty(rows, columns, *weight.shape[2:])
        inner = weight
    block = nn.init.orthogonal_(block, generator=generator).to(weight)
    across = torch.cat([block, -block], 1) if columns < n_in else block
    inner.copy_(torch.cat([across, -across]) if rows < n_out else across)


def _differs(received: Tensor, module: LayerModule) -> bool:
    """Whether the halves of the channels differ: for equal halves, mirrored weights would give zero."""
    axis = channel_axis(module)
    if received.shape[axis] % 2:
        return True
    first, second = received.chunk(2, axis)
    # the difference has half as many entries
    return root_mean_square(first - second) > math.sqrt(2.0) * _CANCELLED * root_mean_square(received)


def _overlaps(module: LayerModule) -> bool:
    """Whether the windows of a convolution overlap, so that their middle positions cover the input."""
    if isinstance(module, nn.Linear) or is_conv1d(module):
        return True
    pairs = zip(module.kernel_size, module.stride, strict=True)
    return not _spreads(module) and all(size == 1 or size > step for size, step in pairs)


def _spreads(module: LayerModule) -> bool:
    """Whether a transposed convolution increases the number of positions, so that one kernel entry is not enough."""
    return isinstance(module, TRANSPOSED) and max(module.stride) > 1


def _centre(weight: Tensor) -> Tensor:
    """The matrix (out, in) in the middle of the kernel."""
    for size in weight.shape[2:]:
        weight = weight.select(2, size // 2)
    return weight


def _groups(module: LayerModule) -> int:
    return 1 if isinstance(module, nn.Linear) or is_conv1d(module) else module.groups


def _log(ratio: float) -> float:
    return math.log(ratio) if 0.0 < ratio < math.inf else math.inf
