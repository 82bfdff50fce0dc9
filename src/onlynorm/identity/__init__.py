"""Near-identity parameterizations: products of layers I + A, their landscape, and networks that memorize a sample.

The files read in the order of the work: matrices, rotations, norm_bounds, factors, constructions, padding, factorize,
factor_file, landscape; then points, thresholds, readout, memorizer, memorize, memorizer_file, off_sample,
memorize_norms; then allconv.
"""

from onlynorm.identity.allconv import AllConvolutional, all_convolutional, branch_bounds
from onlynorm.identity.factor_file import load_factors, save_factors
from onlynorm.identity.factorize import factorize
from onlynorm.identity.factors import Factorization, NearIdentity
from onlynorm.identity.landscape import Descent, Dominance, Landscape
from onlynorm.identity.matrices import nearest_invertible, random_matrix
from onlynorm.identity.memorize import memorize
from onlynorm.identity.memorize_norms import NormMemorizer, memorize_norms
from onlynorm.identity.memorizer import SILENT, Memorizer, MemorizerFacts
from onlynorm.identity.memorizer_file import load_memorizer, save_memorizer
from onlynorm.identity.norm_bounds import least_norm, paper_bound, spiral_bound
from onlynorm.identity.off_sample import OffSample, activation_distances, class_radii, measure_off_sample

__all__ = [
    "SILENT",
    "AllConvolutional",
    "Descent",
    "Dominance",
    "Factorization",
    "Landscape",
    "Memorizer",
    "MemorizerFacts",
    "NearIdentity",
    "NormMemorizer",
    "OffSample",
    "activation_distances",
    "all_convolutional",
    "branch_bounds",
    "class_radii",
    "factorize",
    "least_norm",
    "load_factors",
    "load_memorizer",
    "measure_off_sample",
    "memorize",
    "memorize_norms",
    "nearest_invertible",
    "paper_bound",
    "random_matrix",
    "save_factors",
    "save_memorizer",
    "spiral_bound",
]

from onlynorm.identity import (  # noqa: F401, each registers its checks
    checks_factorize,
    checks_landscape,
    checks_memorize,
)
