"""The objective of a permutation of the target's rows: the missed energy, from precomputed tables.

Row t of the target, placed at output i, has the coordinates

    pieces[i, t, k] = sum over j of basis[i, j, k] * target[t, j]

in the missed directions, so the missed energy of a permutation p is |sum over i of pieces[i, p(i)]|^2. The sum is
inside the square, so rows interact: this is a quadratic assignment problem. In reached directions the same sum is the
reached energy of the target.

Theory: random_features:thm-4.1
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from onlynorm.alignment.directions import Directions, PerOutput
from onlynorm.display import Result
from onlynorm.errors import ShapeError, shown
from onlynorm.memory import memory_limit, need_memory
from onlynorm.validate import as_real, as_tensor, need_instance

Array = npt.NDArray[np.float64]
Order = npt.NDArray[np.int64]
_ORDER = "It is a permutation of the target's rows."
SMALL = 2**26
"""Size of tables in bytes below which free memory is not queried."""


@dataclass(frozen=True, eq=False)
class Objective(Result):
    """The missed energy offset + sign * |sum of pieces[i, p(i)]|^2 as a function of a permutation p.

    `weights` is the missed energy of an average row per output; greedy starts with the largest. `costs` are the costs
    of single pairs if rows do not interact, else None.
    """

    pieces: Array
    weights: Array
    sign: float
    offset: float
    costs: Array | None = None

    @property
    def n_rows(self) -> int:
        """The number of rows."""
        return len(self.pieces)

    def total(self, order: Order) -> Array:
        """The sum of the pieces that a permutation selects."""
        order = self._need_order(order)
        return np.asarray(self.pieces[np.arange(self.n_rows), order].sum(0))

    def missed(self, order: Order) -> float:
        """The missed energy of target[order]."""
        total = self.total(order)
        return max(0.0, self.offset + self.sign * float(total @ total))

    def _need_order(self, order: Order) -> Order:
        """`order` as an array; raises unless it is a permutation."""
        given = as_tensor("order", order, cure=_ORDER)
        is_whole = not given.is_floating_point() and not given.is_complex() and given.dtype != torch.bool
        if not is_whole or given.shape != (self.n_rows,) or sorted(given.tolist()) != list(range(self.n_rows)):
            raise ShapeError(f"order needs each of 0, ..., {self.n_rows - 1} once; got {shown(order)}. {_ORDER}")
        return np.asarray(given.cpu().numpy(), dtype=np.int64)


def objective_for(target: Float[Tensor, "out inp"], directions: Directions | PerOutput) -> Objective:
    """The objective of a target, with tables (rows, rows, directions).

    Examples:
        >>> import numpy as np
        >>> import torch
        >>> import onlynorm as on
        >>> from onlynorm.alignment import find_directions, objective_for
        >>> generator = torch.Generator().manual_seed(0)
        >>> target = torch.randn(6, 8, generator=generator).double()
        >>> features = on.draw("he_normal", (6, 8), n_features=40)
        >>> directions = find_directions(features.left(), features.right())
        >>> objective = objective_for(target, directions)
        >>> objective.missed(np.arange(6)) > 0
        True
    """
    need_instance("objective_for", directions, (Directions, PerOutput), cure="Pass the result of find_directions.")
    target = as_real("target", target, is_finite=True, cure="Pass the target weight of the features.").detach()
    if tuple(target.shape) != directions.shape:
        raise ShapeError(
            f"objective_for needs a target of the shape {directions.shape} of the features; got {tuple(target.shape)}. "
            "Call find_directions with features for this target."
        )
    target = target.to(directions.bases[0] if isinstance(directions, PerOutput) else directions.basis)
    n_rows = len(target)
    n_dims = n_rows if isinstance(directions, PerOutput) else directions.basis.shape[-1]
    n_bytes = 8 * n_rows**2 * n_dims
    if n_bytes > SMALL:
        need_memory(
            f"align with tables of {n_rows} x {n_rows} x {n_dims}",
            n_bytes,
            memory_limit(),
            "Align a part of the outputs at a time.",
        )
    if isinstance(directions, PerOutput):
        costs = directions.costs(target).cpu().numpy()
        # Separate coordinates for every output, so that there are no cross terms.
        pieces = np.zeros((n_rows, n_rows, n_rows))
        pieces[np.arange(n_rows), :, np.arange(n_rows)] = np.sqrt(costs)
        weights = np.array([float(basis.shape[0] - basis.shape[1]) for basis in directions.bases])
        return Objective(pieces, weights, 1.0, 0.0, costs)
    basis = directions.basis
    pieces = torch.matmul(target, basis).cpu().numpy()
    weights = torch.linalg.vector_norm(basis, dim=(1, 2)).square().cpu().numpy()
    if directions.is_reached:
        return Objective(pieces, -weights, -1.0, float(target.square().sum()))
    return Objective(pieces, weights, 1.0, 0.0)
