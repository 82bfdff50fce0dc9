"""Selects the method for a system from its shape, with predicted time and memory.

Condition number, time and memory of each method are predicted from the shape alone. Methods that cannot reach the
tolerance or do not fit into memory are excluded, with the reason. Of the others the fastest is selected; an iterative
method must be faster by a margin, since its convergence depends on the features.

    choice = choose(32, 288, 11_520, memory=8e9)      # 32 outputs, 288 inputs, 11,520 features
    print(choice)                                     # krylov: fastest for 11520 features for 9216 equations ...

The choice is a pure function of the sizes, the tolerance and the memory limit. Times are operations divided by the
constant rates below and are not measured: methods round differently, and a choice that depends on the load of the
machine would make results irreproducible.

| method | requires | operations | additional memory |
| --- | --- | --- | --- |
| closed form | ID cond and Ortho cond features | two products, or fast transforms | none |
| lu | as many features as equations | 2/3 N^3 | 5 N^2 bytes |
| cholesky | kappa^2 eps small enough | c^2 (out + inp) + c^3 / 3, or N^2 c / 2 + N^3 / 3 | 10 min(N, c)^2 B |
| krylov | iterations ~ kappa, within the limit | 4 N c per iteration | half of the features, in float32, or a block |
| qr | any rank | 4 min(N, c)^2 max(N, c) | 20 N c bytes |
| svd | any rank | 20 min(N, c)^2 max(N, c) | 32 N c bytes |

Factorizations and iterations run in float32 if the predicted condition number allows it; residuals are computed in
float64.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from onlynorm.display import Result
from onlynorm.errors import MemoryLimitError
from onlynorm.memory import readable, readable_need
from onlynorm.solvers.operator import THIN, cached_features
from onlynorm.solvers.prepare import need_tolerance
from onlynorm.solvers.spectrum import predict_condition, predict_iterations
from onlynorm.validate import need_choice, need_integer, need_number

METHODS = ("lu", "cholesky", "krylov", "qr", "svd")
MAX_ITERATIONS = 6000
"""Above this count (kappa of about 500 at 1e-10) a factorization or a larger excess is faster."""
RATES = {torch.float32: 1e11, torch.float64: 5e10}
"""Operations per second of a matrix product on one nominal core (a multiply-add counts as two): 256-bit vectors at
about 3 GHz. The choice depends on their ratio only, which is 2 wherever vectors hold both precisions."""
BANDWIDTH, CACHED = 1.3e10, 16 * 2**20
"""Memory bandwidth in bytes per second, and the size of features that stay in the cache between two sweeps."""
ELEMENTS = 1e9
"""Elementwise operations per second."""
CALL = 3e-5
"""Overhead in seconds of the calls in one iteration or one refinement."""
EFFICIENCY = {"product": 0.9, "pairs": 0.7, "lu": 0.9, "cholesky": 0.75, "qr": 0.3, "svd": 0.1}
"""Fraction of the nominal rate that each operation reaches."""
REFINABLE = 0.1
"""kappa^2 eps up to which refinement with a Cholesky factor converges: it gains a factor of 1e3 or more at a tenth."""
ROBUST = 1.35
"""Required speedup of an iteration over a factorization, which is less sensitive to small singular values."""
TINY = 150
"""Rows up to which a factor is computed in float64: refinements would take longer than float32 saves."""
LARGE_COPY, HIDING = 16 * 2**20, 24
"""Size in bytes up to which a float32 copy is always stored, and the number of outputs and inputs from which the cost
of a conversion is small compared with the products."""
SMALL = 1200
"""Equations up to which a singular value decomposition takes less than about a second."""


@dataclass(frozen=True)
class Option(Result):
    """Predicted time and memory of one method; `obstacle` is the reason if it cannot be used."""

    method: str
    seconds: float
    memory: int
    iterations: int
    obstacle: str = ""


@dataclass(frozen=True)
class Choice(Result):
    """The selected method, the reason, and the predictions for all methods."""

    method: str
    reason: str
    condition: float
    options: tuple[Option, ...]

    @property
    def option(self) -> Option:
        """The prediction for the chosen method."""
        return next(o for o in self.options if o.method == self.method)

    def __str__(self) -> str:
        o = self.option
        steps = f", about {o.iterations} iterations" if o.method == "krylov" else ""
        return (
            f"{self.method}: {self.reason} (predicted condition number {self.condition:.3g}{steps}, "
            f"{o.seconds:.2g} s, {readable(o.memory)} in addition to the features)"
        )


def choose(
    n_outputs: int,
    n_inputs: int,
    n_features: int,
    *,
    tolerance: float = 1e-10,
    memory: int,
    method: str = "auto",
    condition: float | None = None,
    block: int | None = None,
) -> Choice:
    """Selects the fastest method that reaches the tolerance within `memory` bytes.

    `condition` is the condition number if it is known (`predict_features`); by default it is predicted for dense random
    features. `block` is the block size of features that are regenerated from their seed; Krylov then stores no copy.

    Examples:
        >>> from onlynorm.solvers import choose
        >>> choose(32, 288, 11_520, memory=8_000_000_000).method  # 32 outputs, 288 inputs, 11,520 features
        'krylov'
    """
    need_choice("method", method, ("auto", *METHODS))
    sizes = {"n_outputs": n_outputs, "n_inputs": n_inputs, "n_features": n_features}
    n_outputs, n_inputs, n_features = (
        need_integer(name, size, low=1, high=2**62, cure="Pass the sizes of the layer.") for name, size in sizes.items()
    )
    tolerance = need_tolerance(tolerance)
    memory = int(need_number("memory", memory, low=0.0, cure="Pass the memory limit in bytes."))
    if condition is not None:
        condition = need_number("condition", condition, low=1.0, high=1e100, cure="Omit it to predict it.")
    if block is not None:
        block = need_integer("block", block, low=1, cure="Omit it if features are stored.")
    return choose_valid(n_outputs, n_inputs, n_features, tolerance, memory, method, condition, block)


@functools.lru_cache(maxsize=1024)  # many layers share a size, and solving a small one takes no longer than this
def choose_valid(
    n_outputs: int,
    n_inputs: int,
    n_features: int,
    tolerance: float,
    memory: int,
    method: str,
    condition: float | None,
    block: int | None,
) -> Choice:
    """`choose` for arguments of the right types and ranges."""
    equations = n_outputs * n_inputs
    kappa = condition or predict_condition(n_outputs, n_inputs, n_features).condition
    options = _options(n_outputs, n_inputs, n_features, kappa, tolerance, memory, block)
    if method != "auto":
        return Choice(method, "requested", kappa, options)
    able = [o for o in options if not o.obstacle]
    if not able:
        # No method is predicted to reach the tolerance: use one that fits into memory and report its residual.
        able = [o for o in options if o.memory <= memory and o.method == "krylov"]
        if not able:
            least = min(
                (o for o in options if o.method == "krylov" or o.obstacle.startswith("needs")), key=lambda o: o.memory
            )
            raise MemoryLimitError(
                f"solving {equations} equations with {n_features} features needs at least "
                f"{readable_need(least.memory)} ({least.method}); the limit is {readable(memory)}. "
                "Raise memory, or regenerate the features from their seed in small blocks: "
                "KhatriRao.regenerating(features, block=...)."
            )
        return Choice("krylov", f"no method is predicted to reach {tolerance:.0e}; this one fits", kappa, options)
    best = min(able, key=lambda o: o.seconds * (ROBUST if o.method == "krylov" else 1.0))
    return Choice(best.method, _reason(best, options, equations, n_features), kappa, options)


def factor_dtype(condition: float, n: int) -> torch.dtype | None:
    """The lowest precision in which refinement with a Cholesky factor of n rows converges; None if float64 fails."""
    for dtype in (torch.float32, torch.float64)[n <= TINY :]:
        if condition**2 * torch.finfo(dtype).eps < REFINABLE:
            return dtype
    return None


def _options(
    n_outputs: int,
    n_inputs: int,
    n_features: int,
    kappa: float,
    tolerance: float,
    memory: int,
    block: int | None,
) -> tuple[Option, ...]:
    equations = n_outputs * n_inputs
    smaller, larger = sorted((equations, n_features))
    single, double = RATES[torch.float32], RATES[torch.float64]

    def option(method: str, seconds: float, n_bytes: float, iterations: int, obstacle: str) -> Option:
        if not obstacle and n_bytes > memory:
            obstacle = f"needs {readable(n_bytes)} of memory"
        return Option(method, seconds, math.ceil(n_bytes), iterations, obstacle)

    refinement = 4.0 * equations * n_features / (0.5 * double) + 2.0 * smaller**2 / ELEMENTS + CALL
    lu = option(
        "lu",
        2 / 3 * equations**3 / (EFFICIENCY["lu"] * single) + equations**2 / ELEMENTS + 3 * refinement + 5 * CALL,
        5.2 * equations**2, 1, "" if n_features == equations else "the system is not square",
    )  # fmt: skip
    dtype = factor_dtype(kappa, smaller)
    rate, width = (single, 1) if dtype == torch.float32 else (double, 2)
    cholesky = option(
        "cholesky",
        _gram_seconds(n_outputs, n_inputs, n_features, rate)
        + smaller**3 / 3 / (EFFICIENCY["cholesky"] * rate) + (4 - width) * refinement + 3 * CALL,
        cholesky_memory(n_outputs, n_inputs, n_features, dtype or torch.float64), 1,
        "" if dtype is not None else "the squared condition number is too large",
    )  # fmt: skip
    count = predict_iterations(kappa, tolerance)
    room = krylov_memory(n_outputs, n_inputs, n_features)
    if block is None and not stores_copy(n_outputs, n_inputs, n_features):
        converted = cached_features(n_features, 4 * (n_outputs + n_inputs))
        room = min(room, krylov_memory(n_outputs, n_inputs, n_features, block=converted))
    elif room > memory:
        room = min(room, krylov_memory(n_outputs, n_inputs, n_features, block=block))
    sweep = sweep_seconds(n_outputs, n_inputs, n_features) + CALL
    krylov = option(
        "krylov", count * sweep + 3 * refinement, room, count,
        "" if count <= MAX_ITERATIONS else f"would take about {count} iterations",
    )  # fmt: skip
    qr = option(
        "qr", 4.0 * smaller**2 * larger / (EFFICIENCY["qr"] * double) + 7 * CALL, 20.0 * equations * n_features, 1, ""
    )
    svd = option(
        "svd",
        20.0 * smaller**2 * larger / (EFFICIENCY["svd"] * double) + 7 * CALL,
        32.0 * equations * n_features,
        1,
        "",
    )
    return lu, cholesky, krylov, qr, svd


def sweep_seconds(n_outputs: int, n_inputs: int, n_features: int) -> float:
    """Seconds of one product with M M^T in float32; limited by memory bandwidth for few outputs or inputs."""
    efficiency = min(EFFICIENCY["product"], 0.35 + 0.035 * min(n_outputs, n_inputs))
    computing = 4.0 * n_features * n_outputs * n_inputs / (efficiency * RATES[torch.float32])
    n_bytes = 4 * n_features * (n_outputs + n_inputs)
    return max(computing, n_bytes / BANDWIDTH if n_bytes > CACHED else 0.0) + CALL


def _gram_seconds(n_outputs: int, n_inputs: int, n_features: int, rate: float) -> float:
    """Seconds to compute the smaller Gram matrix."""
    thin, wide = sorted((n_outputs, n_inputs))
    by_pairs, rate = rate * EFFICIENCY["pairs"], rate * EFFICIENCY["product"]
    if n_features < thin * wide:
        return 2.0 * n_features**2 * (thin + wide) / rate + 3.0 * n_features**2 / ELEMENTS
    pairs, wide_pairs = thin * (thin + 1) / 2, wide * (wide + 1) / 2
    filled = 3.0 * (thin * wide) ** 2 / ELEMENTS
    if thin < THIN:
        scaled = n_features * wide * pairs / ELEMENTS + 0.5 * pairs * CALL
        return 1.2 * n_features * pairs * wide**2 / by_pairs + scaled + filled
    gathered = n_features * wide_pairs / ELEMENTS + 0.1 * wide * CALL
    return 2.0 * n_features * pairs * wide_pairs / rate + gathered + filled


def cholesky_memory(n_outputs: int, n_inputs: int, n_features: int, dtype: torch.dtype) -> int:
    """Bytes for the features, the smaller Gram matrix and its intermediates in this precision."""
    smaller = min(n_outputs * n_inputs, n_features)
    return int(dtype.itemsize * (2.4 * smaller**2 + n_features * (n_outputs + n_inputs)))


def krylov_memory(n_outputs: int, n_inputs: int, n_features: int, *, block: int | None = None) -> int:
    """Bytes for the vectors, two intermediates of a float64 sweep, and a float32 copy of the features.

    With `block`, features are regenerated in blocks of that size and not copied.
    """
    width = n_outputs + n_inputs
    copy = 5 * n_features if block is None else 20 * block  # a block is drawn in float64, transposed and cast
    swept = cached_features(n_features, 8 * width) if block is None else block
    vectors = 64 * (n_outputs * n_inputs + n_features)
    return copy * width + vectors + 16 * swept * min(n_outputs, n_inputs)


def stores_copy(n_outputs: int, n_inputs: int, n_features: int) -> bool:
    """Whether an iteration stores a float32 copy of the features instead of converting them in every sweep.

    A large copy is not stored if it would raise the memory of a solve above about a twentieth of the dense matrix, and
    the products are large enough that the conversion costs little.
    """
    thin, copy = min(n_outputs, n_inputs), 4 * n_features * (n_outputs + n_inputs)
    whole = copy + 8 * n_features * thin + 4 * 2**20
    return copy <= LARGE_COPY or thin < HIDING or whole <= 8 * (n_outputs * n_inputs) ** 2 / 24


def _reason(best: Option, options: tuple[Option, ...], equations: int, n_features: int) -> str:
    others = "; ".join(
        f"{o.method}: {o.obstacle or f'{o.seconds / best.seconds:.3g} times as long'}"
        for o in options
        if o.method not in (best.method, "qr", "svd")
    )
    shape = f"{n_features} features for {equations} equations (excess {n_features / equations:.3g})"
    is_fastest = all(o.obstacle or o.seconds >= best.seconds for o in options)
    return f"{'fastest' if is_fastest else 'more robust and nearly as fast'} for {shape} [{others}]"
