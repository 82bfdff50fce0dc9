"""Which method solves this system, why, and what it will cost: known before anything is computed.

Every method gets a predicted condition number, time and memory from the shape alone; those that cannot reach the
tolerance or do not fit into memory drop out with a reason, and the fastest of the rest is taken.

| method | when it can | time | memory beside the features |
| --- | --- | --- | --- |
| closed form | ID cond and Ortho cond features | two small products | nothing |
| lu | as many features as equations | N^3 | 4 N^2 bytes |
| cholesky | kappa^2 eps small enough for refinement | c^2 (out + inp) + c^3, or N^2 c + N^3 | 16 min(N, c)^2 bytes |
| krylov | iterations ~ kappa, within the limit | iterations * N * c | half of the features, in float32, or a block |
"""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass

import torch

from onlynorm.errors import MemoryLimitError, UnknownNameError
from onlynorm.solvers.memory import readable
from onlynorm.solvers.spectrum import condition_for, condition_number, features_for_condition, iterations_for

METHODS = ("lu", "cholesky", "krylov", "svd")
MAX_ITERATIONS = 6000
"""Beyond this many steps (kappa of about 500 at 1e-10) a factorization or a few more features are the better way."""
SMALL = 1200
"""Equations up to which every method takes well under a second, so that the most robust one is taken."""


@dataclass(frozen=True)
class Option:
    """One method's prediction: can it, and at what price."""

    method: str
    seconds: float
    memory: int
    iterations: int
    obstacle: str = ""


@dataclass(frozen=True)
class Choice:
    """The method for a system, the reason in words, and every option that was weighed."""

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
            f"{o.seconds:.2g} s, {readable(o.memory)} beside the features)"
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
    """The fastest method that reaches the tolerance within the memory, with the reason.

    `condition` replaces the prediction for random features where the caller knows better. `block` is the number of
    features made at a time where they come from their seed; Krylov then needs no copy of them.
    """
    equations = n_outputs * n_inputs
    kappa = condition or condition_number(equations, n_features)
    options = _options(n_outputs, n_inputs, n_features, kappa, tolerance, memory, block)
    if method != "auto":
        if method not in METHODS:
            raise UnknownNameError("method", method, ("auto", *METHODS))
        return Choice(method, "asked for", kappa, options)
    able = [o for o in options if not o.obstacle]
    if not able:
        # Nothing is sure to reach the tolerance: take what fits into memory and report how far it gets.
        able = [o for o in options if o.memory <= memory and o.method == "krylov"]
        if not able:
            least = min(options, key=lambda o: o.memory)
            raise MemoryLimitError(
                f"solving {equations} equations with {n_features} features needs at least "
                f"{readable(least.memory)} ({least.method}); the limit is {readable(memory)}. "
                "Raise memory, or take the features from their seed, in smaller blocks if they are: "
                "KhatriRao.regenerating(features, block=...)."
            )
        return Choice("krylov", f"no method is sure to reach {tolerance:.0e}; this one fits", kappa, options)
    best = min(able, key=lambda o: o.seconds)
    return Choice(best.method, _reason(best, options, equations, n_features), kappa, options)


def _options(
    n_outputs: int,
    n_inputs: int,
    n_features: int,
    kappa: float,
    tolerance: float,
    memory: int,
    block: int | None,
) -> tuple[Option, ...]:
    equations, smaller = n_outputs * n_inputs, min(n_outputs * n_inputs, n_features)
    eps = torch.finfo(torch.float64).eps
    single, double = product_rate(torch.float32), product_rate(torch.float64)

    def option(method: str, flops: float, rate: float, n_bytes: float, iterations: int, obstacle: str) -> Option:
        if not obstacle and n_bytes > memory:
            obstacle = f"needs {readable(n_bytes)} of memory"
        return Option(method, flops / rate, int(n_bytes), iterations, obstacle)

    lu = option(
        "lu", 2 / 3 * equations**3 + 20 * equations**2, 0.6 * single, 4.5 * equations**2, 1,
        "" if n_features == equations else "the system is not square",
    )  # fmt: skip
    gram = 2 * n_features**2 * (n_outputs + n_inputs) if n_features < equations else 2 * equations**2 * n_features
    cholesky = option(
        "cholesky", gram + smaller**3 / 3, 0.6 * double, 17 * smaller**2, 1,
        "" if kappa**2 * eps * math.sqrt(smaller) < 1e-2 else "the squared condition number is too large",
    )  # fmt: skip
    count = iterations_for(kappa, tolerance)
    room = krylov_memory(n_outputs, n_inputs, n_features)
    if room > memory:
        room = min(room, krylov_memory(n_outputs, n_inputs, n_features, block=block))
    krylov = option(
        "krylov", 4.0 * n_features * equations * count, 0.7 * single, room,
        count, "" if count <= MAX_ITERATIONS else f"would take about {count} iterations",
    )  # fmt: skip
    svd = option(
        "svd", 20.0 * smaller**2 * max(equations, n_features), 0.3 * double, 32.0 * equations * n_features, 1,
        "" if equations <= SMALL and n_features <= 2 * SMALL else "the system is too large",
    )  # fmt: skip
    return lu, cholesky, krylov, svd


def krylov_memory(n_outputs: int, n_inputs: int, n_features: int, *, block: int | None = None) -> int:
    """Bytes for the vectors and a float32 copy of the features or, given `block`, for one block at a time."""
    copy = 5 * n_features if block is None else 20 * block  # a block is drawn in float64, transposed and cast
    return copy * (n_outputs + n_inputs) + 64 * (n_outputs * n_inputs + n_features)


def _reason(best: Option, options: tuple[Option, ...], equations: int, n_features: int) -> str:
    others = "; ".join(
        f"{o.method}: {o.obstacle or f'{o.seconds / best.seconds:.3g} times as long'}"
        for o in options
        if o.method not in (best.method, "svd")
    )
    shape = f"{n_features} features for {equations} equations (excess {n_features / equations:.3g})"
    return f"fastest for {shape} [{others}]"


def cure(n_outputs: int, n_inputs: int, n_features: int, tolerance: float) -> str:
    """What would reach the tolerance: how many more features, from the law of the spectrum."""
    equations = n_outputs * n_inputs
    enough = features_for_condition(equations, condition_for(MAX_ITERATIONS, tolerance))
    if n_features < equations:
        return (
            f"{equations - n_features} more features make the system solvable, {enough - n_features} well conditioned"
        )
    if enough > n_features:
        return f"{enough - n_features} more features reach {tolerance:.0e}"
    return "the features are not generic (repeated, sparse or of deficient rank): draw others or whiten"


@functools.cache
def product_rate(dtype: torch.dtype) -> float:
    """Multiply-adds counted twice, per second, of this machine's own matrix product (measured once, about 20 ms)."""
    n = 768
    a = torch.ones(n, n, dtype=dtype)
    best = math.inf
    for _ in range(4):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return 2.0 * n**3 / best
