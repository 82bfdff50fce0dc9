"""Certified ranges: a tensor of intervals goes through any `nn.Module`.

The files read in the order: tensor, linear, elementwise, shapes, propagate.
"""

from onlynorm.intervals import elementwise as elementwise  # registers its rules
from onlynorm.intervals import linear as linear  # registers its rules
from onlynorm.intervals import shapes as shapes  # registers its rules
from onlynorm.intervals.tensor import Box, interval_rule

__all__ = [
    "Box",
    "interval_rule",
]
