"""Small samples to memorize: points and labels."""

from __future__ import annotations

from torch import Tensor

from onlynorm.features import draw


def normals(rows: int, columns: int, *, seed: int = 0) -> Tensor:
    return draw("er_normal", (rows, 1), n_features=columns, density=1.0, seed=seed, layer="test").left().contiguous()


def some_labels(n: int, r: int, *, seed: int = 0) -> Tensor:
    return (normals(n, 1, seed=seed)[:, 0].abs() * 1e6).long() % r
