"""Structured features: gamma is read off or costs two products, and M is never built.

ID cond has M = I, Ortho cond has M = U2 (x) U1. Both are perfectly conditioned, so there is nothing to iterate; what
remains is rounding. Features that a mask left out cannot be reached by any gamma: the result is then the
projection of the target, and its residual says how much was lost.

Theory: random_features:thm-3.1
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from onlynorm.features.structured import IdCondMinimal, Structure


def solve_closed_form(
    structure: Structure, target: Float[Tensor, "*batch rows cols"]
) -> tuple[Float[Tensor, "*batch feat"], Float[Tensor, "*batch outputs"] | None, float]:
    """Gamma, the output gamma where the structure has one, and the relative residual."""
    found = structure.solve(target)
    if isinstance(structure, IdCondMinimal):
        gamma, output_gamma = found
        made = structure.apply(gamma, output_gamma)
    else:
        gamma, output_gamma = found, None
        made = structure.apply(gamma)
    size = torch.linalg.vector_norm(target)
    residual = torch.linalg.vector_norm(made - target) / size if float(size) > 0.0 else size
    return gamma, output_gamma, float(residual)
