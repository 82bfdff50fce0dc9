"""Repairs that draw new weights: orthogonal, near the identity, and mirrored, which makes the network linear at first.

Mirrored weights (Balduzzi et al., 2017, "looks linear"): half of the channels carry u, the other half -u. Since
phi(u) - phi(-u) = u for ReLU, GELU and SiLU, a layer [[V, -V], [-V, V]] after them gives (V u, -V u): with V
orthogonal the signal keeps its rank and the gradient its norm through any number of layers. For odd activations such
as tanh it is 2 phi(u), which is nearly linear while u is small; `mirrored` chooses the scale by the gradient ratio.
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
"""How far near-identity weights are from the identity, relative to a random matrix of unit scale."""
MIRRORED_SCALES = (1.0, 0.5, 0.25, 0.125)
_CANCELLED = 1e-3


def orthogonal(route: Route, *, seed: int) -> None:
    """Orthogonal weights and zero biases, scaled by the gain that the batch needs at the second layer.

    That gain is sqrt(2) for ReLU on centred signals: one gain for the network, where LSUV has one per layer.
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
    """The identity plus a little noise in layers that keep the number of channels, orthogonal weights in others.

    The identity of a convolution has its ones in the middle of the kernel. Only layers that are not identities are
    scaled to unit output.
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
    """(scale, gradient ratio) of the signals for which mirrored orthogonal weights keep the gradient ratio nearest one.

    Scales are tried from one downwards; with ReLU, GELU and SiLU the first is used. `ratio` measures it.
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
    """Mirrored orthogonal weights and zero biases; every hidden output has this root mean square, the last has one."""
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
    """Draws the weight; `is_mirrored` says whether the input comes in halves. Odd and grouped sides are not halved."""
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
    """Whether the halves of the channels differ: if they were equal, mirrored weights would cancel everything."""
    axis = channel_axis(module)
    if received.shape[axis] % 2:
        return True
    first, second = received.chunk(2, axis)
    # the difference has half as many entries
    return root_mean_square(first - second) > math.sqrt(2.0) * _CANCELLED * root_mean_square(received)


def _overlaps(module: LayerModule) -> bool:
    """Whether the windows of a convolution overlap, so that the middle of each is enough to see everything."""
    if isinstance(module, nn.Linear) or is_conv1d(module):
        return True
    pairs = zip(module.kernel_size, module.stride, strict=True)
    return not _spreads(module) and all(size == 1 or size > step for size, step in pairs)


def _spreads(module: LayerModule) -> bool:
    """Whether a transposed convolution makes more positions than it gets, of which one kernel entry fills few."""
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
