"""`Factorization`: a matrix as a product of layers I + A near the identity, stored as runs of similar layers.

A file contains the cores and rotations as sealed safetensors, much smaller than all layers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Num, Shaped
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.display import Curve, Figure, Panel, Result, ShownResult, Table, View
from onlynorm.errors import FormatError, ShapeError
from onlynorm.identity.factorization.bounds import paper_bound, spiral_bound
from onlynorm.identity.factorization.matrices import Decomposition
from onlynorm.identity.factorization.rotations import Rotation
from onlynorm.memory import memory_limit, need_memory
from onlynorm.storage import canonical, make_checked, read_tensors, write_tensors
from onlynorm.validate import as_real, as_tensor, need_float_dtype

MAX_REFACTORED = 128
"""Largest size of the factors for which `plot` computes norms at other depths; two seconds at most."""


@dataclass(frozen=True, eq=False)
class LayerRun(Result):
    """`count` layers I + A_j with A_j = G^j core G^-j for a rotation G; equal layers if `rotation` is None.

    All layers of a run have the same spectral norm.
    """

    core: Float[Tensor, "dim dim"]
    count: int
    rotation: Rotation | None = None

    def layers(self) -> Iterator[Float[Tensor, "dim dim"]]:
        """Yields the A_j in order of application."""
        for place in range(self.count):
            yield self.layer(place)

    def layer(self, place: int) -> Float[Tensor, "dim dim"]:
        """A_j for j = place."""
        if self.rotation is None or place == 0:
            return self.core
        turned = self.rotation.power(place)
        return turned @ self.core @ turned.mT

    def product(self) -> Float[Tensor, "dim dim"]:
        """The product of all layers, G^count (G^-1 (I + core))^count, by repeated squaring."""
        whole = self.core + torch.eye(len(self.core), dtype=self.core.dtype, device=self.core.device)
        if self.rotation is None:
            return torch.linalg.matrix_power(whole, self.count)
        return self.rotation.power(self.count) @ torch.linalg.matrix_power(self.rotation.power(-1) @ whole, self.count)

    def apply(self, columns: Float[Tensor, "dim n"]) -> Float[Tensor, "dim n"]:
        """Applies all layers to the columns, in their dtype, without building the layers."""
        core, rotation = self.core.to(columns), self.rotation
        if rotation is None:
            for _ in range(self.count):
                columns = columns + core @ columns
            return columns
        basis = rotation.basis.to(columns)
        rotation = Rotation(basis, rotation.angles.to(columns))
        core = basis.mT @ core @ basis
        inside = basis.mT @ columns
        for place in range(self.count):
            inside = inside + rotation.turn(core @ rotation.turn(inside, -place), place)
        return basis @ inside


@dataclass(frozen=True)
class TriedMethod(Result):
    """A method that was tried: its maximum norm, or why it does not apply."""

    method: str
    max_norm: float = float("nan")
    obstacle: str = ""

    def __str__(self) -> str:
        return f"{self.method}: {self.obstacle}" if self.obstacle else f"{self.method} {self.max_norm:.3g}"


@dataclass(frozen=True, eq=False, repr=False)
class Factorization(ShownResult):
    """A factorization R = (I + A_l) ... (I + A_1) with small |A_i|.

    `max_norm` is the largest spectral norm, `bound` the bound of the paper, `least_norm` a lower bound for this depth.
    `product_error` is the measured relative error, of the product and layer by layer. `stretch` is the largest |log| of
    a singular value of R. With `n_extra` = 1 the layers have one more dimension than R, because its determinant is
    negative; see `usage`. `shape` is that of R; if it is rectangular, R is the upper left part of the product. `bias`,
    that of a Linear, is added after the last layer.
    """

    runs: tuple[LayerRun, ...] = field(repr=False)
    shape: tuple[int, int]
    method: str
    reason: str
    max_norm: float
    bound: float
    least_norm: float
    product_error: float
    stretch: float
    seconds: float
    n_extra: int = 0
    options: tuple[TriedMethod, ...] = ()
    bias: Float[Tensor, " out"] | None = field(default=None, repr=False)

    @property
    def depth(self) -> int:
        """The number of layers."""
        return sum(run.count for run in self.runs)

    @property
    def dim(self) -> int:
        """The size of R without an extra dimension; of a rectangular R, its larger size."""
        return len(self.runs[0].core) - self.n_extra

    @property
    def is_promised(self) -> bool:
        """Whether the depth is large enough for the paper's bound, depth >= 3 * stretch."""
        return self.depth >= 3.0 * self.stretch

    @property
    def usage(self) -> str:
        """How to use the factors of a rectangular R or with an extra dimension; empty if they multiply to R."""
        outputs, inputs = self.shape
        if inputs != outputs:
            n = self.dim - min(inputs, outputs)
            how = f"Append {_zeros(n)} to x" if inputs < outputs else f"Drop the last {_outputs(n)}"
            return (
                f"R is {outputs} x {inputs}, the upper left part of a {self.dim} x {self.dim} matrix, whose factors "
                f"these are. {how}, as apply and to_network do."
            )
        if not self.n_extra:
            return ""
        odd = " In odd dimension, factors of -R with the sign of the output flipped work too." * (self.dim % 2)
        return (
            "det(R) < 0 is impossible for a product of layers near the identity. The factors are those of a matrix "
            "with one more row and column, whose upper left part is R. Append a zero to x and drop the last output, as "
            f"apply and to_network do.{odd}"
        )

    def layers(self) -> Iterator[Float[Tensor, "dim dim"]]:
        """Yields A_1, A_2, ..., A_l in order of application."""
        for run in self.runs:
            yield from run.layers()

    def factors(self) -> Float[Tensor, "depth dim dim"]:
        """All A_i in one tensor, A_1 first; raises if it does not fit into memory."""
        whole = self.dim + self.n_extra
        need_memory(
            f"a tensor of {self.depth} factors", 8 * self.depth * whole**2, memory_limit(),
            "Iterate over layers() instead.",
        )  # fmt: skip
        return torch.stack(list(self.layers()))

    def product(self) -> Float[Tensor, "dim dim"]:
        """(I + A_l) ... (I + A_1), with the extra dimension if there is one; R is its upper left part."""
        made = self.runs[0].product()
        for run in self.runs[1:]:
            made = run.product() @ made
        return made

    def apply(self, x: Shaped[Tensor | np.ndarray, "*batch inp"]) -> Num[Tensor, "*batch out"]:
        """R x (plus the bias, if there is one) for every row of x, layer by layer, on its device, without autocast.

        The result has the dtype of x, float64 for integers. Half precision inputs are computed in float32, since
        rounding after each of many layers would be inaccurate.
        """
        x = as_tensor("apply", x)
        outputs, inputs = self.shape
        if not x.ndim or x.shape[-1] != inputs:
            raise ShapeError(
                f"apply needs inputs (..., {inputs}); got {tuple(x.shape)}. Pass samples as rows, x.mT if they are "
                "columns."
            )
        if x.is_complex():
            return torch.complex(self.apply(x.real), replace(self, bias=None).apply(x.imag))
        given = x.dtype if x.is_floating_point() else torch.float64
        columns = x.reshape(-1, inputs).mT.to(torch.promote_types(given, torch.float32))
        if n_zeros := self.dim + self.n_extra - inputs:
            columns = torch.cat([columns, columns.new_zeros(n_zeros, columns.shape[1])])
        with torch.autocast(x.device.type, enabled=False):
            for run in self.runs:
                columns = run.apply(columns)
        rows = columns[:outputs].mT
        rows = rows if self.bias is None else rows + self.bias.to(rows)
        return rows.reshape(*x.shape[:-1], outputs).to(given)

    def to_network(self, *, dtype: torch.dtype = torch.float64) -> nn.Sequential:
        """A linear residual network with one trainable layer x + A x per factor; the last one also has the bias.

        It takes inputs of R and returns its outputs: zeros are appended before the first layer and outputs dropped
        after the last one if the layers have more dimensions. `dtype` is that of the parameters and inputs.
        """
        dtype = need_float_dtype("dtype of to_network", dtype)
        outputs, inputs = self.shape
        size = self.dim + self.n_extra
        weights = self.factors().to(dtype)
        bias = None if self.bias is None else functional.pad(self.bias.to(weights), (0, size - outputs))
        layers: list[nn.Module] = [NearIdentity(weight) for weight in weights[:-1]]
        layers.append(NearIdentity(weights[-1], bias))
        if size > inputs:
            layers.insert(0, nn.ConstantPad1d((0, size - inputs), 0.0))
        return nn.Sequential(*layers, *([Keep(outputs)] if size > outputs else []))

    def as_dict(self) -> dict[str, Any]:
        """All fields except the factors, for JSON; `shape` only if R is rectangular, and `has_bias` only with one."""
        more: dict[str, Any] = {} if self.shape == (self.dim, self.dim) else {"shape": list(self.shape)}
        more |= {} if self.bias is None else {"has_bias": True}
        return {
            "dim": self.dim, "depth": self.depth, "method": self.method, "reason": self.reason,
            "max_norm": self.max_norm, "bound": self.bound, "is_promised": self.is_promised,
            "least_norm": self.least_norm, "product_error": self.product_error, "stretch": self.stretch,
            "n_extra": self.n_extra, "usage": self.usage, "seconds": self.seconds,
            "runs": [run.count for run in self.runs],
            "options": [{"method": o.method, "max_norm": o.max_norm, "obstacle": o.obstacle} for o in self.options],
            **more,
        }  # fmt: skip

    def plot(self) -> Figure:
        """The largest norm by method, and against the depth with the bounds; above size 128, at this depth only."""
        found = [one for one in self.options if not one.obstacle and math.isfinite(one.max_norm)]
        names = [one.method for one in found]
        curves = []
        if found:
            ends = (0.5, len(found) + 0.5)
            curves = [
                Curve("largest |A|", range(1, len(found) + 1), [one.max_norm for one in found], "bars", "methods"),
                Curve("lower bound", ends, (self.least_norm,) * 2, panel="methods", style="law"),
                Curve("bound of the paper", ends, (self.bound,) * 2, panel="methods", style="law"),
            ]
        depths = sorted({max(1, round(self.depth * 2.0 ** (step / 4))) for step in range(-12, 13)})
        for label, bound in (("bound of the paper", paper_bound), ("bound of spiral", spiral_bound)):
            points = [(depth, bound(self.stretch, depth)) for depth in depths]
            points = [(x, y) for x, y in points if math.isfinite(y) and y < 1e6]
            if points:
                xs, ys = zip(*points, strict=True)
                curves.append(Curve(label, xs, ys, panel="depth", style="law"))
        norms = self._norms_at(depths) if len(self.runs[0].core) <= MAX_REFACTORED else {}
        norms[self.depth] = self.max_norm
        measured = [(depth, norm) for depth, norm in sorted(norms.items()) if 0.0 < norm < math.inf]
        if measured:
            xs, ys = zip(*measured, strict=True)
            curves.append(Curve("largest |A|", xs, ys, "line+points", "depth"))
        return Figure(curves, (
            Panel("methods", f"Methods at depth {self.depth:,}", y_label="largest |A|", x_names=names),
            Panel("depth", "Deeper layers are closer to the identity", "depth", "largest |A|", x_log=True, y_log=True),
        ))  # fmt: skip

    def _norms_at(self, depths: Sequence[int]) -> dict[int, float]:
        """The largest norm of factorizations by the same method at other depths, where it applies."""
        # This module is imported by that of the methods.
        from onlynorm.identity.factorization.decompositions import METHODS, DecomposedMatrix, ObstacleError

        found = Decomposition.of(self.product())
        if not bool(torch.isfinite(found.matrix).all()) or found.is_singular or found.sign < 0:
            return {}
        parts, norms = DecomposedMatrix(found), {}
        for depth in depths:
            with contextlib.suppress(ObstacleError):
                runs = METHODS[self.method](parts, depth)
                norms[depth] = max(float(torch.linalg.matrix_norm(run.core, 2)) for run in runs)
        return norms

    def view(self) -> View:
        """The norms, the error of the product, and the methods that were tried."""
        rows = [(one.method, "–" if one.obstacle else f"{one.max_norm:.4g}", one.obstacle) for one in self.options]
        return View(
            f"A {self.shape[0]} x {self.shape[1]} matrix as {self.depth:,} layers I + A",
            lines=[text for text in (f"{self.reason[:1].upper()}{self.reason[1:]}", self.usage) if text],
            facts={
                "method": self.method, "largest |A|": self.max_norm, "lower bound": self.least_norm,
                "bound of the paper" + ("" if self.is_promised else ", for greater depth"): self.bound,
                "largest |log| of a singular value": self.stretch,
                "relative error of the product": f"{self.product_error:.1e}", "seconds": self.seconds,
            },
            tables={"Methods": Table(("method", "largest |A|", "obstacle"), rows)},
        )  # fmt: skip

    def __str__(self) -> str:
        bias = " and a bias" if self.bias is not None else ""
        size = f"{self.shape[0]} x {self.shape[1]}{bias}" + " with one extra dimension" * self.n_extra
        promise = "bound of the paper" if self.is_promised else "bound of the paper, for larger depth,"
        text = (
            f"{size} as {self.depth} layers I + A by {self.method}: largest |A| {self.max_norm:.4g} ({promise} "
            f"{self.bound:.4g}, lower bound {self.least_norm:.4g}), product error {self.product_error:.1e}, "
            f"{self.seconds:.2g} s\n  {self.reason}"
        )
        return f"{text}\n  {self.usage}" if self.usage else text


def _zeros(n: int) -> str:
    return "a zero" if n == 1 else f"{n} zeros"


def _outputs(n: int) -> str:
    return "output" if n == 1 else f"{n} outputs"


class NearIdentity(nn.Module):
    """A layer x + A x, or x + A x + b with a bias."""

    bias: nn.Parameter | None

    def __init__(
        self, weight: Num[Tensor | np.ndarray, "dim dim"], bias: Num[Tensor | np.ndarray, " dim"] | None = None
    ) -> None:
        super().__init__()
        weight = as_real("a layer x + A x", weight)
        if weight.ndim != 2 or weight.shape[0] != weight.shape[1]:
            raise ShapeError(f"a layer x + A x needs a square A; got {tuple(weight.shape)}. Pass A, not I + A.")
        self.weight = nn.Parameter(weight.detach().clone())
        self.register_parameter("bias", None)
        if bias is not None:
            bias = as_real("bias of a layer x + A x", bias, ndim=1)
            if len(bias) != len(weight):
                raise ShapeError(f"a layer x + A x + b needs a bias ({len(weight)},); got {tuple(bias.shape)}. Pad it.")
            self.bias = nn.Parameter(bias.detach().to(weight, copy=True))

    def forward(self, x: Tensor) -> Tensor:
        """x + A x for every row of x, plus the bias if there is one."""
        made = x + x @ self.weight.mT
        return made if self.bias is None else made + self.bias

    def extra_repr(self) -> str:
        """The size, and whether there is a bias."""
        return f"dim={len(self.weight)}, bias={self.bias is not None}"


class Keep(nn.Module):
    """The first `n` outputs."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def forward(self, x: Tensor) -> Tensor:
        """The first n entries of every row."""
        return x[..., : self.n]

    def extra_repr(self) -> str:
        """The number of outputs."""
        return str(self.n)


KIND = "factorization"
FORMAT = 1
_CURE = "Save it again with onlynorm.save or `onlynorm factorize --out`."
_NUMBERS = ("max_norm", "bound", "least_norm", "product_error", "stretch", "seconds")


def save_factors(factors: Factorization, path: Path) -> None:
    """Writes the factorization to `path` atomically; equal factorizations give equal bytes."""
    tensors: dict[str, Tensor] = {}
    for place, run in enumerate(factors.runs):
        tensors[f"core.{place}"] = run.core.cpu().contiguous()
        if run.rotation is not None:
            tensors[f"basis.{place}"] = run.rotation.basis.cpu().contiguous()
            tensors[f"angles.{place}"] = run.rotation.angles.cpu().contiguous()
    if factors.bias is not None:
        tensors["bias"] = factors.bias.cpu().contiguous()
    write_tensors(path, tensors, kind=KIND, format=FORMAT, document={"factorization": factors.as_dict()})


def load_factors(path: Path) -> Factorization:
    """The factorization in a file written by `save_factors`; raises `FormatError` for other or damaged files."""
    document, tensors = read_tensors(path, kind=KIND, format=FORMAT, cure=_CURE)
    try:
        facts = document["factorization"]
        runs = tuple(_run(tensors, place, count) for place, count in enumerate(facts["runs"]))
        bias = _bias(tensors) if facts.get("has_bias") else None
        if len(tensors) != sum(1 if run.rotation is None else 3 for run in runs) + (bias is not None):
            raise ValueError("unused tensors")
        made = Factorization(
            runs=runs,
            method=facts["method"],
            reason=facts["reason"],
            n_extra=facts["n_extra"],
            shape=_shape(facts, runs),
            bias=bias,
            options=tuple(make_checked(TriedMethod, option) for option in facts["options"]),
            **{name: float(facts[name]) for name in _NUMBERS},
        )
        _need_facts(made, facts)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise FormatError(
            f"a factorization needs matching tensors and metadata; {path.name} has others ({error!s:.200}). {_CURE}"
        ) from error
    return made


def _need_facts(made: Factorization, facts: dict[str, Any]) -> None:
    """Raises ValueError if metadata in the file do not match the factors."""
    if type(made.n_extra) is not int or made.n_extra not in (0, 1) or made.dim < 1:
        raise ValueError(f"{made.n_extra!r:.40} extra dimensions")
    if max(made.shape) != made.dim or (made.n_extra and made.shape[0] != made.shape[1]):
        raise ValueError(f"a {made.shape[0]} x {made.shape[1]} matrix of factors of size {made.dim}")
    if made.bias is not None and len(made.bias) != made.shape[0]:
        raise ValueError(f"a bias of {len(made.bias)} entries for {made.shape[0]} outputs")
    if len({run.core.shape for run in made.runs}) != 1 or not isinstance(made.method + made.reason, str):
        raise ValueError("cores of different sizes")
    known = made.as_dict()
    for name, value in facts.items():
        if canonical(value) != canonical(known.get(name)):
            raise ValueError(f"{name} {value!r:.60} instead of {known.get(name)!r:.60}")
    largest = max(float(torch.linalg.matrix_norm(run.core, 2)) for run in made.runs)
    if not abs(largest - made.max_norm) <= torch.finfo(torch.float64).eps ** 0.5 * (largest + made.max_norm):
        raise ValueError(f"a largest norm of {made.max_norm} for factors of {largest}")


def _shape(facts: dict[str, Any], runs: tuple[LayerRun, ...]) -> tuple[int, int]:
    """The shape of the matrix; facts have it only if it is rectangular."""
    if "shape" not in facts:
        return (len(runs[0].core) - facts["n_extra"],) * 2
    rows, columns = facts["shape"]
    if type(rows) is not int or type(columns) is not int or min(rows, columns) < 1:
        raise ValueError(f"the shape {facts['shape']!r:.40}")
    return rows, columns


def _bias(tensors: dict[str, Tensor]) -> Tensor:
    bias = tensors["bias"]
    if bias.ndim != 1 or bias.dtype != torch.float64 or not bool(bias.isfinite().all()):
        raise ValueError(f"a bias of {bias.dtype} and shape {tuple(bias.shape)}, not of finite numbers in float64")
    return bias


def _run(tensors: dict[str, Tensor], place: int, count: Any) -> LayerRun:
    core = tensors[f"core.{place}"]
    if type(count) is not int or not 1 <= count < 2**53 or core.ndim != 2 or core.shape[0] != core.shape[1]:
        raise ValueError(f"a run of {count!r:.40} layers of shape {tuple(core.shape)}")
    if core.dtype != torch.float64 or not bool(core.isfinite().all()):
        raise ValueError("a run of layers that are not finite and float64")
    if f"basis.{place}" not in tensors:
        return LayerRun(core, count)
    basis, angles = tensors[f"basis.{place}"], tensors[f"angles.{place}"]
    is_finite = bool(basis.isfinite().all() and angles.isfinite().all())
    if basis.shape != core.shape or angles.ndim != 1 or 2 * len(angles) > len(core) or not is_finite:
        raise ValueError("a basis that does not fit its angles")
    if {basis.dtype, angles.dtype} != {torch.float64} or not _is_orthogonal(basis):
        raise ValueError("a basis that is not orthogonal and float64")
    return LayerRun(core, count, Rotation(basis, angles))


def _is_orthogonal(basis: Tensor) -> bool:
    """Whether the columns are orthonormal up to rounding."""
    lacks = basis.mT @ basis - torch.eye(len(basis), dtype=basis.dtype)
    return float(lacks.abs().max()) <= 64 * len(basis) * torch.finfo(basis.dtype).eps
