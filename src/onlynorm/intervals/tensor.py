"""`Interval`: a tensor that represents all tensors between two bounds; `rules` has the torch functions on it.

Enclosures hold for the exact function and for its evaluation in float64, in any order of summation. All bounds are
float64 and rounded outward: the error of a sum of n products is at most n eps times the sum of their absolute values,
and linear maps are widened by four times that, for the sums computed here and in the network. Single operations are
widened by one unit in the last place, other elementwise functions by sixteen. It is assumed that convolutions are
computed from products and sums (no Winograd or Fourier methods), and elementwise functions to a few units in the last
place, as in torch with float64.

Intervals ignore dependencies between entries: every layer widens them by its absolute row sums. An interval may
therefore also have a `Ball`: all its tensors lie within a Euclidean distance of the image of one input. A layer widens
a ball only by its largest singular value, which is much smaller, but the initial ball is larger. Both bounds hold, so
the narrower one is used.

`Stretch` bounds the largest singular value of a linear layer. A convolution with any stride, padding, dilation and
image size is bounded in two ways:

- As a matrix on patches. An entry is in at most k patches (k kernel positions), so |A| <= sqrt(k) |W| with W the weight
  as (out, inp k); the same holds for the transposed map and W as (out k, inp).
- By frequencies. Zero padding, strides and borders only remove rows and columns of the full convolution, whose norm is
  the largest |W(w)| over all frequencies w, with W(w) the (out, inp) matrix sum_t W_t e^(-i w t). A grid of N
  frequencies per dimension may miss the maximum, but u* W(w) v is a trigonometric polynomial of degree n = (k - 1) / 2
  up to a phase, which by a lemma of M. Riesz is at least cos(n d) times its maximum within distance d of it, and no
  frequency is farther than pi / N from the grid. Dividing by cos(pi n / N) per dimension gives a bound.

Eigenvalues and Fourier sums are backward stable, with errors far below `SLACK`, which is added.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional
from torch.overrides import resolve_name

from onlynorm.errors import OnlynormError, ShapeError, ValueRangeError
from onlynorm.validate import as_real

SLACK = 1e-9
"""Relative tolerance for rounding in eigenvalues and Fourier sums."""
N_FREQUENCIES = 16
"""Frequencies per dimension and kernel position beyond the first: half a percent above the maximum."""
LARGEST_WORK = 2e9
"""Maximum number of multiplications for eigenvalues of a matrix, or of all frequencies of a convolution."""


@dataclass(frozen=True)
class Stretch:
    """The linear part of a layer, by its weight (out, inp per group, *kernel)."""

    weight: Float[Tensor, "out inp *kernel"]
    groups: int = 1

    def scaled(self, scale: Float[Tensor, " out"]) -> Stretch:
        """The layer followed by one factor per output, such as a norm in evaluation mode."""
        return Stretch(self.weight * scale.reshape(-1, *(1,) * (self.weight.ndim - 1)), self.groups)

    def bound(self) -> float:
        """An upper bound of |A x| / |x|."""
        return (1.0 + SLACK) * max(_bound(part) for part in self.weight.chunk(self.groups))


def _bound(weight: Tensor) -> float:
    n_kernel = math.prod(weight.shape[2:])
    if n_kernel == 1:
        return _largest(weight.flatten(1))
    flat = weight.flatten(2)
    patches = math.sqrt(n_kernel) * min(_largest(flat.flatten(1)), _largest(flat.mT.flatten(0, 1)))
    sizes = [max(1, N_FREQUENCIES * (k - 1)) for k in weight.shape[2:]]
    if math.prod(sizes) / 2 * min(weight.shape[:2]) ** 3 > LARGEST_WORK:
        return patches
    axes = tuple(range(2, weight.ndim))
    # Frequencies w and -w have conjugate matrices, so half of them are enough.
    spectrum = torch.fft.rfftn(weight, s=sizes, dim=axes).flatten(2).permute(2, 0, 1)
    missed = math.prod(math.cos(math.pi * (k - 1) / 2 / n) for k, n in zip(weight.shape[2:], sizes, strict=True))
    return min(patches, _largest(spectrum) / missed)


def _largest(matrices: Tensor) -> float:
    """The largest singular value of matrices, from their smaller Gram matrices; an upper bound for a huge matrix."""
    if matrices.ndim == 2 and min(matrices.shape) ** 3 > LARGEST_WORK:
        sizes = matrices.abs()
        by_sums = math.sqrt(float(sizes.sum(0).max()) * float(sizes.sum(1).max()))
        return min(by_sums, float(torch.linalg.vector_norm(matrices)))
    if matrices.shape[-2] > matrices.shape[-1]:
        matrices = matrices.mH
    return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(matrices @ matrices.mH)[..., -1].max())))


EPS = torch.finfo(torch.float64).eps


class IntervalError(OnlynormError, RuntimeError):
    """An operation that is not supported on intervals; `propagate` converts it to a ConversionError.

    It is not a ConversionError because that is a TypeError, for which Python tries the reflected operator.
    """


@dataclass(frozen=True)
class Ball:
    """All tensors lie within `radius` of `centre`, in the Euclidean norm over all entries.

    After a linear layer the radius is that of its inputs, `inner`, times the norm of the layer, which is computed
    lazily: a following norm is merged into the layer first, since the norm of their product is smaller.
    """

    centre: Float[Tensor, "*shape"]
    inner: float
    stretch: Stretch | None = None
    extra: float = 0.0

    @functools.cached_property
    def radius(self) -> float:
        """The radius, rounded up."""
        inner = self.inner if self.stretch is None else self.inner * self.stretch.bound()
        return (inner + self.extra) * (1.0 + 4 * EPS)


@dataclass(frozen=True, eq=False)
class Box:
    """Elementwise bounds `low` <= `high`, both finite, of all inputs of a layer, with the shape of one sample.

    `propagate` may add a ball that contains all inputs too. Boxes with equal bounds are equal.

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.models import mlp
        >>> box = on.Box(torch.zeros(8), torch.ones(8))
        >>> model, inputs = mlp((8, 16, 4)).double(), torch.rand(64, 8).double()
        >>> rebuilt = on.reconstruct(model, inputs, ranges=on.Ranges(box=box))
        >>> on.verify(model, rebuilt, torch.rand(1000, 8).double(), box=box).relative_error < 1e-8
        True
    """

    low: Float[Tensor, "*sample"]
    high: Float[Tensor, "*sample"]
    ball: Ball | None = None

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            object.__setattr__(self, name, as_real(f"{name} of a box", getattr(self, name)))
        _need_bounds(self.low, self.high)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Box):
            return NotImplemented
        pairs = ((self.low, other.low), (self.high, other.high))
        return self.ball is other.ball and all(
            a.device == b.device and torch.equal(a.double(), b.double()) for a, b in pairs
        )

    def __hash__(self) -> int:
        return hash((self.low.shape, float(self.low.double().sum()), float(self.high.double().sum())))

    def __repr__(self) -> str:
        entries = "" if not self.low.numel() else f" from {float(self.low.min()):.4g} to {float(self.high.max()):.4g}"
        ball = ", with a ball" * (self.ball is not None)
        return f"Box of shape {tuple(self.low.shape)}{entries}{ball}"


def _need_bounds(low: Tensor, high: Tensor) -> None:
    """Raises unless the bounds are finite and in order, with the same shape on the same device."""
    if low.shape != high.shape:
        raise ShapeError(
            f"a box needs low and high of the same shape; got {tuple(low.shape)} and {tuple(high.shape)}. Pass both "
            "in the shape of one sample."
        )
    if low.device != high.device:
        raise ValueRangeError(
            f"a box needs low and high on one device; got {low.device} and {high.device}. Call low.to(high.device)."
        )
    low, high = low.detach().double(), high.detach().double()
    is_range = (low <= high) & torch.isfinite(high - low)
    if not bool(is_range.all()):
        raise ValueRangeError(
            f"a box needs low <= high, both finite; got {int((~is_range).sum())} invalid of {low.numel()} entries. "
            "Pass the smallest and the largest value of every input."
        )


class Interval(Tensor):
    """A tensor given by bounds; torch functions on it return bounds of their values."""

    low: Tensor
    high: Tensor
    _ball: Ball | None
    _version_of_ball: int

    @staticmethod
    def __new__(cls, low: Tensor, high: Tensor, *, ball: Ball | None = None) -> Interval:
        made: Interval = Tensor._make_wrapper_subclass(cls, low.shape, dtype=torch.float64, device=low.device)
        made.low, made.high, made.ball = low, high, ball
        return made

    @property
    def ball(self) -> Ball | None:
        """A ball that contains all tensors, if known; None after an in-place operation."""
        return self._ball if self.low._version == self._version_of_ball else None

    @ball.setter
    def ball(self, ball: Ball | None) -> None:
        # Views share the version counter of their storage, so a change through any of them invalidates the ball.
        self._ball, self._version_of_ball = ball, self.low._version

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Interval(low={self.low}, high={self.high})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from onlynorm.intervals.rules import RULES  # written in terms of this class

        kwargs = dict(kwargs or {})
        rule = RULES.get(func)
        if rule is None and (func in _METADATA or getattr(func, "__name__", "") == "__get__"):
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if rule is None:
            raise no_rule(func)
        is_in_place = bool(kwargs.pop("inplace", False)) or _is_in_place(func)
        if kwargs.pop("out", None) is not None or (is_in_place and not isinstance(args[0], Interval)):
            raise IntervalError(
                "certified ranges need a network that does not write intervals into other tensors; got "
                f"{name_of(func)}. Write y = f(x) instead, or use calibrated ranges."
            )
        made = rule(*args, **kwargs)
        for one in made if isinstance(made, tuple) else (made,):
            # NaN fails this too.
            if isinstance(one, Interval) and not bool((one.low <= one.high).all()):
                raise ValueRangeError(
                    f"certified ranges need operations that are defined on the whole interval; got {name_of(func)} on "
                    "one where it is undefined or overflows. Shrink the box, or use calibrated ranges."
                )
        if is_in_place and made is not args[0]:
            target = args[0]
            target.low.copy_(made.low)
            target.high.copy_(made.high)
            target.ball = made.ball
            return target
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise no_rule(func)  # operations below the torch function level have no rules


def aliases(*names: str, in_place: bool = True) -> list[Any]:
    """All functions of these names in torch, torch.nn.functional, torch.special and Tensor, optionally in-place."""
    spellings = [f"{name}{end}" for name in names for end in (("", "_") if in_place else ("",))]
    spaces = (torch, functional, Tensor, torch.special)
    return [getattr(space, name) for name in spellings for space in spaces if hasattr(space, name)]


def enclose(low: Tensor, high: Tensor, *, error: Tensor | None = None, ball: Ball | None = None) -> Interval:
    """The interval widened by `error` and by one unit in the last place."""
    if error is not None:
        low, high = low - error, high + error
    infinity = torch.full((), math.inf, dtype=low.dtype, device=low.device)
    return Interval(torch.nextafter(low, -infinity), torch.nextafter(high, infinity), ball=ball)


def ends(value: Any) -> tuple[Tensor, Tensor]:
    """(low, high) of an interval; twice the value of a constant."""
    if isinstance(value, Interval):
        return value.low, value.high
    is_whole = isinstance(value, Tensor) and not value.is_floating_point()
    constant = torch.as_tensor(value, dtype=value.dtype if is_whole else torch.float64).detach()
    return constant, constant


def size(low: Tensor, high: Tensor) -> Tensor:
    """The largest absolute value between the bounds."""
    return torch.maximum(low.abs(), high.abs())


def ball_of(x: Interval) -> Ball:
    """A ball that contains all tensors of the interval: the known one, or that of the box, whichever is smaller."""
    known = x.ball
    centre = x.low / 2 + x.high / 2 if known is None else known.centre
    around = norm(torch.maximum(centre - x.low, x.high - centre))
    return Ball(centre, around if known is None else min(around, known.radius))


def norm(values: Tensor) -> float:
    """The Euclidean norm, rounded up."""
    return float(torch.linalg.vector_norm(values)) * (1.0 + (values.numel() + 8) * EPS)


def name_of(func: Any) -> str:
    """The public name of a torch function."""
    return resolve_name(func) or getattr(func, "__name__", str(func))


def no_rule(func: Any) -> IntervalError:
    """The error for a torch function without a rule."""
    name = name_of(func)
    if func in _DECIDES:
        return IntervalError(
            f"certified ranges need a network without data-dependent control flow; got {name} on an interval, which "
            "may have more than one result. Use calibrated ranges."
        )
    return IntervalError(
        f"certified ranges need a rule for every operation; got {name}, which has none. Use calibrated ranges, "
        f"or register a rule with interval_rule({name})."
    )


def _is_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__") and name != "requires_grad_"


_METADATA = frozenset(
    aliases("size", "dim", "ndimension", "numel", "nelement", "__len__", "is_floating_point", "is_complex",
            "element_size", "is_contiguous", "stride", "get_device", "__hash__", in_place=False)
)  # fmt: skip
_DECIDES = frozenset(
    aliases("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "gt", "lt", "ge", "le", "eq", "ne",
            "argmax", "argmin", "argsort", "equal", "allclose", in_place=False)
)  # fmt: skip
