"""The interface of constructions: a function that builds the block of a layer, and one that estimates its cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import nn

from onlynorm.frozen.form import FrozenBlock
from onlynorm.modules.layers import TargetLayer
from onlynorm.reconstruction.constructions.options import Construction, Settings
from onlynorm.reconstruction.costs import Costs, Load
from onlynorm.reconstruction.ranges import LayerInputs
from onlynorm.solvers.operator import OnStep

_Options = TypeVar("_Options", bound=Construction)


@dataclass(frozen=True)
class Rebuilt:
    """The block of a layer and its evidence. `shortfall` is empty if the solution is exact."""

    block: FrozenBlock
    method: str
    residual: float
    window_error: float
    seconds: float
    shortfall: str = ""


@dataclass(frozen=True)
class Builder(Generic[_Options]):
    """The two functions of a construction."""

    build: Callable[[TargetLayer, nn.Module, LayerInputs, _Options, Settings, OnStep | None], Rebuilt]
    estimate: Callable[[TargetLayer, _Options, Settings, Load], Costs]
