"""Checks of burkholz2024 on activations: the error of one layer, the stated windows, and whole networks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d

from onlynorm.evidence.papers.giannou2023.sparse import smallest_enough
from onlynorm.evidence.registry import EPS, Evidence, normal, verdict
from onlynorm.features import draw
from onlynorm.modules import activations
from onlynorm.reconstruction import linearize
from onlynorm.solvers import solve_features

ACTIVATIONS: dict[str, activations.Activation] = {
    "ReLU": nn.ReLU(), "LeakyReLU": nn.LeakyReLU(0.1), "tanh": nn.Tanh(), "sigmoid": nn.Sigmoid(), "GELU": nn.GELU(),
    "SiLU": nn.SiLU(), "ELU": nn.ELU(), "softplus": nn.Softplus(), "hardtanh": nn.Hardtanh(), "atan": torch.atan,
}  # fmt: skip
CUBIC = {"tanh": (1.0, 0.0, 3.0), "sigmoid": (0.25, 0.5, 48.0)}
"""(slope m, offset c, f) with |phi(t) - m t - c| <= |t|^3 / f."""


class Line(NamedTuple):
    """phi(s x + b) is m (s x + b) + c, up to an error."""

    s: float
    b: float
    m: float
    c: float

    def error(self, activation: activations.Activation, reach: float) -> float:
        """The largest error on [-reach, reach], sampled."""
        x = torch.linspace(-reach, reach, 4001, dtype=torch.float64)
        return float((activation(self.s * x + self.b) - (self.m * (self.s * x + self.b) + self.c)).abs().max())

    def error_fraction(self, activation: activations.Activation, reach: float, tolerance: float) -> float:
        """The error minus rounding, over the allowed error: the tolerance times m s."""
        rounding = 4 * EPS * max(1.0, self.s * reach + abs(self.b))
        return max(0.0, self.error(activation, reach) - rounding) / (tolerance * self.m * self.s)


class SourceConvolutions(NamedTuple):
    """Frozen convolutions (c1, c0, k1) and (c2, c1, k2) along one axis, and the scales that reproduce the target."""

    first: Tensor
    second: Tensor
    gamma1: Tensor
    gamma2: Tensor

    @property
    def q1(self) -> float:
        """The largest absolute value of a feature for inputs in [-1, 1]."""
        return float((self.gamma1.abs() * self.first.abs().sum((1, 2))).max())

    @property
    def q2(self) -> float:
        """The largest factor from feature errors to output errors: sums over features and kernel positions."""
        return float((self.gamma2.abs() * self.second.abs().sum((1, 2))).max())

    @property
    def printed_q2(self) -> float:
        """The same with a maximum over kernel positions, as printed."""
        return float((self.gamma2[:, None] * self.second.abs().sum(1)).abs().max())

    def linear(self, x: Tensor) -> Tensor:
        """The output of the two convolutions without an activation between them."""
        return self.gamma2[:, None] * conv1d(self.gamma1[:, None] * conv1d(x, self.first), self.second)

    def with_activation(
        self, x: Tensor, activation: activations.Activation, line: Line, *, as_printed: bool = False
    ) -> Tensor:
        """The same with an activation between them and both norms corrected."""
        s, b, m, c = line
        hidden = activation(s * self.gamma1[:, None] * conv1d(x, self.first) + b)
        correction = (m * b + c) / (m * s) * torch.ones_like(self.gamma2)
        if not as_printed:
            correction = correction * self.gamma2 * self.second.sum((1, 2))
        return self.gamma2[:, None] / (m * s) * conv1d(hidden, self.second) - correction[:, None]


def _find_line(activation: activations.Activation, reach: float, tolerance: float) -> Line:
    """A linear approximation of the activation on [-reach, reach] whose error over m s is at most the tolerance."""
    window = linearize(activation, -reach, reach, tolerance=tolerance)
    return Line(*(float(value) for value in (window.scale, window.shift, window.slope, window.offset)))


def _random_source(seed: int, kernel: str) -> tuple[SourceConvolutions, Tensor]:
    """Random features solved for a (3, 2, 3) target, with the kernel in the given convolution, and the target."""
    shape = (3, 2, 3)
    features = draw("he_uniform", shape, excess=1.0, seed=seed, kernel=kernel, layer="activations")
    gamma2 = 0.5 + normal(seed, "output scales", 3, 1).abs()
    target = normal(seed, "target", 3, 6).reshape(shape)
    gamma1 = solve_features(features, target / gamma2[:, :, None]).gamma
    return SourceConvolutions(features.first_weight(), features.second_weight(), gamma1, gamma2[:, 0]), target


def _cube(n_points: int, channels: int, positions: int, *, seed: int) -> Tensor:
    """Inputs in [-1, 1]; every second one is a corner of the cube."""
    x = draw("uniform", (n_points, 1), n_features=channels * positions, seed=seed, layer="cube").left()
    x[::2] = x[::2].sign()
    return x.reshape(n_points, channels, positions)


def almost_any_activation_serves(seed: int) -> Evidence:
    eps = 1e-3
    measured: dict[str, float] = {}
    is_assumed, printed_shift = True, 0.0
    for name, activation in ACTIVATIONS.items():
        for kernel in ("first", "second"):
            source, target = _random_source(seed, kernel)
            line = _find_line(activation, source.q1, eps / source.q2)
            is_assumed &= line.error_fraction(activation, source.q1, eps / source.q2) <= 1.0 + 1e-9
            x = _cube(256, 2, 12, seed=seed)
            wanted = conv1d(x, target)
            error = float((source.with_activation(x, activation, line) - wanted).abs().max())
            printed = source.with_activation(x, activation, line, as_printed=True) - wanted
            printed_shift = max(printed_shift, float(printed.abs().max()))
            measured[f"error over eps, {name}, kernel {kernel}"] = error / eps
    worst = max(measured.values())
    # Equal features and positive weights at three positions: all errors add up, and the bound is reached.
    ones = torch.ones(1, 4, 3, dtype=torch.float64)
    source = SourceConvolutions(ones[0, :, :1, None], ones / 12, 2.0 * ones[0, :, 0], ones[0, :1, 0])
    sharp, printed_q2 = (_largest_error(source, "tanh", eps=eps, q2=q2) / eps for q2 in (source.q2, source.printed_q2))
    is_right = is_assumed and worst <= 1.0 + 1e-6 and 0.98 <= sharp <= 1.0 + 1e-6
    return Evidence(
        verdict(is_right, as_printed=printed_shift <= eps and printed_q2 <= 1.0),
        f"3 x 2 x 3 targets, eps = {eps:g}, {len(ACTIVATIONS)} activations, the kernel in either convolution: at most "
        f"{worst:.2f} eps on the cube; {sharp:.3f} eps where all errors add up. The printed correction of beta2 is off "
        f"by {printed_shift:.1e}, the printed Q2 by {printed_q2:.2f} eps with three kernel positions",
        measured
        | {
            "sharp case over eps": sharp,
            "printed Q2 over eps": printed_q2,
            "error of the printed shift": printed_shift,
        },
    )


def _largest_error(source: SourceConvolutions, name: str, *, eps: float, q2: float) -> float:
    """The error on constant inputs with the largest scale s that meets the assumption for this Q2."""
    m, c, _ = CUBIC[name]
    activation = ACTIVATIONS[name]

    def is_too_large(s: float) -> bool:
        return Line(s, 0.0, m, c).error(activation, source.q1) > eps * s * m / q2

    line = Line(smallest_enough(is_too_large) - 2.0**-14, 0.0, m, c)
    x = torch.linspace(-1.0, 1.0, 101, dtype=torch.float64)[:, None, None].expand(-1, source.first.shape[1], 12)
    return float((source.with_activation(x, activation, line) - source.linear(x)).abs().max())


def common_activations_have_the_windows_named(seed: int) -> Evidence:
    ours = printed = library = 0.0
    sizes = itertools.product((0.3, 1.0, 3.0, 10.0), (0.5, 1.0, 20.0), (1e-1, 1e-3, 1e-6))
    for (q1, q2, eps), name in itertools.product(sizes, CUBIC):
        m, c, factor = CUBIC[name]
        fractions = []
        for cubed in (q1**3, 1.0):
            s = min(math.sqrt(factor * m * eps / (q2 * cubed)), 1.0 / q1)
            fractions.append(Line(s, 0.0, m, c).error_fraction(ACTIVATIONS[name], q1, eps / q2))
        line = _find_line(ACTIVATIONS[name], q1, eps / q2)
        ours, printed = max(ours, fractions[0]), max(printed, fractions[1])
        library = max(library, line.error_fraction(ACTIVATIONS[name], q1, eps / q2))
    t = torch.linspace(1e-2, 20.0, 20001, dtype=torch.float64)
    rests = [(ACTIVATIONS[name](t) - m * t - c).abs() * factor / t**3 for name, (m, c, factor) in CUBIC.items()]
    cubic, sharp = max(float(rest.max()) for rest in rests), min(float(rest[0]) for rest in rests)
    pieces = itertools.product(("ReLU", "LeakyReLU"), (0.3, 30.0))
    exact = max(Line(1.0, q1, 1.0, 0.0).error(ACTIVATIONS[name], q1) / q1 for name, q1 in pieces)
    is_right = max(ours, library) <= 1.0 + 1e-9 and cubic <= 1.0 and sharp >= 0.99 and exact <= EPS
    return Evidence(
        verdict(is_right, as_printed=printed <= 1.0),
        "tanh and sigmoid at Q1 = 0.3 to 10, Q2 = 0.5 to 20, eps = 1e-6 to 1e-1: with Q1^3 in the scale the error is "
        f"at most {ours:.4f} of the allowed one, {library:.4f} with the windows of linearize; without it, as printed, "
        f"{printed:.0f} times too large. Constants 1/3 and 1/48: the error is {sharp:.4f} of the cubic bound near 0 "
        f"and {cubic:.4f} at most. The error of ReLU and LeakyReLU is {exact:.1e}",
        {"error over allowed": ours, "printed over allowed": printed, "linearize over allowed": library,
         "error over cubic bound": cubic, "near zero": sharp, "piecewise linear": exact},
    )  # fmt: skip


def layers_within_a_fraction_of_eps_make_a_network_within_eps(seed: int) -> Evidence:
    worst, d = 0.0, 5
    for depth in (2, 4, 6):
        weights = [normal(seed + i, f"{depth}", d, d) for i in range(depth)]
        for eps in (1e-2, 1e-4, 1e-6):
            worst = max(worst, _network_error(weights, eps, seed) / eps)
    sharp = _added_up(seed)
    return Evidence(
        verdict(worst <= 1.0 and abs(sharp - 1.0) <= 1e-9),
        f"tanh networks of 2, 4 and 6 layers of width {d}, two frozen layers with tanh between them for each, layer l "
        "within eps / L over the product of the later layers' norms, eps = 1e-2 to 1e-6: the network's error is at "
        f"most {worst:.1e} eps. Where errors of layers cannot cancel, they add up to {sharp:.9f} of that bound: the "
        "constant, the product of norms, is needed",
        {"error over eps": worst, "sharp case over bound": sharp},
    )


def _network_error(weights: Sequence[Tensor], eps: float, seed: int) -> float:
    """The largest error of a tanh network with layers rebuilt with tanh inside, each within its fraction of eps."""
    d = weights[0].shape[0]
    made = wanted = _cube(256, d, 1, seed=seed)
    for i, weight in enumerate(weights):
        later = math.prod(float(w.abs().sum(1).max()) for w in weights[i + 1 :])
        features = draw("he_uniform", (d, d, 1), excess=1.25, seed=seed, layer=f"layer {i}")
        gamma = solve_features(features, weight[..., None]).gamma
        ones = torch.ones(d, dtype=torch.float64)
        source = SourceConvolutions(features.first_weight(), features.second_weight(), gamma, ones)
        line = _find_line(nn.Tanh(), source.q1, eps / (len(weights) * later * source.q2))
        made = source.with_activation(made, nn.Tanh(), line)
        wanted = weight @ wanted
        if i + 1 < len(weights):  # the target's own activation keeps its inputs in [-1, 1], where the lines hold
            made, wanted = made.tanh(), wanted.tanh()
    return float((made - wanted).abs().max())


def _added_up(seed: int) -> float:
    """Error over bound for ReLU layers of positive weights with equal row sums, each shifted by its own error."""
    d, depth, bound = 5, 6, 0.0
    made = wanted = _cube(8, d, 1, seed=seed).abs()
    for i in range(depth):
        weight = normal(seed, f"positive {i}", d, d).abs()
        norm, error = 0.7 + 0.1 * i, 1e-3 / (i + 1)
        weight = norm * weight / weight.sum(1, keepdim=True)
        made, wanted = (weight @ made + error).relu(), (weight @ wanted).relu()
        bound = norm * bound + error
    return float((made - wanted).abs().max()) / bound
