"""Train only the norms of any model, and keep what was learned as a tiny exact adapter.

The files read in the order of the work: norms, only_norms.
"""

from onlynorm.tuning.norms import NormLayer, Norms, SkippedNorm, find_norms
from onlynorm.tuning.only_norms import NormHandle, init_gamma, only_norms

__all__ = ["NormHandle", "NormLayer", "Norms", "SkippedNorm", "find_norms", "init_gamma", "only_norms"]
