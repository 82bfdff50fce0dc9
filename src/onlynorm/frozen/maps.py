"""The frozen half of a norm-only layer: a linear map from gamma to the weight that the layer then applies.

The middle of such a layer is linear, so its two frozen source layers and the norm between them act as one weight

    W = left diag(gamma) right,    y = W x + beta

and W is what the forward pass makes first: for every distribution that is cheaper than to run the features on a batch,
unless the batch has fewer than out inp / (out + inp) samples and positions. Only Ortho cond gains enough there to turn
the samples instead. What a map keeps is what its structure needs: nothing for ID cond, the numbers of the kept weights
for a sparse one, two square factors for Ortho cond, both factors of one block for random features.

A map is made from its seed whenever its precision or device changes, so that float32 and back loses nothing. Weights
are made outside autocast, in the precision of gamma, and the layer then rounds them once, as an ordinary layer does.
Gammas of random features need the digits of float32, since they are large and cancel: in a model of half precision all
maps but ID cond itself work in float32, and only the weight is rounded.

Theory: random_features:thm-3.1, random_features:ortho-cond, random_features:eq-3
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.errors import ConversionError, InsufficientFeaturesError
from onlynorm.features import Features, draw
from onlynorm.features.blocks import BlockFeatures, draw_blocks
from onlynorm.features.distributions import STRUCTURED
from onlynorm.features.scaled import Scaled, need_spectrum, semicircle_spectrum
from onlynorm.features.structured import IdCond, IdCondMinimal, OrthoCond, Structure
from onlynorm.frozen.options import Choice
from onlynorm.memory import memory_limit, need_memory
from onlynorm.modules import is_autocast, without_autocast
from onlynorm.solvers import KhatriRao
from onlynorm.solvers.methods.blocks import solve_blocks


class FrozenMap(nn.Module):
    """A map from the gammas of a layer to its weight of `shape`; holds no parameters, and nothing of it is saved.

    A feature of a convolution in `groups` reads the inputs of one group and feeds outputs of the same. ID cond does so
    by itself; all others have the same frozen numbers in every group, those drawn for the weight of one.
    """

    like: Tensor

    def __init__(
        self, shape: tuple[int, ...], choice: Choice, *, dtype: torch.dtype, device: torch.device, groups: int = 1
    ) -> None:
        super().__init__()
        self.shape, self.choice, self.groups = shape, choice, groups
        self.register_buffer("like", torch.empty(0, dtype=dtype, device=device), persistent=False)
        self.fill()

    @property
    def equations(self) -> int:
        """Weights of the layer."""
        return math.prod(self.shape)

    @property
    def is_identity(self) -> bool:
        """Whether gamma is the weight itself, number by number."""
        return False

    @property
    def keeps_float32(self) -> bool:
        """Whether gamma stays in float32 where the weight has half precision: wherever it is not the weight itself."""
        c = self.choice
        return c.features != "id_cond" or c.condition is not None or c.spectrum is not None

    @property
    def gamma_dtype(self) -> torch.dtype:
        """The precision of gamma, for a weight in the precision of `like`."""
        return torch.promote_types(self.like.dtype, torch.float32) if self.keeps_float32 else self.like.dtype

    def forward(self, *gammas: Tensor) -> Tensor:
        """The weight of these gammas, whatever autocast says."""
        with without_autocast(self.like.device):
            return self.make(*gammas)

    @abstractmethod
    def make(self, *gammas: Tensor) -> Tensor:
        """The weight of these gammas."""

    @property
    @abstractmethod
    def n_features(self) -> int:
        """Entries of gamma."""

    @abstractmethod
    def numbers(self) -> list[Tensor]:
        """The frozen numbers that are held beside gamma."""

    @property
    def n_frozen(self) -> int:
        """How many of them there are."""
        return sum(held.numel() for held in self.numbers())

    def is_reproducible(self) -> bool:
        """Whether they are, bit for bit, what the seed gives."""
        again = type(self)(self.shape, self.choice, dtype=self.like.dtype, device=self.like.device, groups=self.groups)
        return all(torch.equal(*pair) for pair in zip(self.numbers(), again.numbers(), strict=True))

    @abstractmethod
    def fill(self) -> None:
        """Makes the frozen numbers from the seed, in the precision and on the device of `like`."""

    @abstractmethod
    def solve(self, weight: Tensor) -> tuple[Tensor, ...]:
        """The gammas in float64 whose weight this is, or comes nearest to it."""

    @abstractmethod
    def digest(self) -> str:
        """SHA-256 of the frozen numbers in float64, as far as they come from a seed."""

    @abstractmethod
    def origin(self) -> str:
        """The words that fix the frozen numbers, whatever their precision; equal words mean equal numbers."""

    def by_group(self, values: Tensor) -> Tensor:
        """Entries of gamma, or a weight, with the groups in front; as they are where there is one."""
        return values if self.groups == 1 else values.reshape(self.groups, -1, *values.shape[1:])

    def linear(self, x: Tensor, gammas: tuple[Tensor, ...], beta: Tensor | None) -> Tensor:
        """W x + beta for the weight of these gammas."""
        return functional.linear(x, self(*gammas), beta)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenMap:
        before = (self.like.dtype, self.like.device)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if (self.like.dtype, self.like.device) != before:
            self.fill()
        return self

    def extra_repr(self) -> str:
        choice = self.choice
        return f"{choice.features}, {self.n_features} features, seed={choice.seed}, layer={choice.layer!r}"


class StructuredMap(FrozenMap):
    """ID cond, sparse or scaled, and Ortho cond: M is known in closed form and never built."""

    structure: Structure

    @property
    def is_identity(self) -> bool:
        return isinstance(self.structure, IdCond) and self.structure.kept is None

    @property
    def n_features(self) -> int:
        return self.structure.n_features * self._n_copies

    @property
    def _n_copies(self) -> int:
        """Groups with the frozen numbers of one."""
        return 1 if self.choice.features == "id_cond" else self.groups

    def numbers(self) -> list[Tensor]:
        structure = self.structure
        if isinstance(structure, OrthoCond):
            return [structure.left_factor, structure.right_factor]
        base = structure.base if isinstance(structure, Scaled) else structure
        assert isinstance(base, IdCond)
        spectrum = [structure.spectrum] if isinstance(structure, Scaled) else []
        return spectrum if base.kept is None else [*spectrum, base.kept]

    def fill(self) -> None:
        if self.choice.features == "ortho_cond":
            out, inp = self.shape[0] // self.groups, self.equations // self.shape[0]
            need_memory(
                f"a weight {' x '.join(map(str, self.shape))} of ortho_cond features",
                8 * (out**2 + inp**2),
                memory_limit(),
                "Take id_cond, which keeps nothing.",
            )
        structure = self._features().structure
        assert structure is not None
        spectrum = self._spectrum(structure.n_features)
        if spectrum is not None:
            assert isinstance(structure, IdCond)
            structure = Scaled(structure, spectrum)
        self.structure = structure.to(self.gamma_dtype, self.like.device)

    def make(self, *gammas: Tensor) -> Tensor:
        gamma = gammas[0] if self._n_copies == 1 else self.by_group(gammas[0])
        return self.structure.apply(gamma).reshape(self.shape).to(self.like.dtype)

    def linear(self, x: Tensor, gammas: tuple[Tensor, ...], beta: Tensor | None) -> Tensor:
        """W x + beta; each factor of Ortho cond turns the weight or, where these are fewer, the samples.

        Forward and backward then take 4 (min(n, out) inp^2 + min(n, inp) out^2) operations beyond the ordinary layer's
        6 n out inp, for n samples.
        """
        structure = self.structure
        out, inp = self.shape[0], self.equations // self.shape[0]
        n_samples = x.numel() // max(1, x.shape[-1])
        is_rounded = self.like.dtype != self.gamma_dtype or is_autocast(x)
        if not isinstance(structure, OrthoCond) or n_samples >= max(out, inp) or is_rounded:
            return super().linear(x, gammas, beta)  # three products of half precision would round three times
        weight = gammas[0].view(out, inp)
        if n_samples < out:
            x = functional.linear(x, structure.right_factor)
        else:
            weight = weight @ structure.right_factor
        if n_samples < inp:
            return functional.linear(functional.linear(x, weight), structure.left_factor, beta)
        return functional.linear(x, structure.left_factor @ weight, beta)

    def solve(self, weight: Tensor) -> tuple[Tensor, ...]:
        matrix = weight.detach().double().reshape(self.shape[0], -1)
        matrix = matrix if self._n_copies == 1 else self.by_group(matrix)
        return (self.structure.to(torch.float64, matrix.device).solve(matrix).flatten(),)

    def digest(self) -> str:
        features = self._features()
        if self.choice.condition is None:
            return features.weights_digest()
        assert isinstance(features.structure, IdCond)
        spectrum = self._spectrum(features.n_features)
        assert spectrum is not None
        return hashlib.sha256(Scaled(features.structure, spectrum).digest_bytes()).hexdigest()

    def origin(self) -> str:
        c = self.choice
        if self.is_identity:
            return c.features
        given = "" if c.spectrum is None else hashlib.sha256(c.spectrum.numpy().tobytes()).hexdigest()
        density = "" if c.density is None else f", density {float(c.density)}"
        scaled = f", condition {float(c.condition)}" if c.condition else f", spectrum {given:.16}" if given else ""
        groups = f", {self.groups} groups" if self._n_copies > 1 else ""
        return f"{c.features}{density}{scaled}{groups}, seed {c.seed}, layer {c.layer!r}"

    def _features(self) -> Features:
        c, shape = self.choice, (self.shape[0] // self._n_copies, *self.shape[1:])
        return draw(c.features, shape, density=c.density, seed=c.seed, layer=c.layer)

    def _spectrum(self, n_features: int) -> Tensor | None:
        c = self.choice
        if c.condition is not None:
            return semicircle_spectrum(n_features, condition=c.condition, seed=c.seed, layer=c.layer)
        return None if c.spectrum is None else need_spectrum(c.spectrum, n_features)


class MinimalMap(FrozenMap):
    """ID cond at the minimum width: all first-position weights share one feature, and a second gamma carries them."""

    structure: IdCondMinimal

    @property
    def n_features(self) -> int:
        return self.structure.n_features * self.groups

    def numbers(self) -> list[Tensor]:
        return []

    def fill(self) -> None:
        structure = self._features().structure
        assert isinstance(structure, IdCondMinimal)
        self.structure = structure

    def make(self, *gammas: Tensor) -> Tensor:
        made = self.structure.apply(*(self.by_group(gamma) for gamma in gammas))
        return made.reshape(self.shape).to(self.like.dtype)

    def solve(self, weight: Tensor) -> tuple[Tensor, ...]:
        matrix = self.by_group(weight.detach().double().reshape(self.shape[0], -1))
        return tuple(values.flatten() for values in self.structure.solve(matrix))

    def digest(self) -> str:
        return self._features().weights_digest()

    def origin(self) -> str:
        groups = f", {self.groups} groups" if self.groups > 1 else ""
        return f"{self.choice.features}, shared column {self.choice.shared_column}{groups}"

    def _features(self) -> Features:
        c, shape = self.choice, (self.shape[0] // self.groups, *self.shape[1:])
        return draw(c.features, shape, density=c.density, seed=c.seed, layer=c.layer, shared_column=c.shared_column)


class RandomMap(FrozenMap):
    """Any random distribution, in one block or several; both factors of one block are kept.

    A convolution in groups has at least a block for each.
    """

    left: Tensor
    right: Tensor

    @property
    def n_features(self) -> int:
        return len(self.right) * self.n_blocks

    @property
    def n_blocks(self) -> int:
        """Groups of outputs with features of their own."""
        return count_blocks(self.choice, self.groups)

    def numbers(self) -> list[Tensor]:
        return [self.left, self.right]

    def fill(self) -> None:
        base = self._features(self.gamma_dtype, self.like.device).base
        n_frozen = base.n_features * (base.rows + base.cols)
        need_memory(
            f"a weight {' x '.join(map(str, self.shape))} made of {base.n_features:,} {base.name} features",
            # Twice for a moment, and once more in the float64 of the solver that finds the first gammas.
            n_frozen * (2 * self.gamma_dtype.itemsize + 8),
            memory_limit(),
            "Take id_cond, which keeps nothing, more n_blocks, or less excess.",
        )
        left, right = base.left().contiguous(), base.right()
        if base.density is not None and not left.is_meta and not bool((left.any(0) & right.any(1)).any()):
            raise InsufficientFeaturesError(
                f"{base.name} needs at least one feature that is not zero; got none of {base.n_features} with density "
                f"{base.density}. Raise the density or change the seed."
            )
        self.left, self.right = left, right

    def operator(self) -> KhatriRao:
        """The operator of one block in float64, with the numbers as they are kept."""
        return KhatriRao(self.left.double(), self.right.double())

    def as_blocks(self, weight: Tensor) -> Tensor:
        """A weight as the matrices (n_blocks, out / n_blocks, inp) of the blocks."""
        return weight.reshape(self.n_blocks, self.left.shape[0], self.right.shape[1])

    def make(self, *gammas: Tensor) -> Tensor:
        """The weight of this gamma: the left factors of all blocks over each other, so that one product serves them."""
        scaled = gammas[0].view(self.n_blocks, 1, -1) * self.left
        return (scaled.flatten(0, 1) @ self.right).reshape(self.shape).to(self.like.dtype)

    def solve(self, weight: Tensor) -> tuple[Tensor, ...]:
        operator, target = self.operator(), self.as_blocks(weight.detach().double())
        gamma = solve_blocks(operator, target)
        if operator.n_features >= operator.equations and self.like.dtype == torch.float64:
            # The solver stops at 1e-10, which only this precision can tell from zero.
            gamma = gamma + solve_blocks(operator, target - operator.apply(gamma))
        return (gamma.flatten(),)

    def digest(self) -> str:
        return self._features(torch.float64, torch.device("cpu")).weights_digest()

    def origin(self) -> str:
        c, base = self.choice, self._features(torch.float64, torch.device("cpu")).base
        density = "" if base.density is None else f", density {base.density}"
        return f"{c.features}{density}, {self.n_blocks} blocks of {base.n_features}, seed {c.seed}, layer {c.layer!r}"

    def _features(self, dtype: torch.dtype, device: torch.device) -> BlockFeatures:
        c = self.choice
        return draw_blocks(
            c.features, self.shape, n_blocks=self.n_blocks, excess=c.excess, density=c.density, seed=c.seed,
            layer=c.layer, dtype=dtype, device=device,
        )  # fmt: skip


def count_blocks(choice: Choice, groups: int) -> int:
    """Blocks of random features for a convolution in groups: those chosen, or one per group."""
    if choice.n_blocks % groups and choice.n_blocks != 1:
        raise ConversionError(
            f"a convolution in {groups} groups needs a multiple of {groups} blocks, so that features stay inside a "
            f"group; got {choice.n_blocks}. Leave n_blocks out."
        )
    return max(choice.n_blocks, groups)


def count_features(shape: tuple[int, ...], choice: Choice, *, groups: int = 1) -> int:
    """Entries of gamma that a layer of this shape would have; makes no frozen numbers but a mask."""
    c = choice
    if c.features in STRUCTURED:
        n_copies = 1 if c.features == "id_cond" else groups
        drawn = draw(
            c.features, (shape[0] // n_copies, *shape[1:]), density=c.density, seed=c.seed, layer=c.layer,
            shared_column=c.shared_column,
        )  # fmt: skip
        return drawn.n_features * n_copies
    n_blocks = count_blocks(choice, groups)
    return draw_blocks(c.features, shape, n_blocks=n_blocks, excess=c.excess, density=c.density).n_features


def make_map(
    shape: tuple[int, ...], choice: Choice, *, dtype: torch.dtype, device: torch.device, groups: int = 1
) -> FrozenMap:
    """The frozen map of this choice for a weight of this shape."""
    kinds: dict[str, type[FrozenMap]] = {"id_cond_minimal": MinimalMap}
    kind = kinds.get(choice.features, StructuredMap if choice.features in STRUCTURED else RandomMap)
    return kind(shape, choice, dtype=dtype, device=device, groups=groups)
