"""The wide construction: one target layer from two frozen layers, by their two norms.

    gamma            with left diag(gamma) right = weight          (solvers)
    s, b, m, c       with phi(s x + b) = m (s x + b) + c           (linearize)
    norm1            scale s gamma, shift b
    norm2            scale 1 / (m s), shift bias - sum over features and positions of left (m b + c) / (m s)

At the maximum width there is a feature per weight. At the minimum width norm2 also has a scale per output, so that
out - 1 fewer features are enough, and zero outputs are removed. With fewer features the weight is the least-squares
solution; for sparse features, weights that they cannot represent are known from the masks (see `unreached`).

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
from onlynorm.features.structured import FastOrthoCond, IdCondMinimal
from onlynorm.frozen.pair import PART, NormOnlyBlock
from onlynorm.memory import release_free_memory
from onlynorm.modules.activations import Ray, known
from onlynorm.modules.affine import set_affine, set_channels, set_statistics
from onlynorm.modules.convolution import embed, need_room, source_shape
from onlynorm.modules.layers import TargetLayer, layer_options, weight_of
from onlynorm.reconstruction.constructions.base import Rebuilt
from onlynorm.reconstruction.constructions.options import Construction, Settings, Wide
from onlynorm.reconstruction.constructions.unreached import Unreached, find_unreached
from onlynorm.reconstruction.costs import ALONE, Costs, Load, add_costs, block_costs, grid_costs, pair_costs
from onlynorm.reconstruction.linearize import Extent, extent, linearize
from onlynorm.reconstruction.ranges import FeatureRanges, LayerInputs, find_ranges
from onlynorm.solvers import Solution, solve_features
from onlynorm.solvers.methods.minimum_width import minimum_features
from onlynorm.solvers.operator import OnStep

SUMMED = 2**22
"""Frozen entries over which constants are summed at a time."""
SMALLEST = 1e-15
"""The smallest tolerance passed to the solver, above rounding."""


def estimate(target: TargetLayer, construction: Wide, settings: Settings, load: Load = ALONE) -> Costs:
    """The cost of the wide construction of this layer."""
    groups = draw_groups(target, construction, settings)
    solving, is_stored = solving_costs(groups, construction, settings), settings.storage == "dense"
    if groups[0].is_structured:
        return grid_costs(solving, groups, load, is_stored=is_stored, is_linear=is_linear(construction))
    return block_costs(solving, groups, load, is_stored=is_stored)


def is_linear(construction: Construction) -> bool:
    """Whether there is no activation between the frozen layers."""
    return isinstance(construction.activation, nn.Identity | None)


def solving_costs(groups: list[Features], construction: Wide, settings: Settings) -> Costs:
    """The cost of solving for the gammas of all groups, one after the other."""
    return add_costs(_group_costs(one, construction, settings) for one in groups)


def draw_groups(
    target: TargetLayer, construction: Wide, settings: Settings, *, device: torch.device | str = "cpu"
) -> list[Features]:
    """The frozen features of a layer, group by group; their weights are not drawn yet."""
    shape = source_shape(target.group_shape, construction.source_kernel)
    n_features = None
    if construction.width == "minimum":
        _need_kernel_first(construction, shape)
        if construction.excess is None and construction.features != "id_cond_minimal":
            n_features = minimum_features(shape[0], math.prod(shape[1:]))
    names = [f"{target.name}/group {group}" for group in range(target.groups)]
    return [
        draw(
            construction.features, shape, n_features=n_features, excess=construction.excess, seed=settings.seed,
            layer=name, kernel=construction.kernel, density=construction.density,
            shared_column=_shared_column(target, construction, shape), device=device,
        )
        for name in (names if target.groups > 1 else [target.name])
    ]  # fmt: skip


def build(
    target: TargetLayer,
    layer: nn.Module,
    received: LayerInputs,
    construction: Wide,
    settings: Settings,
    on_step: OnStep | None = None,
) -> Rebuilt:
    """The block of the layer from two frozen layers per group. Theory: giannou2023:thm-1"""
    weight, bias = weight_of(layer)
    drawn = draw_groups(target, construction, settings, device=weight.device)
    solutions = solve_groups(drawn, weight, construction, settings, on_step)
    release_free_memory()
    block = NormOnlyBlock(
        layer_options(layer),
        drawn,
        activation=construction.activation,
        norms=construction.norms,
        storage=settings.storage,
    )
    return set_norms(block.to(weight.device), solutions, bias, received, settings)


def solve_groups(
    drawn: list[Features], weight: Tensor, construction: Wide, settings: Settings, on_step: OnStep | None = None
) -> list[Solution]:
    """Gamma for every group of a weight (out, inp per group, *kernel)."""
    whole = embed(weight, drawn[0].shape[2:])
    return [
        _solve_group(one, part, construction, settings, on_step, first_output=group * one.shape[0])
        for group, (one, part) in enumerate(zip(drawn, whole.chunk(len(drawn)), strict=True))
    ]


def set_norms(
    block: NormOnlyBlock,
    solutions: list[Solution],
    bias: Tensor | None,
    received: LayerInputs,
    settings: Settings,
    *,
    unit_gain: bool = False,
) -> Rebuilt:
    """Sets the norms of the block from the solutions and the ranges of its features; returns it with its evidence."""
    need_room(block.padding, block.options, received.inputs.shape)
    release_free_memory()  # returns the memory of drawing and solving to the system
    ranges = find_ranges(block, received, margin=settings.ranges.margin)
    release_free_memory()
    dtype = torch.float32 if settings.ranges.precision == "float32" else torch.float64
    error = choose_norms(block, solutions, bias, ranges, window=settings.window, dtype=dtype, unit_gain=unit_gain)
    worst = max(solutions, key=lambda solution: solution.residual)
    return Rebuilt(
        block, worst.method, worst.residual, error, sum(s.seconds for s in solutions),
        worst.shortfall,
    )  # fmt: skip


def choose_norms(
    block: NormOnlyBlock,
    solutions: list[Solution],
    bias: Tensor | None,
    ranges: FeatureRanges,
    *,
    window: float,
    dtype: torch.dtype = torch.float64,
    unit_gain: bool = False,
) -> float:
    """Sets both norms of the block; returns the largest certified error of a window, in the units of its feature.

    `dtype` is the precision of the block, which determines the rounding of an activation with an offset. `unit_gain`
    uses a ray with gain one, for a second norm that cannot rescale the branch. Features are processed in parts, to
    limit the number of temporary vectors with an entry per feature.
    """
    gammas = [solution.gamma for solution in solutions]
    gamma = gammas[0] if len(gammas) == 1 else torch.cat(gammas)
    parts = [slice(start, min(start + PART, len(gamma))) for start in range(0, len(gamma), PART)]

    def bounds(which: slice) -> tuple[Tensor, Tensor]:
        release_free_memory()  # many small vectors fragment the memory of the C library
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
            if which.start == 0 or bool(own.any()):  # a line without features equals the other
                first = int(own.int().argmax())
                block.lines[number] = torch.stack([linear.slope[first], linear.offset[first]])
    # Constants are computed from the stored norm, so that its rounding errors cancel too.
    added = torch.cat([_row_sums(block, group, one) for group, one in enumerate(block.features)])
    output_gamma = torch.cat([_output_gamma(*pair) for pair in zip(block.features, solutions, strict=True)])
    out_scale = output_gamma / gain
    out_shift = (torch.zeros_like(added) if bias is None else bias) - out_scale * added
    set_affine(block.second_norm, out_scale, out_shift)
    return error


def relative_error(layer: nn.Module, weight: Tensor) -> float:
    """|W - weight| / |weight| for the weight W of a layer, whose kernel may be larger; |W| if `weight` is zero."""
    made = layer.weight
    assert isinstance(made, Tensor)
    rest = made.detach().to(weight) - embed(weight, tuple(made.shape[2:]))
    size = float(torch.linalg.vector_norm(weight))
    return float(torch.linalg.vector_norm(rest)) / (size if size > 0.0 else 1.0)


def tightened(settings: Settings, factor: float) -> Settings:
    """The settings with the tolerance, if given, divided by a factor above one."""
    if settings.tolerance is None or not factor > 1.0:
        return settings
    return dataclasses.replace(settings, tolerance=max(settings.tolerance / factor, SMALLEST))


def need_reached(residual: float, construction: Wide, settings: Settings, target: TargetLayer) -> None:
    """Raises if the residual of the layer exceeds the tolerance, although those of its parts do not."""
    if settings.tolerance is not None and not residual <= settings.tolerance:
        raise ToleranceError(
            f"the {construction.name} construction needs a relative residual of {settings.tolerance:.0e} at "
            f"{target.name!r}; got {residual:.1e} from parts that reached it. Use more features (a larger excess), or "
            "leave the tolerance out for the closest solution."
        )


def _solve_group(
    features: Features,
    weight: Tensor,
    construction: Wide,
    settings: Settings,
    on_step: OnStep | None,
    *,
    first_output: int,
) -> Solution:
    """Gamma of one group; raises if a given tolerance is not reached, else the closest solution, with the cure."""
    is_exact_wanted = settings.tolerance is not None
    with_scales = construction.width == "minimum" and not features.is_structured
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
    # Without a solution at the minimum width, the scales of the outputs are one in least squares.
    with_scales = with_scales and (is_exact_wanted or (is_enough and gap is None))
    solution = solve_features(
        features, weight, tolerance=settings.tolerance, minimum_width=with_scales, on_step=on_step
    )
    release_free_memory()  # the frozen weights of the block are drawn next
    if solution.is_exact:
        return solution
    if gap is not None:
        return dataclasses.replace(solution, shortfall=f"residual {solution.residual:.1e}; {gap}")
    if not is_enough and construction.width == "minimum":
        short = f"residual {solution.residual:.1e}; the minimum width needs {need - features.n_features} more features"
        return dataclasses.replace(solution, shortfall=short)
    return solution


def _as_wide_as_the_edge(activation: nn.Module, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Ranges widened so that the ray of the activation needs no scaling."""
    ray = known(activation)
    if not isinstance(ray, Ray) or not math.isfinite(ray.edge):
        return low, high
    centre, half = (low + high) / 2, ((high - low) / 2).clamp(min=abs(ray.edge))
    return centre - half, centre + half


def _group_costs(features: Features, construction: Wide, settings: Settings) -> Costs:
    costs = pair_costs(features, tolerance=settings.tolerance)
    if features.is_structured:
        lost = features.equations - features.n_features
        if features.density is None or not lost:
            return costs
        note = f"{lost} weights without a feature"
        return dataclasses.replace(costs, error=(lost / features.equations) ** 0.5, note=note)
    if construction.width == "maximum":
        return costs
    # The scales of the outputs are unknowns of the system as well, but cost neither features nor frozen weights.
    system = dataclasses.replace(features, n_features=features.n_features + features.shape[0] - 1)
    of_system = pair_costs(system, tolerance=settings.tolerance)
    own = ("n_features", "n_norm_parameters", "n_frozen", "multiplications")
    return dataclasses.replace(of_system, **{name: getattr(costs, name) for name in own})


def _need_kernel_first(construction: Wide, shape: tuple[int, ...]) -> None:
    if construction.kernel == "second" and len(shape) > 2 and construction.features != "id_cond_minimal":
        raise ValueRangeError(
            "width='minimum' needs the kernel in the first frozen layer; got kernel='second'. Leave kernel out."
        )


def _shared_column(target: TargetLayer, construction: Wide, shape: tuple[int, ...]) -> int:
    """The position that all outputs share at the minimum width of ID cond: the first one of the target's kernel."""
    if construction.features != "id_cond_minimal" or shape == target.group_shape:
        return 0
    first = embed(torch.ones(1, 1, *target.group_shape[2:]), shape[2:]).flatten().nonzero()[0]
    # Positions are counted row by row of `left` (outputs, kernel positions) and column by column of `right`.
    return int(first) * (shape[1] if construction.kernel == "second" else 1)


def _output_gamma(features: Features, solution: Solution) -> Tensor:
    """The scale per output at the minimum width; ones otherwise."""
    if solution.output_gamma is not None:
        return solution.output_gamma
    return torch.ones(features.shape[0], dtype=solution.gamma.dtype, device=solution.gamma.device)


def _row_sums(block: NormOnlyBlock, group: int, features: Features) -> Tensor:
    """The sum of the constants of a group's features for each output, over kernel positions."""

    def constants(start: int, stop: int) -> Tensor:
        release_free_memory()
        return block.line(block.feature_slice(group, start, min(stop, features.n_features)))[1]

    if features.is_full_grid:  # row by row, so that no vector has an entry per feature
        step = max(1, PART // features.n_seen) * features.n_seen
        starts = range(0, features.n_features, step)
        total = torch.cat([constants(start, start + step).view(-1, features.n_seen).sum(1) for start in starts])
        if features.has_dense_factors:
            total = total @ factor_rows(features, "left").to(total)
        elif isinstance(features.structure, FastOrthoCond):
            total = features.structure.transform_outputs(total)
    elif isinstance(features.structure, IdCondMinimal):
        structure, shared = features.structure, constants(0, 1)
        step = max(1, PART // structure.n_positions)
        parts = (structure.part(i, min(i + step, structure.n_outputs)) for i in range(0, structure.n_outputs, step))
        total = torch.cat([one.constant(torch.cat([shared, constants(own.start, own.stop)])) for one, own in parts])
    elif features.structure is not None:
        total = features.structure.constant(constants(0, features.n_features))
    else:
        total = torch.zeros(features.rows, dtype=torch.float64, device=block.low.device)
        step = max(1, SUMMED // features.rows)
        for start in range(0, features.n_features, step):
            made = constants(start, start + step)
            total += features.left(start, start + len(made)).to(made) @ made
    return total.reshape(features.shape[0], -1).sum(1)
