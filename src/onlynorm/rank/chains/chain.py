"""The Markov chain of pre-activations of a random network, with or without batch norms; many chains in one tensor.

    H+ = norm(H + gamma W F(H))        gamma = inf: H+ = norm(W F(H)), a network without skips

H is (chains, width, samples), W has independent entries of variance one, F is elementwise. The norm scales every row to
norm sqrt(N) ("batch", as in the paper), after subtracting its mean ("centred"), or not at all ("none").

Without a norm the entries grow or vanish exponentially. For homogeneous F the matrix is rescaled in every step, which
does not change ranks; for other F it is not rescaled.
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

from onlynorm.display import Result
from onlynorm.errors import ShapeError, ValueRangeError
from onlynorm.features.streams import Stream
from onlynorm.rank.chains.weights import LAWS, ChainWeights
from onlynorm.validate import (
    as_tensor,
    need_choice,
    need_device,
    need_free_memory,
    need_instance,
    need_integer,
    need_number,
    need_seed,
    need_sizes,
)

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
_CHECK_EVERY = 256  # steps between two checks that all entries are finite
CHAIN_ENTRIES, MOST_CHAINS = 2**15, 128
"""Maximum entries of H over all chains, and chains, if `n_chains` is not given; see docs/rank.md for the speed."""
MAX_STEPS = 10**10
"""Maximum number of steps."""
_TINY = 1e-30  # rows with a smaller norm are zero: dead units, which stay zero


@dataclass(frozen=True)
class Chain(Result):
    """The settings of a chain; equal chains give equal values. Theory: daneshmand2020:thm-3, daneshmand2020:lemma-4

    `activation` is a name or an elementwise function. The default of `n_chains` depends on the size (see `chains`). The
    default dtype is float32, which is two to three times as fast; statistical errors are at least 1e-3.

    Examples:
        >>> import onlynorm as on
        >>> from onlynorm.rank import walk
        >>> chain = on.Chain(width=8, gamma=0.5, n_samples=8, n_chains=2)
        >>> [(depth, tuple(H.shape)) for depth, H in walk(chain, (0, 10))]
        [(0, (2, 8, 8)), (10, (2, 8, 8))]
    """

    width: int
    gamma: float = 1.0
    n_samples: int | None = None
    activation: str | Activation = "linear"
    norm: str = "batch"
    weights: str = "uniform"
    n_chains: int | None = None
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, low in (("width", 1), ("n_samples", 2), ("n_chains", 1)):
            value = getattr(self, name)
            if value is not None or name == "width":
                number = need_integer(f"{name} of a chain", value, low=low, cure=f"Pass {name}=8.")
                object.__setattr__(self, name, number)
        need_integer("the number of samples of a chain", self.samples, low=2, cure="Pass n_samples=8.")
        if not (isinstance(self.gamma, float) and self.gamma == math.inf):
            need_number("gamma of a chain", self.gamma, low=0.0, cure="math.inf drops the skips.")
        for name, known in (("norm", NORMS), ("weights", LAWS), ("dtype", tuple(DTYPES))):
            need_choice(name, getattr(self, name), known)
        if not callable(self.activation):
            need_choice("activation", self.activation, ACTIVATIONS)
        need_device("device of a chain", self.device)
        need_seed(self.seed)

    @property
    def samples(self) -> int:
        """The number of samples N, by default the width."""
        return self.width if self.n_samples is None else self.n_samples

    @property
    def chains(self) -> int:
        """`n_chains`, by default as many as a processor runs efficiently: 128 up to width 16, 32 at 32, 2 at 128."""
        if self.n_chains is not None:
            return self.n_chains
        return max(1, min(CHAIN_ENTRIES // (self.width * self.samples), MOST_CHAINS))

    @property
    def shape(self) -> tuple[int, int, int]:
        """(chains, width, samples)."""
        return self.chains, self.width, self.samples

    @property
    def is_rescaled(self) -> bool:
        """Whether a chain without norms is rescaled in every step, since F(c x) = c F(x) for c > 0."""
        return self.norm == "none" and self.activation in HOMOGENEOUS

    def settings(self) -> dict[str, Any]:
        """All settings that determine the values, as plain data, with functions as names."""
        named = self.activation if isinstance(self.activation, str) else _name(self.activation)
        names = ("width", "gamma", "samples", "norm", "weights", "seed", "dtype")
        return {**{name: getattr(self, name) for name in names}, "n_chains": self.chains, "activation": named}

    def draw_inputs(self) -> Float[Tensor, "chains width samples"]:
        """A Gaussian input matrix for every chain, of full rank with probability one."""
        values = Stream(self.seed, "rank/chain", "inputs").normals(0, math.prod(self.shape))
        return torch.from_numpy(values).view(self.shape).to(self.device, DTYPES[self.dtype])

    def ready_inputs(self, inputs: Tensor | None) -> Float[Tensor, "chains width samples"]:
        """A copy of the given inputs, one matrix for all chains or one for each; random inputs if None."""
        size = 8.0 * self.chains * self.width * max(self.width, self.samples)  # random inputs are float64
        need_free_memory(f"a chain of width {self.width} and {self.samples} samples", size, cure="Pass smaller sizes.")
        if inputs is None:
            return self.draw_inputs()
        inputs = as_tensor("inputs of a chain", inputs)
        if tuple(inputs.shape) not in (self.shape, self.shape[1:]):
            raise ShapeError(
                f"a chain needs inputs {self.shape[1:]} or {self.shape}, (chains, width, samples); got "
                f"{tuple(inputs.shape)}. Pass X.T if rows are samples, and their number as n_samples."
            )
        if not bool(torch.isfinite(inputs).all()):
            raise ValueRangeError("a chain needs finite inputs; got NaN or infinite ones. Clean the data first.")
        return inputs.detach().to(self.device, DTYPES[self.dtype]).expand(self.shape).clone()

    def draw_weights(self) -> ChainWeights:
        """The weights of all steps."""
        return ChainWeights(
            self.weights, seed=self.seed, n_chains=self.chains, width=self.width, dtype=DTYPES[self.dtype],
            device=self.device,
        )  # fmt: skip

    def step(
        self, H: Float[Tensor, "chains width samples"], W: Float[Tensor, "chains width width"], *, scale: float = 1.0
    ) -> Float[Tensor, "chains width samples"]:
        """H+ for the weights scale * W."""
        H, W = (as_tensor(name, value).to(DTYPES[self.dtype]) for name, value in (("H", H), ("W", W)))
        square = (self.chains, self.width, self.width)
        if tuple(H.shape) != self.shape or tuple(W.shape) != square:
            raise ShapeError(
                f"a step needs H {self.shape} and W {square}; got {tuple(H.shape)} and {tuple(W.shape)}. Take both "
                "from this chain."
            )
        return self._step(H, W, need_number("scale", scale, low=-1e30, high=1e30, cure="Pass weights.scale."))

    def _step(self, H: Tensor, W: Tensor, scale: float) -> Tensor:
        """`step` without validation, which would take longer than the step."""
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
            f"{self.chains} chains of width {self.width}, {self.samples} samples, {s['activation']}, {norm}, {skip}, "
            f"{self.weights} weights, seed {self.seed}, {self.dtype}"
        )


def walk(
    chain: Chain, depths: Iterable[int], *, inputs: Tensor | None = None
) -> Iterator[tuple[int, Float[Tensor, "chains width samples"]]]:
    """Yields (depth, H) at these depths, in order; depth 0 is the input.

    Examples:
        >>> import onlynorm as on
        >>> from onlynorm.rank import walk
        >>> for depth, H in walk(on.Chain(width=8, n_samples=8, n_chains=2), (0, 5, 10)):
        ...     print(depth, tuple(H.shape))
        0 (2, 8, 8)
        5 (2, 8, 8)
        10 (2, 8, 8)
    """
    need_instance("walk", chain, Chain, cure="Pass Chain(width=32).")
    cure = "walk needs depths >= 0, such as range(0, 100, 10)."
    ordered = sorted(set(need_sizes("depths", depths, low=0, n_least=1, cure=cure)))
    chosen = set(ordered)
    X = chain.ready_inputs(inputs)
    if ordered[0] == 0:
        yield 0, X
    for depth, H in steps(chain, X, weights=chain.draw_weights(), start=0, stop=ordered[-1]):
        if depth in chosen:
            yield depth, H


def steps(
    chain: Chain, H: Tensor, *, weights: ChainWeights, start: int, stop: int
) -> Iterator[tuple[int, Float[Tensor, "chains width samples"]]]:
    """Yields (depth, H) after each of the steps start, ..., stop - 1; raises at NaN or infinity."""
    for depth, W in enumerate(weights.steps(start, stop), start=start + 1):
        H = chain._step(H, W, weights.scale)
        if (depth % _CHECK_EVERY == 0 or depth == stop) and not bool(torch.isfinite(H).all()):
            raise ValueRangeError(
                f"a chain needs entries within the range of {chain.dtype}; got NaN or infinity before step {depth}. "
                "Without norms a signal grows or vanishes: use dtype='float64', a smaller gamma or fewer steps."
            )
        yield depth, H


def _function(activation: str | Activation) -> Activation:
    return ACTIVATIONS[activation] if isinstance(activation, str) else activation


def _name(function: Activation) -> str:
    """The name of a function for a saved state; for a module such as nn.ELU(), its repr."""
    name = getattr(function, "__qualname__", None)
    return str(function) if name is None else f"{function.__module__}.{name}"
