"""Constructions: methods of rebuilding a layer, their options, and the mapping from options to functions.

Reading order: options, base, wide, unreached, low_rank, residual, slices, deep, multilayer.
"""

from collections.abc import Mapping
from typing import Any

from onlynorm.errors import ValueRangeError, shown
from onlynorm.reconstruction.constructions import deep, low_rank, multilayer, residual, wide
from onlynorm.reconstruction.constructions.base import Builder
from onlynorm.reconstruction.constructions.options import Construction, Deep, LowRank, Multilayer, Residual, Wide
from onlynorm.validate import need_instance

BUILDERS: Mapping[type[Construction], Builder[Any]] = {
    Wide: Builder(wide.build, wide.estimate),
    LowRank: Builder(low_rank.build, low_rank.estimate),
    Residual: Builder(residual.build, residual.estimate),
    Deep: Builder(deep.build, deep.estimate),
    Multilayer: Builder(multilayer.build, multilayer.estimate),
}


def find_builder(construction: Construction) -> Builder[Any]:
    """The functions of this construction, or of its nearest base class."""
    cure = "Pass onlynorm.Wide(), LowRank(), Residual(), Deep() or Multilayer(), with the options in the parentheses."
    need_instance("construction", construction, Construction, cure=cure)
    for kind in type(construction).__mro__:
        if kind in BUILDERS:
            return BUILDERS[kind]
    raise ValueRangeError(f"construction needs one of the constructions; got {shown(construction)}. {cure}")
