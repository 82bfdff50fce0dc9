"""Estimates of the cost of a layer.

Memory follows from sizes: the peak while a layer is drawn, solved and calibrated, and the part that is stored. Seconds
are operations divided by constant rates of a nominal processor core; `slowness` measures a matrix product on this
machine to convert them. That measurement is for display only: no choice depends on it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from onlynorm.features import Features
from onlynorm.features.fast_orthogonal import count_additions
from onlynorm.features.normals import CHUNK as NORMAL_CHUNK
from onlynorm.frozen.pair import CHUNK_BYTES, INPUT_BYTES, PART
from onlynorm.frozen.streaming import HIDDEN_BYTES, PATCH_BYTES, n_rows
from onlynorm.memory import memory_budget
from onlynorm.solvers import choose
from onlynorm.solvers.choose import RATES
from onlynorm.solvers.methods.direct import FLOOR
from onlynorm.solvers.spectrum import predict_features

EPS = 2.0**-52
N_MEASURED = 4
"""Number of samples for measuring the error of a layer."""
VECTORS = 64
"""Bytes per feature stored in any case: four values of its norm, two of its range, two of its line."""
SCRATCH = 160
"""Bytes per feature of temporary vectors while norms are chosen."""
DRAW_BYTES = 16
"""Temporary bytes per drawn entry, before and after scaling. Large blocks are drawn in pieces of `PIECE`."""
PIECE = 2**20
NORMAL_BYTES = 40
"""Temporary bytes per entry of the transform to normals, which processes `NORMAL_CHUNK` at a time."""
SUMMED = 2**22
"""Entries of frozen weights over which constants are summed at a time."""
LAYER_SECONDS = 0.004
"""Python overhead per layer, and below per solve, per iterative solve, and per iteration."""
SOLVE_SECONDS = 0.002
ITERATIVE_SECONDS = 0.01
STEP_SECONDS = 6e-5
DRAW_SECONDS = {"he_uniform": 8e-9, "uniform": 7e-9, "er_sign": 17e-9, "id_cond": 7e-9, "id_cond_minimal": 7e-9,
                "ortho_cond": 7e-9, "fast_ortho_cond": 7e-9, "sparse_he_normal": 26e-9, "er_normal": 26e-9}  # fmt: skip
"""Per frozen entry; other distributions, drawn from normals, take `NORMAL_SECONDS`."""
NORMAL_SECONDS = 22e-9
HAAR_SECONDS = 1e-9
"""Per entry and row of an orthogonal matrix, which is drawn without LAPACK."""
TRANSFORM_SECONDS = 0.6e-9
"""Per addition of a fast orthogonal transform."""
HIDDEN_SECONDS = 14e-9
"""Per hidden value of the calibration batch, for its range, mean and variance."""
LEAVE_ONE_OUT_SECONDS = 10e-9
"""Per feature and sample, for the leave-one-out check."""
HAAR_BYTES = 24
"""Bytes per entry of an orthogonal matrix while it is drawn."""
NORM_VECTORS = 20
"""Temporary vectors with an entry per feature of a part while its norm parameters are chosen."""
NORM_SECONDS = 150e-9
"""Per feature of a grid, for choosing its norm parameters."""
UNFOLD_SECONDS = 4e-9
"""Per entry of the patches of a float64 convolution."""
GRID_LAYER_SECONDS = 0.0065
"""Python overhead per layer of structured features."""
INPUT_SECONDS = 20e-9
"""Per distinct input of a grid on the calibration batch, for its selection, range, mean and variance."""
GRID_SECONDS = 1.6e-9
"""Per hidden value of a grid in a forward pass: norm, activation and sum."""
CONVOLUTION = 0.5
"""Speed of a float64 convolution relative to a matrix product."""


@dataclass(frozen=True)
class Load:
    """The use of a layer on the calibration batch: output positions and input entries per sample, over all calls."""

    n_samples: int = 64
    n_positions: int = 1
    n_inputs: int = 0


ALONE = Load()
"""A layer at one position, without counting its input."""
NOTHING = Load(n_samples=1)
"""The smallest possible calibration batch."""


@dataclass(frozen=True)
class Costs:
    """The cost of one rebuilt layer. `error` is the predicted relative error of the effective weight.

    `multiplications` counts one forward pass at one output position. `memory` is the peak of additional bytes while the
    layer is drawn, solved and calibrated; `stored` is the part that is stored afterwards. `seconds` are those of a
    nominal core.
    """

    equations: int
    n_features: int
    n_norm_parameters: int
    n_frozen: int
    memory: int
    condition: float
    error: float
    seconds: float
    multiplications: int
    method: str
    note: str = ""
    stored: int = 0


def pair_costs(features: Features, *, tolerance: float | None = None) -> Costs:
    """The cost of solving for the norms of two frozen layers with these features."""
    wanted = 1e-10 if tolerance is None else tolerance
    n_frozen = features.n_frozen
    # A grid multiplies once for every feature, and by its two factors if it has any.
    multiplications = features.n_features + sum(transform_costs(features)) if features.is_structured else n_frozen
    method, condition, note = "closed form", 1.0, ""
    # The scaled target, its reconstruction, their difference, and gamma.
    seconds, memory = SOLVE_SECONDS + 20e-9 * features.equations, 32 * features.equations
    error = EPS * features.equations**0.5
    if features.name == "ortho_cond":
        seconds += HAAR_SECONDS * (features.rows**3 + features.cols**3)
        seconds += 4.0 * features.equations * (features.rows + features.cols) / RATES[torch.float64]
        memory += HAAR_BYTES * n_frozen
    elif features.name == "fast_ortho_cond":  # gamma and its weight, each transformed on both sides
        right, left = transform_costs(features)
        seconds += 2.0 * TRANSFORM_SECONDS * (features.rows * right + features.cols * left)
        memory += 8 * features.equations + 16 * n_frozen
    elif features.name == "kron_normal":
        condition = predict_features(features).condition
        error = max(error, EPS * condition)
        seconds += kron_seconds(features)
        memory = max(memory, kron_bytes(features))
    if not features.is_structured:
        prediction = predict_features(features)
        choice = choose(
            features.rows, features.cols, features.n_features, tolerance=wanted, memory=memory_budget(),
            condition=max(1.0, prediction.condition) if prediction.is_known else None,
        )  # fmt: skip
        method, condition = choice.method, choice.condition
        seconds = choice.option.seconds + (ITERATIVE_SECONDS if method == "krylov" else SOLVE_SECONDS)
        seconds += choice.option.iterations * STEP_SECONDS
        seconds += draw_seconds(features, n_left=1, n_right=1)
        # Both sides are drawn one after the other, and solved after the temporary memory is freed.
        left, right = (features.n_features * width for width in (features.rows, features.cols))
        drawing = max(8 * left + draw_bytes(left), 8 * n_frozen + draw_bytes(right))
        scaled = 8 * features.n_features * min(features.rows, features.cols)  # one side is copied at unit length
        memory = max(drawing, 8 * n_frozen + scaled + choice.option.memory)
        refined = wanted if method == "krylov" else FLOOR * wanted if method in ("lu", "cholesky") else 0.0
        error = max(refined, EPS * condition, EPS * features.equations**0.5)
    if features.n_features < features.equations and not features.is_structured:
        # The least-squares residual of a generic target: the fraction of its energy outside the span of the features.
        error = (1.0 - features.n_features / features.equations) ** 0.5
        note = f"{features.equations - features.n_features} features too few: least squares"
    return Costs(
        features.equations, features.n_features, 2 * features.n_features + 2 * features.shape[0], n_frozen, memory,
        condition, error, seconds, multiplications, method, note,
    )  # fmt: skip


def kron_seconds(features: Features) -> float:
    """Seconds for drawing both factors, factoring them, and solving with one refinement."""
    (n_left, n_right), rate = features.grid_shape, RATES[torch.float64]
    rows, cols = features.rows, features.cols
    flops = sum(n * n * c + n**3 / 3 for n, c in ((rows, n_left), (cols, n_right)))
    inverse = 2.0 * rows * cols * (cols + n_right) + 2.0 * rows * n_right * (rows + n_left)
    product = 2.0 * rows * n_right * (n_left + cols)
    # Drawn for the solution and for the digest.
    return 2 * NORMAL_SECONDS * features.n_frozen + (flops + 2 * inverse + 3 * product) / rate


def kron_bytes(features: Features) -> int:
    """Peak memory of a solution: both factors, the Gram matrix with its factor, and two gammas with a residual."""
    n_right, rows, cols = features.n_seen, features.rows, features.cols
    factoring = 16 * cols**2
    solving = 8 * (cols**2 + rows**2) + 24 * features.n_features + 24 * features.equations + 16 * rows * n_right
    return 8 * features.n_frozen + max(factoring, solving)


def transform_costs(features: Features) -> tuple[int, int]:
    """Operations for multiplying one vector by U1 and one by U2; zero if they are the identity."""
    if not features.has_factors:
        return 0, 0
    if features.has_dense_factors:
        n_left, n_right = features.grid_shape
        return features.cols * n_right, features.rows * n_left
    return count_additions(features.cols), count_additions(features.rows)


def block_costs(solving: Costs, groups: Sequence[Features], load: Load, *, is_stored: bool) -> Costs:
    """The cost of a block of two frozen layers, including `solving` for all its groups one after the other."""
    one, n_features = groups[0], sum(group.n_features for group in groups)
    right, left = (8 * n_features * width for width in (one.cols, one.rows))
    stored = VECTORS * (n_features + one.shape[0] * len(groups)) + is_stored * (right + left)
    hidden = hidden_costs(
        one.cols, n_features, len(groups), load, axes=len(one.shape) - 2, n_kernel=one.n_kernel,
        n_channels=one.shape[1] * len(groups), n_outputs=one.rows, is_seen_at_inputs=one.kernel == "second",
        is_stored=is_stored, is_drawn=not one.is_structured,
    )  # fmt: skip
    seconds = solving.seconds + hidden.seconds + LAYER_SECONDS
    seconds += sum(draw_seconds(group, n_left=2 if is_stored else 3, n_right=1 if is_stored else 2) for group in groups)
    # The error of the layer's output, and the target itself.
    flops = 2.0 * min(N_MEASURED, load.n_samples) * load.n_positions * n_features * (one.cols + one.rows)
    flops += 2.0 * load.n_samples * load.n_positions * one.equations * len(groups)
    seconds += flops / (RATES[torch.float64] * (CONVOLUTION if len(one.shape) > 2 else 1.0))
    if one.kernel == "second":  # unfolding the hidden values
        seconds += 6e-9 * min(N_MEASURED, load.n_samples) * load.n_positions * n_features * one.n_kernel
    seconds += 4e-9 * (right + left) / 8 * is_stored  # the cast to the dtype of the target
    few = dataclasses.replace(load, n_samples=min(N_MEASURED, load.n_samples))
    measuring = pass_memory(one, n_features, few, is_stored=is_stored)
    working = max(hidden.memory, measuring, _summing_memory(one))
    memory = stored + SCRATCH * n_features + working
    if is_stored:
        memory = max(memory, stored - right - left + _building_memory(groups))
    memory = max(solving.memory, memory)
    return dataclasses.replace(solving, memory=memory, stored=stored, seconds=seconds)


def grid_costs(solving: Costs, groups: Sequence[Features], load: Load, *, is_stored: bool, is_linear: bool) -> Costs:
    """The cost of a block of structured features, including `solving` for all its groups.

    With `is_linear` there is no activation between the layers, so that they act as one.
    """
    one, n_groups = groups[0], len(groups)
    axes, n_features, n_seen = len(one.shape) - 2, sum(g.n_features for g in groups), sum(g.n_seen for g in groups)
    factors = 8 * sum(g.n_frozen for g in groups) if one.has_factors else 0
    index = 0 if one.density is None else 4 * n_features
    # Gamma and beta; statistics and range of distinct inputs; the second norm.
    n_copies = 1 + (is_stored and one.has_dense_factors)
    stored = 16 * n_features + 32 * n_seen + 32 * one.shape[0] * n_groups + index + factors * n_copies
    outside = load.n_inputs // max(1, one.shape[1] * n_groups)
    padded = _padded_places(outside, one.n_kernel, axes)
    batch = 8 * load.n_samples * padded * one.shape[1] * n_groups if axes else 0
    positions = max(1, padded if one.kernel == "second" and axes else load.n_positions)
    values = 8 * load.n_samples * positions * one.n_seen
    # The size of a chunk depends on the input positions; a stride or a kernel leaves fewer at the output.
    each = 8 * load.n_samples * max(padded, positions)
    chunk = values // one.n_seen * min(one.n_seen, max(1, (CHUNK_BYTES if one.has_factors else INPUT_BYTES) // each))
    # A chunk of distinct inputs, computed from all patches if there are factors, and its copy with features first.
    unfolded = values // one.n_seen * one.cols if one.has_factors and one.n_kernel > 1 else 0
    calibrating = batch + chunk + max(chunk, unfolded)
    is_fast = one.has_factors and not one.has_dense_factors
    is_transformed = is_fast and values * max(padded, positions) <= CHUNK_BYTES * positions
    if is_transformed:  # patches in rows, transformed in place
        calibrating = batch + values
    elif is_fast:  # the rows of U1 for the inputs of a chunk, computed in panels
        calibrating += 24 * one.cols * min(one.cols, max(1, CHUNK_BYTES // max(each, 8 * (one.rows + one.cols))))
    part = 8 * min(n_features, PART)
    choosing = max(NORM_VECTORS * part, 0 if one.density is None else 80 * n_features)
    few = min(N_MEASURED, load.n_samples)
    measured = dataclasses.replace(load, n_samples=few)
    measuring = grid_pass_memory(groups, measured, is_linear=is_linear)
    outputs = 16 * few * load.n_positions * one.shape[0] * n_groups
    gamma = 8 * n_features
    memory = stored + max(gamma + calibrating, gamma + choosing, measuring + outputs)
    seconds = solving.seconds + GRID_LAYER_SECONDS + NORM_SECONDS * n_features
    seconds += load.n_samples * positions * n_seen * INPUT_SECONDS
    seconds += (
        load.n_samples * (1 if axes else positions) * n_seen * LEAVE_ONE_OUT_SECONDS
    )  # every row of a linear layer
    rate = RATES[torch.float64]
    if one.has_factors:
        right, left = transform_costs(one)
        n_rows, n_measured = n_groups * positions * load.n_samples, n_groups * few * positions
        per_addition = TRANSFORM_SECONDS if is_fast else 2.0 / rate
        seconds += n_measured * (right + left) * per_addition
        seconds += n_rows * (right * TRANSFORM_SECONDS if is_transformed else 2.0 * one.n_seen * one.cols / rate)
        if is_fast and not is_transformed:
            seconds += n_groups * one.cols * right * TRANSFORM_SECONDS
    if not is_linear:
        seconds += few * positions * math.prod(one.grid_shape) * n_groups * GRID_SECONDS
    if one.n_kernel > 1:
        seconds += 2 * load.n_samples * load.n_positions * n_seen * UNFOLD_SECONDS
    # The target, twice on the whole batch and once on the measured samples.
    n_calls = 2 * load.n_samples + few * (1 + is_linear)
    seconds += 2.0 * n_calls * load.n_positions * one.equations * n_groups / (rate * (CONVOLUTION if axes else 1.0))
    return dataclasses.replace(solving, memory=max(solving.memory, memory), stored=stored, seconds=seconds)


def grid_pass_memory(groups: Sequence[Features], load: Load, *, is_linear: bool) -> int:
    """Memory of a forward pass through a block of structured features, without its output."""
    one, part = groups[0], 8 * min(groups[0].n_features, PART)
    rows = load.n_samples * max(1, load.n_positions)
    # Patches, their products with the factors, and the sums over features.
    patches = 8 * rows * ((one.n_seen if one.has_factors else 0) + one.cols + one.rows + one.grid_shape[0])
    if is_linear:
        return 8 * one.n_features + 8 * part + patches
    n_parts = min(load.n_samples, -(-8 * rows * one.cols // PATCH_BYTES)) if len(groups) == 1 else 1
    grids = 0 if one.density is None else 24 * one.n_features
    return patches // max(1, n_parts) + 3 * max(HIDDEN_BYTES, 8 * one.n_seen) + grids


@dataclass(frozen=True)
class HiddenCosts:
    """Memory and seconds of passing the calibration batch through a frozen layer."""

    memory: int
    seconds: float


def hidden_costs(
    cols: int,
    n_features: int,
    n_groups: int,
    load: Load,
    *,
    axes: int,
    n_kernel: int,
    n_channels: int,
    n_outputs: int = 0,
    is_seen_at_inputs: bool = False,
    is_stored: bool = True,
    is_drawn: bool = True,
) -> HiddenCosts:
    """The cost of the ranges and statistics of `n_features` features, in groups with `cols` inputs each.

    `axes` is the number of kernel axes, 0 for a linear layer. With `is_drawn`, frozen weights that are not stored are
    drawn; structured ones are copied.
    """
    padded = _padded_places(load.n_inputs // max(1, n_channels), n_kernel, axes)
    positions = max(1, padded if is_seen_at_inputs else load.n_positions)  # padding has features too
    rows, per_group = load.n_samples * positions, -(-n_features // n_groups)
    flops = 2.0 * rows * n_features * cols
    seconds = flops / (RATES[torch.float64] * (CONVOLUTION if axes else 1.0))
    seconds += rows * n_features * HIDDEN_SECONDS + load.n_samples * n_features * LEAVE_ONE_OUT_SECONDS
    # The size of a chunk depends on the input positions; a stride leaves fewer at the output.
    chunk = _chunk(per_group, max(load.n_samples * max(padded, positions), cols + n_outputs))
    values, extremes = 8 * rows * chunk, 8 * load.n_samples * chunk
    frozen = 0 if is_stored else 8 * chunk * cols
    # In sequence: frozen weights, hidden values, then the extremes of every sample, without the weights.
    moments = [frozen + values, values + 2 * extremes]
    if not is_stored and is_drawn:
        moments.append(frozen + draw_bytes(chunk * cols))
    if not axes:
        return HiddenCosts(max(moments), seconds)
    if n_kernel > 1 and not is_seen_at_inputs:
        moments[0] += 8 * rows * cols  # float64 convolutions unfold the whole batch
    moments += [values + 4 * extremes, 2 * (values + extremes)]  # also extremes of rows; a copy with features first
    return HiddenCosts(8 * load.n_samples * padded * n_channels + max(moments), seconds)


def pass_memory(one: Features, n_features: int, load: Load, *, is_stored: bool = True) -> int:
    """Memory of a forward pass through a block, without its output."""
    axes = len(one.shape) - 2
    padded = _padded_places(load.n_inputs // one.shape[1], one.n_kernel, axes)
    if axes and one.kernel == "first":
        return 8 * load.n_samples * padded * one.shape[1] + _stream_memory(one, n_features, load, is_stored=is_stored)
    rows = load.n_samples * max(1, padded if axes else load.n_positions)
    chunk = _chunk(n_features, max(rows, one.rows + one.cols))
    values = 8 * rows * chunk
    # A chunk before and after its norm and its activation.
    memory = 3 * values + (one.n_kernel * values if one.n_kernel > 1 else 0)
    return memory if is_stored else max(memory, values + _made_again(one, chunk))


def _stream_memory(one: Features, n_features: int, load: Load, *, is_stored: bool) -> int:
    """Memory of patches, hidden values and outputs of a convolution computed by matrix products."""
    columns = load.n_samples * load.n_positions
    if is_stored:  # samples are split into parts
        columns = min(columns, max(PATCH_BYTES // (8 * one.cols), load.n_positions))
    chunk = min(n_features, n_rows(max(columns, one.rows + one.cols), 8))
    outputs = 8 * load.n_samples * load.n_positions * one.shape[0]
    # Most activations are not computed in place.
    memory = 8 * columns * (one.cols + 2 * chunk) + 2 * outputs
    return memory if is_stored else memory + _made_again(one, chunk)


def _made_again(one: Features, chunk: int) -> int:
    """Memory for drawing the frozen weights of a chunk, first `right`, then `left`, which is transposed."""
    right, left = (chunk * width for width in (one.cols, one.rows))
    scratch = 0 if one.is_structured else draw_bytes(max(right, left))
    return max(8 * right, 16 * left, 8 * max(right, left) + scratch)


def _building_memory(groups: Sequence[Features]) -> int:
    """Memory for drawing the frozen weights of all groups; each side exists twice while groups are concatenated."""
    one, n_features = groups[0], sum(group.n_features for group in groups)
    before, highest = 0, 0
    for width in (one.cols, one.rows):
        side = 8 * n_features * width
        scratch = 0 if one.is_structured else draw_bytes(one.n_features * width)
        highest, before = max(highest, before + 2 * side, before + side + scratch), before + side
    return highest


def _summing_memory(one: Features) -> int:
    """Memory of the part of `left` over which constants are summed."""
    n_entries = min(one.n_features * one.rows, SUMMED)
    if one.is_structured:  # drawn, and then copied
        return 16 * n_entries
    return 8 * n_entries + draw_bytes(n_entries)


def _chunk(n_features: int, widest: int) -> int:
    """Number of features in a chunk, with `widest` hidden values or frozen weights each."""
    return min(n_features, max(1, CHUNK_BYTES // (8 * widest)))


def _padded_places(n_places: int, n_kernel: int, axes: int) -> int:
    """Number of input positions with "same" padding."""
    if not axes or not n_places:
        return n_places
    return round((n_places ** (1 / axes) + n_kernel ** (1 / axes) - 1) ** axes)


def pass_seconds(block: Costs, load: Load, *, is_grid: bool = False) -> float:
    """Seconds of a forward pass of the calibration batch through a block."""
    if is_grid:
        return GRID_SECONDS * load.n_samples * load.n_positions * block.multiplications
    flops = 2.0 * load.n_samples * load.n_positions * block.multiplications
    return flops / RATES[torch.float64] + 4e-9 * load.n_samples * load.n_positions * block.n_features


def draw_seconds(features: Features, *, n_left: int, n_right: int) -> float:
    """Seconds for drawing `left` `n_left` times and `right` `n_right` times."""
    each, seconds = DRAW_SECONDS.get(features.name, NORMAL_SECONDS), 0.0
    for width, times in ((features.rows, n_left), (features.cols, n_right)):
        haar = HAAR_SECONDS * width if features.name == "orthogonal" else 0.0
        seconds += times * features.n_features * width * (each + haar)
    return seconds


def draw_bytes(n_entries: int) -> int:
    """Temporary memory for drawing `n_entries` entries."""
    return DRAW_BYTES * min(n_entries, PIECE) + NORMAL_BYTES * min(n_entries, NORMAL_CHUNK)


def add_costs(parts: Iterable[Costs]) -> Costs:
    """The cost of several parts of one layer: sums, and the largest condition number and error.

    The memory is that of building the parts one after the other, including the stored memory of earlier parts.
    """
    listed = list(parts)
    before = highest = 0
    for part in listed:
        highest, before = max(highest, before + part.memory), before + part.stored
    return Costs(
        sum(p.equations for p in listed), sum(p.n_features for p in listed), sum(p.n_norm_parameters for p in listed),
        sum(p.n_frozen for p in listed), highest, max(p.condition for p in listed),
        max(p.error for p in listed), sum(p.seconds for p in listed), sum(p.multiplications for p in listed),
        ", ".join(dict.fromkeys(p.method for p in listed)), "; ".join(dict.fromkeys(p.note for p in listed if p.note)),
        before,
    )  # fmt: skip


@functools.cache
def slowness(n_threads: int) -> float:
    """Time of a matrix product on this machine relative to a nominal core, measured once in 50 ms.

    Only for displaying seconds, so that results do not depend on speed or load.
    """
    n = 384
    a = torch.ones(n, n, dtype=torch.float64)
    best = math.inf
    for _ in range(12):  # short runs, so that some are not interrupted by other processes
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return best * RATES[torch.float64] / (2.0 * n**3)
