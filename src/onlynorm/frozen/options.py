"""What may be chosen about the frozen features of a layer, and which choices go together."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from onlynorm.errors import UnknownNameError, ValueRangeError, shown
from onlynorm.features.distributions import STRUCTURED
from onlynorm.features.scaled import as_spectrum
from onlynorm.validate import need_integer, need_number, need_seed, need_text


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """Which frozen features a layer gets: all that fixes them beside the shape of the weight.

    - `features`: a distribution of `onlynorm.draw`; `excess` and `density` as there.
    - `seed`, `layer`: what the numbers are drawn from; equal seeds and different layers are independent.
    - `condition` or `spectrum`: ID cond with singular values of a semi-circle at this condition number, or given ones.
    - `n_blocks`: groups of outputs with features of their own, for random distributions.
    - `shared_column`: the position that id_cond_minimal gives to the second norm.
    """

    features: str = "id_cond"
    excess: float | None = None
    density: float | None = None
    seed: int = 0
    layer: str = ""
    condition: float | None = None
    spectrum: Tensor | None = None
    n_blocks: int = 1
    shared_column: int = 0

    def __post_init__(self) -> None:
        need_text("features", self.features, cure="Take id_cond, ortho_cond or he_normal.")
        checked: dict[str, Any] = {"seed": need_seed(self.seed)}
        if not isinstance(self.layer, str):
            raise ValueRangeError(f"layer needs a text; got {shown(self.layer)}. Leave it out.")
        checked["n_blocks"] = need_integer("n_blocks", self.n_blocks, low=1, cure="Leave it out for one block.")
        checked["shared_column"] = need_integer("shared_column", self.shared_column, low=0, cure="Leave it out.")
        for name, high in (("excess", math.inf), ("density", 1.0), ("condition", math.inf)):
            if (value := getattr(self, name)) is not None:
                checked[name] = need_number(name, value, low=0.0, high=high, open_low=True, cure="Leave it out.")
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.features in STRUCTURED and self.excess is not None:
            why = "square orthogonal factors" if self.features == "ortho_cond" else "one path per weight"
            raise ValueRangeError(
                f"{self.features} needs {why}, which fix the number of features; got excess={self.excess!r}. Leave "
                "excess out, or take a random distribution such as he_normal."
            )
        if self.n_blocks != 1 and self.features in STRUCTURED:
            raise ValueRangeError(
                f"n_blocks needs a random distribution; got {self.n_blocks} blocks of {self.features}, whose weights "
                "are independent already. Leave n_blocks out."
            )
        if self.shared_column != 0 and self.features != "id_cond_minimal":
            raise ValueRangeError(
                f"shared_column needs id_cond_minimal; got {self.shared_column!r} for {self.features}. Leave it out."
            )
        if self.condition is not None and self.spectrum is not None:
            raise ValueRangeError("a layer needs one of condition and spectrum; got both. Leave one out.")
        if self.features != "id_cond" and not (self.condition is None and self.spectrum is None):
            raise ValueRangeError(
                f"a custom spectrum needs id_cond features; got {self.features}, whose spectrum is fixed. Leave "
                "condition and spectrum out, or take id_cond."
            )
        if self.spectrum is not None:  # a copy: what is done to the given one later must not reach the layer
            object.__setattr__(self, "spectrum", as_spectrum(self.spectrum).clone())

    def settings(self) -> dict[str, Any]:
        """The choice in JSON types; a spectrum that was given is only mentioned."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**fields, "spectrum": self.spectrum is not None}


def make_choice(**choices: Any) -> Choice:
    """The choice with these fields; unknown ones are refused by name."""
    known = [f.name for f in dataclasses.fields(Choice)]
    for name in choices:
        if name not in known:
            raise UnknownNameError("option of a norm-only layer", name, known)
    return Choice(**choices)


STORAGES = ("dense", "seed")
