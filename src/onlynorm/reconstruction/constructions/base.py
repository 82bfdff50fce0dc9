"""How a layer is to be rebuilt, what comes out, and which constructions there are.

A construction is a name and two functions: one that builds the block for a layer, one that says beforehand what it will
cost. Each file of this room that holds a construction registers it here; `reconstruct` and `plan` look it up.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from torch import nn

from onlynorm.errors import UnknownNameError, ValueRangeError, shown
from onlynorm.frozen.form import Block
from onlynorm.frozen.options import STORAGES
from onlynorm.modules import need_model
from onlynorm.modules.affine import NORM_KINDS
from onlynorm.modules.layers import TargetLayer
from onlynorm.reconstruction.costs import Costs, Load
from onlynorm.reconstruction.ranges import Seen
from onlynorm.validate import need_choice, need_integer, need_number, need_seed, need_sizes, need_text

if TYPE_CHECKING:
    from onlynorm.solvers.operator import Progress

WIDTHS = ("maximum", "minimum")
PRECISIONS = ("float64", "float32")
COMMON = frozenset({"construction", "features", "excess", "density", "seed", "activation", "norms", "storage",
                    "tolerance", "window", "precision", "margin"})  # fmt: skip
"""Fields that every construction understands; the others belong to some of them only."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How every layer of a network is rebuilt. `reconstruct` and `plan` take these fields as keywords.

    - `construction`: "wide" (two frozen layers), or another name of `constructions()`.
    - `features`, `excess`, `density`, `seed`: which frozen weights, and how many per equation.
    - `activation`: what stands between the frozen layers (None: nothing).
    - `norms`: "batch" for real batch norms with the statistics of the calibration batch, "affine" for plain maps.
    - `storage`: "dense" keeps the frozen weights in memory, "seed" makes them again chunk by chunk on every pass.
    - `tolerance`: residual that every layer must reach, else an error; None aims at 1e-10 and reports.
    - `window`: error of the activation's linear piece, relative to the widest range of a feature.
    - `precision`: "float32" or "float64", in which the network will run; windows are chosen for it. None: the target's.
    - `margin`: how much wider than the calibrated range the features may swing, as a share of its width; None: as
      much as the activation gives for next to nothing.
    - `kernel`: which frozen convolution holds the kernel, "first" or "second".
    - `width`: "maximum", or "minimum", which also chooses a scale per output and needs out - 1 fewer features.
    - `source_kernel`: kernel of the frozen convolution where it is larger than the target's.
    - `rank`, `rank_tolerance`: of the low-rank construction; None finds the rank to the tolerance.
    - `n_layers`: frozen layers of the multilayer construction.
    - `narrow`: inputs per slice of the deep construction, the paper's k.
    - `skip`: where the norm of a residual source stands, "inside" the branch or "outside" the sum.
    """

    construction: str = "wide"
    features: str = "he_normal"
    excess: float | None = None
    density: float | None = None
    seed: int = 0
    activation: nn.Module | None = None
    norms: str = "batch"
    storage: str = "dense"
    tolerance: float | None = None
    window: float = 1e-10
    precision: str | None = None
    margin: float | None = None
    kernel: str = "first"
    width: str = "maximum"
    source_kernel: int | tuple[int, ...] | None = None
    rank: int | None = None
    rank_tolerance: float = 1e-12
    n_layers: int = 3
    narrow: int = 1
    skip: str = "inside"

    def __post_init__(self) -> None:
        for what, known in (
            ("norms", NORM_KINDS),
            ("storage", STORAGES),
            ("width", WIDTHS),
            ("kernel", ("first", "second")),
            ("skip", ("inside", "outside")),
            ("construction", _CONSTRUCTIONS),
        ):
            need_choice(what, getattr(self, what), known)
        if self.precision is not None:
            need_choice("precision", self.precision, PRECISIONS)
        need_text("features", self.features, cure="Name a distribution of onlynorm.draw, as 'he_normal'.")
        checked: dict[str, Any] = {
            "seed": need_seed(self.seed),
            "window": need_number("window", self.window, low=0.0, open_low=True, cure="Try 1e-10."),
            "rank_tolerance": need_number("rank_tolerance", self.rank_tolerance, cure="Try 1e-12."),
            "n_layers": need_integer("n_layers", self.n_layers, cure="Try 3."),
            "narrow": need_integer("narrow", self.narrow, cure="Try 1."),
        }
        cure = "Leave it out."
        if self.margin is not None:
            checked["margin"] = need_number("margin", self.margin, low=0.0, cure="0.25 widens by a quarter.")
        for name in ("excess", "density", "tolerance"):
            if getattr(self, name) is not None:
                checked[name] = need_number(name, getattr(self, name), low=0.0, open_low=True, cure=cure)
        if self.rank is not None:
            checked["rank"] = need_integer("rank", self.rank, cure=cure)
        kernel: object = self.source_kernel
        if isinstance(kernel, numbers.Integral):
            checked["source_kernel"] = need_integer("source_kernel", self.source_kernel, cure=cure)
        elif self.source_kernel is not None:
            checked["source_kernel"] = need_sizes("source_kernel", self.source_kernel, cure=cure)
        if self.activation is not None:
            _need_module(self.activation)
        for name, value in checked.items():
            object.__setattr__(self, name, value)  # NumPy numbers as plain ones, which JSON can hold

    def changed(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}


def _need_module(activation: object) -> None:
    if not isinstance(activation, nn.Module):
        raise ValueRangeError(
            f"activation needs a module, which a block can hold; got {shown(activation)}. Pass torch.nn.Tanh() for "
            "torch.tanh; wrap a function of your own in a module."
        )
    need_model("activation", activation)


@dataclass(frozen=True)
class Rebuilt:
    """A layer's block and the evidence for it. `shortfall` is empty unless exactness was missed."""

    block: Block
    method: str
    residual: float
    window_error: float
    seconds: float
    shortfall: str = ""


Build = Callable[[TargetLayer, nn.Module, Seen, Recipe, "Progress | None"], Rebuilt]


@runtime_checkable
class Estimate(Protocol):
    """Says beforehand what a layer will take; without a load, for one position and the samples recommended."""

    def __call__(self, target: TargetLayer, recipe: Recipe, load: Load = ..., /) -> Costs: ...


@dataclass(frozen=True)
class Construction:
    """A way to rebuild a layer; `fields` are the fields of the recipe it reads beside the common ones."""

    name: str
    build: Build
    estimate: Estimate
    fields: frozenset[str] = field(default_factory=frozenset)


_CONSTRUCTIONS: dict[str, Construction] = {}
_Build = TypeVar("_Build", bound=Build)


def construction(name: str, *, estimate: Estimate, fields: tuple[str, ...] = ()) -> Callable[[_Build], _Build]:
    """A decorator that registers a build function under this name."""

    def register(build: _Build) -> _Build:
        _CONSTRUCTIONS[name] = Construction(name, build, estimate, frozenset(fields))
        return build

    return register


def constructions() -> Mapping[str, Construction]:
    """Every construction by name."""
    return dict(_CONSTRUCTIONS)


def make_recipe(**choices: Any) -> tuple[Recipe, Construction]:
    """The recipe with these fields and its construction; fields unknown or of other constructions are refused."""
    names = [f.name for f in dataclasses.fields(Recipe)]
    for name in choices:
        if name not in names:
            raise UnknownNameError("field of a recipe", name, names)
    recipe = Recipe(**choices)
    chosen = _CONSTRUCTIONS[recipe.construction]
    for name in recipe.changed():
        if name not in COMMON | chosen.fields:
            users = ", ".join(sorted(c.name for c in _CONSTRUCTIONS.values() if name in c.fields)) or "no construction"
            raise ValueRangeError(
                f"the {chosen.name} construction needs only its own fields; got {name}={shown(choices[name])}, which "
                f"belongs to {users}. Leave {name} out."
            )
    return recipe, chosen
