"""`factorize`: write a matrix as a product of layers I + A with small A."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Num
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from onlynorm.errors import ConversionError, ToleranceError, ValueRangeError
from onlynorm.identity.factorization.bounds import least_norm, paper_bound
from onlynorm.identity.factorization.decompositions import METHODS, DecomposedMatrix, ObstacleError, need_chance
from onlynorm.identity.factorization.factors import Factorization, LayerRun, TriedMethod
from onlynorm.identity.factorization.matrices import (
    Decomposition,
    Matrix,
    need_depth,
    need_invertible,
    need_matrix,
    random_matrix,
)
from onlynorm.identity.factorization.padding import complete, pad, pad_as_printed
from onlynorm.validate import as_real, need_choice, need_number

AUTO = ("root", "polar", "spiral", "log")
"""Methods tried by "auto", in order of preference for ties. svd is never better than polar: its angles add up."""
EXACT = 1e-10
"""Largest product error of a method selected by "auto", if one reaches it."""
N_PROBES = 16
_TIE = 1e-9


def factorize(
    matrix: Num[Tensor | np.ndarray, "out inp"] | nn.Linear,
    depth: int,
    *,
    method: str = "auto",
    tolerance: float | None = None,
) -> Factorization:
    """A factorization R = (I + A_l) ... (I + A_1) with l = depth and small |A_i|.

    `matrix` is a tensor or NumPy array (out, inp), or an `nn.Linear`, whose weight is R and whose bias is added after
    the last layer: `apply` and `to_network` of the result compute what the Linear computes. `method` is "root", "log",
    "polar", "spiral", "svd", or "auto" for the one with the smallest maximum norm. With `tolerance`, a larger relative
    error of the product raises.

    A rectangular R becomes the upper left part of a square matrix: the factors are those of that matrix. A negative
    determinant requires an extra dimension for depth >= 2. In both cases `usage` of the result says how to use the
    factors. A matrix without full rank raises; see `nearest_invertible`.
    Theory: hardt_ma2017:thm-2.1, hardt_ma2017:negative-determinant, hardt_ma2017:positive-definite

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> factors = on.factorize(torch.tensor([[0.0, -2.0], [2.0, 0.0]]), depth=8)
        >>> round(factors.max_norm, 3)
        0.224
        >>> torch.allclose(factors.product(), torch.tensor([[0.0, -2.0], [2.0, 0.0]]).double())
        True
    """
    start = time.perf_counter()
    depth = need_depth(depth)
    need_choice("method", method, ("auto", *METHODS))
    if tolerance is not None:
        tolerance = need_number("tolerance", tolerance, low=0.0, open_low=True, cure="Try 1e-10.")
    matrix, bias = _weight_and_bias(matrix)
    original = need_matrix(matrix, cure="Pass a matrix as a tensor or NumPy array, or an nn.Linear.")
    given = Decomposition.of(original)
    need_invertible(given)
    if original.shape[0] != original.shape[1]:
        given = complete(given)
    n_extra = int(given.sign < 0 and depth > 1)
    found = given if not n_extra else pad_as_printed(given) if method == "svd" else pad(given, depth)
    methods = AUTO if method == "auto" else (method,)
    weighed = (
        _one_layer(given, methods)
        if given.sign < 0 and depth == 1
        else _weigh(DecomposedMatrix(found), original, depth, methods)
    )
    made = [one for one in weighed if not one.option.obstacle]
    if not made:
        raise ValueRangeError(f"method {method!r} {weighed[0].option.obstacle}. Use method='auto'.")
    exact = [one for one in made if one.error <= EXACT] or [min(made, key=lambda one: one.error)]
    least = min(one.option.max_norm for one in exact)
    best = next(one for one in exact if one.option.max_norm <= (1.0 + _TIE) * least)
    error = max(best.error, layer_error(best.runs, original))
    if tolerance is not None and not error <= tolerance:
        raise ToleranceError(
            f"factorize needs a product error of {tolerance:.1e}; {best.option.method} reaches {error:.1e} at "
            f"depth {depth}. Try method='spiral', or a tolerance above the rounding of {depth} products."
        )
    return Factorization(
        runs=best.runs,
        method=best.option.method,
        reason=_reason(method, best, weighed, error, depth, given),
        max_norm=best.option.max_norm,
        bound=paper_bound(given.stretch, depth),
        least_norm=min(least_norm(original, depth), best.option.max_norm),
        product_error=error,
        stretch=given.stretch,
        seconds=time.perf_counter() - start,
        n_extra=n_extra,
        options=tuple(one.option for one in weighed),
        shape=(original.shape[0], original.shape[1]),
        bias=bias,
    )


def _weight_and_bias(matrix: Any) -> tuple[Any, Tensor | None]:
    """The weight and the bias in float64 of a Linear; anything else unchanged, without bias."""
    if not isinstance(matrix, nn.Linear):
        return matrix, None
    if is_lazy(matrix.weight):
        raise ConversionError(
            f"factorize needs a Linear with a weight; got a {type(matrix).__name__} that was never called. Call it "
            "once."
        )
    bias: Tensor | None = matrix.bias
    if bias is None:
        return matrix.weight, None
    return matrix.weight, as_real("bias of factorize", bias, is_finite=True).detach().double().clone()


@dataclass(frozen=True, eq=False)
class Weighed:
    """A method that was tried: its layers and their product error, or its obstacle."""

    option: TriedMethod
    runs: tuple[LayerRun, ...] = ()
    error: float = math.inf


def _one_layer(given: Decomposition, methods: Sequence[str]) -> list[Weighed]:
    """R - I as the only layer, for depth 1 and a negative determinant."""
    core = given.matrix - torch.eye(len(given.matrix)).to(given.matrix)
    runs = (LayerRun(core, 1),)
    whole = TriedMethod("spiral", float(torch.linalg.matrix_norm(core, 2)))
    obstacle = "needs two layers or more for a negative determinant; got depth 1"
    return [
        Weighed(whole, runs, product_error(runs, given.matrix))
        if name == "spiral"
        else Weighed(TriedMethod(name, obstacle=obstacle))
        for name in methods
    ]


def _weigh(parts: DecomposedMatrix, matrix: Matrix, depth: int, methods: Sequence[str]) -> list[Weighed]:
    weighed: list[Weighed] = []
    for name in methods:
        smallest = min((one.option.max_norm for one in weighed if one.runs), default=math.inf)
        try:
            if name == "log" and smallest < math.inf:
                need_chance(parts, depth, smallest)
            runs = METHODS[name](parts, depth)
        except ObstacleError as obstacle:
            weighed.append(Weighed(TriedMethod(name, obstacle=str(obstacle))))
            continue
        norm = max(float(torch.linalg.matrix_norm(run.core, 2)) for run in runs)
        weighed.append(Weighed(TriedMethod(name, norm), runs, product_error(runs, matrix)))
    return weighed


def product_error(runs: Sequence[LayerRun], matrix: Matrix) -> float:
    """The relative Frobenius error of the product of all layers, of its upper left part if it is larger."""
    whole = runs[0].product()
    for run in runs[1:]:
        whole = run.product() @ whole
    rows, columns = matrix.shape
    return _relative(whole[:rows, :columns], matrix)


def layer_error(runs: Sequence[LayerRun], matrix: Matrix) -> float:
    """The relative error for 16 random vectors passed through all layers, as in a network."""
    rows, columns = matrix.shape
    probes = random_matrix(max(columns, N_PROBES), name="probes").to(matrix)[:columns, :N_PROBES]
    outputs = torch.cat([probes, probes.new_zeros(len(runs[0].core) - columns, probes.shape[1])])
    for run in runs:
        outputs = run.apply(outputs)
    return _relative(outputs[:rows], matrix @ probes)


def _relative(found: Tensor, expected: Tensor) -> float:
    unit = expected.abs().max()  # avoids overflow and underflow of squares
    value = float(((found - expected) / unit).norm() / (expected / unit).norm())
    return value if math.isfinite(value) else math.inf


def _reason(
    method: str, best: Weighed, weighed: Sequence[Weighed], error: float, depth: int, found: Decomposition
) -> str:
    text = f"Method {method} was requested."
    if method == "auto" and depth == 1 and found.sign < 0:
        text = "A single layer is R - I for every method."
    elif method == "auto":
        others = "; ".join(str(one.option) for one in weighed if one is not best)
        is_beaten = any(one.option.max_norm < best.option.max_norm and one.error > EXACT for one in weighed)
        among = " of the exact methods" * is_beaten
        text = f"{best.option.method} has the smallest maximum norm{among} ({others}; svd is not better than polar)."
    if error > EXACT:
        text += f" The product error is {error:.1e}, more than {EXACT:.0e}; it is smaller for layers closer to I."
    if depth < 3.0 * found.stretch:
        text += f" Depth {depth} is below 3 * {found.stretch:.3g}, required for the bound of the paper: "
        text += _enough_depth(found)
    return text


def _enough_depth(found: Decomposition) -> str:
    """Advice for the bound of the paper: more layers, or scaling the singular values to around one."""
    advice = f"use at least {math.ceil(3.0 * found.stretch)} layers"
    logs = found.values[[0, -1]].log()
    centred = float(logs[0] - logs[1]) / 2
    if centred < 0.9 * found.stretch:
        advice += f", or {max(1, math.ceil(3.0 * centred))} for R scaled by {float(torch.exp(-logs.mean())):.3g}"
    return f"{advice}."
