"""What a layer will take, before anything large is computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onlynorm.features import Features
from onlynorm.solvers import choose
from onlynorm.solvers.memory import memory_limit

EPS = 2.0**-52


@dataclass(frozen=True)
class Costs:
    """The price of one rebuilt layer. `error` is the predicted relative error of the effective weight.

    `multiplications` are those of one forward pass at one output position; `memory` is what solving needs beside what
    the process holds, the frozen weights included.
    """

    equations: int
    n_features: int
    n_norm_parameters: int
    n_frozen: int
    memory: int
    condition: float
    error: float
    seconds: float
    multiplications: int
    method: str
    note: str = ""


def pair_costs(features: Features, *, tolerance: float | None = None) -> Costs:
    """The price of the two frozen layers with these features and their two norms."""
    wanted = 1e-10 if tolerance is None else tolerance
    n_frozen = features.n_features * (features.rows + features.cols)
    method, condition, seconds, memory, note = "closed form", 1.0, 1e-9 * features.equations, 8 * n_frozen, ""
    error = EPS * features.equations**0.5
    if not features.is_structured:
        choice = choose(features.rows, features.cols, features.n_features, tolerance=wanted, memory=memory_limit())
        method, condition = choice.method, choice.condition
        seconds, memory = choice.option.seconds, choice.option.memory + 8 * n_frozen
        error = wanted if method == "krylov" else max(EPS * condition, EPS * features.equations**0.5)
    if features.n_features < features.equations and not features.is_structured:
        # The least-squares residual of a generic target: the share of its energy outside the span of the features.
        error = (1.0 - features.n_features / features.equations) ** 0.5
        note = f"{features.equations - features.n_features} features too few: least squares"
    return Costs(
        features.equations, features.n_features, 2 * features.n_features + 2 * features.shape[0], n_frozen, memory,
        condition, error, seconds, n_frozen, method, note,
    )  # fmt: skip


def add_costs(parts: Iterable[Costs]) -> Costs:
    """The price of several parts of one layer: sums, the worst condition and error, the largest memory."""
    listed = list(parts)
    return Costs(
        sum(p.equations for p in listed), sum(p.n_features for p in listed), sum(p.n_norm_parameters for p in listed),
        sum(p.n_frozen for p in listed), max(p.memory for p in listed), max(p.condition for p in listed),
        max(p.error for p in listed), sum(p.seconds for p in listed), sum(p.multiplications for p in listed),
        ", ".join(dict.fromkeys(p.method for p in listed)), "; ".join(dict.fromkeys(p.note for p in listed if p.note)),
    )  # fmt: skip
