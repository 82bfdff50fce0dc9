"""Certified ranges: interval arithmetic through any `nn.Module`.

Reading order: tensor, linear, elementwise, shapes, rules, propagate.
"""

from onlynorm.intervals.rules import interval_rule
from onlynorm.intervals.tensor import Box

__all__ = [
    "Box",
    "interval_rule",
]
