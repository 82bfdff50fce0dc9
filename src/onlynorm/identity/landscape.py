"""The population risk of deep linear networks near the identity: gradients, a lower bound on them, gradient descent.

A network of l square layers A_1, ..., A_l computes (I + A_l) ... (I + A_1) x, or A_l ... A_1 x in the standard
parameterization. Both learn y = R x + noise. Only the first has no bad critical points near its initialization.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Num
from torch import Tensor

from onlynorm.display import Curve, Figure, Panel, Result, ShownResult, View
from onlynorm.errors import ShapeError, TrainingError, ValueRangeError
from onlynorm.identity.factorization.matrices import EPS, need_depth, need_square
from onlynorm.validate import as_real, as_tensor, need_callable, need_flag, need_integer, need_number

BLOW_UP = 1e6
"""Gradient descent raises an error if the risk grows by this factor."""


@dataclass(frozen=True, eq=False)
class Dominance(Result):
    """Both sides of inequality 2.3 at one point: |grad f|^2 >= 4 l (1 - tau)^(2l-2) s_min(Sigma) (f - min f).

    `tau` is the largest distance of a layer from the identity; for tau >= 1 the bounds are zero. `printed` is the right
    side as printed in the paper, with the square of s_min(Sigma).
    Theory: hardt_ma2017:ineq-2.3
    """

    gradient: float
    bound: float
    printed: float
    tau: float

    @property
    def ratio(self) -> float:
        """Left side divided by right side, at least one by the theory; infinite if the right side is zero."""
        return self.gradient / self.bound if self.bound > 0.0 else math.inf

    def __str__(self) -> str:
        return (
            f"squared gradient {self.gradient:.3g}, at least {self.bound:.3g} by inequality 2.3; layers within "
            f"{self.tau:.3g} of the identity"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Descent(ShownResult):
    """A run of gradient descent: risks, squared gradients, largest distances from the identity, right sides of 2.3.

    All lists include the initial point. `path` has the layers at every step if `keep_path`.
    """

    risks: tuple[float, ...]
    gradients: tuple[float, ...]
    norms: tuple[float, ...]
    bounds: tuple[float, ...]
    rate: float
    end: Float[Tensor, "depth dim dim"] = field(repr=False)
    path: Float[Tensor, "steps depth dim dim"] | None = field(default=None, repr=False)

    @property
    def ratios(self) -> tuple[float, ...]:
        """Left side of inequality 2.3 divided by its right side, for nonzero right sides."""
        return tuple(g / b for g, b in zip(self.gradients, self.bounds, strict=True) if b > 0.0)

    def plot(self) -> Figure:
        """Risk and both sides of inequality 2.3 against the steps."""
        curves = []
        for label, values, panel, style in (
            ("risk", self.risks, "risk", "data"), ("|gradient|^2", self.gradients, "gradient", "data"),
            ("right side of 2.3", self.bounds, "gradient", "law"),
        ):  # fmt: skip
            points = [(x, y) for x, y in enumerate(values) if y > 0 and math.isfinite(y)]
            if points:
                xs, ys = zip(*points, strict=True)
                curves.append(Curve(label, xs, ys, panel=panel, style="law" if style == "law" else "data"))
        return Figure(curves, (
            Panel("risk", "Risk", "step", y_log=True),
            Panel("gradient", "Squared gradient", "step", y_log=True),
        ))  # fmt: skip

    def view(self) -> View:
        """Initial and final risk, and the ratio of inequality 2.3."""
        return View(
            "Gradient descent near the identity",
            facts={
                "steps": len(self.risks) - 1, "learning rate": self.rate, "initial risk": self.risks[0],
                "final risk": self.risks[-1], "largest |A|": max(self.norms),
                "smallest ratio of inequality 2.3": min(self.ratios) if self.ratios else "undefined",
            },
        )  # fmt: skip

    def __str__(self) -> str:
        smallest = f"{min(self.ratios):.3g}" if self.ratios else "undefined"
        return (
            f"{len(self.risks) - 1} steps with learning rate {self.rate:.3g}: risk {self.risks[0]:.3g} to "
            f"{self.risks[-1]:.3g}, largest |A| {max(self.norms):.3g}, smallest ratio of inequality 2.3: {smallest}"
        )


@dataclass(frozen=True, eq=False)
class Landscape(Result):
    """The population risk f(A) = |(product - R) Sigma^(1/2)|_F^2 + noise as a function of the layers, A_1 first.

    `noise` is E |noise|^2, the minimum risk. `covariance` is Sigma = E x x^T, by default the identity; it must be
    symmetric and positive semidefinite up to the rounding of its dtype, as `x.mT @ x / len(x)` is. Everything is
    computed in float64.
    Theory: hardt_ma2017:claim-2.3
    """

    target: Tensor
    covariance: Tensor | None = None
    noise: float = 0.0
    is_residual: bool = True

    def __post_init__(self) -> None:
        target = need_square(self.target, what="a landscape")
        noise = need_number("noise of a landscape, its mean square,", self.noise, low=0.0, cure="Pass 0 for no noise.")
        given = torch.eye(len(target)).to(target) if self.covariance is None else self.covariance
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "covariance", _need_covariance(given, target))
        object.__setattr__(self, "noise", noise)
        object.__setattr__(self, "is_residual", need_flag("is_residual", self.is_residual))

    @property
    def sigma(self) -> Float[Tensor, "dim dim"]:
        """The covariance, by default the identity."""
        assert self.covariance is not None  # set by __post_init__
        return self.covariance

    @functools.cached_property
    def least_variance(self) -> float:
        """s_min(Sigma)."""
        return max(float(torch.linalg.eigvalsh(self.sigma)[0]), 0.0)

    def risk(self, layers: Num[Tensor | np.ndarray, "*batch depth dim dim"]) -> Float[Tensor, "*batch"]:
        """f at one point or at every point of a batch, in float64."""
        weights = self._weights(layers)
        product = weights[..., 0, :, :]
        for place in range(1, weights.shape[-3]):
            product = weights[..., place, :, :] @ product
        error = product - self.target
        return ((error @ self.sigma) * error).sum((-2, -1)) + self.noise

    def gradient(self, layers: Num[Tensor | np.ndarray, "depth dim dim"]) -> Float[Tensor, "depth dim dim"]:
        """The gradient of f with respect to every layer, in closed form and float64.

        For layer i it is 2 after_i^T (product - R) Sigma before_i^T, with the products of the layers after and before.
        Theory: hardt_ma2017:lemma-2.4
        """
        weights = self._weights(layers, is_batch=False)
        before = [torch.eye(len(self.target)).to(weights)]
        after = [before[0]]
        for place in range(len(weights) - 1):
            before.append(weights[place] @ before[-1])
            after.append(after[-1] @ weights[len(weights) - 1 - place])
        middle = (weights[-1] @ before[-1] - self.target) @ self.sigma
        return 2.0 * torch.stack(after[::-1]).mT @ middle @ torch.stack(before).mT

    def dominance(self, layers: Num[Tensor | np.ndarray, "depth dim dim"]) -> Dominance:
        """Both sides of inequality 2.3 at this point."""
        layers = self._need_layers(layers, is_batch=False)
        return self._dominance(layers, float(self.risk(layers)), self.gradient(layers))

    def _dominance(self, layers: Tensor, risk: float, gradient: Tensor) -> Dominance:
        tau = float(torch.linalg.matrix_norm(self._weights(layers) - torch.eye(len(self.target)).to(layers), 2).max())
        factor = (1.0 - tau) ** (2 * len(layers) - 2) if tau < 1.0 else 0.0
        unit = 4.0 * len(layers) * factor * max(risk - self.noise, 0.0)
        least = self.least_variance
        return Dominance(float(gradient.square().sum()), unit * least, unit * least**2, tau)

    def usual_rate(self, depth: int) -> float:
        """A stable learning rate for descent from the identity: 1 / (4 l |Sigma| max(1, |R|)^2)."""
        depth = need_depth(depth, what="a landscape")
        size = max(1.0, float(torch.linalg.matrix_norm(self.target, 2)))
        variance = float(torch.linalg.matrix_norm(self.sigma, 2)) or 1.0
        return 0.25 / (depth * variance * size**2)

    def descend(
        self,
        start: Num[Tensor | np.ndarray, "depth dim dim"],
        *,
        n_steps: int = 1000,
        rate: float | None = None,
        keep_path: bool = False,
        on_step: Callable[[int, float], None] | None = None,
    ) -> Descent:
        """Plain gradient descent from `start`, with both sides of inequality 2.3 at every step."""
        n_steps = need_integer("n_steps of a descent", n_steps, low=1, high=10**7, cure="Leave it out for 1000.")
        layers = self._need_layers(start, is_batch=False).detach()
        rate = self.usual_rate(len(layers)) if rate is None else rate
        rate = need_number("rate of a descent", rate, low=0.0, open_low=True, cure="Leave it out for the usual one.")
        if on_step is not None:
            need_callable("on_step", on_step, cure="It is called with the step and the risk.")
        keep_path = need_flag("keep_path", keep_path)
        risks: list[float] = []
        seen: list[Dominance] = []
        path = [layers] if keep_path else []
        for step in range(n_steps + 1):
            risks.append(float(self.risk(layers)))
            if not risks[-1] <= BLOW_UP * risks[0]:
                raise TrainingError(
                    f"gradient descent needs a learning rate at which the risk decreases; at {rate:.2g} it rose from "
                    f"{risks[0]:.2g} to {risks[-1]:.2g} in {step} steps. Pass a smaller learning rate."
                )
            gradient = self.gradient(layers)
            seen.append(self._dominance(layers, risks[-1], gradient))
            if on_step is not None:
                on_step(step, risks[-1])
            if step < n_steps:
                layers = layers - rate * gradient
                path += [layers] if keep_path else []
        return Descent(
            risks=tuple(risks),
            gradients=tuple(one.gradient for one in seen),
            norms=tuple(one.tau for one in seen),
            bounds=tuple(one.bound for one in seen),
            rate=rate,
            end=layers,
            path=torch.stack(path) if keep_path else None,
        )

    def on_plane(
        self,
        across: Num[Tensor | np.ndarray, "depth dim dim"],
        up: Num[Tensor | np.ndarray, "depth dim dim"],
        *,
        reach: float = 1.0,
        n_places: int = 101,
    ) -> tuple[Float[Tensor, " places"], Float[Tensor, "places places"]]:
        """(places, risks) for a contour plot, with risks[i, j] = f(places[j] across + places[i] up)."""
        reach = need_number("reach of a plane", reach, low=0.0, open_low=True, cure="Leave it out for 1.")
        n_places = need_integer("n_places of a plane", n_places, low=2, high=10_000, cure="Leave it out for 101.")
        across, up = (self._need_layers(layers, is_batch=False) for layers in (across, up))
        if across.shape != up.shape:
            raise ShapeError(
                f"a plane needs two directions of the same shape; got {tuple(across.shape)} and {tuple(up.shape)}. "
                "Pass both with the same depth."
            )
        places = torch.linspace(-reach, reach, n_places, dtype=torch.float64).to(self.target)
        rows = [self.risk(places[:, None, None, None] * across + place * up) for place in places]
        return places, torch.stack(rows)

    def _weights(self, layers: Tensor | np.ndarray, *, is_batch: bool = True) -> Float[Tensor, "*batch depth dim dim"]:
        layers = self._need_layers(layers, is_batch=is_batch)
        return layers + torch.eye(len(self.target)).to(layers) if self.is_residual else layers

    def _need_layers(self, layers: Tensor | np.ndarray, *, is_batch: bool) -> Float[Tensor, "*batch depth dim dim"]:
        """The layers in the dtype and on the device of the target."""
        made = as_real("layers of a landscape", layers, is_finite=True)
        is_fine = made.ndim >= 3 if is_batch else made.ndim == 3
        if not is_fine or made.shape[-2:] != self.target.shape or not made.shape[-3]:
            raise ShapeError(
                f"a landscape needs layers (depth, {len(self.target)}, {len(self.target)}), at least one; got "
                f"{tuple(made.shape)}. Stack them, A_1 first."
            )
        return made.to(self.target)


def _need_covariance(given: Tensor | np.ndarray, target: Tensor) -> Float[Tensor, "dim dim"]:
    """The covariance in float64, made exactly symmetric and positive semidefinite.

    The rounding error of x.mT @ x over n samples is up to n eps; a tolerance of sqrt(eps) is enough for any n.
    """
    covariance = need_square(given, what="a covariance").to(target)
    if covariance.shape != target.shape:
        raise ShapeError(
            f"a landscape needs a covariance of the shape of R, {tuple(target.shape)}; got {tuple(covariance.shape)}. "
            "Pass x.mT @ x / len(x) with samples as rows."
        )
    dtype = as_tensor("a covariance", given).dtype
    slack = (torch.finfo(dtype).eps if dtype.is_floating_point else EPS) ** 0.5 * float(covariance.abs().max())
    gap = float((covariance - covariance.mT).abs().max())
    values, vectors = torch.linalg.eigh((covariance + covariance.mT) / 2.0)
    if gap > slack or float(values[0]) < -slack:
        raise ValueRangeError(
            f"a covariance needs to be symmetric without negative eigenvalues; got the smallest eigenvalue "
            f"{float(values[0]):.2g} and a difference of {gap:.2g} from its transpose, where rounding in {dtype} "
            f"explains up to {slack:.1g}. Pass x.mT @ x / len(x) with samples as rows."
        )
    if float(values[0]) < 0.0:
        covariance = vectors * values.clamp(min=0.0) @ vectors.mT
    return (covariance + covariance.mT) / 2.0
