"""`memorize_norms`: a sample learnt by heart by norms alone, from frozen random weights.

    y(x) = left . norm2( relu( norm1( right . x ) ) )

`right` and `left` are random, frozen and known by their seed. norm1 puts the threshold of every feature just below the
projection of a training point, a quarter of the way to the next one, so that features cut the sample apart instead of
passing it all or nothing; every point has features that begin at it. norm2 holds one gamma per feature. With the
activations Phi (features, points) the gammas solve

    left diag(gamma) Phi = targets,

the Khatri-Rao system of every reconstruction, with points in the place of inputs: one feature per number to remember.
The other way is to rebuild a memorizer layer by layer: `reconstruct(memorize(x, labels), inputs=x)` has norms as its
only chosen numbers too, at 2.5 norm parameters per weight. `docs/identity.md` has both costs.

Theory: giannou2023:thm-1, hardt_ma2017:thm-3.2
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.errors import ConversionError, InsufficientFeaturesError, ShapeError, ToleranceError
from onlynorm.features import Features, draw
from onlynorm.features.streams import Stream
from onlynorm.identity.memorization.points import CLASS_LIMIT, REAL_LIMIT, Sample, collect, relative_errors
from onlynorm.modules import Affine
from onlynorm.solvers import Solution, solve
from onlynorm.validate import as_tensor, need_choice, need_free_memory, need_instance, need_number

CODES = ("number", "one-hot")
_BELOW = 0.25
"""How far below its point a threshold lies, over the distance to the next point below.

At one half, features of opposite directions that begin at neighbours would have one threshold: on a line, one too few.
"""
ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class NormMemorizerFacts:
    """What norms alone took to memorize a sample; `error` is the largest of any output, measured at the points."""

    n_points: int
    n_equations: int
    n_features: int
    n_norm_parameters: int
    n_frozen: int
    error: float
    residual: float
    condition: float
    method: str
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.n_points:,} points, {self.n_equations:,} equations, {self.n_features:,} frozen features\n"
            f"{self.n_norm_parameters:,} norm parameters chosen, {self.n_frozen:,} frozen numbers known by a seed\n"
            f"largest error {self.error:.1e}, residual {self.residual:.1e} by {self.method}, condition about "
            f"{self.condition:.2g}, {self.seconds:.3g} s"
        )


class NormMemorizer(nn.Module):
    """A frozen random network whose norms remember a sample; the norms are its only parameters."""

    right: Tensor
    left: Tensor

    def __init__(self, features: Features, *, code: str) -> None:
        super().__init__()
        features = need_instance("a norm memorizer", features, Features, cure="Pass what draw returns.")
        need_choice("code", code, (*CODES, "real"))
        self.features, self.code = features, code
        self.norm1 = Affine(features.n_features)
        self.norm2 = Affine(features.n_features)
        # A state dict has the norms alone: the seed knows the rest.
        self.register_buffer("right", features.right(), persistent=False)
        self.register_buffer("left", features.left(), persistent=False)
        self.facts: NormMemorizerFacts | None = None

    def activations(self, rows: Float[Tensor, "n inputs"]) -> Float[Tensor, "n feat"]:
        """The features before their second norm."""
        hidden: Tensor = functional.relu(self.norm1(rows.to(self.right) @ self.right.mT))
        return hidden

    def forward(self, x: Tensor | np.ndarray) -> Float[Tensor, "n outputs"]:
        """Outputs for samples of any shape and dtype in the network's own dtype, `ROWS` at a time, without autocast."""
        x = as_tensor("a memorizer", x)
        rows = x.flatten(1) if x.ndim > 1 else x.reshape(-1, 1)
        if rows.shape[1] != self.right.shape[1] or not len(rows) or rows.is_complex():
            raise ShapeError(
                f"this memorizer needs samples of {self.right.shape[1]} real numbers, one sample at least; got "
                f"{x.dtype} of shape {tuple(x.shape)}. Put the samples along the first axis."
            )
        with torch.autocast(self.right.device.type, enabled=False):
            return torch.cat([self.norm2(self.activations(part)) @ self.left.mT for part in rows.split(ROWS)])

    @torch.no_grad()
    def classify(self, x: Tensor | np.ndarray) -> Int[Tensor, " n"]:
        """The nearest class number, or the class with the largest output if the code is one-hot."""
        if self.code == "real":
            raise ConversionError(
                f"classify needs a memorizer of classes; this one has {len(self.left)} real outputs, since its targets "
                "were floating-point numbers. Call the network itself, or memorize labels.long()."
            )
        outputs = self(x)
        return outputs.argmax(1) if self.code == "one-hot" else outputs[:, 0].round().long()


def memorize_norms(
    x: Shaped[Tensor | np.ndarray, "n ..."],
    labels: Shaped[Tensor | np.ndarray, "n ..."],
    *,
    code: str = "number",
    excess: float = 1.25,
    features: str = "he_normal",
    seed: int = 0,
) -> NormMemorizer:
    """A frozen random network with norms chosen so that every point gets its label or its real target.

    `code="number"` has one output, the number of the class: one equation per point. `"one-hot"` has one output per
    class and that many equations per point. Real targets (n,) or (n, outputs) count their own outputs. `excess` is
    features per equation. The network is evaluated at every point before it is returned: an output for a class that is
    off by more than 0.25, or a real one that is off by more than 1e-6 of the largest target of that output, raises.

    Theory: giannou2023:thm-1
    """
    started = time.perf_counter()
    need_choice("code", code, CODES)
    excess = need_number("excess", excess, cure="Try 1.25.")
    if not excess >= 1.0:
        raise InsufficientFeaturesError(
            f"memorize_norms needs a feature for every equation, an excess of 1 or more; got {excess}. Try 1.25."
        )
    sample = collect(x, labels, n_classes=None)
    targets = _as_outputs(sample, code)
    n, outputs = targets.shape
    n_features = max(n * outputs, round(excess * n * outputs))
    size = 16.0 * n_features * (n + outputs + sample.points.shape[1])
    need_free_memory(
        f"a memorizer of {n_features:.3g} features", size, cure="Choose a smaller excess, or fewer points."
    )
    drawn = draw(
        features, (outputs, sample.points.shape[1]), n_features=n_features, seed=seed,
        layer="memorize/norms", device=sample.points.device,
    )  # fmt: skip
    network = NormMemorizer(drawn, code="real" if sample.is_real else code).to(sample.points.device)
    _place_thresholds(network, sample.points, seed)
    with torch.no_grad():
        said = torch.cat([network.activations(part) for part in sample.points.split(ROWS)])
        size = float(targets.abs().amax()) or 1.0
        solution = solve(network.left, said.mT, targets.mT / size)
        network.norm2.weight.copy_(solution.gamma * size)
        outputs_now = network(sample.points)
        error = float((outputs_now - targets).abs().amax())
    _need_right(sample, outputs_now, targets, solution)
    network.facts = NormMemorizerFacts(
        n_points=n, n_equations=n * outputs, n_features=drawn.n_features,
        n_norm_parameters=sum(p.numel() for p in network.parameters()),
        n_frozen=network.right.numel() + network.left.numel(), error=error, residual=solution.residual,
        condition=solution.condition, method=solution.method, seconds=time.perf_counter() - started,
    )  # fmt: skip
    return network


def _as_outputs(sample: Sample, code: str) -> Tensor:
    if sample.is_real:
        return sample.targets
    if code == "number":
        return sample.targets[:, None].double()
    return functional.one_hot(sample.targets, sample.n_outputs).double()


def _place_thresholds(network: NormMemorizer, points: Tensor, seed: int) -> None:
    """Sets norm1: every feature at unit spread, with its threshold a quarter of the way from a point to the next below.

    The feature is then positive at that point. Points take turns: random choices would leave some out, and two points
    that no threshold lies between can have no targets of their own. Where nothing is below, it is one spread away.
    """
    n_features, n = network.features.n_features, len(points)
    order = torch.from_numpy(Stream(seed, "memorize/norms", "thresholds").words(0, n).argsort(kind="stable"))
    chosen = order[torch.arange(n_features) % n].to(points.device)
    spread = network.right.new_zeros(n_features)
    at = network.right.new_zeros(n_features)
    for start in range(0, n_features, ROWS):
        part = slice(start, min(start + ROWS, n_features))
        projected = points @ network.right[part].mT
        largest = projected.abs().amax(0)
        largest = torch.where(largest > 0.0, largest, 1.0)  # squares of what it divides neither overflow nor vanish
        unit = (projected / largest).std(0, correction=0) * largest
        spread[part] = torch.where(unit > 0.0, unit, largest)
        own = projected.gather(0, chosen[part][None])[0]
        below = torch.where(projected < own, projected, -torch.inf).amax(0)
        at[part] = torch.where(torch.isfinite(below), own + _BELOW * (below - own), own - spread[part])
    scale = 1.0 / spread
    with torch.no_grad():
        network.norm1.weight.copy_(scale)
        network.norm1.bias.copy_(-scale * at)


def _need_right(sample: Sample, outputs: Tensor, targets: Tensor, solution: Solution) -> None:
    """Raises unless every output is near its target; NaN is not."""
    if sample.is_real:
        error, limit = float(relative_errors(outputs, targets).amax()), REAL_LIMIT
        what = f"every output within {limit:.0e} of the largest target"
    else:
        error, limit = float((outputs - targets).abs().amax()), CLASS_LIMIT
        what = f"every output within {limit} of its class"
    if error <= limit:
        return
    raise ToleranceError(
        f"memorize_norms needs {what}; the worst is off by {error:.1e} (residual "
        f"{solution.residual:.1e}, condition about {solution.condition:.1e}). Draw more features (a larger excess), or "
        "standardise the inputs."
    )
