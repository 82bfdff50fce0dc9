"""The low-rank construction: a target of rank r from four frozen layers with O(d r) features.

    T = A B,   B (r, inp * kernel) has the kernel, stride and padding,   A (out, r) is 1 x 1

Both factors come from the singular value decomposition of T, with the square root of the singular values in each, so
that their errors have equal weight. Each is rebuilt by the wide construction. B needs r inp k features per group and A
out r, together fewer than the out inp k of the wide construction if r < out inp k / (out + inp k).

The rank is that of the weight of the layer; zero outputs do not increase it.

Theory: giannou2023:cor-1, giannou2023:remark-7
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from onlynorm.errors import ToleranceError, ValueRangeError
from onlynorm.frozen.pair import LowRankBlock, NormOnlyBlock
from onlynorm.intervals.propagate import propagate
from onlynorm.modules.layers import TargetLayer, layer_options, plain_layer, weight_of
from onlynorm.reconstruction.constructions import wide
from onlynorm.reconstruction.constructions.base import Rebuilt
from onlynorm.reconstruction.constructions.options import LowRank, Settings
from onlynorm.reconstruction.costs import ALONE, Costs, Load, add_costs, grid_pass_memory, pass_memory, pass_seconds
from onlynorm.reconstruction.ranges import LayerInputs
from onlynorm.solvers.operator import OnStep


def estimate(target: TargetLayer, construction: LowRank, settings: Settings, load: Load = ALONE) -> Costs:
    """The cost of the low-rank construction of this layer, of full rank by default."""
    largest = _largest_rank(target)
    rank = largest if construction.rank is None else min(construction.rank, largest)
    parts = _factor_targets(target, rank)
    constructions = (construction, _without_kernel(construction))
    between = rank * target.groups * load.n_positions
    loads = (load, dataclasses.replace(load, n_inputs=between))
    first, second = (
        wide.estimate(part, own, settings, one) for part, own, one in zip(parts, constructions, loads, strict=True)
    )
    # The output of the first block for the whole batch is in memory while the second is built.
    is_stored, groups = settings.storage == "dense", wide.draw_groups(parts[0], construction, settings)
    is_grid = groups[0].is_structured
    if is_grid:
        passing = grid_pass_memory(groups, load, is_linear=wide.is_linear(construction))
    else:
        passing = pass_memory(groups[0], first.n_features, load, is_stored=is_stored)
    held = 8 * load.n_samples * between
    seconds = second.seconds + pass_seconds(first, load, is_grid=is_grid)
    second = dataclasses.replace(second, memory=max(passing, second.memory) + held, seconds=seconds)
    costs = add_costs((first, second))
    n_wide = sum(one.n_features for one in wide.draw_groups(target, construction, settings))
    text = f"rank {rank}" if construction.rank is not None else f"rank {rank} or less, depending on the weights"
    note = f"{text}; the wide construction needs {n_wide} features"
    return dataclasses.replace(costs, note=f"{note}; {costs.note}" if costs.note else note)


def build(
    target: TargetLayer,
    layer: nn.Module,
    received: LayerInputs,
    construction: LowRank,
    settings: Settings,
    on_step: OnStep | None = None,
) -> Rebuilt:
    """The block of the layer from its two factors. Theory: giannou2023:cor-1"""
    weight, bias = weight_of(layer)
    factors = factorise(weight, target.groups, rank=construction.rank, tolerance=construction.rank_tolerance)
    # Half of the tolerance is for the truncation to the rank, half for solving for the factors.
    allowed = construction.rank_tolerance if settings.tolerance is None else settings.tolerance / 2
    short = factors.shortfall(allowed) if factors.error > allowed else ""
    if short and settings.tolerance is not None:
        raise ToleranceError(
            f"the low-rank construction needs a relative residual of {settings.tolerance:.0e} at {target.name!r}; "
            f"{short}. Raise the rank, leave it out, or leave the tolerance out."
        )
    # Relative errors e of the factors give at most 2 e rank^(1/4): |A| |B|_2 is the square root of the sum of singular
    # values times the largest, at most rank^(1/4) |T|, and so is |A|_2 |B|.
    tightened = wide.tightened(settings, 4 * factors.rank**0.25)
    targets = _factor_targets(target, factors.rank)
    options = layer_options(layer)
    first = wide.build(
        targets[0], plain_layer(factors.right, None, options), received, construction, tightened, on_step
    )
    assert isinstance(first.block, NormOnlyBlock)
    small = {**options, "stride": _ones(options), "padding": 0, "dilation": _ones(options), "padding_mode": "zeros"}
    second_layer = plain_layer(factors.left, bias, small if options else {})
    with torch.no_grad():
        inputs = first.block(received.inputs.double())
    box = None
    if received.box is not None:
        box = propagate(nn.Sequential(first.block.to_plain(), second_layer), ["1"], received.box)["1"]
    second = wide.build(
        targets[1],
        second_layer,
        LayerInputs(inputs, box, received.leave_one_out),
        _without_kernel(construction),
        tightened,
        on_step,
    )
    assert isinstance(second.block, NormOnlyBlock)
    block = LowRankBlock(first.block, second.block)
    residual = wide.relative_error(block.to_plain(), weight)
    wide.need_reached(residual, construction, settings, target)
    shortfall = "; ".join(text for text in (short, first.shortfall, second.shortfall) if text)
    return Rebuilt(
        block, ", ".join(dict.fromkeys((first.method, second.method))), residual,
        max(first.window_error, second.window_error), first.seconds + second.seconds, shortfall,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Factors:
    """Balanced factors with left @ right = weight, group by group, up to the relative truncation `error`.

    `errors` are the truncation errors of ranks 0, 1, 2, ...
    """

    left: Tensor
    right: Tensor
    rank: int
    errors: tuple[float, ...]

    @property
    def error(self) -> float:
        """The truncation error, relative to the weight."""
        return self.errors[self.rank]

    def shortfall(self, tolerance: float) -> str:
        """The error of this rank, and the rank that would reach the tolerance."""
        enough = _first_below(self.errors, tolerance)
        return f"rank {self.rank} leaves {self.error:.1e} of the weight; rank {enough} leaves {self.errors[enough]:.1e}"


def factorise(
    weight: Float[Tensor, "out inp *kernel"], groups: int = 1, *, rank: int | None = None, tolerance: float = 1e-12
) -> Factors:
    """Balanced factors of a layer's weight, of the given rank in every group or the smallest within the tolerance.

    Truncation errors are relative Frobenius norms. Theory: giannou2023:cor-1
    """
    _need_rank(rank)
    if not 0.0 <= tolerance < 1.0:
        raise ValueRangeError(f"rank_tolerance needs a number in [0, 1); got {tolerance}. Try 1e-12.")
    parts = [torch.linalg.svd(part.flatten(1), full_matrices=False) for part in weight.double().chunk(groups)]
    squares = torch.stack([S.square() for _, S, _ in parts]).sum(0)
    size = float(squares.sum())
    left_over = torch.cat([squares.flip(0).cumsum(0).flip(0), squares.new_zeros(1)])
    errors = tuple(((left_over / size).sqrt() if size else left_over).tolist())
    chosen = max(1, _first_below(errors, tolerance)) if rank is None else min(rank, len(squares))
    left = torch.cat([U[:, :chosen] * S[:chosen].sqrt() for U, S, _ in parts])
    right = torch.cat([S[:chosen].sqrt()[:, None] * V[:chosen] for _, S, V in parts])
    left = left.reshape(*left.shape, *(1,) * (weight.ndim - 2))
    return Factors(left, right.reshape(-1, *weight.shape[1:]), chosen, errors)


def _need_rank(rank: int | None) -> None:
    if rank is not None and rank < 1:
        raise ValueRangeError(f"rank needs a positive integer; got {rank}. Leave it out to choose it automatically.")


def _factor_targets(target: TargetLayer, rank: int) -> tuple[TargetLayer, TargetLayer]:
    """B and A as separate layers, with separate random streams."""
    n_middle = rank * target.groups
    axes = len(target.shape) - 2
    first = dataclasses.replace(
        target, names=(f"{target.name}/first",), shape=(n_middle, *target.shape[1:]), has_bias=False
    )
    second = dataclasses.replace(target, names=(f"{target.name}/second",), shape=(target.shape[0], rank, *(1,) * axes))
    return first, second


def _largest_rank(target: TargetLayer) -> int:
    return min(target.group_shape[0], math.prod(target.group_shape[1:]))


def _first_below(errors: tuple[float, ...], tolerance: float) -> int:
    return next(rank for rank, error in enumerate(errors) if error <= tolerance)


def _without_kernel(construction: LowRank) -> LowRank:
    """The options of the 1 x 1 factor."""
    return dataclasses.replace(construction, source_kernel=None)


def _ones(options: dict[str, Any]) -> tuple[int, ...]:
    return (1,) * len(options.get("kernel_size", ()))
