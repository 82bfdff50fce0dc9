"""Options of `plan` and `reconstruct`: how layers are rebuilt, and for which ranges their norms are set.

The class is the construction: `Wide`, `LowRank`, `Residual`, `Deep` or `Multilayer`.
"""

from __future__ import annotations

import dataclasses
import numbers
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from onlynorm.errors import ValueRangeError, shown
from onlynorm.features.distributions import FACTORED, STRUCTURED
from onlynorm.frozen.options import STORAGES, FrozenOptions
from onlynorm.intervals.tensor import Box
from onlynorm.modules import need_model, unwrap
from onlynorm.modules.activations import Ray, known
from onlynorm.modules.affine import NORM_KINDS
from onlynorm.solvers import need_tolerance
from onlynorm.validate import need_choice, need_instance, need_integer, need_number, need_seed, need_sizes

WIDTHS = ("maximum", "minimum")
KERNELS = ("first", "second")
SKIPS = ("inside", "outside")
PRECISIONS = ("float64", "float32")
DEFAULT_WINDOW = 1e-10


@dataclass(frozen=True, kw_only=True, repr=False)
class Construction(FrozenOptions):
    """How every layer of a network is rebuilt. Base class; use one of the subclasses.

    - `activation`: the module between the frozen layers; None for no activation.
    - `norms`: "batch" for batch norms with the statistics of the calibration batch, "affine" for scales and shifts.

    `features`, `excess` and `density` are options of the frozen features, see `FrozenOptions`. `n_blocks`, `spectrum`
    and `shared_column` are for layers that are trained, and must have their defaults.
    """

    name: ClassVar[str] = ""
    """The name of the construction on the command line."""

    features: str = "he_normal"
    activation: nn.Module | None = None
    norms: str = "batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, default in (("n_blocks", 1), ("spectrum", None), ("shared_column", 0)):
            value = getattr(self, name)
            if isinstance(value, Tensor) or value != default:
                raise ValueRangeError(
                    f"{type(self).__name__} needs the default of {name}, which is for training from scratch; got "
                    f"{shown(value)}. Leave {name} out."
                )
        need_choice("norms", self.norms, NORM_KINDS)
        if self.activation is not None:
            _need_module(self.activation)
            object.__setattr__(self, "activation", unwrap(self.activation))  # without the wrapper of torch.compile

    def changed(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        return _changed(self)

    def as_dict(self) -> dict[str, Any]:
        """The name of the construction and all of its fields, in JSON types."""
        return {"construction": self.name, **{name: to_json(value) for name, value in _fields(self).items()}}

    def __repr__(self) -> str:
        return _call(self)


@dataclass(frozen=True, kw_only=True, repr=False)
class Wide(Construction):
    """Rebuilds each layer from two frozen layers, with a feature per weight of the target. Theory: giannou2023:thm-1

    - `kernel`: which frozen convolution has the kernel, "first" or "second".
    - `width`: "maximum", or "minimum", which also chooses a scale per output and needs out - 1 fewer features.
    - `source_kernel`: kernel size of the frozen convolution, if it is larger than the target's.

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.models import mlp
        >>> plan = on.plan(mlp((8, 16, 4)), torch.rand(64, 8), on.Wide(excess=1.5))
        >>> [layer.costs.n_features for layer in plan.layers]
        [192, 96]
    """

    name: ClassVar[str] = "wide"

    kernel: str = "first"
    width: str = "maximum"
    source_kernel: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        need_choice("kernel", self.kernel, KERNELS)
        need_choice("width", self.width, WIDTHS)
        kernel: object = self.source_kernel
        if isinstance(kernel, numbers.Integral):
            _set(self, "source_kernel", need_integer("source_kernel", kernel, cure="Leave it out."))
        elif kernel is not None:
            _set(self, "source_kernel", need_sizes("source_kernel", kernel, cure="Leave it out."))
        if self.width == "minimum" and self.features in ("id_cond", *FACTORED):
            raise ValueRangeError(
                f"width='minimum' needs random features or id_cond_minimal; got {self.features}, which has a feature "
                "for every weight. Use id_cond_minimal, or leave width out."
            )


@dataclass(frozen=True, kw_only=True, repr=False)
class LowRank(Wide):
    """Rebuilds two factors of each weight, each from two frozen layers. Theory: giannou2023:cor-1

    - `rank`: rank of the factors; by default the smallest rank within `rank_tolerance`.
    - `rank_tolerance`: maximum truncation error of the weight, as a relative Frobenius norm.

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.models import mlp
        >>> plan = on.plan(mlp((8, 16, 4)), torch.rand(64, 8), on.LowRank(rank=2))
        >>> [layer.costs.n_features for layer in plan.layers]
        [60, 50]
    """

    name: ClassVar[str] = "low_rank"

    rank: int | None = None
    rank_tolerance: float = 1e-12

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank is not None:
            _set(self, "rank", need_integer("rank", self.rank, low=1, cure="Leave it out to choose it automatically."))
        tolerance = need_number(
            "rank_tolerance", self.rank_tolerance, low=0.0, high=1.0, open_high=True, cure="Try 1e-12."
        )
        _set(self, "rank_tolerance", tolerance)


@dataclass(frozen=True, kw_only=True, repr=False)
class Residual(Wide):
    """Rebuilds each layer from two frozen layers with a frozen skip connection. Theory: burkholz2024:eq-3

    - `skip`: position of the second norm, "inside" the branch or "outside" the sum.

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.models import mlp
        >>> plan = on.plan(mlp((8, 16, 4)), torch.rand(64, 8), on.Residual(skip="outside"))
        >>> [layer.costs.n_features for layer in plan.layers]
        [160, 80]
    """

    name: ClassVar[str] = "residual"

    skip: str = "inside"

    def __post_init__(self) -> None:
        super().__post_init__()
        need_choice("skip", self.skip, SKIPS)
        if self.skip == "inside":
            return
        if not isinstance(known(self.activation), Ray):
            raise ValueRangeError(
                "skip='outside' needs an activation that is linear on a half-axis (none, ReLU, LeakyReLU, ELU, GELU, "
                f"SiLU, ...); got {self.activation}. Use skip='inside'."
            )
        if self.features == "id_cond_minimal":
            raise ValueRangeError(
                "skip='outside' needs features without a scale per output; got id_cond_minimal. Use id_cond, or "
                "skip='inside'."
            )


@dataclass(frozen=True, kw_only=True, repr=False)
class Deep(Construction):
    """Rebuilds each layer from many narrow frozen layers with skip connections. Theory: giannou2023:thm-2

    - `inputs_per_slice`: number of inputs per frozen layer, the k of the paper. Layers with fewer inputs have one
      slice.

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.models import mlp
        >>> plan = on.plan(mlp((8, 16, 4)), torch.rand(64, 8), on.Deep(inputs_per_slice=4))
        >>> [layer.costs.n_features for layer in plan.layers]
        [160, 80]
    """

    name: ClassVar[str] = "deep"

    inputs_per_slice: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        count = need_integer("inputs_per_slice", self.inputs_per_slice, low=1, cure="Try inputs_per_slice=1.")
        _set(self, "inputs_per_slice", count)
        if self.features in STRUCTURED:
            raise ValueRangeError(
                f"the deep construction needs random features; got {self.features!r}, which is structured. Use "
                "features='orthogonal'."
            )


@dataclass(frozen=True, kw_only=True, repr=False)
class Multilayer(Construction):
    """Rebuilds each layer from several frozen layers in sequence. Theory: burkholz2024:thm-2.5

    - `n_layers`: number of frozen layers.

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.models import mlp
        >>> plan = on.plan(mlp((8, 16, 4)), torch.rand(64, 8), on.Multilayer(n_layers=2))
        >>> [layer.costs.n_features for layer in plan.layers]
        [127, 69]
    """

    name: ClassVar[str] = "multilayer"

    n_layers: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        _set(self, "n_layers", need_integer("n_layers", self.n_layers, low=2, cure="Try 3."))
        if self.features in STRUCTURED:
            raise ValueRangeError(
                f"the multilayer construction needs random features; got {self.features!r}, which is structured. Use "
                "features='orthogonal' or 'he_normal'."
            )


@dataclass(frozen=True, kw_only=True, repr=False)
class Ranges:
    """The input ranges for which norms are set.

    - `window`: maximum error of the linear approximation of the activation, relative to the widest range of a feature.
      By default 1e-10, or a fraction of the `error` of `reconstruct`.
    - `margin`: how far the calibrated range is extended on either side, as a fraction of its width. By default 1 or 2,
      depending on the activation.
    - `precision`: precision of the network for which windows are chosen, "float32" or "float64". By default that of
      the model.
    - `box`: certifies the ranges for every input in the box by interval arithmetic, instead of calibrating them.

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.models import mlp
        >>> model, inputs = mlp((8, 16, 4)), torch.rand(64, 8)
        >>> rebuilt = on.reconstruct(model, inputs, ranges=on.Ranges(margin=4.0))
        >>> far = 2 * inputs  # beyond the calibration batch, within the margin
        >>> torch.allclose(rebuilt.network(far), model(far), atol=1e-3)
        True
    """

    window: float | None = None
    margin: float | None = None
    precision: str | None = None
    box: Box | None = None

    def __post_init__(self) -> None:
        if self.window is not None:
            _set(self, "window", need_number("window", self.window, low=0.0, open_low=True, cure="Try 1e-10."))
        if self.margin is not None:
            _set(self, "margin", need_number("margin", self.margin, low=0.0, cure="0.25 widens by a quarter."))
        if self.precision is not None:
            need_choice("precision", self.precision, PRECISIONS)
        if self.box is not None:
            need_instance("box", self.box, Box, cure="Pass Box(low, high).")

    def as_dict(self) -> dict[str, Any]:
        """All fields in JSON types; the bounds of a box as lists."""
        box = None if self.box is None else {"low": self.box.low.tolist(), "high": self.box.high.tolist()}
        return {**_fields(self), "box": box}

    def __repr__(self) -> str:
        return _call(self)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keywords of `plan` and `reconstruct` for all constructions.

    - `seed`: seed of the frozen weights.
    - `tolerance`: maximum residual of every layer; raises if it is not reached. None aims at 1e-10 and warns.
    - `storage`: "dense" stores the frozen weights, "seed" draws them again in chunks on every forward pass.
    - `ranges`: the input ranges for which norms are set.
    """

    seed: int = 0
    tolerance: float | None = None
    storage: str = "dense"
    ranges: Ranges = dataclasses.field(default_factory=Ranges)

    def __post_init__(self) -> None:
        _set(self, "seed", need_seed(self.seed))
        if self.tolerance is not None:
            _set(self, "tolerance", need_tolerance(self.tolerance))
        need_choice("storage", self.storage, STORAGES)
        need_instance("ranges", self.ranges, Ranges, cure="Pass onlynorm.Ranges(window=1e-10).")

    @property
    def window(self) -> float:
        """The window of the ranges, by default `DEFAULT_WINDOW`."""
        return DEFAULT_WINDOW if self.ranges.window is None else self.ranges.window

    def as_dict(self) -> dict[str, Any]:
        """All fields in JSON types, including those of the ranges."""
        own = {"seed": self.seed, "tolerance": self.tolerance, "storage": self.storage}
        return own | self.ranges.as_dict()


def to_json(value: object) -> object:
    """A field in JSON types; a module as its string."""
    if isinstance(value, tuple):
        return list(value)
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _fields(options: Construction | Ranges) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}


def _changed(options: Construction | Ranges) -> dict[str, Any]:
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    return {name: value for name, value in _fields(options).items() if value is not None and value != defaults[name]}


def _call(options: Construction | Ranges) -> str:
    """The constructor call with the fields that differ from their defaults."""
    return f"{type(options).__name__}({', '.join(f'{name}={value!r}' for name, value in _changed(options).items())})"


def _set(options: Construction | Ranges | Settings, name: str, value: object) -> None:
    object.__setattr__(options, name, value)  # Python numbers, which JSON supports


def _need_module(activation: object) -> None:
    if not isinstance(activation, nn.Module):
        raise ValueRangeError(
            f"activation needs a module; got {shown(activation)}. Pass torch.nn.Tanh() for torch.tanh; wrap other "
            "functions in a module."
        )
    need_model("activation", activation)
