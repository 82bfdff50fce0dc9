"""Features: the frozen weights of two source layers, generated on demand from a name, a shape and a seed.

Nothing is stored. Any block of features is a pure function of (format version, name, shape, seed, layer, ...). It is
always computed on the CPU in float64 and then cast and moved, so that all devices agree.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from onlynorm.display import Result
from onlynorm.errors import ShapeError, ValueRangeError, shown
from onlynorm.features.distributions import FACTORED, ORTHOGONAL, STRUCTURED, Distribution, Side, lookup
from onlynorm.features.fast_orthogonal import count_parameters
from onlynorm.features.kronecker import KronNormal, find_grid, grid_for_excess
from onlynorm.features.streams import Stream, as_integer, check_density, check_range, check_seed
from onlynorm.features.structured import FastOrthoCond, IdCond, IdCondMinimal, OrthoCond, Structure, one_hot
from onlynorm.validate import as_tensor, is_real_number, need_choice, need_device, need_float_dtype, need_free_memory

_PIECE = 2**20  # entries per task when a block is split over threads


@dataclass(frozen=True, kw_only=True)
class Features(Result):
    """The result of `draw`: `left(start, stop)` and `right(start, stop)` return any block of the frozen weights.

    Column f of the feature matrix M is left[:, f] (x) right[f, :]: M gamma = left diag(gamma) right.
    """

    name: str
    shape: tuple[int, ...]
    n_features: int
    seed: int
    layer: str
    kernel: str
    density: float | None
    shared_column: int
    dtype: torch.dtype
    device: torch.device

    @property
    def n_kernel(self) -> int:
        """Kernel positions of the target, 1 for a linear layer."""
        return math.prod(self.shape[2:])

    @property
    def rows(self) -> int:
        """Rows of `left`: outputs, times kernel positions if the kernel is in the second layer."""
        return self.shape[0] * (self.n_kernel if self.kernel == "second" else 1)

    @property
    def cols(self) -> int:
        """Columns of `right`: inputs, times kernel positions if the kernel is in the first layer."""
        return self.shape[1] * (self.n_kernel if self.kernel == "first" else 1)

    @property
    def equations(self) -> int:
        """Number of weights of the target, the rows of M."""
        return math.prod(self.shape)

    @property
    def excess(self) -> float:
        """Features per equation."""
        return self.n_features / self.equations

    @property
    def is_structured(self) -> bool:
        """Whether the features have a closed-form solution, `structure.solve`."""
        return self.name in STRUCTURED

    @property
    def is_full_grid(self) -> bool:
        """Whether feature k is (q, d) = divmod(k, n_seen) of a structured distribution without a mask."""
        return self.name in FACTORED or (self.name == "id_cond" and self.density is None)

    @functools.cached_property
    def grid_shape(self) -> tuple[int, int]:
        """The shape of the grid of structured features: (rows, cols), or that of the factors of kron_normal."""
        if self.name == "kron_normal":
            return find_grid(self.rows, self.cols, self.n_features)
        return self.rows, self.cols

    @property
    def n_seen(self) -> int:
        """Number of distinct feature inputs per patch: columns of the grid if structured, else `n_features`."""
        return self.grid_shape[1] if self.is_structured else self.n_features

    @property
    def has_factors(self) -> bool:
        """Whether there are frozen factors to multiply by; ID cond has none."""
        return not self.is_structured or self.name in FACTORED

    @property
    def has_dense_factors(self) -> bool:
        """Whether the factors are dense matrices that a layer can store; others are applied by `structure`."""
        return self.has_factors and self.name != "fast_ortho_cond"

    @property
    def n_frozen(self) -> int:
        """Number of frozen entries: those of both layers, or of the factors of a structure."""
        if not self.is_structured:
            return self.n_features * (self.rows + self.cols)
        if self.name in ("ortho_cond", "kron_normal"):
            n_left, n_right = self.grid_shape
            return n_left * self.rows + n_right * self.cols
        if self.name == "fast_ortho_cond":
            return count_parameters(self.rows) + count_parameters(self.cols)
        return 0 if self.density is None else self.n_features

    @functools.cached_property
    def structure(self) -> Structure | None:
        """The closed form of a structured distribution, None for a random one; built on first access."""
        return build_structure(self).to(self.dtype, self.device) if self.is_structured else None

    def left(self, start: int = 0, stop: int | None = None) -> Float[Tensor, "rows block"]:
        """Second source layer of features [start, stop), one column per feature."""
        start, stop = self._block(start, stop, self.rows)
        if self.structure is not None:
            return self.structure.left(start, stop).to(self.device, self.dtype).contiguous()
        return self._fill(self._left_side, start, stop).T

    def right(self, start: int = 0, stop: int | None = None) -> Float[Tensor, "block cols"]:
        """First source layer of features [start, stop), one row per feature."""
        start, stop = self._block(start, stop, self.cols)
        if self.structure is not None:
            return self.structure.right(start, stop).to(self.device, self.dtype).contiguous()
        return self._fill(self._right_side, start, stop)

    def mask_left(self, start: int = 0, stop: int | None = None) -> Bool[Tensor, "rows block"]:
        """Mask of the entries of `left` that are nonzero by construction."""
        start, stop = self._block(start, stop, self.rows)
        if self.structure is not None:
            return self.structure.left(start, stop).to(self.device) != 0
        return torch.from_numpy(self._left_side.mask(start, stop)).to(self.device).T

    def mask_right(self, start: int = 0, stop: int | None = None) -> Bool[Tensor, "block cols"]:
        """Mask of the entries of `right` that are nonzero by construction."""
        start, stop = self._block(start, stop, self.cols)
        if self.structure is not None:
            return self.structure.right(start, stop).to(self.device) != 0
        return torch.from_numpy(self._right_side.mask(start, stop)).to(self.device)

    def first_weight(self) -> Tensor:
        """`right` in the shape of the first source layer, (feat, inp, *kernel) or (feat, inp, 1, ...)."""
        kernel = self.shape[2:] if self.kernel == "first" else (1,) * len(self.shape[2:])
        return self.right().reshape(self.n_features, self.shape[1], *kernel)

    def second_weight(self) -> Tensor:
        """`left` in the shape of the second source layer, (out, feat, 1, ...) or (out, feat, *kernel)."""
        kernel = self.shape[2:] if self.kernel == "second" else (1,) * len(self.shape[2:])
        left = self.left().reshape(self.shape[0], -1, self.n_features)
        return left.mT.reshape(self.shape[0], self.n_features, *kernel)

    def as_matrix(self, weight: Float[Tensor, "*shape"]) -> Float[Tensor, "rows cols"]:
        """A weight of the target's shape as the matrix that left diag(gamma) right must equal."""
        weight = as_tensor("as_matrix", weight, cure="Pass the weight of the target layer.")
        if tuple(weight.shape) != self.shape:
            raise ShapeError(
                f"as_matrix needs a weight of shape {self.shape}; got {tuple(weight.shape)}. "
                "Draw the features for the shape of the weight."
            )
        if self.kernel == "second":
            weight = weight.flatten(2).mT if weight.ndim > 2 else weight
        return weight.reshape(self.rows, self.cols)

    def as_weight(self, matrix: Float[Tensor, "rows cols"]) -> Float[Tensor, "*shape"]:
        """The inverse of `as_matrix`: a (rows, cols) matrix in the target's shape."""
        matrix = as_tensor("as_weight", matrix, cure="Pass left @ diag(gamma) @ right.")
        if tuple(matrix.shape) != (self.rows, self.cols):
            raise ShapeError(
                f"as_weight needs a matrix of shape {(self.rows, self.cols)}; got {tuple(matrix.shape)}. "
                "Pass left @ diag(gamma) @ right."
            )
        return shape_weight(self, matrix)

    def weights_digest(self) -> str:
        """SHA-256 (hex) of the float64 weights before any cast: equal digests mean equal frozen weights.

        Random distributions: `right` row by row, then `left` column by column, little endian. Structured
        ones: `digest_bytes` of the structure.
        """
        digest = hashlib.sha256()
        if self.is_structured:
            digest.update(build_structure(self).digest_bytes())  # always in float64
            return digest.hexdigest()
        for side in (self._right_side, self._left_side):
            for piece in self._entries_by_piece(side, 0, self.n_features):
                digest.update(piece.astype("<f8", copy=False).tobytes())
        return digest.hexdigest()

    def __str__(self) -> str:
        density = "" if self.density is None else f", density {self.density:g}"
        kernel = f", kernel in the {self.kernel} layer" if len(self.shape) > 2 else ""
        return (
            f"{self.name} features for a target of shape {self.shape}: {self.n_features} features for "
            f"{self.equations} equations (excess {self.excess:.4g}), left {(self.rows, self.n_features)}, "
            f"right {(self.n_features, self.cols)}, seed {self.seed}, layer {self.layer!r}{density}{kernel}, "
            f"{str(self.dtype).removeprefix('torch.')} on {self.device}"
        )

    @property
    def _right_side(self) -> Side:
        return self._side("right", self.cols, self.cols)

    @property
    def _left_side(self) -> Side:
        return self._side("left", self.rows, self.n_features * (self.rows // self.shape[0]))

    def _side(self, part: str, width: int, fan_in: int) -> Side:
        return Side(part, width, fan_in, self.n_features, self.seed, self.layer, self.density)

    def _block(self, start: int, stop: int | None, width: int) -> tuple[int, int]:
        """[start, stop) as ints; raises unless a block of features of this width fits into memory."""
        first, last = check_range(start, self.n_features if stop is None else stop, self.n_features)
        distribution = lookup(self.name)
        n_copies = 2.0 if distribution is None else 1.0  # structured blocks are copied once
        n_bytes = n_copies * (last - first) * width * 8
        if distribution is not None and distribution.is_grouped and last > first:
            n_bytes += 24.0 * width**2  # a group is drawn at once
        need_free_memory(
            f"a block of {last - first:.3g} features", n_bytes, cure="Use smaller blocks: left(start, stop)."
        )
        return first, last

    def _pieces(self, side: Side, start: int, stop: int) -> list[tuple[int, int]]:
        """[start, stop) split into ranges of about `_PIECE` entries, at multiples of a group of features."""
        group = side.width if _distribution(self.name).is_grouped else 1
        step = max(1, _PIECE // (side.width * group)) * group
        cuts = [start, *range(start - start % step + step, stop, step), stop]
        return list(itertools.pairwise(cuts))

    def _entries(self, side: Side, start: int, stop: int) -> npt.NDArray[np.float64]:
        """The float64 entries of features [start, stop) of one side, one row per feature."""
        distribution = _distribution(self.name)
        entries = np.asarray(distribution.fill(side, start, stop))
        if entries.shape != (stop - start, side.width) or entries.dtype != np.float64:
            raise ShapeError(
                f"distribution {self.name!r} needs to return ({stop - start}, {side.width}) float64 entries; "
                f"got {entries.shape} {entries.dtype}. Return one row of side.width entries per feature."
            )
        if self.density is not None:
            entries = np.where(side.mask(start, stop), entries, 0.0)  # a product would leave negative zeros
        return entries

    def _entries_by_piece(self, side: Side, start: int, stop: int) -> Iterator[npt.NDArray[np.float64]]:
        """The entries of [start, stop) in pieces, in order; generated in parallel by as many threads as torch uses."""
        pieces = self._pieces(side, start, stop)
        n_threads = min(torch.get_num_threads(), len(pieces))
        with ThreadPoolExecutor(n_threads) as pool:
            for i in range(0, len(pieces), n_threads):
                yield from pool.map(lambda piece: self._entries(side, *piece), pieces[i : i + n_threads])

    def _fill(self, side: Side, start: int, stop: int) -> Tensor:
        block = torch.empty(stop - start, side.width, dtype=self.dtype)

        def fill(piece: tuple[int, int]) -> None:
            low, high = piece
            block[low - start : high - start] = torch.from_numpy(self._entries(side, low, high))

        pieces = self._pieces(side, start, stop)
        if len(pieces) == 1:  # threads do not pay off for a small block
            fill(pieces[0])
        else:
            with ThreadPoolExecutor(torch.get_num_threads()) as pool:
                list(pool.map(fill, pieces))
        return block.to(self.device)


def factor_rows(features: Features, side: str, start: int = 0, stop: int | None = None) -> Float[Tensor, "block _"]:
    """Rows of the factor used in a forward pass: `right` or left^T, or U1 or U2^T of a structure."""
    if not features.is_structured:
        return features.right(start, stop) if side == "right" else features.left(start, stop).mT
    if isinstance(features.structure, OrthoCond | KronNormal):
        factor = features.structure.right_factor if side == "right" else features.structure.left_factor.mT
        return factor[start:stop]
    n = features.cols if side == "right" else features.rows
    if isinstance(features.structure, FastOrthoCond):
        stop = n if stop is None else stop
        if side == "right":
            return features.structure.right_factor.rows(start, stop)
        return features.structure.left_factor.columns(start, stop)
    return one_hot(torch.arange(start, n if stop is None else stop), n).to(features.device, features.dtype)


def shape_weight(features: Features, matrix: Float[Tensor, "rows cols"]) -> Float[Tensor, "*shape"]:
    """A (rows, cols) matrix in the target's shape; it may be without values."""
    if features.kernel == "second":
        matrix = matrix.reshape(features.shape[0], features.n_kernel, features.shape[1]).mT
    return matrix.reshape(features.shape)


def build_structure(features: Features) -> Structure:
    """The structure of a structured distribution, in float64 on the CPU."""
    rows, cols, seed, layer = features.rows, features.cols, features.seed, features.layer
    n_bytes = 0.0
    if features.name == "ortho_cond":
        n_bytes = 24.0 * (rows**2 + cols**2)
    elif features.name == "kron_normal":
        n_bytes = 8.0 * features.n_frozen
    elif features.name == "id_cond" and features.density is not None:
        n_bytes = 17.0 * rows * cols  # words and indices of the mask
    need_free_memory(
        f"{features.name} for a target of shape {features.shape}", n_bytes, cure="Draw features for a smaller layer."
    )
    if features.name == "ortho_cond":
        return OrthoCond.draw(rows, cols, seed=seed, layer=layer)
    if features.name == "fast_ortho_cond":
        return FastOrthoCond.draw(rows, cols, seed=seed, layer=layer)
    if features.name == "kron_normal":
        grid = features.grid_shape
        fan_in = grid[0] * (rows // features.shape[0])  # of an output: all its kernel positions
        return KronNormal.draw(rows, cols, grid, fan_in=fan_in, seed=seed, layer=layer)
    if features.name == "id_cond_minimal":
        return IdCondMinimal(rows, cols, features.shape[0], features.shared_column)
    return IdCond.draw(rows, cols, seed=seed, layer=layer, density=features.density)


def _distribution(name: str) -> Distribution:
    distribution = lookup(name)
    if distribution is None:
        raise ValueRangeError(f"a random distribution is needed; got the structured {name!r}. Use its structure.")
    return distribution


DEFAULT_EXCESS = 1.25
_KERNELS = ("first", "second")
_MOST_WEIGHTS = 2**62
"""Maximum number of entries of a weight, or of features."""


def draw(
    name: str,
    shape: Sequence[int],
    *,
    n_features: int | None = None,
    excess: float | None = None,
    seed: int = 0,
    layer: str = "",
    kernel: str = "first",
    density: float | None = None,
    shared_column: int = 0,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Features:
    """Frozen features for a target weight of `shape`: (out, inp) or (out, inp, *kernel), 1 to 3 kernel axes.

    The number of features is `n_features`, or `excess` (features per equation, default 1.25) times the number of
    equations; kron_normal rounds it up to a full grid, other structured distributions have a fixed number. `kernel`
    selects the source layer with the kernel: "first" gives right (feat, inp * positions) and left (out, feat), "second"
    right (feat, inp) and left (out * positions, feat). `density` is for sparse distributions and id_cond,
    `shared_column` for id_cond_minimal. Features of equal seed and different `layer` are independent. Nothing large is
    computed before a block is requested.

    Distributions with the same seed and layer name use the same random stream, so that he_normal and he_uniform are
    dependent (comonotone). Use another seed or layer name for independent draws.

    Examples:
        >>> import onlynorm as on
        >>> features = on.draw("he_normal", (4, 8), excess=1.25, seed=0)
        >>> features.left().shape, features.right().shape
        (torch.Size([4, 40]), torch.Size([40, 8]))
    """
    distribution = lookup(name)
    shape = check_shape(shape)
    kernel = need_choice("kernel", kernel, _KERNELS)
    if distribution is not None and distribution.density is not None:
        density = distribution.density if density is None else check_density(density)
    elif density is not None:
        if name != "id_cond":
            raise ValueRangeError(
                f"density needs a sparse distribution; got {shown(density)} for {name}, which is dense. Omit "
                "density, or draw sparse_he_normal, er_normal, er_sign or id_cond."
            )
        density = check_density(density)
    column = as_integer(shared_column)
    if column != 0 and name != "id_cond_minimal":
        raise ValueRangeError(
            f"shared_column needs id_cond_minimal; got {shown(shared_column)} for {name}. Omit shared_column."
        )
    features = Features(
        name=name,
        shape=shape,
        n_features=0 if distribution is None else _need_room(_count(n_features, excess, math.prod(shape))),
        seed=check_seed(seed),
        layer=Stream(0, layer, "").layer,
        kernel=kernel,
        density=density,
        shared_column=shared_column if column is None else column,  # validated by the structure
        dtype=need_float_dtype("dtype", dtype),
        device=need_device("device", device, is_meta_allowed=True),
    )
    return features if distribution is not None else _with_own_count(features, n_features, excess)


def _with_own_count(features: Features, n_features: int | None, excess: float | None) -> Features:
    if features.name == "kron_normal":
        return _with_grid(features, n_features, excess)
    # Orthogonal factors are expensive to draw and not needed to count the features.
    own = features.equations if features.name in ORTHOGONAL else build_structure(features).n_features
    if excess is not None or (n_features is not None and as_integer(n_features) != own):
        raise ValueRangeError(
            f"{features.name} needs exactly {own} features; got n_features={shown(n_features)}, "
            f"excess={shown(excess)}. Omit both."
        )
    return dataclasses.replace(features, n_features=_need_room(own))


def _with_grid(features: Features, n_features: int | None, excess: float | None) -> Features:
    """The features on a grid with this number of features, or at least this excess."""
    count = _need_room(_count(n_features, excess, features.equations))
    if count < features.equations:
        got = f"excess={shown(excess)}" if n_features is None else f"n_features={shown(n_features)}"
        raise ValueRangeError(
            f"kron_normal needs at least one feature per equation, {features.equations}; got {got}. Use excess=1.25, "
            "or he_normal for fewer features."
        )
    if n_features is None:
        n_q, n_d = grid_for_excess(
            features.rows, features.cols, _as_written(DEFAULT_EXCESS if excess is None else excess)
        )
        count = _need_room(n_q * n_d)
    find_grid(features.rows, features.cols, count)
    return dataclasses.replace(features, n_features=count)


def check_shape(shape: object) -> tuple[int, ...]:
    """The shape of a target weight as ints; raises unless it is valid.

    Examples:
        >>> from onlynorm.features import check_shape
        >>> check_shape([8, 4, 3, 3])
        (8, 4, 3, 3)
    """
    is_listed = isinstance(shape, Iterable) and not isinstance(shape, torch.nn.Module)
    is_nested = isinstance(shape, torch.Tensor) and shape.is_nested
    is_listed = is_listed and not is_nested and getattr(shape, "ndim", 1) != 0
    sizes = [as_integer(size) for size in itertools.islice(shape, 6)] if is_listed else []  # type: ignore[call-overload]
    if not 2 <= len(sizes) <= 5 or any(size is None or size < 1 for size in sizes):
        raise ShapeError(
            f"shape needs 2 to 5 positive integers, (out, inp) or (out, inp, *kernel); got {shown(shape)}. "
            "Pass tuple(layer.weight.shape)."
        )
    found = tuple(size for size in sizes if size is not None)
    if math.prod(found) > _MOST_WEIGHTS:
        raise ShapeError(f"shape needs fewer than 2^62 entries; got {shown(shape)}. Pass tuple(layer.weight.shape).")
    return found


def _count(n_features: object, excess: object, equations: int) -> int:
    if n_features is not None and excess is not None:
        raise ValueRangeError(
            f"draw needs one of n_features and excess; got n_features={shown(n_features)} and excess={shown(excess)}. "
            "Omit one."
        )
    if n_features is not None:
        count = as_integer(n_features)
        if count is None or count < 1:
            raise ValueRangeError(
                f"n_features needs a positive integer; got {shown(n_features)}. Use "
                f"{math.ceil(DEFAULT_EXCESS * equations)} for {equations} equations."
            )
        return count
    excess = DEFAULT_EXCESS if excess is None else excess
    if not is_real_number(excess) or not 0.0 < excess < math.inf:  # type: ignore[operator]
        raise ValueRangeError(
            f"excess needs a positive finite number, features per equation; got {shown(excess)} for {equations} "
            "equations. Pass excess=1.25."
        )
    return math.ceil(_as_written(excess) * equations)  # exact decimal: 1.1 times 10 is 11


def _need_room(n_features: int) -> int:
    """Raises unless the gammas, one entry per feature, fit into memory."""
    n_bytes = 8.0 * min(n_features, 10**300)
    need_free_memory(
        f"one gamma for each of {n_bytes / 8:.3g} features", n_bytes, cure="Use a smaller excess or n_features."
    )
    return n_features


def _as_written(number: object) -> Fraction:
    """The shortest decimal that rounds to this float in its dtype."""
    narrow = isinstance(number, np.floating) and number.itemsize < 8
    return Fraction(str(number) if narrow else str(float(number)))  # type: ignore[arg-type]
