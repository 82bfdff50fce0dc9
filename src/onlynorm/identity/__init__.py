"""Near-identity parameterizations: factorization into layers I + A, loss landscapes, and memorizing networks.

Reading order: `factorization`, `landscape`, `memorization`, `near_identity`, `allconv`.
"""

from onlynorm.identity.allconv import AllConvolutional, all_convolutional, branch_bounds
from onlynorm.identity.factorization import decompositions, matrices, rotations
from onlynorm.identity.factorization.bounds import least_norm, paper_bound, spiral_bound
from onlynorm.identity.factorization.factorize import factorize
from onlynorm.identity.factorization.factors import Factorization, NearIdentity
from onlynorm.identity.factorization.matrices import nearest_invertible, random_matrix
from onlynorm.identity.landscape import Descent, Dominance, Landscape
from onlynorm.identity.memorization import thresholds
from onlynorm.identity.memorization.by_norms import NormMemorizer, memorize_norms
from onlynorm.identity.memorization.generalization import (
    SIZES,
    OffSample,
    activation_distances,
    class_radii,
    measure_off_sample,
)
from onlynorm.identity.memorization.memorize import PROJECTIONS, memorize
from onlynorm.identity.memorization.memorizer import SILENT, Memorizer, MemorizerFacts
from onlynorm.identity.memorization.points import REAL_LIMIT, relative_errors
from onlynorm.identity.near_identity import near_identity_

__all__ = [
    "PROJECTIONS",
    "REAL_LIMIT",
    "SILENT",
    "SIZES",
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
    "decompositions",
    "factorize",
    "least_norm",
    "matrices",
    "measure_off_sample",
    "memorize",
    "memorize_norms",
    "near_identity_",
    "nearest_invertible",
    "paper_bound",
    "random_matrix",
    "relative_errors",
    "rotations",
    "spiral_bound",
    "thresholds",
]
