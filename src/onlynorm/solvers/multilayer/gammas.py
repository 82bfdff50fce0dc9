"""Gammas of L consecutive frozen layers whose product is a target:

    diag(g_L) W_L diag(g_(L-1)) W_(L-1) ... diag(g_1) W_1 = T

The product is linear in each gamma and a polynomial of degree L in all of them. It is solved by Levenberg-Marquardt
from gamma = 1 (`product`), with factorizations for small systems and iterations for large ones.

Number of gammas: T has N = out * inp entries. The L layers have width_1 + ... + width_(L-1) + out gammas, of which L -
1 are redundant, since a factor can be moved between neighbouring layers. N + L - 1 gammas are therefore needed,
including those of the outputs; the theorem requires N + L, and `widths_for` multiplies that by the excess. In addition
no hidden layer is narrower than 1.5 max(out, inp), since the product cannot have a higher rank.

Theory: burkholz2024:thm-2.5
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from jaxtyping import Float
from torch import Tensor

from onlynorm.display import Result
from onlynorm.errors import InsufficientFeaturesError, ShapeError, ToleranceError, ValueRangeError, shown
from onlynorm.features.draw import check_shape
from onlynorm.features.streams import as_integer
from onlynorm.solvers.multilayer.product import LayerProduct, descend, product, relative, starts
from onlynorm.solvers.operator import OnStep, times_power
from onlynorm.solvers.prepare import need_finite, need_tolerance, to_middle
from onlynorm.validate import as_real, is_real_number, need_callable, need_choice, need_integer, need_items

DEFAULT_EXCESS = 1.1
METHODS = ("auto", "dense", "matrix-free")
TINY = 1e-150
DENSE = 600
"""Equations up to which steps are factorized: faster at 256 equations, 2 to 4 times slower at 1,024."""
SAFE_EXCESS = 1.25
"""Excess of the recommended widths: at 1, some systems of two layers are not solved."""
SAFE_LAYERS = 3
"""Layers up to which all dense systems of this excess that were tried were solved, also for targets of low rank: deeper
products are worse conditioned."""
MOST_LAYERS = 100_000
MAX_STEPS = 500
"""Over all restarts; 15 to 50 are typical."""
ROOM = 1.5
"""Minimum width over max(out, inp). Products of square Gaussian layers are badly conditioned: at 1, 18 of 150 small
targets with 2 to 10 layers were not reached; at 1.5, all of 4,853 with 2 to 6 were."""


def widths_for(shape: Sequence[int], *, n_layers: int, excess: float = DEFAULT_EXCESS) -> tuple[int, ...]:
    """Widths of the n_layers - 1 hidden layers for a target (out, inp) or (out, inp, *kernel), kernel in the first.

    The smallest equal widths with sum + out = excess * (equations + n_layers), and at least
    1.5 * max(out, inp * kernel). Theory: burkholz2024:thm-2.5

    Examples:
        >>> from onlynorm.solvers import widths_for
        >>> widths_for((64, 64), n_layers=3)
        (2223, 2222)
    """
    count = as_integer(n_layers)
    if count is None or not 2 <= count <= MOST_LAYERS:
        raise ValueRangeError(
            f"n_layers needs an integer from 2 to {MOST_LAYERS}; got {shown(n_layers)}. Use 2, or more for narrower "
            "layers."
        )
    n_layers = count
    if not is_real_number(excess) or not 0.0 < excess < math.inf:
        raise ValueRangeError(
            f"excess needs a positive finite number; got {shown(excess)}. Pass 1.1, or 1.25 for faster convergence."
        )
    out, *rest = check_shape(shape)
    inp = math.prod(rest)
    total = math.ceil(Fraction(str(float(excess))) * (out * inp + n_layers)) - out
    whole, more = divmod(max(0, total), n_layers - 1)
    floor = math.ceil(ROOM * max(out, inp))
    return tuple(max(whole + (layer < more), floor) for layer in range(n_layers - 1))


@dataclass(frozen=True)
class MultilayerSolution(Result):
    """The gammas of all layers from input to output, and their residual.

    `residual` is |product - target| / |target|, measured in float64 after the solve. `iterations` counts inner
    iterations, 0 if systems were factorized. `shortfall` is empty if the tolerance was reached.
    """

    gammas: tuple[Tensor, ...]
    residual: float
    method: str
    steps: int
    iterations: int
    seconds: float
    tolerance: float
    shortfall: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether the residual is within the tolerance."""
        return self.residual <= self.tolerance

    def __str__(self) -> str:
        widths = ", ".join(str(len(gamma)) for gamma in self.gammas)
        return (
            f"gammas of {len(self.gammas)} layers ({widths}) by {self.method} steps: relative residual "
            f"{self.residual:.1e} (tolerance {self.tolerance:.0e}) after {self.steps} steps and {self.iterations} "
            f"iterations, {self.seconds:.2g} s" + (f"\ntolerance missed: {self.shortfall}" if self.shortfall else "")
        )


def solve_multilayer(
    weights: Sequence[Float[Tensor, ...]],
    target: Float[Tensor, "out inp"],
    *,
    tolerance: float | None = None,
    method: str = "auto",
    max_steps: int = MAX_STEPS,
    on_step: OnStep | None = None,
) -> MultilayerSolution:
    """Gammas with diag(g_L) W_L ... diag(g_1) W_1 = target; `weights` are W_1, ..., W_L.

    With a `tolerance`, too few features or a larger residual raise an error. By default the tolerance is 1e-10 and the
    residual is only reported. `method` "dense" factorizes the matrix of every step, "matrix-free" iterates, "auto"
    selects by size. `max_steps` limits the steps of all restarts together. Theory: burkholz2024:thm-2.5

    Examples:
        >>> import torch
        >>> from onlynorm.solvers import solve_multilayer, widths_for
        >>> generator = torch.Generator().manual_seed(0)
        >>> widths = (6, *widths_for((4, 6), n_layers=3, excess=1.5), 4)
        >>> weights = [torch.randn(o, i, generator=generator).double() for i, o in zip(widths, widths[1:])]
        >>> solution = solve_multilayer(weights, torch.randn(4, 6, generator=generator).double())
        >>> len(solution.gammas), solution.residual < 1e-8
        (3, True)
    """
    start = time.perf_counter()
    wanted = need_tolerance(tolerance)
    need_choice("method", method, METHODS)
    max_steps = need_integer("max_steps", max_steps, low=0, cure="Omit it: 15 to 50 steps are typical.")
    if on_step is not None:
        need_callable("on_step", on_step, cure="It is called with (steps, relative residual).")
    target = as_real("target", target)
    weights = [as_real("a frozen weight", w) for w in need_items("weights", weights, cure="List W_1, ..., W_L.")]
    layers = _need_chain(weights, target)
    scaled, power = to_middle(target.detach().to(layers[0]))
    # Zero rows of the target get a gamma of zero and are removed from the system.
    on = scaled.abs().amax(1) > 0
    live, rows = [*layers[:-1], layers[-1][on]], scaled[on]
    if tolerance is not None:
        _need_enough(live, rows.numel())
    if method == "auto":
        method = "dense" if rows.numel() <= DENSE else "matrix-free"
    gammas = [torch.ones_like(w[:, 0]) for w in layers[:-1]] + [torch.zeros_like(scaled[:, 0])]
    steps, iterations, best = 0, 0, math.inf
    for tilt, seed in starts(len(live), rows) if bool(on.any()) else []:
        found = descend(
            LayerProduct.of(live, tilt=tilt), rows, seed=seed, tolerance=wanted, method=method, steps=steps,
            max_steps=max_steps, on_step=on_step,
        )  # fmt: skip
        steps, iterations = found.steps, iterations + found.iterations
        if found.residual < best:
            best, gammas[:-1], gammas[-1][on] = found.residual, found.gammas[:-1], found.gammas[-1]
        if best <= wanted or steps >= max_steps or not _is_enough(live, rows.numel()):
            break
    residual = relative(product(layers, gammas) - scaled, scaled)
    stopped = max_steps < MAX_STEPS and steps >= max_steps
    gammas[-1] = times_power(gammas[-1], power)
    solution = MultilayerSolution(
        tuple(gammas), residual, method, steps, iterations, time.perf_counter() - start, wanted,
        "" if residual <= wanted else f"residual {residual:.1e}; {_cure(live, rows, is_stopped=stopped)}",
    )  # fmt: skip
    if tolerance is not None and solution.shortfall:
        raise ToleranceError(
            f"solve_multilayer needs a relative residual of {wanted:.0e}; got {solution.shortfall}, or omit the "
            "tolerance to get the best solution found."
        )
    return solution


def _need_chain(weights: Sequence[Tensor], target: Tensor) -> list[Tensor]:
    """The frozen weights in float64; raises unless their shapes fit together and to the target."""
    shapes = [tuple(w.shape) for w in weights]
    fits = len(weights) >= 2 and target.ndim == 2 and all(w.ndim == 2 and w.numel() for w in weights)
    fits = fits and all(after[1] == before[0] for before, after in itertools.pairwise(shapes))
    if not fits or (shapes[-1][0], shapes[0][1]) != tuple(target.shape):
        raise ShapeError(
            "solve_multilayer needs at least two matrices W_1 (width_1, inp), ..., W_L (out, width_(L-1)) and a target "
            f"(out, inp); got {', '.join(map(str, shapes)) or 'none'} and {tuple(target.shape)}. List them from input "
            "to output, and flatten the kernel of a convolution into its inputs."
        )
    need_finite("target", target)
    for layer, weight in enumerate(weights, 1):
        need_finite(f"W_{layer}", weight)
        if not bool(weight.any()):
            raise ValueRangeError(f"W_{layer} needs entries other than zero; got none. Draw dense features.")
        if not TINY < float(torch.linalg.vector_norm(weight.double())) < 1.0 / TINY:
            raise ValueRangeError(
                f"W_{layer} needs a sum of squares within the range of float64; got a largest entry of "
                f"{float(weight.abs().max()):.1e}. Divide it by that; the gammas compensate."
            )
    return [w.detach().double() for w in weights]


def _is_enough(weights: Sequence[Tensor], equations: int) -> bool:
    return sum(len(w) for w in weights) >= equations + len(weights) - 1


def _need_enough(weights: Sequence[Tensor], equations: int) -> None:
    if not _is_enough(weights, equations):
        got, needed = sum(len(w) for w in weights), equations + len(weights) - 1
        raise InsufficientFeaturesError(
            f"an exact solution needs {needed} gammas for {equations} equations and {len(weights)} layers, including "
            f"those of the outputs; got {got}. Widen the hidden layers by {needed - got} in total at least, better to "
            f"the widths of widths_for with excess={SAFE_EXCESS}, or omit the tolerance for the closest product."
        )


def _cure(weights: Sequence[Tensor], target: Tensor, *, is_stopped: bool) -> str:
    """Why a system was not solved, and what solves it; options that do not help reliably are not named."""
    if is_stopped:
        return f"leave max_steps out, which allows {MAX_STEPS}"
    out, inp = target.shape
    n_layers, widths = len(weights), [len(w) for w in weights[:-1]]
    needed = out * inp + n_layers - 1 - sum(widths) - out
    reason = ""
    if needed > 0:
        reason = f"{needed} more features are needed; "
    elif min(widths) < max(out, inp):
        reason = f"a hidden layer of {min(widths)} features is too narrow for {out} x {inp} weights; "
    safe = widths_for((out, inp), n_layers=n_layers, excess=SAFE_EXCESS)
    is_wide = all(width >= least for width, least in zip(sorted(widths), sorted(safe), strict=True))
    is_dense, is_orthogonal = all(map(_is_dense, weights)), all(map(_is_orthogonal, weights))
    is_deep = n_layers > SAFE_LAYERS
    needs_orthogonal = not is_orthogonal and (is_wide or not is_dense or is_deep)
    options = [f"n_layers={SAFE_LAYERS}"] if is_deep else []
    options += ["features='orthogonal'" + ("" if is_dense else " (without a density)")] if needs_orthogonal else []
    options += [f"excess={SAFE_EXCESS} (the widths of widths_for)"] if is_deep or not is_wide else []
    return f"{reason}use {' and '.join(options)}" if options else f"{reason}no option is known to help"


def _is_dense(weight: Tensor) -> bool:
    """Whether the entries look drawn from a density: no zeros, and not of one size, as random signs are."""
    sizes = weight.abs()
    return bool((sizes > 0).all()) and (sizes.numel() < 2 or not bool((sizes == sizes.amax()).all()))


def _is_orthogonal(weight: Tensor) -> bool:
    """Whether the first rows, as many as fit, are orthogonal and of one length."""
    block = weight[: weight.shape[1]]
    gram = block @ block.mT
    return bool((gram - gram[0, 0] * torch.eye(len(gram)).to(gram)).abs().max() <= 1e-6 * gram[0, 0])
