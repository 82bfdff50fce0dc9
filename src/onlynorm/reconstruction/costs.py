"""What a layer will take, before anything large is computed.

Memory follows from sizes: what is alive at the same time while a layer is drawn, solved and calibrated, and what of it
stays. Seconds are operations and numbers divided by constant rates of a nominal processor core; `slowness` times one
matrix product of this machine to convert them. That measurement is for display only: no choice depends on it.
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
from onlynorm.features.normals import CHUNK as NORMAL_CHUNK
from onlynorm.frozen.pair import CHUNK_BYTES, PART, SEEN_BYTES
from onlynorm.frozen.streaming import HIDDEN_BYTES, PATCH_BYTES, n_rows
from onlynorm.memory import memory_budget
from onlynorm.solvers import choose
from onlynorm.solvers.choose import RATES
from onlynorm.solvers.methods.direct import FLOOR
from onlynorm.solvers.spectrum import predict_features

EPS = 2.0**-52
N_MEASURED = 4
"""Samples on which the error of a layer is measured."""
VECTORS = 64
"""Bytes per feature that stay whatever the storage: four numbers of its norm, two of its range, two of its line."""
SCRATCH = 160
"""Bytes per feature of vectors that are alive while norms are chosen."""
DRAW_BYTES = 16
"""Scratch bytes per number that is drawn: as it is made, and scaled. Large blocks are drawn in pieces of `PIECE`."""
PIECE = 2**20
NORMAL_BYTES = 40
"""Scratch bytes per number of the transform to normals, which works on `NORMAL_CHUNK` at a time."""
SUMMED = 2**22
"""Numbers of a block of frozen weights over which constants are summed."""
LAYER_SECONDS = 0.004
"""Python's own time for a layer, and below for a solve, for an iterative one, and for a step of an iteration."""
SOLVE_SECONDS = 0.002
ITERATIVE_SECONDS = 0.01
STEP_SECONDS = 6e-5
DRAW_SECONDS = {"he_uniform": 8e-9, "uniform": 7e-9, "er_sign": 17e-9, "id_cond": 7e-9, "id_cond_minimal": 7e-9,
                "ortho_cond": 7e-9, "sparse_he_normal": 26e-9, "er_normal": 26e-9}  # fmt: skip
"""Per number of a frozen weight; normal numbers, the default of all others, take `NORMAL_SECONDS`."""
NORMAL_SECONDS = 22e-9
HAAR_SECONDS = 1e-9
"""Per number and row of an orthogonal matrix, which is drawn without LAPACK."""
HIDDEN_SECONDS = 14e-9
"""Per hidden value of the calibration batch, for its range, mean and variance."""
HELD_SECONDS = 10e-9
"""Per feature and sample, for holding the sample back."""
HAAR_BYTES = 24
"""Bytes per number of an orthogonal matrix while it is drawn."""
NORM_VECTORS = 20
"""Vectors with a number per feature of a part that are alive while its norm parameters are chosen."""
NORM_SECONDS = 150e-9
"""Per feature of a grid, for choosing its norm parameters."""
UNFOLD_SECONDS = 4e-9
"""Per number of the patches that a float64 convolution makes."""
GRID_LAYER_SECONDS = 0.0065
"""Python's own time for a layer of structured features."""
SEEN_SECONDS = 20e-9
"""Per distinct input of a grid on the calibration batch, for picking it and for its range, mean and variance."""
GRID_SECONDS = 1.6e-9
"""Per hidden value of a grid in a forward pass: norm, activation and sum."""
CONVOLUTION = 0.5
"""Speed of a float64 convolution relative to a product of matrices."""


@dataclass(frozen=True)
class Load:
    """How a network uses a layer on the calibration batch: output positions and input numbers per sample, all calls."""

    n_samples: int = 64
    n_positions: int = 1
    n_inputs: int = 0


ALONE = Load()
"""A layer at one position, of which the input is not counted."""
NOTHING = Load(n_samples=1)
"""As little to calibrate on as can be."""


@dataclass(frozen=True)
class Costs:
    """The price of one rebuilt layer. `error` is the predicted relative error of the effective weight.

    `multiplications` are those of one forward pass at one output position. `memory` is what the layer needs at most
    while it is drawn, solved and calibrated, beside what the process holds before; `stored` is what of it stays.
    `seconds` are those of a nominal core for all of this.
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
    """The price of solving for the two frozen layers with these features and their two norms."""
    wanted = 1e-10 if tolerance is None else tolerance
    n_frozen = features.n_frozen
    # A grid multiplies once for every feature, and by its two factors if it has any.
    multiplications = features.n_features + n_frozen * features.has_factors if features.is_structured else n_frozen
    method, condition, note = "closed form", 1.0, ""
    # The target, scaled, what is made of it, their difference, and gamma.
    seconds, memory = SOLVE_SECONDS + 20e-9 * features.equations, 32 * features.equations
    error = EPS * features.equations**0.5
    if features.name == "ortho_cond":
        seconds += HAAR_SECONDS * (features.rows**3 + features.cols**3)
        seconds += 4.0 * features.equations * (features.rows + features.cols) / RATES[torch.float64]
        memory += HAAR_BYTES * n_frozen
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
        # Both sides are drawn one after the other, and solved when the scratch memory of drawing is free again.
        left, right = (features.n_features * width for width in (features.rows, features.cols))
        drawing = max(8 * left + draw_bytes(left), 8 * n_frozen + draw_bytes(right))
        scaled = 8 * features.n_features * min(features.rows, features.cols)  # one side is copied at unit length
        memory = max(drawing, 8 * n_frozen + scaled + choice.option.memory)
        refined = wanted if method == "krylov" else FLOOR * wanted if method in ("lu", "cholesky") else 0.0
        error = max(refined, EPS * condition, EPS * features.equations**0.5)
    if features.n_features < features.equations and not features.is_structured:
        # The least-squares residual of a generic target: the share of its energy outside the span of the features.
        error = (1.0 - features.n_features / features.equations) ** 0.5
        note = f"{features.equations - features.n_features} features too few: least squares"
    return Costs(
        features.equations, features.n_features, 2 * features.n_features + 2 * features.shape[0], n_frozen, memory,
        condition, error, seconds, multiplications, method, note,
    )  # fmt: skip


def block_costs(solving: Costs, groups: Sequence[Features], load: Load, *, is_stored: bool) -> Costs:
    """The price of a whole block of two frozen layers, from that of solving for all its groups one after the other."""
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
    if one.kernel == "second":  # the hidden values are unfolded
        seconds += 6e-9 * min(N_MEASURED, load.n_samples) * load.n_positions * n_features * one.n_kernel
    seconds += 4e-9 * (right + left) / 8 * is_stored  # to the precision of the target
    few = dataclasses.replace(load, n_samples=min(N_MEASURED, load.n_samples))
    measuring = pass_memory(one, n_features, few, is_stored=is_stored)
    working = max(hidden.memory, measuring, _summing_memory(one))
    memory = stored + SCRATCH * n_features + working
    if is_stored:
        memory = max(memory, stored - right - left + _building_memory(groups))
    memory = max(solving.memory, memory)
    return dataclasses.replace(solving, memory=memory, stored=stored, seconds=seconds)


def grid_costs(solving: Costs, groups: Sequence[Features], load: Load, *, is_stored: bool, is_linear: bool) -> Costs:
    """The price of a whole block of structured features, from that of solving for all its groups.

    `is_linear` says that no activation stands between the layers, so that they act as one.
    """
    one, n_groups = groups[0], len(groups)
    axes, n_features, n_seen = len(one.shape) - 2, sum(g.n_features for g in groups), sum(g.n_seen for g in groups)
    factors = 8 * sum(g.n_frozen for g in groups) if one.has_factors else 0
    index = 0 if one.is_full_grid else 8 * n_features
    # Gamma and beta; statistics and range of distinct inputs; the second norm.
    stored = 16 * n_features + 32 * n_seen + 32 * one.shape[0] * n_groups + index + factors * (1 + is_stored)
    outside = load.n_inputs // max(1, one.shape[1] * n_groups)
    padded = _padded_places(outside, one.n_kernel, axes)
    batch = 8 * load.n_samples * padded * one.shape[1] * n_groups if axes else 0
    positions = max(1, padded if one.kernel == "second" and axes else load.n_positions)
    values = 8 * load.n_samples * positions * one.cols
    # A chunk is sized by the input positions, of which a stride or a kernel leaves fewer at the output.
    each = 8 * load.n_samples * max(padded, positions)
    chunk = values // one.cols * min(one.cols, max(1, (CHUNK_BYTES if one.has_factors else SEEN_BYTES) // each))
    # A chunk of distinct inputs, made of all patches where there are factors, and then its copy feature by feature.
    unfolded = values if one.has_factors and one.n_kernel > 1 else 0
    calibrating = batch + chunk + max(chunk, unfolded)
    part = 8 * min(n_features, PART)
    choosing = max(NORM_VECTORS * part, 0 if one.is_full_grid else 80 * n_features)
    few = min(N_MEASURED, load.n_samples)
    measured = dataclasses.replace(load, n_samples=few)
    measuring = grid_pass_memory(groups, measured, is_linear=is_linear)
    outputs = 16 * few * load.n_positions * one.shape[0] * n_groups
    gamma = 8 * n_features
    memory = stored + max(gamma + calibrating, gamma + choosing, measuring + outputs)
    seconds = solving.seconds + GRID_LAYER_SECONDS + NORM_SECONDS * n_features
    seconds += load.n_samples * positions * n_seen * SEEN_SECONDS
    seconds += load.n_samples * (1 if axes else positions) * n_seen * HELD_SECONDS  # every row of a linear layer
    rate = RATES[torch.float64]
    if one.has_factors:
        n_rows = n_groups * positions * (load.n_samples + few)
        seconds += 2.0 * (n_rows * one.cols**2 + n_groups * few * positions * one.rows**2) / rate
    if not is_linear:
        seconds += few * positions * one.rows * one.cols * n_groups * GRID_SECONDS
    if one.n_kernel > 1:
        seconds += 2 * load.n_samples * load.n_positions * n_seen * UNFOLD_SECONDS
    # The target itself, twice on the whole batch and once on the samples that are measured.
    n_calls = 2 * load.n_samples + few * (1 + is_linear)
    seconds += 2.0 * n_calls * load.n_positions * one.equations * n_groups / (rate * (CONVOLUTION if axes else 1.0))
    return dataclasses.replace(solving, memory=max(solving.memory, memory), stored=stored, seconds=seconds)


def grid_pass_memory(groups: Sequence[Features], load: Load, *, is_linear: bool) -> int:
    """What passing a batch through a block of structured features takes, beside its output."""
    one, part = groups[0], 8 * min(groups[0].n_features, PART)
    rows = load.n_samples * max(1, load.n_positions)
    # Patches, what the factors make of them, and the sums over features.
    patches = 8 * rows * ((2 if one.has_factors else 1) * one.cols + 2 * one.rows)
    if is_linear:
        return 8 * one.n_features + 8 * part + patches
    n_parts = min(load.n_samples, -(-8 * rows * one.cols // PATCH_BYTES)) if len(groups) == 1 else 1
    grids = 0 if one.is_full_grid else 24 * one.n_features
    return patches // max(1, n_parts) + 3 * max(HIDDEN_BYTES, 8 * one.cols) + grids


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
    """What the ranges and statistics of `n_features` features take, in groups that see `cols` inputs each.

    `axes` are those of the kernel, 0 for a linear layer. `is_drawn` says that frozen weights which are not stored are
    random numbers; structured ones are copied.
    """
    padded = _padded_places(load.n_inputs // max(1, n_channels), n_kernel, axes)
    positions = max(1, padded if is_seen_at_inputs else load.n_positions)  # padding has features too
    rows, per_group = load.n_samples * positions, -(-n_features // n_groups)
    flops = 2.0 * rows * n_features * cols
    seconds = flops / (RATES[torch.float64] * (CONVOLUTION if axes else 1.0))
    seconds += rows * n_features * HIDDEN_SECONDS + load.n_samples * n_features * HELD_SECONDS
    # A chunk is sized by the input positions, of which a stride leaves fewer at the output.
    chunk = _chunk(per_group, max(load.n_samples * max(padded, positions), cols + n_outputs))
    values, extremes = 8 * rows * chunk, 8 * load.n_samples * chunk
    frozen = 0 if is_stored else 8 * chunk * cols
    # One after the other: frozen weights, hidden values, then the extremes of every sample, without the weights.
    moments = [frozen + values, values + 2 * extremes]
    if not is_stored and is_drawn:
        moments.append(frozen + draw_bytes(chunk * cols))
    if not axes:
        return HiddenCosts(max(moments), seconds)
    if n_kernel > 1 and not is_seen_at_inputs:
        moments[0] += 8 * rows * cols  # float64 convolutions unfold the whole batch
    moments += [values + 4 * extremes, 2 * (values + extremes)]  # extremes of rows too; laid out feature by feature
    return HiddenCosts(8 * load.n_samples * padded * n_channels + max(moments), seconds)


def pass_memory(one: Features, n_features: int, load: Load, *, is_stored: bool = True) -> int:
    """What passing a batch through a block takes, beside its output."""
    axes = len(one.shape) - 2
    padded = _padded_places(load.n_inputs // one.shape[1], one.n_kernel, axes)
    if axes and one.kernel == "first":
        return 8 * load.n_samples * padded * one.shape[1] + _stream_memory(one, n_features, load, is_stored=is_stored)
    rows = load.n_samples * max(1, padded if axes else load.n_positions)
    chunk = _chunk(n_features, max(rows, one.rows + one.cols))
    values = 8 * rows * chunk
    # A chunk is held before and after its norm and its activation.
    memory = 3 * values + (one.n_kernel * values if one.n_kernel > 1 else 0)
    return memory if is_stored else max(memory, values + _made_again(one, chunk))


def _stream_memory(one: Features, n_features: int, load: Load, *, is_stored: bool) -> int:
    """Patches, hidden values and outputs of a convolution as products of matrices."""
    columns = load.n_samples * load.n_positions
    if is_stored:  # samples go in parts
        columns = min(columns, max(PATCH_BYTES // (8 * one.cols), load.n_positions))
    chunk = min(n_features, n_rows(max(columns, one.rows + one.cols), 8))
    outputs = 8 * load.n_samples * load.n_positions * one.shape[0]
    # Most activations are computed into memory of their own.
    memory = 8 * columns * (one.cols + 2 * chunk) + 2 * outputs
    return memory if is_stored else memory + _made_again(one, chunk)


def _made_again(one: Features, chunk: int) -> int:
    """Frozen weights of a chunk of features that are not stored, one side and then the other, which is transposed."""
    right, left = (chunk * width for width in (one.cols, one.rows))
    scratch = 0 if one.is_structured else draw_bytes(max(right, left))
    return max(8 * right, 16 * left, 8 * max(right, left) + scratch)


def _building_memory(groups: Sequence[Features]) -> int:
    """Drawing the frozen weights of all groups: those of either side exist twice while groups are joined."""
    one, n_features = groups[0], sum(group.n_features for group in groups)
    before, highest = 0, 0
    for width in (one.cols, one.rows):
        side = 8 * n_features * width
        scratch = 0 if one.is_structured else draw_bytes(one.n_features * width)
        highest, before = max(highest, before + 2 * side, before + side + scratch), before + side
    return highest


def _summing_memory(one: Features) -> int:
    """Blocks of `left`, over which what constants add to each output is summed."""
    n_numbers = min(one.n_features * one.rows, SUMMED)
    if one.is_structured:  # made, and then laid out
        return 16 * n_numbers
    return 8 * n_numbers + draw_bytes(n_numbers)


def _chunk(n_features: int, widest: int) -> int:
    """Features whose hidden values or frozen weights, `widest` numbers for each, are alive at one time."""
    return min(n_features, max(1, CHUNK_BYTES // (8 * widest)))


def _padded_places(n_places: int, n_kernel: int, axes: int) -> int:
    """Input positions with padding, where as many are added as leave the output as large as the input."""
    if not axes or not n_places:
        return n_places
    return round((n_places ** (1 / axes) + n_kernel ** (1 / axes) - 1) ** axes)


def pass_seconds(block: Costs, load: Load, *, is_grid: bool = False) -> float:
    """The time of passing the calibration batch through a block."""
    if is_grid:
        return GRID_SECONDS * load.n_samples * load.n_positions * block.multiplications
    flops = 2.0 * load.n_samples * load.n_positions * block.multiplications
    return flops / RATES[torch.float64] + 4e-9 * load.n_samples * load.n_positions * block.n_features


def draw_seconds(features: Features, *, n_left: int, n_right: int) -> float:
    """The time of drawing the frozen weights of either side so many times."""
    each, seconds = DRAW_SECONDS.get(features.name, NORMAL_SECONDS), 0.0
    for width, times in ((features.rows, n_left), (features.cols, n_right)):
        haar = HAAR_SECONDS * width if features.name == "orthogonal" else 0.0
        seconds += times * features.n_features * width * (each + haar)
    return seconds


def draw_bytes(n_numbers: int) -> int:
    """Scratch memory of drawing so many numbers."""
    return DRAW_BYTES * min(n_numbers, PIECE) + NORMAL_BYTES * min(n_numbers, NORMAL_CHUNK)


def add_costs(parts: Iterable[Costs]) -> Costs:
    """The price of several parts of one layer: sums, the worst condition and error.

    The memory is that of parts made one after the other, each beside what the ones before it left.
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
    """How many times longer than a nominal core this machine takes for a matrix product, measured once in 50 ms.

    For display of seconds only: nothing is chosen by it, so that results do not depend on speed or load.
    """
    n = 384
    a = torch.ones(n, n, dtype=torch.float64)
    best = math.inf
    for _ in range(12):  # short, so that some of them are not interrupted by other processes
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return best * RATES[torch.float64] / (2.0 * n**3)
