"""Frozen maps: the frozen weights of a pair of layers, as a linear map from gamma to a weight.

Two frozen layers with a norm between them, and no activation or one in its linear range, act as one weight

    W = left diag(gamma) right

Blocks apply `left` and `right` one after the other, chunk by chunk. Norm-only layers compute W first, which is cheaper
unless the batch has fewer than out inp / (out + inp) samples and positions; only Ortho cond then rotates the samples
instead. A map stores what its structure needs: nothing for ID cond, the entries of the features if it is sparse, two
square factors for Ortho cond, both factors for random features. Outputs may be split into equal parts with the same
frozen weights: blocks of random features (see `features.blocks`), or the groups of a convolution.

Frozen weights are cast to a lower precision and drawn again for a higher one, so that a cast to float32 and back is
exact. They are in float32 at least: gammas of random features are large and cancel. Weights are computed without
autocast, in the precision of gamma, and rounded once to that of the layer.

Theory: random_features:thm-3.1, random_features:ortho-cond, random_features:eq-3
"""

from __future__ import annotations

import functools
import hashlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.errors import ConversionError, InsufficientFeaturesError, ValueRangeError
from onlynorm.features import Features, draw
from onlynorm.features.blocks import draw_blocks
from onlynorm.features.distributions import STRUCTURED
from onlynorm.features.draw import factor_rows
from onlynorm.features.kronecker import KronInverse, KronNormal
from onlynorm.features.scaled import Scaled, need_spectrum, semicircle_spectrum
from onlynorm.features.structured import FastOrthoCond, IdCond, OrthoCond, Structure
from onlynorm.frozen.options import FrozenOptions
from onlynorm.memory import memory_limit, need_memory
from onlynorm.modules import is_autocast, without_autocast
from onlynorm.solvers import KhatriRao
from onlynorm.solvers.methods.blocks import solve_blocks

LOWEST = torch.float32
"""The lowest precision of frozen weights, and of gammas that are not the weight itself."""
SIDES = ("right", "left")
CHUNK = 2**22
"""Frozen entries drawn at a time if they are not stored."""


def at_least_float32(made: Tensor, before: Tensor) -> Tensor:
    """A tensor after a cast or move, in float32 if the cast was to a lower precision."""
    is_lower = made.is_floating_point() and made.dtype.itemsize < LOWEST.itemsize
    return before.to(made.device, LOWEST) if is_lower else made


class FrozenMap(nn.Module):
    """A linear map from the gammas of a layer to its weight of `shape`, with frozen weights drawn from a seed.

    `features` describes one of `n_copies` equal parts of the outputs. `sides` are the factors in use; `is_stored=False`
    draws them on every pass. Frozen tensors are plain attributes, not buffers, so that optimizers, adapters and files
    ignore them. `like` is an empty buffer with the dtype of the weight.
    """

    like: Tensor

    def __init__(
        self,
        features: Features,
        *,
        n_copies: int = 1,
        spectrum: float | Tensor | None = None,
        sides: Sequence[str] = SIDES,
        is_stored: bool = True,
        dtype: torch.dtype = torch.float64,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if spectrum is not None and features.name != "id_cond":
            raise ValueRangeError(f"a spectrum needs id_cond features; got {features.name}. Leave spectrum out.")
        self.features, self.n_copies, self.spectrum = features, n_copies, spectrum
        self.sides, self.is_stored = tuple(sides), is_stored
        self.register_buffer("like", torch.empty(0, dtype=dtype, device=device), persistent=False)
        for name, draw_now in self.stored().items():
            drawn = draw_now()
            if features.is_structured:  # a copy, since `features` holds the original
                drawn = drawn.clone(memory_format=torch.contiguous_format)
            own_dtype = torch.promote_types(dtype, LOWEST) if drawn.is_floating_point() else drawn.dtype
            setattr(self, name, drawn.to(device, own_dtype).contiguous())

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight, (out, inp, *kernel)."""
        return (self.features.shape[0] * self.n_copies, *self.features.shape[1:])

    @property
    def equations(self) -> int:
        """Number of entries of the weight."""
        return self.features.equations * self.n_copies

    @property
    def n_features(self) -> int:
        """Number of entries of gamma."""
        return self.features.n_features * self.n_copies

    @property
    def n_frozen(self) -> int:
        """Number of frozen entries in use, stored or not."""
        f = self.features
        widths = {"right": f.cols, "left": f.rows}
        return f.n_features * sum(widths[side] for side in self.sides)

    @property
    def is_identity(self) -> bool:
        """Whether gamma is the weight itself, entry by entry."""
        return False

    @property
    def has_output_gamma(self) -> bool:
        """Whether there is a second gamma, one per output."""
        return False

    @property
    def keeps_float32(self) -> bool:
        """Whether gamma stays in float32 for a weight in half precision."""
        return self.features.name != "id_cond" or self.spectrum is not None

    @property
    def gamma_dtype(self) -> torch.dtype:
        """The dtype of gamma, for a weight with the dtype of `like`."""
        return torch.promote_types(self.like.dtype, LOWEST) if self.keeps_float32 else self.like.dtype

    def stored(self) -> dict[str, Callable[[], Tensor]]:
        """Functions that draw each stored tensor in float64, by name."""
        if not self.is_stored or not self.features.has_dense_factors:
            return {}
        return {side: functools.partial(factor_rows, self.features, side) for side in self.sides}

    def stored_tensors(self) -> list[Tensor]:
        """The stored frozen tensors."""
        return [getattr(self, name) for name in self.stored()]

    def is_reproducible(self) -> bool:
        """Whether the stored tensors are bit-identical to those drawn from the seed."""
        for name, draw_now in self.stored().items():
            held: Tensor = getattr(self, name)
            if not torch.equal(held, draw_now().to(held)):
                return False
        return True

    def rows(self, side: str, start: int = 0, stop: int | None = None, *, like: Tensor | None = None) -> Tensor:
        """Rows of `right`, or of `left` transposed: one per feature, or per row of a structure's factor.

        With `like` they have its dtype and device, and are drawn again if the stored precision is lower.
        """
        held: Tensor | None = getattr(self, side, None)
        if self.like.is_meta:  # only shapes are computed
            width = {"right": self.features.cols, "left": self.features.rows}[side]
            f = self.features
            n_rows = f.grid_shape[side == "right"] if f.is_structured else f.n_features
            stop = n_rows if stop is None else stop
            return self.like.new_empty(stop - start, width, dtype=self.gamma_dtype if like is None else like.dtype)
        if held is not None and (like is None or held.dtype.itemsize >= like.dtype.itemsize):
            return held[start:stop].to(self.like.device) if like is None else held[start:stop].to(like)
        # The memory layout of stored rows, so that products round the same.
        drawn = factor_rows(self.features, side, start, stop)
        return (drawn.to(self.like.device) if like is None else drawn.to(like)).contiguous()

    def forward(self, *gammas: Tensor) -> Tensor:
        """The weight for these gammas in the dtype of `like`, without autocast."""
        with without_autocast(self.like.device):
            return self.weight(*gammas).to(self.like.dtype)

    @abstractmethod
    def weight(self, *gammas: Tensor) -> Tensor:
        """The weight for these gammas, in their dtype."""

    @abstractmethod
    def constant(self, beta: Tensor) -> Tensor:
        """The constant that a shift per feature adds to each output."""

    @abstractmethod
    def solve(self, weight: Tensor) -> tuple[Tensor, ...]:
        """The gammas in float64 with this weight, or the closest to it."""

    def linear(self, x: Tensor, gammas: tuple[Tensor, ...], beta: Tensor | None) -> Tensor:
        """W x + beta for the weight of these gammas."""
        return functional.linear(x, self(*gammas), beta)

    def digest(self) -> str:
        """SHA-256 of the frozen weights in float64, except a given spectrum."""
        return self.features.weights_digest()

    def settings(self) -> dict[str, Any]:
        """The arguments of `map_from_settings`, in JSON types except a spectrum given as a tensor."""
        f = self.features
        made: dict[str, Any] = {
            "name": f.name, "shape": list(f.shape), "n_features": f.n_features, "seed": f.seed, "layer": f.layer,
            "kernel": f.kernel, "density": f.density, "shared_column": f.shared_column,
        }  # fmt: skip
        if self.n_copies != 1:
            made["n_copies"] = self.n_copies
        if self.spectrum is not None:
            made["spectrum"] = self.spectrum
        return made

    def origin(self) -> str:
        """A string that identifies the frozen weights in any precision."""
        f = self.features
        density = "" if f.density is None else f", density {f.density}"
        blocks = f"{self.n_copies} blocks of {f.n_features}"
        return f"{f.name}{density}, {blocks}, seed {f.seed}, layer {f.layer!r}"

    def by_copy(self, values: Tensor) -> Tensor:
        """Entries of gamma with the copies as first axis, if there are several."""
        return values.reshape(*self._copies, -1)

    def as_matrices(self, weight: Tensor) -> Tensor:
        """A weight as the matrix (rows, cols) that left diag(gamma) right must equal, one for each copy."""
        f = self.features
        if f.kernel == "second":
            weight = weight.reshape(self.shape[0], f.shape[1], -1).mT
        return weight.reshape(*self._copies, f.rows, f.cols)

    def as_blocks(self, weight: Tensor) -> Tensor:
        """A weight as the matrices (n_copies, rows, cols) of the copies."""
        return self.as_matrices(weight).reshape(self.n_copies, self.features.rows, self.features.cols)

    def as_weight(self, matrices: Tensor) -> Tensor:
        """The inverse of `as_matrices`."""
        f = self.features
        if f.kernel == "second":
            matrices = matrices.reshape(self.shape[0], -1, f.shape[1]).mT
        return matrices.reshape(self.shape)

    @property
    def _copies(self) -> tuple[int, ...]:
        """The axis of the copies, empty for one copy."""
        return () if self.n_copies == 1 else (self.n_copies,)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenMap:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, draw_now in self.stored().items():
            before: Tensor = getattr(self, name)
            now = at_least_float32(fn(before), before)
            is_new = now.dtype.itemsize > before.dtype.itemsize or before.is_meta
            setattr(self, name, draw_now().to(now).contiguous() if is_new and not now.is_meta else now)
        return self

    def extra_repr(self) -> str:
        f = self.features
        return f"{f.name}, {self.n_features} features, seed={f.seed}, layer={f.layer!r}"


class GridMap(FrozenMap):
    """Structured features: ID cond, sparse, scaled or at the minimum width, Ortho cond, and random factors.

    Their matrix is known and never built. At the minimum width all first-position weights share one feature, and are
    represented by a second gamma, one per output.
    """

    kept: Tensor
    values: Tensor

    @property
    def has_output_gamma(self) -> bool:
        return self.features.name == "id_cond_minimal"

    @property
    def is_identity(self) -> bool:
        return not self.keeps_float32 and self.features.density is None

    @property
    def n_frozen(self) -> int:
        return self.features.n_frozen + (0 if self.spectrum is None else self.n_features)

    def stored(self) -> dict[str, Callable[[], Tensor]]:
        made = super().stored()
        if self.spectrum is not None:
            made["values"] = self._values
        if self.features.name == "id_cond" and self.features.density is not None:
            made["kept"] = self._kept_entries
        return made

    def structure(self, like: Tensor | None = None) -> Structure:
        """The structure with the stored tensors of this map; `like` as in `rows`."""
        f = self.features
        if f.name in ("ortho_cond", "kron_normal"):
            kind = OrthoCond if f.name == "ortho_cond" else KronNormal
            return kind(self.rows("left", like=like).mT, self.rows("right", like=like))
        if self.has_output_gamma or f.name == "fast_ortho_cond":
            assert f.structure is not None
            return f.structure
        base = IdCond(f.rows, f.cols, getattr(self, "kept", None))
        return base if self.spectrum is None else Scaled(base, self.values)

    def weight(self, *gammas: Tensor) -> Tensor:
        return self.as_weight(self.structure(gammas[0]).apply(*(self.by_copy(gamma) for gamma in gammas)))

    def constant(self, beta: Tensor) -> Tensor:
        return self.structure(beta).constant(self.by_copy(beta)).reshape(self.shape[0], -1).sum(1)

    def rotate_inputs(self, x: Tensor, *, overwrite: bool = False) -> Tensor:
        """U1 x for every row x, the inputs of the features; x itself for ID cond.

        With `overwrite` the result may be written to x, if no gradients are needed.
        """
        structure = self._fast()
        if structure is not None:
            learns = torch.is_grad_enabled() and x.requires_grad
            return structure.right_factor.apply_(x) if overwrite and not learns else structure.transform_inputs(x)
        return x @ self.rows("right").to(x.dtype).mT if self.features.has_factors else x

    def rotate_outputs(self, v: Tensor) -> Tensor:
        """U2 v for every row v of sums over features; v itself for ID cond."""
        structure = self._fast()
        if structure is not None:
            return structure.transform_outputs(v)
        return v @ self.rows("left").to(v.dtype) if self.features.has_factors else v

    def rotate_grid(self, scale: Tensor) -> Tensor:
        """U2 scale U1 for the scales of one copy as a (rows, cols) matrix, which may be overwritten."""
        structure = self._fast()
        if structure is not None:
            learns = torch.is_grad_enabled() and scale.requires_grad
            return structure.apply(scale.flatten()) if learns else structure.rotate_(scale)
        if not self.features.has_factors:
            return scale
        return self.rows("left").to(scale).mT @ scale @ self.rows("right").to(scale)

    def _fast(self) -> FastOrthoCond | None:
        """The structure of fast orthogonal features, None for all others."""
        if self.features.name != "fast_ortho_cond":
            return None
        structure = self.features.structure
        assert isinstance(structure, FastOrthoCond)
        return structure

    def linear(self, x: Tensor, gammas: tuple[Tensor, ...], beta: Tensor | None) -> Tensor:
        """W x + beta; each factor of Ortho cond rotates the weight or, where these are fewer, the samples.

        Forward and backward then take 4 (min(n, out) inp^2 + min(n, inp) out^2) operations beyond the ordinary layer's
        6 n out inp, for n samples.
        """
        out, inp = self.shape
        n_samples = x.numel() // max(1, x.shape[-1])
        is_rounded = self.like.dtype != self.gamma_dtype or is_autocast(x)
        if self.features.name == "fast_ortho_cond" and not is_rounded and n_samples * (out + inp) < 2 * out * inp:
            made = self.rotate_outputs(functional.linear(self.rotate_inputs(x), gammas[0].view(out, inp)))
            return made if beta is None else made + beta
        if self.features.name != "ortho_cond" or n_samples >= max(out, inp) or is_rounded:
            return super().linear(x, gammas, beta)  # three products in half precision would round three times
        left, right = self.rows("left", like=gammas[0]).mT, self.rows("right", like=gammas[0])
        weight = gammas[0].view(out, inp)
        if n_samples < out:
            x = functional.linear(x, right)
        else:
            weight = weight @ right
        if n_samples < inp:
            return functional.linear(functional.linear(x, weight), left, beta)
        return functional.linear(x, left @ weight, beta)

    def solve(self, weight: Tensor) -> tuple[Tensor, ...]:
        matrices = self.as_matrices(weight.detach().double())
        solved = self.structure().to(torch.float64, matrices.device).solve(matrices)
        return tuple(gamma.flatten() for gamma in (solved if self.has_output_gamma else (solved,)))

    def inverse(self) -> KronInverse | None:
        """The pseudo-inverse for steps of training, factored once; None if `solve` is as cheap."""
        structure = self.structure()
        if not isinstance(structure, KronNormal):
            return None
        return KronInverse(structure.to(torch.float64, self.like.device), is_refined=False)

    def digest(self) -> str:
        if not isinstance(self.spectrum, float):
            return super().digest()
        base = self.features.structure
        assert isinstance(base, IdCond)
        return hashlib.sha256(Scaled(base, self._values()).digest_bytes()).hexdigest()

    def origin(self) -> str:
        f, scaled = self.features, ""
        if self.is_identity:
            return f.name
        if isinstance(self.spectrum, Tensor):
            scaled = f", spectrum {hashlib.sha256(self.spectrum.numpy().tobytes()).hexdigest():.16}"
        elif self.spectrum is not None:
            scaled = f", condition {self.spectrum}"
        density = "" if f.density is None else f", density {float(f.density)}"
        groups = f", {self.n_copies} groups" if self.n_copies > 1 else ""
        if self.has_output_gamma:
            return f"{f.name}, shared column {f.shared_column}{groups}"
        return f"{f.name}{density}{scaled}{groups}, seed {f.seed}, layer {f.layer!r}"

    def _values(self) -> Tensor:
        """The singular values of all features."""
        f = self.features
        if isinstance(self.spectrum, Tensor):
            return need_spectrum(self.spectrum, f.n_features)
        assert self.spectrum is not None
        return semicircle_spectrum(f.n_features, condition=self.spectrum, seed=f.seed, layer=f.layer)

    def _kept_entries(self) -> Tensor:
        """The indices of the weight entries with a feature."""
        structure = self.features.structure
        assert isinstance(structure, IdCond)
        assert structure.kept is not None
        return structure.kept


class RandomMap(FrozenMap):
    """Random features of any distribution."""

    left: Tensor
    right: Tensor

    def weight(self, *gammas: Tensor) -> Tensor:
        """The weight for this gamma; the left factors of all copies are stacked, for a single matrix product."""
        gamma = gammas[0].view(self.n_copies, 1, -1)
        made: Tensor | None = None
        for start, stop in self._chunks(gamma):
            left, right = (self.rows(side, start, stop, like=gamma) for side in ("left", "right"))
            part = (gamma[..., start:stop] * left.mT).flatten(0, 1) @ right
            made = part if made is None else made + part
        assert made is not None
        return self.as_weight(made)

    def constant(self, beta: Tensor) -> Tensor:
        by_copy, made = beta.view(self.n_copies, -1), beta.new_zeros(self.n_copies, self.features.rows)
        for start, stop in self._chunks(beta):
            made += by_copy[:, start:stop] @ self.rows("left", start, stop, like=beta)
        return made.reshape(self.shape[0], -1).sum(1)

    def solve(self, weight: Tensor) -> tuple[Tensor, ...]:
        operator, target = self.operator(), self.as_blocks(weight.detach().double())
        gamma = solve_blocks(operator, target)
        if operator.n_features >= operator.equations and self.like.dtype == torch.float64:
            # The solver stops at 1e-10, which matters only in float64.
            gamma = gamma + solve_blocks(operator, target - operator.apply(gamma))
        return (gamma.flatten(),)

    def operator(self) -> KhatriRao:
        """The operator of one copy in float64, from the stored tensors."""
        return KhatriRao(self.rows("left").mT.double().contiguous(), self.rows("right").double())

    def _chunks(self, like: Tensor) -> list[tuple[int, int]]:
        """Ranges of features: all at once if they are stored, else as many as are drawn at a time."""
        f = self.features
        is_stored = self.is_stored and self.left.dtype.itemsize >= like.dtype.itemsize
        step = f.n_features if is_stored else max(1, CHUNK // (f.rows + f.cols))
        return [(start, min(start + step, f.n_features)) for start in range(0, f.n_features, step)]


def kind_of(features: Features) -> type[FrozenMap]:
    """The class of maps with these features."""
    return GridMap if features.is_structured else RandomMap


def features_from_settings(settings: dict[str, Any]) -> Features:
    """The features of a map with these settings."""
    s = settings
    return draw(
        s["name"], s["shape"], n_features=s["n_features"], seed=s["seed"], layer=s["layer"], kernel=s["kernel"],
        density=s["density"], shared_column=s["shared_column"],
    )  # fmt: skip


def map_from_settings(settings: dict[str, Any], *, is_stored: bool, dtype: torch.dtype) -> FrozenMap:
    """The map with these settings, see `FrozenMap.settings`."""
    features, n_copies, spectrum = (
        features_from_settings(settings),
        settings.get("n_copies", 1),
        settings.get("spectrum"),
    )
    return kind_of(features)(features, n_copies=n_copies, spectrum=spectrum, is_stored=is_stored, dtype=dtype)


def make_maps(
    features: Sequence[Features], *, storage: str, dtype: torch.dtype, sides: Sequence[str] = SIDES
) -> nn.ModuleList:
    """A map for each of these features."""
    is_stored = storage == "dense"
    return nn.ModuleList(kind_of(one)(one, sides=sides, is_stored=is_stored, dtype=dtype) for one in features)


def make_map(
    shape: tuple[int, ...],
    options: FrozenOptions,
    *,
    seed: int = 0,
    layer: str = "",
    groups: int = 1,
    dtype: torch.dtype = torch.float64,
    device: torch.device | None = None,
    is_stored: bool = True,
) -> FrozenMap:
    """The map with these options for a weight of this shape.

    In a convolution with `groups`, a feature connects inputs and outputs of one group. Except for ID cond, all groups
    have the same frozen weights.
    """
    features, n_copies = _choose_features(shape, options, seed=seed, layer=layer, groups=groups)
    n_bytes = 8 * features.n_frozen
    if not features.is_structured:
        # Two copies at a time, and one in float64 for the solver of the initial gammas.
        n_bytes += 2 * torch.promote_types(dtype, LOWEST).itemsize * features.n_frozen
    if is_stored:
        need_memory(
            f"a weight {' x '.join(map(str, shape))} of {features.n_features:,} {features.name} features",
            n_bytes, memory_limit(), "Take id_cond, which stores nothing, more n_blocks, or a smaller excess.",
        )  # fmt: skip
    made = kind_of(features)(
        features, n_copies=n_copies, spectrum=options.spectrum, is_stored=is_stored, dtype=dtype, device=device
    )
    if is_stored and features.density is not None:
        _need_features(made)
    return made


def _need_features(made: FrozenMap) -> None:
    """Raises if all sparse random features are zero."""
    f = made.features
    if isinstance(made, RandomMap) and not made.like.is_meta and not bool((made.left.any(1) & made.right.any(1)).any()):
        raise InsufficientFeaturesError(
            f"{f.name} needs at least one feature that is not zero; got none of {f.n_features} with density "
            f"{f.density}. Raise the density or change the seed."
        )


def _choose_features(
    shape: tuple[int, ...], options: FrozenOptions, *, seed: int, layer: str, groups: int
) -> tuple[Features, int]:
    """The features of one copy, and the number of copies; only a mask is drawn."""
    o = options
    if o.features in STRUCTURED:
        n_copies = 1 if o.features == "id_cond" else groups
        part = (shape[0] // n_copies, *shape[1:])
        grid = draw(
            o.features, part, excess=o.excess, density=o.density, seed=seed, layer=layer, shared_column=o.shared_column
        )
        return grid, n_copies
    if o.n_blocks % groups and o.n_blocks != 1:
        raise ConversionError(
            f"a convolution in {groups} groups needs a multiple of {groups} blocks; got {o.n_blocks}. Leave n_blocks "
            "out."
        )
    drawn = draw_blocks(
        o.features, shape, n_blocks=max(o.n_blocks, groups), excess=o.excess, density=o.density, seed=seed, layer=layer
    )
    return drawn.base, drawn.n_blocks
