"""How exact narrow layers will be, from their shapes alone, and the table that the law was read from.

    log10 condition = rate (L - 1),    rate = c (r - 1)^-0.6 (1 - 1 / excess)^-0.5
    error           = eps (2 sqrt(equations) + 0.3 condition)

L is the number of layers, r = k * excess the features of a layer per output of the target, c = 0.088 for orthogonal
frozen weights and 0.17 for others. It is a fit, not a theorem. Its form says that no layer may have one solution only
(excess 1), nor be as narrow as the target (r = 1), and that more of either helps. Exponents and constants were read
from targets of 16 and 32 outputs with 24 slices of 1, 2, 3, 4 and 8 inputs at excess 1.1 to 6, two seeds each, where
the rate measured was 0.5 to 1.4 times this one. Bad errors lay between 0.02 and 2 times eps * condition, on average at
0.3. So expect to lose 0.5 to 1.4 times as many digits as predicted; near excess 1.25 seeds differ most.

Theory: giannou2023:thm-2
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from onlynorm.features import draw
from onlynorm.features.distributions import check_shape
from onlynorm.modules import as_real, need_free_memory, need_integer, need_items, need_number, need_seed, need_sizes
from onlynorm.reconstruction.costs import EPS
from onlynorm.reconstruction.deep_slices import Slices, draw_layers, solve_slices

ORTHOGONAL_RATE = 0.088
RANDOM_RATE = 0.17
EXCESSES = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0)
"""What the default is chosen from."""
WANTED = 1e-11
"""Predicted error that the default excess aims at: a hundredth of 1e-9, because the law is a fit."""


@dataclass(frozen=True)
class Law:
    """The law for a target of `shape` (out, inp, *kernel) cut into slices of `narrow` inputs."""

    shape: tuple[int, ...]
    narrow: int
    is_orthogonal: bool = True

    @property
    def n_layers(self) -> int:
        """Slices of the input, each with a layer of its own."""
        return -(-self.shape[1] // self.narrow)

    @property
    def n_columns(self) -> int:
        """Input numbers of the target, kernel positions included."""
        return math.prod(self.shape[1:])

    def condition(self, excess: float) -> float:
        """The predicted condition number of what the later layers pass on."""
        if self.n_layers == 1:
            return 1.0
        if not excess > 1.0:
            return math.inf
        per_output = self.narrow * math.prod(self.shape[2:]) * excess
        rate = ORTHOGONAL_RATE if self.is_orthogonal else RANDOM_RATE
        rate *= (per_output - 1.0) ** -0.6 * (1.0 - 1.0 / excess) ** -0.5
        return float(10.0 ** min(rate * (self.n_layers - 1), 300.0))

    def error(self, excess: float) -> float:
        """The predicted relative error of the effective weight, at most one."""
        if excess < 1.0:
            return math.sqrt(1.0 - excess)
        return min(1.0, EPS * (2.0 * math.sqrt(math.prod(self.shape)) + 0.3 * self.condition(excess)))

    def choose_excess(self, *, error: float = WANTED) -> float:
        """The smallest of `EXCESSES` whose predicted error is within `error`, the largest if none is."""
        return next((excess for excess in EXCESSES if self.error(excess) <= error), EXCESSES[-1])

    def choose_narrow(self, excess: float, *, error: float = WANTED) -> int:
        """The smallest number of inputs to a slice whose predicted error is within `error`; all inputs are one."""
        for narrow in range(self.narrow, self.shape[1]):
            if replace(self, narrow=narrow).error(excess) <= error:
                return narrow
        return self.shape[1]

    def cure(self, excess: float, *, error: float) -> str:
        """What to change where the error is larger than wanted, in words."""
        ways = [f"excess={more:g}" for more in EXCESSES if more > excess and self.error(more) <= error][:1]
        if excess >= 1.0 and self.narrow < self.shape[1]:
            ways.append(f"narrow={max(self.narrow + 1, self.choose_narrow(excess, error=error))}")
        if not self.is_orthogonal and replace(self, is_orthogonal=True).error(excess) <= error:
            ways.append("features='orthogonal'")
        return f"cure: {', or '.join(ways or [f'narrow={self.shape[1]} and excess={EXCESSES[0]}'])}"


@dataclass(frozen=True)
class DeepRow:
    """What is reached at one width of target, one k and one excess, beside the paper's unique solution."""

    width: int
    narrow: int
    excess: float
    n_layers: int
    n_features: int
    error: float
    condition: float
    predicted_error: float
    unique_error: float
    unique_condition: float

    def __str__(self) -> str:
        return (
            f"d={self.width}, k={self.narrow}, excess {self.excess:g}: {self.n_layers} layers of {self.n_features} "
            f"features reach {self.error:.1e} (condition {self.condition:.1e}, predicted {self.predicted_error:.1e}); "
            f"the unique solution {self.unique_error:.1e} (condition {self.unique_condition:.1e})"
        )


def deep_table(
    widths: Iterable[int],
    ks: Iterable[int],
    *,
    excesses: Iterable[float],
    seed: int = 0,
    features: str = "orthogonal",
) -> list[DeepRow]:
    """For every width d, k <= d and excess: the error that is reached for a normal target of variance 1 / d.

    The unique solution beside it is the paper's: as many he_normal features as equations.
    """
    cure = "Try widths=(16,), ks=(1, 4), excesses=(1.25, 2.0)."
    widths, ks = need_sizes("widths", widths, cure=cure), need_sizes("ks", ks, cure=cure)
    excesses = [
        need_number("an excess", excess, low=0.0, open_low=True, cure=cure)
        for excess in need_items("excesses", excesses, cure=cure)
    ]
    seed = need_seed(seed)
    need_free_memory("a target of the table", 8.0 * max(widths, default=0) ** 2, cure=cure)
    rows = []
    for width in widths:
        generator = torch.Generator().manual_seed(seed)
        target = torch.randn(width, width, dtype=torch.float64, generator=generator) / width**0.5
        for narrow in [k for k in ks if k <= width]:
            unique = unique_solution(target, narrow=narrow, seed=seed)
            law = Law((width, width), narrow, is_orthogonal=isinstance(features, str) and features == "orthogonal")
            for excess in excesses:
                n_features = draw(features, (width, narrow), excess=excess).n_features
                layers = draw_layers(features, (width, width), narrow=narrow, n_features=n_features, seed=seed)
                found = solve_slices(layers, target)
                rows.append(
                    DeepRow(
                        width, narrow, excess, law.n_layers, n_features, found.residual, found.condition,
                        law.error(n_features / (width * narrow)), unique.residual, unique.condition,
                    )
                )  # fmt: skip
    return rows


def unique_solution(
    target: Float[Tensor, "out inp *kernel"], *, narrow: int, features: str = "he_normal", seed: int = 0
) -> Slices:
    """The paper's own solution: as many features as equations in every layer, so that each has one solution only.

    It exists with probability one, and float64 loses it to rounding where layers are many and narrow.
    Theory: giannou2023:thm-2
    """
    target = as_real("target", target, is_finite=True, cure="Pass the weight of a layer.").detach()
    check_shape(target.shape)
    narrow = need_integer("narrow", narrow, low=1, high=target.shape[1], cure="It counts the inputs of a slice.")
    n_features = math.prod((len(target), narrow, *target.shape[2:]))
    layers = draw_layers(features, tuple(target.shape), narrow=narrow, n_features=n_features, seed=seed)
    return solve_slices(layers, target, is_near=False)
