"""The wide construction: one target layer from two frozen layers, by its two norms.

    gamma            with left diag(gamma) right = weight          (solvers)
    s, b, m, c       with phi(s x + b) = m (s x + b) + c           (linearize)
    norm1            scale s gamma, shift b
    norm2            scale 1 / (m s), shift bias - sum over features and positions of left (m b + c) / (m s)

At the maximum width there is a feature per weight; at the minimum width norm2 carries a scale per output too, so that
out - 1 features fewer do, and outputs that are zero throughout are switched off. With fewer features the weight is the
closest in least squares; with sparse ones the masks say beforehand what they cannot reach. Layers may have any widths.

Theory: giannou2023:thm-1, giannou2023:remark-2, giannou2023:thm-3, burkholz2024:thm-2.2, burkholz2024:thm-2.3,
burkholz2024:thm-2.4
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn

from onlynorm.errors import InsufficientFeaturesError, ToleranceError, ValueRangeError
from onlynorm.features import Features, draw
from onlynorm.features.draw import factor_rows
from onlynorm.frozen.pair import PART, NormOnlyBlock
from onlynorm.memory import release_free_memory
from onlynorm.modules.activations import Ray, known
from onlynorm.modules.affine import set_affine, set_channels, set_statistics
from onlynorm.modules.convolution import embed, need_room, source_shape
from onlynorm.modules.layers import TargetLayer, layer_options, weight_of
from onlynorm.reconstruction.constructions.base import Rebuilt, Recipe, construction
from onlynorm.reconstruction.constructions.unreached import Unreached, find_unreached
from onlynorm.reconstruction.costs import ALONE, Costs, Load, add_costs, block_costs, grid_costs, pair_costs
from onlynorm.reconstruction.linearize import Extent, extent, linearize
from onlynorm.reconstruction.ranges import Ranges, Seen, find_ranges
from onlynorm.solvers import Solution, solve_features
from onlynorm.solvers.methods.minimum_width import minimum_features
from onlynorm.solvers.operator import Progress

FIELDS = ("kernel", "width", "source_kernel")
SUMMED = 2**22
"""Frozen numbers of a block over which constants are summed."""
SMALLEST = 1e-15
"""No tolerance below rounding is asked of the solver."""


def estimate(target: TargetLayer, recipe: Recipe, load: Load = ALONE) -> Costs:
    """What the wide construction of this layer takes."""
    groups = draw_groups(target, recipe)
    solving, is_stored = solving_costs(groups, recipe), recipe.storage == "dense"
    if groups[0].is_structured:
        return grid_costs(solving, groups, load, is_stored=is_stored, is_linear=is_linear(recipe))
    return block_costs(solving, groups, load, is_stored=is_stored)


def is_linear(recipe: Recipe) -> bool:
    """Whether nothing stands between the frozen layers."""
    return isinstance(recipe.activation, nn.Identity | None)


def solving_costs(groups: list[Features], recipe: Recipe) -> Costs:
    """What solving for the gammas of all groups takes, one after the other."""
    return add_costs(_group_costs(one, recipe) for one in groups)


def draw_groups(target: TargetLayer, recipe: Recipe, *, device: torch.device | str = "cpu") -> list[Features]:
    """The frozen features of a layer, group by group; nothing is computed yet."""
    shape = source_shape(target.group_shape, recipe.source_kernel)
    n_features = None
    if recipe.width == "minimum":
        _need_random(recipe, shape)
        if recipe.excess is None and recipe.features != "id_cond_minimal":
            n_features = minimum_features(shape[0], math.prod(shape[1:]))
    names = [f"{target.name}/group {group}" for group in range(target.groups)]
    return [
        draw(
            recipe.features, shape, n_features=n_features, excess=recipe.excess, seed=recipe.seed, layer=name,
            kernel=recipe.kernel, density=recipe.density, shared_column=_shared_column(target, recipe, shape),
            device=device,
        )
        for name in (names if target.groups > 1 else [target.name])
    ]  # fmt: skip


@construction("wide", estimate=estimate, fields=FIELDS)
def build(
    target: TargetLayer, layer: nn.Module, seen: Seen, recipe: Recipe, progress: Progress | None = None
) -> Rebuilt:
    """The block that computes the layer, from two frozen layers per group. Theory: giannou2023:thm-1"""
    weight, bias = weight_of(layer)
    drawn = draw_groups(target, recipe, device=weight.device)
    solutions = solve_groups(drawn, weight, recipe, progress)
    release_free_memory()
    block = NormOnlyBlock(
        layer_options(layer), drawn, activation=recipe.activation, norms=recipe.norms, storage=recipe.storage
    )
    return settle(block.to(weight.device), solutions, bias, seen, recipe)


def solve_groups(
    drawn: list[Features], weight: Tensor, recipe: Recipe, progress: Progress | None = None
) -> list[Solution]:
    """Gamma for every group of a weight (out, inp per group, *kernel)."""
    whole = embed(weight, drawn[0].shape[2:])
    return [
        _solve_group(one, part, recipe, progress, first_output=group * one.shape[0])
        for group, (one, part) in enumerate(zip(drawn, whole.chunk(len(drawn)), strict=True))
    ]


def settle(
    block: NormOnlyBlock,
    solutions: list[Solution],
    bias: Tensor | None,
    seen: Seen,
    recipe: Recipe,
    *,
    unit_gain: bool = False,
) -> Rebuilt:
    """The block with its norms set from the solutions and the ranges of its features, and the evidence."""
    need_room(block.padding, block.options, seen.inputs.shape)
    release_free_memory()  # what drawing and solving freed would else stay resident beside the hidden values
    ranges = find_ranges(block, seen, margin=recipe.margin)
    release_free_memory()
    dtype = torch.float32 if recipe.precision == "float32" else torch.float64
    error = choose_norms(block, solutions, bias, ranges, window=recipe.window, dtype=dtype, unit_gain=unit_gain)
    worst = max(solutions, key=lambda solution: solution.residual)
    return Rebuilt(
        block, worst.method, worst.residual, error, sum(s.seconds for s in solutions),
        worst.shortfall,
    )  # fmt: skip


def choose_norms(
    block: NormOnlyBlock,
    solutions: list[Solution],
    bias: Tensor | None,
    ranges: Ranges,
    *,
    window: float,
    dtype: torch.dtype = torch.float64,
    unit_gain: bool = False,
) -> float:
    """Sets both norms of the block; returns the largest certified error of a window, in the units of its feature.

    `dtype` is the precision in which the block will run: where the activation has an offset, its rounding counts.
    `unit_gain` places it on a ray with gain one, for a second norm that must not undo any other. Features are taken in
    parts, so that no more than a few of the vectors on the way have one number for each.
    """
    gammas = [solution.gamma for solution in solutions]
    gamma = gammas[0] if len(gammas) == 1 else torch.cat(gammas)
    parts = [slice(start, min(start + PART, len(gamma))) for start in range(0, len(gamma), PART)]

    def bounds(which: slice) -> tuple[Tensor, Tensor]:
        release_free_memory()  # many small vectors leave the memory of the C library in fragments
        low, high = (gamma[which] * block.spread(bound, which) for bound in (ranges.low, ranges.high))
        low, high = torch.minimum(low, high), torch.maximum(low, high)
        return _as_wide_as_the_edge(block.activation, low, high) if unit_gain else (low, high)

    reach = 0.0
    extents: list[Extent] = []
    for which in parts:
        low, high = bounds(which)
        reach = max(reach, float((high - low).max()))
        extents.append(extent(low, high, dtype=dtype))
    among = Extent(*(torch.stack(values).max() for values in zip(*extents, strict=True)))
    set_statistics(block.first_norm, ranges.mean, ranges.variance)
    block.low.copy_(ranges.low)
    block.high.copy_(ranges.high)
    error, gain = 0.0, torch.ones(())
    for which in parts:
        low, high = bounds(which)
        linear = linearize(
            block.activation, low, high, tolerance=window * max(reach, 1e-300), shared=True, among=among, dtype=dtype
        )
        set_channels(block.first_norm, linear.scale * gamma[which], linear.shift, which)
        error, gain = max(error, float(linear.error_in_input.max())), linear.gain[0]
        is_second = linear.scale * (low + high) / 2 + linear.shift < 0.0
        for number, own in enumerate((~is_second, is_second)):
            if which.start == 0 or bool(own.any()):  # where no feature has one of the lines, it is as the other
                first = int(own.int().argmax())
                block.lines[number] = torch.stack([linear.slope[first], linear.offset[first]])
    # The constant is taken from the norm as it was stored, so that its rounding cancels too.
    added = torch.cat([_row_sums(block, group, one) for group, one in enumerate(block.features)])
    output_gamma = torch.cat([_output_gamma(*pair) for pair in zip(block.features, solutions, strict=True)])
    out_scale = output_gamma / gain
    out_shift = (torch.zeros_like(added) if bias is None else bias) - out_scale * added
    set_affine(block.second_norm, out_scale, out_shift)
    return error


def relative_error(layer: nn.Module, weight: Tensor) -> float:
    """|W - weight| / |weight| for the weight W of an ordinary layer, whose kernel may be larger; |W| if it is zero."""
    made = layer.weight
    assert isinstance(made, Tensor)
    rest = made.detach().to(weight) - embed(weight, tuple(made.shape[2:]))
    size = float(torch.linalg.vector_norm(weight))
    return float(torch.linalg.vector_norm(rest)) / (size if size > 0.0 else 1.0)


def sharper(recipe: Recipe, factor: float) -> Recipe:
    """The recipe with a tolerance that many times smaller, where one is asked for and the factor is above one."""
    if recipe.tolerance is None or not factor > 1.0:
        return recipe
    return dataclasses.replace(recipe, tolerance=max(recipe.tolerance / factor, SMALLEST))


def need_reached(residual: float, recipe: Recipe, target: TargetLayer) -> None:
    """Raises where the systems reached the tolerance that was asked for, but the layer made of them did not."""
    if recipe.tolerance is not None and not residual <= recipe.tolerance:
        raise ToleranceError(
            f"the {recipe.construction} construction needs a relative residual of {recipe.tolerance:.0e} at "
            f"{target.name!r}; got {residual:.1e} from parts that reached it. Draw more features (a larger excess), or "
            "leave the tolerance out to take the best there is."
        )


def _solve_group(
    features: Features, weight: Tensor, recipe: Recipe, progress: Progress | None, *, first_output: int
) -> Solution:
    """Gamma of one group: exact, or refused if a tolerance was asked for, else the closest, with the cure."""
    is_exact_wanted = recipe.tolerance is not None
    with_scales = recipe.width == "minimum" and not features.is_structured
    n_outputs = int((weight.flatten(1) != 0).any(1).sum()) if with_scales else features.shape[0]
    need = minimum_features(max(1, n_outputs), features.cols) if with_scales else features.equations
    is_enough = features.n_features >= need or features.is_structured
    gap: Unreached | None = None
    if is_enough:
        gap = find_unreached(features, weight, minimum_width=with_scales, first_output=first_output)
    if gap is not None and is_exact_wanted:
        raise InsufficientFeaturesError(
            f"an exact solution at {features.layer!r} needs a feature for every weight; {gap}. Raise the density, or "
            "leave the tolerance out for the closest solution."
        )
    # Without a solution at the minimum width, the scales of the outputs stay one: least squares has no use for them.
    with_scales = with_scales and (is_exact_wanted or (is_enough and gap is None))
    solution = solve_features(
        features, weight, tolerance=recipe.tolerance, minimum_width=with_scales, progress=progress
    )
    release_free_memory()  # the frozen weights of the block are drawn next
    if solution.is_exact:
        return solution
    if gap is not None:
        return dataclasses.replace(solution, shortfall=f"residual {solution.residual:.1e}; {gap}")
    if not is_enough and recipe.width == "minimum":
        short = f"residual {solution.residual:.1e}; {need - features.n_features} more features reach the minimum width"
        return dataclasses.replace(solution, shortfall=short)
    return solution


def _as_wide_as_the_edge(activation: nn.Module, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Ranges wide enough for the ray of the activation to be used without scaling them up."""
    ray = known(activation)
    if not isinstance(ray, Ray) or not math.isfinite(ray.edge):
        return low, high
    centre, half = (low + high) / 2, ((high - low) / 2).clamp(min=abs(ray.edge))
    return centre - half, centre + half


def _group_costs(features: Features, recipe: Recipe) -> Costs:
    costs = pair_costs(features, tolerance=recipe.tolerance)
    if features.is_structured:
        lost = features.equations - features.n_features
        if features.density is None or not lost:
            return costs
        note = f"{lost} weights without a feature"
        return dataclasses.replace(costs, error=(lost / features.equations) ** 0.5, note=note)
    if recipe.width == "maximum":
        return costs
    # The scales of the outputs are unknowns of the system as well, but cost neither features nor frozen weights.
    system = dataclasses.replace(features, n_features=features.n_features + features.shape[0] - 1)
    of_system = pair_costs(system, tolerance=recipe.tolerance)
    own = ("n_features", "n_norm_parameters", "n_frozen", "multiplications")
    return dataclasses.replace(of_system, **{name: getattr(costs, name) for name in own})


def _need_random(recipe: Recipe, shape: tuple[int, ...]) -> None:
    if recipe.features in ("id_cond", "ortho_cond"):
        raise ValueRangeError(
            f"width='minimum' needs random features or id_cond_minimal; got {recipe.features}, which has a feature "
            "for every weight. Draw id_cond_minimal, or leave width out."
        )
    if recipe.kernel == "second" and len(shape) > 2 and recipe.features != "id_cond_minimal":
        raise ValueRangeError(
            "width='minimum' needs the kernel in the first frozen layer, where a row of the second is an output; got "
            "kernel='second'. Leave kernel out."
        )


def _shared_column(target: TargetLayer, recipe: Recipe, shape: tuple[int, ...]) -> int:
    """The position all outputs share at the minimum width of ID cond: the first one the target's kernel covers."""
    if recipe.features != "id_cond_minimal" or shape == target.group_shape:
        return 0
    first = embed(torch.ones(1, 1, *target.group_shape[2:]), shape[2:]).flatten().nonzero()[0]
    # Positions are counted row by row of `left` (outputs, kernel positions) and column by column of `right`.
    return int(first) * (shape[1] if recipe.kernel == "second" else 1)


def _output_gamma(features: Features, solution: Solution) -> Tensor:
    """The scale per output that the minimum width adds; one otherwise."""
    if solution.output_gamma is not None:
        return solution.output_gamma
    return torch.ones(features.shape[0], dtype=solution.gamma.dtype, device=solution.gamma.device)


def _row_sums(block: NormOnlyBlock, group: int, features: Features) -> Tensor:
    """What the constants of a group's features add to each output, summed over kernel positions."""

    def constants(start: int, stop: int) -> Tensor:
        release_free_memory()
        return block.line(block.where(group, start, min(stop, features.n_features)))[1]

    if features.is_full_grid:  # row by row of the grid, so that no vector has a number per feature
        step = max(1, PART // features.cols) * features.cols
        starts = range(0, features.n_features, step)
        total = torch.cat([constants(start, start + step).view(-1, features.cols).sum(1) for start in starts])
        if features.has_factors:
            total = total @ factor_rows(features, "left").to(total)
    elif features.structure is not None:
        total = features.structure.constant(constants(0, features.n_features))
    else:
        total = torch.zeros(features.rows, dtype=torch.float64, device=block.low.device)
        step = max(1, SUMMED // features.rows)
        for start in range(0, features.n_features, step):
            made = constants(start, start + step)
            total += features.left(start, start + len(made)).to(made) @ made
    return total.reshape(features.shape[0], -1).sum(1)
