"""Near-identity parameterizations: products of layers I + A, their landscape, and networks that memorize a sample.

Read `factorization`, then `landscape`, `memorization` and `allconv`.
"""

from onlynorm.identity.allconv import AllConvolutional, all_convolutional, branch_bounds
from onlynorm.identity.factorization.bounds import least_norm, paper_bound, spiral_bound
from onlynorm.identity.factorization.factorize import factorize
from onlynorm.identity.factorization.factors import Factorization, NearIdentity, load_factors, save_factors
from onlynorm.identity.factorization.matrices import nearest_invertible, random_matrix
from onlynorm.identity.landscape import Descent, Dominance, Landscape
from onlynorm.identity.memorization.by_norms import NormMemorizer, memorize_norms
from onlynorm.identity.memorization.generalization import (
    OffSample,
    activation_distances,
    class_radii,
    measure_off_sample,
)
from onlynorm.identity.memorization.memorize import memorize
from onlynorm.identity.memorization.memorizer import SILENT, Memorizer, MemorizerFacts, load_memorizer, save_memorizer

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
