"""Rotations as angles in orthogonal planes, so that fractional and integer powers are exact."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from onlynorm.display import Result
from onlynorm.errors import ValueRangeError


@dataclass(frozen=True, eq=False)
class Rotation(Result):
    """The rotation by `angles[k]` in the plane of columns 2k and 2k + 1 of `basis`; other columns are fixed.

    Theory: hardt_ma2017:claim-C.1, hardt_ma2017:claim-A.1
    """

    basis: Float[Tensor, "dim dim"]
    angles: Float[Tensor, " planes"]

    @classmethod
    def of(cls, matrix: Float[Tensor, "dim dim"]) -> Rotation:
        """The planes and angles of an orthogonal matrix of determinant one, by its real Schur form.

        Eigenvalues of -1 come in pairs, each a rotation by pi.
        """
        import scipy.linalg

        blocks, vectors = scipy.linalg.schur(matrix.cpu().numpy(), output="real")
        turning: list[tuple[int, int]] = []
        minus: list[int] = []
        angles: list[float] = []
        n, place = len(blocks), 0
        while place < n:
            if place + 1 < n and blocks[place + 1, place] != 0.0:
                (a, b), (c, d) = blocks[place : place + 2, place : place + 2]
                turning.append((place, place + 1))
                angles.append(math.atan2(c - b, a + d))
                place += 2
            else:
                if blocks[place, place] < 0.0:
                    minus.append(place)
                place += 1
        if len(minus) % 2:
            raise ValueRangeError(
                f"a rotation needs determinant one; got a reflection, with -1 {len(minus)} times among its "
                "eigenvalues. Flip the sign of one row."
            )
        pairs = turning + list(zip(minus[::2], minus[1::2], strict=True))
        first = [column for pair in pairs for column in pair]
        order = first + sorted(set(range(n)) - set(first))
        every = angles + [math.pi] * (len(minus) // 2)
        basis = torch.from_numpy(vectors[:, order].copy()).to(matrix)
        # Errors in orthogonality accumulate in deep products; one Newton step reduces them to rounding.
        basis = basis @ (3.0 * torch.eye(n).to(basis) - basis.mT @ basis) / 2.0
        return cls(basis, torch.tensor(every, dtype=torch.float64).to(matrix))

    @property
    def largest(self) -> float:
        """The largest angle."""
        return float(self.angles.abs().max()) if len(self.angles) else 0.0

    def step_norm(self, count: int) -> float:
        """|G^(1/count) - I|, which is 2 sin(largest angle / (2 count)) and at most pi / count."""
        return 2.0 * math.sin(self.largest / (2 * count))

    def split(self) -> tuple[Rotation, Rotation]:
        """(angles below pi, angles of pi) as two commuting rotations, whose product is the rotation."""
        half = self.angles.abs() == math.pi
        return Rotation(self.basis, self.angles * ~half), Rotation(self.basis, self.angles * half)

    def turn(self, coordinates: Float[Tensor, "dim n"], times: float) -> Float[Tensor, "dim n"]:
        """Rotates columns given in the basis `times` times; returns them in the basis."""
        n = 2 * len(self.angles)
        cos, sin = torch.cos(times * self.angles)[:, None], torch.sin(times * self.angles)[:, None]
        even, odd = coordinates[0:n:2], coordinates[1:n:2]
        turned = coordinates.clone()
        turned[0:n:2], turned[1:n:2] = cos * even - sin * odd, sin * even + cos * odd
        return turned

    def power(self, times: float) -> Float[Tensor, "dim dim"]:
        """The matrix of the rotation to the power `times`, which may be fractional."""
        return self.basis @ self.turn(self.basis.mT, times)
