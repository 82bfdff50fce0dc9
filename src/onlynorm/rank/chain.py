"""The chain of pre-activations of a random network, with batch norms or without, many chains as one tensor.

    H+ = norm(H + gamma W F(H))        gamma = inf: H+ = norm(W F(H)), a network without skips

H is (chains, width, samples), W has independent entries of variance one, F works elementwise. The norm scales every
row to norm sqrt(N) ("batch", the paper's), after taking off its mean ("centred"), or there is none ("none").

Without a norm the numbers grow or vanish exponentially. Where F is homogeneous the whole matrix is rescaled in every
step, which changes no rank; with other F the true numbers are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from onlynorm.errors import ShapeError, UnknownNameError, ValueRangeError
from onlynorm.features.streams import Stream, as_integer, check_seed
from onlynorm.rank.chain_weights import LAWS, ChainWeights

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "linear": lambda x: x,
    "relu": torch.relu,
    "leaky_relu": functional.leaky_relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "sin": torch.sin,
}
HOMOGENEOUS = ("linear", "relu", "leaky_relu")
NORMS = ("batch", "centred", "none")
DTYPES = {"float32": torch.float32, "float64": torch.float64}
_LOOK = 256  # steps between two looks at whether all numbers are finite
_TINY = 1e-30  # a row below it is zero: a dead unit, which stays zero


@dataclass(frozen=True)
class Chain:
    """The law of a chain; equal chains give equal numbers. Theory: daneshmand2020:thm-3, daneshmand2020:lemma-4

    `activation` is a name or an elementwise function. float32 is the default: averages over a chain have errors of
    1e-3 at best, and it is two to three times as fast.
    """

    width: int
    gamma: float = 1.0
    n_samples: int | None = None
    activation: str | Activation = "linear"
    norm: str = "batch"
    weights: str = "uniform"
    n_chains: int = 1
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, value, least in (
            ("width", self.width, 1), ("n_chains", self.n_chains, 1), ("n_samples", self.samples, 2)
        ):  # fmt: skip
            if (as_integer(value) or 0) < least:
                raise ValueRangeError(
                    f"a chain needs {name} as a whole number, at least {least}; got {value!r}. Pass {name}=8."
                )
        if not self.gamma >= 0.0:
            raise ValueRangeError(f"a chain needs gamma in [0, inf]; got {self.gamma!r}. math.inf drops the skips.")
        names = (("norm", NORMS), ("weights", LAWS), ("dtype", tuple(DTYPES)))
        for name, known in names:
            if getattr(self, name) not in known:
                raise UnknownNameError(name, str(getattr(self, name)), known)
        if isinstance(self.activation, str) and self.activation not in ACTIVATIONS:
            raise UnknownNameError("activation", self.activation, ACTIVATIONS)
        check_seed(self.seed)

    @property
    def samples(self) -> int:
        """The number of samples N: as many as the width where nothing else is said."""
        return self.width if self.n_samples is None else self.n_samples

    @property
    def shape(self) -> tuple[int, int, int]:
        """(chains, width, samples)."""
        return self.n_chains, self.width, self.samples

    @property
    def is_rescaled(self) -> bool:
        """Whether a vanilla chain may be rescaled in every step, because F(c x) = c F(x) for c > 0."""
        return self.norm == "none" and self.activation in HOMOGENEOUS

    def settings(self) -> dict[str, Any]:
        """Everything that the numbers depend on, as plain data; a function goes by its name."""
        named = self.activation if isinstance(self.activation, str) else _name(self.activation)
        kept = ("width", "gamma", "samples", "norm", "weights", "n_chains", "seed", "dtype")
        return {**{name: getattr(self, name) for name in kept}, "activation": named}

    def draw_inputs(self) -> Float[Tensor, "chains width samples"]:
        """A Gaussian input matrix for every chain, of full rank with probability one."""
        numbers = Stream(self.seed, "rank/chain", "inputs").normals(0, math.prod(self.shape))
        return torch.from_numpy(numbers).view(self.shape).to(self.device, DTYPES[self.dtype])

    def ready_inputs(self, inputs: Tensor | None) -> Float[Tensor, "chains width samples"]:
        """The given inputs, one matrix for all chains or one for each, or drawn ones; always a copy."""
        if inputs is None:
            return self.draw_inputs()
        if tuple(inputs.shape) not in (self.shape, self.shape[1:]):
            raise ShapeError(
                f"a chain needs inputs {self.shape[1:]} or {self.shape}, (chains, width, samples); got "
                f"{tuple(inputs.shape)}. Pass X.T if its rows are samples, and n_samples={inputs.shape[-1]}."
            )
        if not bool(torch.isfinite(inputs).all()):
            raise ValueRangeError("a chain needs finite inputs; got NaN or infinite ones. Clean the data first.")
        return inputs.detach().to(self.device, DTYPES[self.dtype]).expand(self.shape).clone()

    def draw_weights(self) -> ChainWeights:
        """The weights of all steps."""
        return ChainWeights(
            self.weights, seed=self.seed, n_chains=self.n_chains, width=self.width, dtype=DTYPES[self.dtype],
            device=self.device,
        )  # fmt: skip

    def step(
        self, H: Float[Tensor, "chains width samples"], W: Float[Tensor, "chains width width"], *, scale: float = 1.0
    ) -> Float[Tensor, "chains width samples"]:
        """H+ for the weights scale * W."""
        inner = _function(self.activation)(H)
        moved = W @ inner if math.isinf(self.gamma) else torch.baddbmm(H, W, inner, alpha=self.gamma * scale)
        if self.norm == "none":
            if self.is_rescaled:
                norms = torch.linalg.matrix_norm(moved, keepdim=True).clamp_(min=_TINY)
                return moved.mul_(norms.reciprocal_().mul_(math.sqrt(self.width * self.samples)))
            return moved.mul_(scale) if math.isinf(self.gamma) else moved
        if self.norm == "centred":
            moved -= moved.mean(2, keepdim=True)
        norms = torch.linalg.vector_norm(moved, dim=2, keepdim=True).clamp_(min=_TINY)
        return moved.mul_(norms.reciprocal_().mul_(math.sqrt(self.samples)))

    def __str__(self) -> str:
        s = self.settings()
        skip = "no skips" if math.isinf(self.gamma) else f"gamma {self.gamma:g}"
        norm = {"batch": "batch norms", "centred": "centred batch norms", "none": "no norms"}[self.norm]
        return (
            f"{self.n_chains} chains of width {self.width}, {self.samples} samples, {s['activation']}, {norm}, {skip}, "
            f"{self.weights} weights, seed {self.seed}, {self.dtype}"
        )


def walk(
    chain: Chain, depths: Iterable[int], *, inputs: Tensor | None = None
) -> Iterator[tuple[int, Float[Tensor, "chains width samples"]]]:
    """(depth, H) at each of the depths, in order; depth 0 is the input itself."""
    chosen = set(depths)
    wanted = sorted(chosen)
    if not wanted or wanted[0] < 0:
        raise ValueRangeError(f"walk needs depths >= 0, at least one; got {wanted[:3]}. Pass range(0, 100, 10).")
    X = chain.ready_inputs(inputs)
    if wanted[0] == 0:
        yield 0, X
    for depth, H in steps(chain, X, weights=chain.draw_weights(), start=0, stop=wanted[-1]):
        if depth in chosen:
            yield depth, H


def steps(
    chain: Chain, H: Tensor, *, weights: ChainWeights, start: int, stop: int
) -> Iterator[tuple[int, Float[Tensor, "chains width samples"]]]:
    """(depth, H) after each of the steps start, ..., stop - 1 from H; numbers that leave their range are an error."""
    for depth, numbers in enumerate(weights.steps(start, stop), start=start + 1):
        H = chain.step(H, numbers, scale=weights.scale)
        if (depth % _LOOK == 0 or depth == stop) and not bool(torch.isfinite(H).all()):
            raise ValueRangeError(
                f"a chain needs numbers within the range of {chain.dtype}; they left it before step {depth}. Without "
                "norms a signal grows or vanishes: use dtype='float64', a smaller gamma or fewer steps."
            )
        yield depth, H


def _function(activation: str | Activation) -> Activation:
    return ACTIVATIONS[activation] if isinstance(activation, str) else activation


def _name(function: Activation) -> str:
    """The name under which a kept state knows a function: a module such as nn.ELU() by what it shows of itself."""
    name = getattr(function, "__qualname__", None)
    return str(function) if name is None else f"{function.__module__}.{name}"
