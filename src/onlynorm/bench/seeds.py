"""Moved."""

from onlynorm.report.spread import LEVEL as LEVEL
from onlynorm.report.spread import Spread as Spread
