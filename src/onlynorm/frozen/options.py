"""Options of the frozen features of a layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onlynorm.display import Result
from onlynorm.errors import ValueRangeError, shown
from onlynorm.features.distributions import ORTHOGONAL, STRUCTURED
from onlynorm.features.scaled import as_spectrum
from onlynorm.validate import is_real_number, need_integer, need_number, need_text

STORAGES = ("dense", "seed")
PRECISIONS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes of tensors in a file."""


def need_precision(name: str, value: object) -> torch.dtype:
    """`value` if it is one of `PRECISIONS`."""
    if isinstance(value, torch.dtype) and value in PRECISIONS.values():
        return value
    known = ", ".join(map(str, PRECISIONS.values()))
    raise ValueRangeError(f"{name} needs one of {known}; got {shown(value)}. Leave it out.")


@dataclass(frozen=True, kw_only=True, eq=False)
class FrozenOptions(Result):
    """Options of the frozen features of a layer.

    - `features`: a distribution of `onlynorm.draw`.
    - `excess`: number of random features per weight; structured features other than kron_normal have a fixed number.
    - `density`: fraction of nonzero entries, or of structured features.
    - `n_blocks`: number of groups of outputs with separate features, for random distributions.
    - `spectrum`: singular values of id_cond features: a condition number, for values that follow the semi-circle law,
      or a tensor with one value per feature.
    - `shared_column`: the position that id_cond_minimal represents by the second norm.
    """

    features: str = "id_cond"
    excess: float | None = None
    density: float | None = None
    n_blocks: int = 1
    spectrum: float | Tensor | None = None
    shared_column: int = 0

    def __post_init__(self) -> None:
        need_text("features", self.features, cure="Take id_cond, ortho_cond or he_normal.")
        checked: dict[str, Any] = {
            "n_blocks": need_integer("n_blocks", self.n_blocks, low=1, cure="Leave it out for one block."),
            "shared_column": need_integer("shared_column", self.shared_column, low=0, cure="Leave it out."),
        }
        for name, high in (("excess", math.inf), ("density", 1.0)):
            if (value := getattr(self, name)) is not None:
                checked[name] = need_number(name, value, low=0.0, high=high, open_low=True, cure="Leave it out.")
        if is_real_number(self.spectrum):
            cure = "Pass a condition number, or a tensor with one value per feature."
            checked["spectrum"] = need_number("spectrum", self.spectrum, low=0.0, open_low=True, cure=cure)
        elif self.spectrum is not None:  # a copy, so that later changes have no effect
            checked["spectrum"] = as_spectrum(self.spectrum).clone()
        for name, value in checked.items():
            object.__setattr__(self, name, value)  # Python numbers, which JSON supports
        if self.features in STRUCTURED and self.features != "kron_normal" and self.excess is not None:
            why = "square orthogonal factors" if self.features in ORTHOGONAL else "one path per weight"
            raise ValueRangeError(
                f"{self.features} needs {why}, which fix the number of features; got excess={self.excess!r}. Leave "
                "excess out, or take a random distribution such as he_normal."
            )
        if self.n_blocks != 1 and self.features in STRUCTURED:
            raise ValueRangeError(
                f"n_blocks needs a random distribution; got {self.n_blocks} blocks of {self.features}. Leave n_blocks "
                "out."
            )
        if self.shared_column != 0 and self.features != "id_cond_minimal":
            raise ValueRangeError(
                f"shared_column needs id_cond_minimal; got {self.shared_column!r} for {self.features:.60}. Leave it "
                "out."
            )
        if self.features != "id_cond" and self.spectrum is not None:
            raise ValueRangeError(
                f"a custom spectrum needs id_cond features; got {self.features:.60}, whose spectrum is fixed. Leave "
                "spectrum out, or take id_cond."
            )
