"""`memorize_norms`: a frozen random network whose norms are chosen to fit every point of a sample.

    y(x) = left . norm2( relu( norm1( right . x ) ) )

`right` and `left` are random, frozen and given by a seed. norm1 places the threshold of every feature below the
projection of a training point, a quarter of the way to the next one, so that features separate the sample; every point
has features with a threshold at it. norm2 has one gamma per feature. With the activations Phi (features, points) the
gammas solve

    left diag(gamma) Phi = targets,

with real targets scaled to about one. If the outputs differ in scale by more than `SAME_SCALE`, or are close to the
limits of float64, a third norm scales every output back by its own power of two: gammas are shared by all outputs, so
that the largest output would otherwise cost the others their digits. This is

the Khatri-Rao system of a reconstruction with points instead of inputs: one feature per equation. An alternative is to
rebuild a memorizer layer by layer: `reconstruct(memorize(x, labels), x)` also has norms as its only chosen
parameters, with 2.5 norm parameters per weight. `docs/identity.md` compares the costs.

A file contains the norms, the arguments that determine the frozen weights, and their digest, as sealed safetensors.

Theory: giannou2023:thm-1, hardt_ma2017:thm-3.2
"""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.display import Result
from onlynorm.errors import (
    ConversionError,
    FormatError,
    InsufficientFeaturesError,
    MemoryLimitError,
    OnlynormError,
    ShapeError,
    ToleranceError,
    ValueRangeError,
)
from onlynorm.features import Features, draw
from onlynorm.features.streams import Stream
from onlynorm.frozen.maps import features_from_settings
from onlynorm.frozen.options import PRECISIONS
from onlynorm.identity.memorization.memorizer import in_parts
from onlynorm.identity.memorization.points import CLASS_LIMIT, REAL_LIMIT, Sample, collect, relative_errors
from onlynorm.identity.memorization.thresholds import lengths_of
from onlynorm.memory import memory_limit, need_memory
from onlynorm.modules import Affine
from onlynorm.solvers import Solution, solve
from onlynorm.solvers.operator import times_power
from onlynorm.storage import make_checked, read_tensors, write_tensors
from onlynorm.validate import as_tensor, need_choice, need_flag, need_free_memory, need_instance, need_number

CODES = ("number", "one-hot")
_BELOW = 0.25
"""Distance of a threshold below its point, relative to the distance to the next point below.

With one half, features of opposite directions at neighbouring points would have the same threshold.
"""
ROWS = 1024
SAME_SCALE = 10
"""Largest difference of the binary exponents of outputs that need no third norm: it costs three of 16 digits."""
UNEVEN = 1e3
"""Largest entry over the smallest deviation of an input, and largest over median distance, up to which points are even.

Projections have the rounding errors of their largest entries, which uneven points lose their differences in."""
N_DIRECTIONS = 16
"""Random directions along which close points are looked for."""
COINCIDING = 1e-8
"""Distance relative to the median distance below which two points nearly coincide."""
MIDDLE = 900
"""Largest binary exponent of targets that need no third norm: gammas and sums then fit into float64."""


@dataclass(frozen=True, kw_only=True)
class NormMemorizerFacts(Result):
    """Sizes and accuracy of a `NormMemorizer`; `error` is the largest output error at the points."""

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
            f"{self.n_norm_parameters:,} norm parameters, {self.n_frozen:,} frozen parameters from a seed\n"
            f"largest error {self.error:.1e}, residual {self.residual:.1e} by {self.method}, condition about "
            f"{self.condition:.2g}, {self.seconds:.3g} s"
        )


class NormMemorizer(nn.Module):
    """A frozen random network whose norms, its only parameters, fit a sample.

    With `has_output_norm` a third norm scales the outputs.
    """

    right: Tensor
    left: Tensor

    def __init__(self, features: Features, *, code: str, has_output_norm: bool = False) -> None:
        super().__init__()
        need_flag("has_output_norm", has_output_norm)
        features = need_instance("a norm memorizer", features, Features, cure="Pass the result of draw.")
        need_choice("code", code, (*CODES, "real"))
        self.features, self.code = features, code
        self.norm1 = Affine(features.n_features)
        self.norm2 = Affine(features.n_features)
        self.norm3 = Affine(features.rows) if has_output_norm else None
        # State dicts contain the norms only; the seed determines the rest.
        self.register_buffer("right", features.right(), persistent=False)
        self.register_buffer("left", features.left(), persistent=False)
        self.facts: NormMemorizerFacts | None = None

    def extra_repr(self) -> str:
        """The frozen features, and the number of memorized points if it is known."""
        f = self.features
        points = "" if self.facts is None else f", {self.facts.n_points:,} memorized points"
        return f"{f.name}, {f.n_features:,} features, seed={f.seed}, code={self.code!r}{points}"

    def activations(self, rows: Float[Tensor, "n inputs"]) -> Float[Tensor, "n feat"]:
        """The features before their second norm."""
        hidden: Tensor = functional.relu(self.norm1(rows.to(self.right) @ self.right.mT))
        return hidden

    def forward(self, x: Tensor | np.ndarray) -> Float[Tensor, "n outputs"]:
        """Outputs for samples of any shape and dtype, in the dtype of the network, without autocast."""
        x = as_tensor("a memorizer", x)
        rows = x.flatten(1) if x.ndim > 1 else x.reshape(-1, 1)
        if rows.shape[1] != self.right.shape[1] or not rows.shape[0] or rows.is_complex():
            raise ShapeError(
                f"this memorizer needs samples of {self.right.shape[1]} real numbers, one sample at least; got "
                f"{x.dtype} of shape {tuple(x.shape)}. Put the samples along the first axis."
            )
        with torch.autocast(self.right.device.type, enabled=False):
            outputs = torch.cat([self.norm2(self.activations(part)) @ self.left.mT for part in in_parts(rows, ROWS)])
            return outputs if self.norm3 is None else self.norm3(outputs)

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
    inputs: Shaped[Tensor | np.ndarray, "n ..."],
    labels: Shaped[Tensor | np.ndarray, "n ..."],
    *,
    code: str = "number",
    excess: float = 1.25,
    features: str = "he_normal",
    seed: int = 0,
) -> NormMemorizer:
    """A frozen random network with norms computed such that it fits every point.

    `code="number"` has one output, the class index: one equation per point. `"one-hot"` has one output per class, with
    as many equations per point. Real targets are (n,) or (n, outputs). `excess` is features per equation. The network
    is evaluated at every point before it is returned: an error of a class output above 0.25, or of a real output above
    1e-6 of its largest target, raises.

    Theory: giannou2023:thm-1

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> generator = torch.Generator().manual_seed(0)
        >>> inputs, labels = torch.rand(100, 8, generator=generator), torch.randint(3, (100,), generator=generator)
        >>> network = on.memorize_norms(inputs, labels)
        >>> (network.classify(inputs) == labels).all()
        tensor(True)
    """
    started = time.perf_counter()
    need_choice("code", code, CODES)
    excess = need_number("excess", excess, cure="Try 1.25.")
    if not excess >= 1.0:
        raise InsufficientFeaturesError(
            f"memorize_norms needs a feature per equation, excess >= 1; got {excess}. Try 1.25."
        )
    sample = collect(inputs, labels, n_classes=None, what="memorize_norms")
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
    powers = _powers(targets)
    network = NormMemorizer(
        drawn, code="real" if sample.is_real else code, has_output_norm=powers is not None
    ).to(sample.points.device)  # fmt: skip
    _place_thresholds(network, sample.points, seed)
    with torch.no_grad():
        activations = torch.cat([network.activations(part) for part in sample.points.split(ROWS)])
        _need_finite(network, activations, sample.points)
        if network.norm3 is None or powers is None:
            scaled, size = targets, float(targets.abs().amax()) or 1.0
        else:
            scaled, size = times_power(targets, -powers), 1.0
            network.norm3.weight.copy_(times_power(torch.ones_like(powers, dtype=targets.dtype), powers))
        solution = solve(network.left, activations.mT, scaled.mT / size)
        network.norm2.weight.copy_(solution.gamma * size)
        outputs_now = network(sample.points)
        error = float((outputs_now - targets).abs().amax())
    _need_fit(sample, outputs_now, targets, solution=solution, directions=network.right[:N_DIRECTIONS])
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


def _powers(targets: Float[Tensor, "n outputs"]) -> Int[Tensor, " outputs"] | None:
    """The exponents that scale each output to a largest target in [1, 2); None if no output needs its own scale."""
    largest = targets.abs().amax(0)
    powers = torch.frexp(largest).exponent.long() - 1
    used = powers[largest > 0.0]
    if not len(used):
        return None
    low, high = int(used.min()), int(used.max())
    if high - low <= SAME_SCALE and max(-low, high) <= MIDDLE:
        return None
    return torch.where(largest > 0.0, powers, 0)


def _need_finite(network: NormMemorizer, activations: Tensor, points: Tensor) -> None:
    """Raises unless norm1 and the activations are finite."""
    if all(bool(torch.isfinite(x).all()) for x in (network.norm1.weight, network.norm1.bias, activations)):
        return
    largest = points.abs().amax(1)
    raise ValueRangeError(
        "memorize_norms needs points in the range of float64 after scaling their projections to one; got entries up to "
        f"{float(largest.amax()):.1e}, and {float(largest.median()):.1e} for the median point. Scale the inputs to "
        "about one, and remove outliers."
    )


def _place_thresholds(network: NormMemorizer, points: Tensor, seed: int) -> None:
    """Sets norm1: features with unit deviation, and thresholds a quarter of the way from a point to the next below.

    The feature is then positive at that point. Points are assigned in turn: a random choice would omit some, and two
    points without a threshold in between cannot have different targets. Below the lowest point the distance is one
    deviation.
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
        largest = torch.where(largest > 0.0, largest, 1.0)  # avoids overflow and underflow of squares
        unit = (projected / largest).std(0, correction=0) * largest
        spread[part] = torch.where(unit > 0.0, unit, largest)
        own = projected.gather(0, chosen[part][None])[0]
        below = torch.where(projected < own, projected, -torch.inf).amax(0)
        at[part] = torch.where(torch.isfinite(below), own + _BELOW * (below - own), own - spread[part])
    scale = 1.0 / spread
    with torch.no_grad():
        network.norm1.weight.copy_(scale)
        network.norm1.bias.copy_(-scale * at)


def _need_fit(
    sample: Sample, outputs: Tensor, targets: Tensor, *, solution: Solution, directions: Tensor
) -> None:  # fmt: skip
    """Raises unless every output is close to its target, real ones relative to the largest target of their output."""
    if sample.is_real:
        errors, limit = relative_errors(outputs, targets), REAL_LIMIT
        what = f"every output within {limit:.0e} of its largest target"
    else:
        errors, limit = (outputs - targets).abs().amax(1), CLASS_LIMIT
        what = f"every output within {limit} of its class"
    if bool((errors <= limit).all()):
        return
    worst = int(errors.nan_to_num(torch.inf).argmax())
    raise ToleranceError(
        f"memorize_norms needs {what}; the largest error is {float(errors[worst]):.1e} at point "
        f"{int(sample.places[worst])} (residual {solution.residual:.1e}, condition about {solution.condition:.1e}). "
        f"{_cure(sample.points, sample.places, directions)}"
    )


def _cure(points: Tensor, places: Tensor, directions: Tensor) -> str:
    """What separates the points better: a scale per input, and fewer outliers and near duplicates."""
    cures = []
    spread = points.std(0, correction=0)
    used = spread > 0.0
    if bool(used.any()) and float(points.abs().amax()) > UNEVEN * float(spread[used].amin()):
        cures.append("standardise the inputs (subtract the mean of each, and divide by its deviation)")
        points = torch.where(used, (points - points.mean(0)) / torch.where(used, spread, 1.0), 0.0)
    lengths = lengths_of(points - points.median(0).values)
    usual = float(lengths.median()) or float(lengths.amax()) or 1.0
    far = int(lengths.argmax())
    if float(lengths[far]) > UNEVEN * usual:
        cures.append(
            f"remove outliers: point {int(places[far])} is {float(lengths[far]) / usual:.1e} median distances from the "
            "centre"
        )
    gap, pair = _closest(points, directions)
    if gap < COINCIDING * usual:
        first, second = sorted(int(places[i]) for i in pair)
        cures.append(
            f"remove one of points that nearly coincide: {first} and {second} are {gap / usual:.1e} median distances "
            "apart"
        )
    text = ", and ".join(cures) or "draw more features (a larger excess)"
    return f"{text[:1].upper()}{text[1:]}."


def _closest(points: Tensor, directions: Tensor) -> tuple[float, tuple[int, int]]:
    """The smallest distance of two points and the pair, among neighbours along a few random directions.

    Points that nearly coincide are neighbours along almost every direction.
    """
    best: tuple[float, tuple[int, int]] = (math.inf, (0, 0))
    for projected in (points @ directions.mT).mT:
        order = projected.argsort(stable=True)
        gaps = lengths_of(points[order[1:]] - points[order[:-1]])
        if len(gaps) and float(gaps.amin()) < best[0]:
            at = int(gaps.argmin())
            best = float(gaps[at]), (int(order[at]), int(order[at + 1]))
    return best


KIND = "norm memorizer"
FORMAT = 2
"""Format 2 may have a third norm; files without one are written in format 1, for earlier versions."""
_CURE = "Save it again with onlynorm.save."
_WORDS = ("name", "shape", "n_features", "seed", "layer", "kernel", "density", "shared_column")
"""The arguments that determine the frozen weights."""


def save_norm_memorizer(network: NormMemorizer, path: Path) -> None:
    """Writes norms, seed and digest to a sealed file atomically; frozen weights are not stored."""
    features = network.features
    is_drawn = all(
        torch.equal(held, side().to(held))
        for held, side in ((network.right, features.right), (network.left, features.left))
    )
    if not is_drawn or {p.dtype for p in network.parameters()} != {network.right.dtype}:
        raise ConversionError(
            f"save needs a memorizer with the frozen weights of its seed, in one precision; got others in "
            f"{network.right.dtype}, as after a cast to a lower precision and back. Save it before it is cast."
        )
    document = {
        "features": {name: getattr(features, name) for name in _WORDS}, "weights": features.weights_digest(),
        "code": network.code, "facts": None if network.facts is None else dataclasses.asdict(network.facts),
    }  # fmt: skip
    tensors = {name: tensor.detach().cpu() for name, tensor in network.state_dict().items()}
    written = 1 if network.norm3 is None else FORMAT
    write_tensors(path, tensors, kind=KIND, format=written, document=document)


def load_norm_memorizer(path: Path) -> NormMemorizer:
    """The network of a file written by `save_norm_memorizer`; frozen weights are drawn from the seed and verified."""
    document, tensors = read_tensors(path, kind=KIND, format=FORMAT, cure=_CURE)
    try:
        features = _read_features(document["features"], tensors)
        if (digest := features.weights_digest()) != document["weights"]:
            raise FormatError(
                f"a {KIND} needs frozen weights with the digest {document['weights']!s:.16}; its seed gives "
                f"{digest:.16} here. The file was altered, or the features changed; use the onlynorm that wrote it."
            )
        facts = document["facts"]
        checked = None if facts is None else make_checked(NormMemorizerFacts, facts)
        has_output_norm = "norm3.weight" in tensors
        newest = FORMAT if has_output_norm else 1
        if document["format"] > newest:
            raise FormatError(
                f"a {KIND} with these norms needs format {newest} or older; {path.name} has {document['format']}. "
                "Update onlynorm."
            )
        network = NormMemorizer(features, code=document["code"], has_output_norm=has_output_norm)
        network.to(tensors["norm1.weight"].dtype)
        counts = (features.n_features, sum(p.numel() for p in network.parameters()))
        if checked is not None and (checked.n_features, checked.n_norm_parameters) != counts:
            raise ValueError("metadata of another network")
        for name, held in network.named_parameters():
            held.data = tensors[name]
        network.facts = checked
    except (FormatError, MemoryLimitError):
        raise
    except (LookupError, TypeError, ValueError, RuntimeError, ArithmeticError, OnlynormError) as error:
        raise FormatError(
            f"a {KIND} needs features and metadata that fit its norms; {path.name} has others ({error!s:.200}). {_CURE}"
        ) from error
    return network


def _read_features(settings: dict[str, Any], tensors: dict[str, Tensor]) -> Features:
    """The features of a file; raises ValueError before drawing them if the norms have another size."""
    n_features, shape = settings["n_features"], settings["shape"]
    if not all(type(size) is int and size > 0 for size in (n_features, *shape)) or len(shape) != 2:
        raise ValueError(f"{n_features!r:.40} features for {shape!r:.40}")
    sizes = {"norm1": n_features, "norm2": n_features}
    sizes |= {"norm3": shape[0]} if "norm3.weight" in tensors else {}
    if tensors.keys() != {f"{norm}.{part}" for norm in sizes for part in ("weight", "bias")}:
        raise ValueError(f"the tensors {sorted(tensors)!s:.100}")
    dtype = tensors["norm1.weight"].dtype
    for name, tensor in tensors.items():
        fits = tuple(tensor.shape) == (sizes[name.partition(".")[0]],)
        is_norm = fits and tensor.dtype == dtype and dtype in PRECISIONS.values()
        if not is_norm or not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} of {tensor.dtype} and shape {tuple(tensor.shape)} for {n_features} features")
    need = 8 * max(n_features * sum(shape), shape[0] * shape[1])
    need_memory(f"the {KIND}", need, memory_limit(), "Load it on a larger machine.")
    return features_from_settings(settings)
