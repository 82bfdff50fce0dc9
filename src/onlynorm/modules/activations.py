"""Intervals on which an activation is linear: proven for common activations, sampled for all others.

Common activations are described by type: `Ray` (linear from an edge to infinity), `Segment` (linear between two points)
and `Cubic` (a tangent with a proven cubic error). All others get a `Chart`: windows of many centres and widths with
sampled errors. Errors relative to the half-width of a window do not depend on the range of a feature, so one chart is
enough for all features of a layer.

Theory: burkholz2024:activations
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.errors import ShapeError, ValueRangeError, first_line

Activation = Callable[[Tensor], Tensor]
N_CELLS = 257
"""Cells per sampled window; a prime, so that steps at round numbers do not fall between samples."""
USABLE = 0.125
"""Largest sampled error of a linear window, relative to its half-width."""
LOST = 1024
"""Largest cost of an exact window, in eps of its half-width; its error is below its rounding."""


class Ray(NamedTuple):
    """phi(t) = slope t from `edge` to infinity (side 1) or to minus infinity (side -1), up to `error`."""

    edge: float
    side: int = 1
    slope: float | Tensor = 1.0
    error: float = 0.0


class Segment(NamedTuple):
    """phi(t) = slope t + offset, exactly, within `reach` of `centre`."""

    centre: float
    reach: float
    slope: float
    offset: float


class Cubic(NamedTuple):
    """|phi(t) - slope t - offset| <= factor |t|^3 for all t."""

    slope: float
    offset: float
    factor: float

    def reach(self, budget: Tensor, eps: float) -> Tensor:
        """The largest h <= 1 with a h^2 + eps (8 + 4 w / h) <= budget, else the h that minimizes the left side.

        Here a = factor / slope and w = offset / slope: error and rounding relative to the half-width of the range. h is
        the largest root of a h^3 - (budget - 8 eps) h + 4 eps w = 0, by the cosine formula. A smaller budget is raised
        to the minimum of the left side; without offset, to where the error is below the rounding.
        """
        a, k = self.factor / self.slope, 4 * eps * self.offset / self.slope
        least = max(a * eps, 3 * a * (k / (2 * a)) ** (2 / 3))
        room = ((budget - 8 * eps) * (1 - 1e-9)).clamp(min=least)  # slightly less, so that rounding cannot exceed it
        angle = torch.arccos((-1.5 * k / room * (3 * a / room).sqrt()).clamp(min=-1.0))
        return (2 * (room / (3 * a)).sqrt() * torch.cos(angle / 3)).clamp(max=1.0)


def known(activation: Activation | None) -> Ray | Segment | Cubic | None:
    """The proven linear part of an activation, by its exact type; None if there is none.

    LeakyReLU and PReLU have a second ray, see `leak`. Tails: t (1 - Phi(t)) < 1.1e-18 for t >= 9 for GELU, and less for
    its tanh form; t e^-t < 1.8e-16 for t >= 40 for SiLU; 2 t e^(-2t) < 1.8e-16 for t >= 20 for Mish;
    e^(-beta t) / beta < 4.3e-18 / beta for t >= 40 / beta for Softplus. All of them decrease beyond.
    """
    phi = module_of(activation)
    if isinstance(phi, nn.Softplus) and type(phi) is nn.Softplus:
        return Ray(40.0 / phi.beta, error=4.3e-18 / phi.beta)
    if isinstance(phi, nn.Hardtanh) and type(phi) in (nn.Hardtanh, nn.ReLU6):
        return Segment((phi.min_val + phi.max_val) / 2, (phi.max_val - phi.min_val) / 2, 1.0, 0.0)
    return _KNOWN.get(type(phi))


def leak(activation: Activation | None) -> Tensor | None:
    """The negative slope of a LeakyReLU (one value) or PReLU (one value, or one per feature); None for others."""
    phi = module_of(activation)
    if isinstance(phi, nn.LeakyReLU) and type(phi) is nn.LeakyReLU:
        return torch.tensor(phi.negative_slope, dtype=torch.float64)
    if isinstance(phi, nn.PReLU) and type(phi) is nn.PReLU:
        return phi.weight.detach().squeeze()
    return None


def module_of(activation: Activation | None) -> Activation | None:
    """The module equivalent to a function of torch with default arguments; other callables unchanged."""
    return _MODULES.get(activation, activation) if isinstance(activation, Hashable) else activation


_KNOWN: dict[type, Ray | Segment | Cubic] = {
    type(None): Ray(-math.inf),
    nn.Identity: Ray(-math.inf),
    nn.ReLU: Ray(0.0),
    nn.LeakyReLU: Ray(0.0),
    nn.PReLU: Ray(0.0),
    nn.ELU: Ray(0.0),
    nn.CELU: Ray(0.0),
    nn.SELU: Ray(0.0, slope=1.0507009873554804934193349852946),
    nn.Hardswish: Ray(3.0),
    nn.GELU: Ray(9.0, error=1.1e-18),
    nn.SiLU: Ray(40.0, error=1.8e-16),
    nn.Mish: Ray(20.0, error=1.8e-16),
    nn.LogSigmoid: Ray(-40.0, side=-1, error=4.3e-18),
    nn.Hardsigmoid: Segment(0.0, 3.0, 1 / 6, 0.5),
    nn.Tanh: Cubic(1.0, 0.0, 1 / 3),
    nn.Sigmoid: Cubic(0.25, 0.5, 1 / 48),
}
_MODULES: dict[Hashable, nn.Module] = {
    **dict.fromkeys((torch.relu, functional.relu), nn.ReLU()),
    **dict.fromkeys((torch.tanh, functional.tanh), nn.Tanh()),
    **dict.fromkeys((torch.sigmoid, functional.sigmoid), nn.Sigmoid()),
    **dict.fromkeys((torch.selu, functional.selu), nn.SELU()),
    functional.leaky_relu: nn.LeakyReLU(),
    functional.elu: nn.ELU(),
    functional.celu: nn.CELU(),
    functional.gelu: nn.GELU(),
    functional.silu: nn.SiLU(),
    functional.mish: nn.Mish(),
    functional.softplus: nn.Softplus(),
    functional.logsigmoid: nn.LogSigmoid(),
    functional.hardtanh: nn.Hardtanh(),
    functional.relu6: nn.ReLU6(),
    functional.hardsigmoid: nn.Hardsigmoid(),
    functional.hardswish: nn.Hardswish(),
}


class Chart(NamedTuple):
    """Sampled windows [centre - reach, centre + reach] of an activation with their linear fits and errors."""

    centre: Tensor
    reach: Tensor
    slope: Tensor
    offset: Tensor
    error: Tensor

    def cost(self, eps: float) -> Tensor:
        """Error and rounding relative to the half-width of the range, as in `linearize` beyond 2 eps max |x|."""
        away = self.centre.abs()
        rounding = away + 4 * (2 * (away + self.reach) + (self.offset.abs() + self.error) / self.slope.abs())
        cost = self.error / (self.slope.abs() * self.reach) + eps * rounding / self.reach
        return cost.nan_to_num(nan=math.inf, posinf=math.inf)

    def choose(self, budget: Tensor, eps: float) -> tuple[Chart, bool]:
        """(windows, True) with the cheapest exact window for all features, else (windows, False).

        Without an exact window, each feature gets the widest one within its budget, or the cheapest if there is none.
        """
        cost = self.cost(eps)
        # The same sign of the slope for all features, so that their gains have the same sign.
        side = self.slope > 0
        if not bool((cost[side] <= USABLE).any()):
            side = self.slope < 0
        rows, cost = Chart(*(value[side] for value in self)), cost[side]
        if not bool((cost <= USABLE).any()):
            why = f"has a relative error of {float(cost.min()):.2g}" if len(cost) else "has slope zero"
            raise ValueRangeError(
                "linearize needs an activation that is nearly linear with nonzero slope somewhere in [-320, 320]; got "
                f"one whose best window {why} (constant, a step function, or NaN). Use another activation."
            )
        is_lost_in_rounding = rows.error / (rows.slope.abs() * rows.reach) <= cost / 2
        exact = (rows.reach >= 2.0**-4) & (cost <= LOST * eps) & is_lost_in_rounding
        if bool(exact.any()):
            row = torch.where(exact, cost, math.inf).argmin().expand(budget.shape)
            return Chart(*(value[row] for value in rows)), True
        order = cost.argsort()
        widest = rows.reach[order].cummax(0).values
        is_wider = torch.cat([widest[:1] > 0, widest.diff() > 0])
        best = order[torch.where(is_wider, torch.arange(len(order), device=order.device), 0).cummax(0).values]
        row = best[(torch.searchsorted(cost[order], budget.contiguous(), right=True) - 1).clamp(min=0)]
        return Chart(*(value[row] for value in rows)), False


def chart(phi: Activation, device: torch.device) -> Chart:
    """Windows of an elementwise callable, sampled in float64.

    Centres are a uniform grid on [-8, 8], the inflection points that it brackets, and points up to 256; half-widths are
    2^-52 to 2^6. The slope is the fourth-order difference quotient at the scale of the window. The error is the largest
    residual at the ends of 257 cells plus the largest second difference of the residuals. If phi is C^2 and its second
    derivative is at most eight times what these differences show, the bound also holds between samples (the error of
    linear interpolation is at most an eighth of a second difference); a kink inside a cell is covered too. It is
    assumed, not proven, that phi has no features narrower than a cell.
    """
    _need_elementwise(phi, device)

    def values(t: Tensor) -> Tensor:
        return phi(t.reshape(-1).clone()).to(torch.float64).reshape(t.shape)

    with torch.no_grad():
        grid = torch.linspace(-8.0, 8.0, 129, dtype=torch.float64, device=device)
        far = torch.tensor([12.0, 16, 24, 32, 48, 64, 96, 128, 256], dtype=torch.float64, device=device)
        centre = torch.cat([grid, _inflections(values, grid), far, -far])
        # Slightly beyond the window, since the rounding of s x + b may cross a jump at its end.
        steps = (1 + 2.0**-10) * torch.linspace(-1.0, 1.0, N_CELLS + 1, dtype=torch.float64, device=device)
        rows = []
        # Starting at scale one, which is selected among windows of equal cost.
        for power in sorted((k / 2 for k in range(-104, 13)), key=abs):
            reach = torch.full_like(centre, 2.0**power)
            at = values(centre[:, None] + reach[:, None] * steps.new_tensor([-1.0, -0.5, 0.0, 0.5, 1.0]))
            slope = (8 * (at[:, 3] - at[:, 1]) - (at[:, 4] - at[:, 0])) / (6 * reach)
            offset = at[:, 2] - slope * centre
            points = centre[:, None] + reach[:, None] * steps
            residual = values(points) - (slope[:, None] * points + offset[:, None])
            error = residual.abs().amax(1) + residual.diff(n=2, dim=1).abs().amax(1)
            rows.append(Chart(centre, reach, slope, offset, error))
    return Chart(*(torch.cat(columns) for columns in zip(*rows, strict=True)))


def _inflections(values: Activation, grid: Tensor) -> Tensor:
    """Inflection points: sign changes of the second difference of phi between grid points, by bisection."""

    def second_difference(t: Tensor) -> Tensor:
        return values(t + 2.0**-9) - 2 * values(t) + values(t - 2.0**-9)

    at = second_difference(grid)
    crosses = at[:-1] * at[1:] < 0
    left, right, sign = grid[:-1][crosses], grid[1:][crosses], at[:-1][crosses].sign()
    for _ in range(40):
        middle = (left + right) / 2
        before = second_difference(middle) * sign > 0
        left, right = torch.where(before, middle, left), torch.where(before, right, middle)
    return left


def _need_elementwise(phi: Activation, device: torch.device) -> None:
    points = torch.linspace(-3.0, 3.1, 64, dtype=torch.float64, device=device)
    need = "linearize needs a deterministic elementwise activation for float64 tensors"
    cure = "Pass an elementwise function such as torch.tanh, or a module in eval() mode."

    try:
        with torch.no_grad():
            whole, again, turned, part = (phi(t.clone()) for t in (points, points, points.flip(0), points[:17]))
            is_shaped = whole.shape == points.shape and part.shape == (17,)
    except Exception as problem:
        raise ValueRangeError(f"{need}; got {type(problem).__name__}: {first_line(problem)}. {cure}") from problem
    if not is_shaped:
        raise ShapeError(f"{need}; got shape {tuple(whole.shape)} from (64,). {cure}")
    if bool(whole.isnan().all()):
        raise ValueRangeError(f"{need}; got only NaN on [-3, 3]. {cure}")
    pairs = {"each call": (whole, again), "their order": (whole, turned.flip(0)), "their count": (whole[:17], part)}
    for name, (first, second) in pairs.items():
        if not torch.allclose(first, second, rtol=1e-9, atol=1e-12, equal_nan=True):
            raise ValueRangeError(f"{need}; got values that change with {name}. {cure}")
