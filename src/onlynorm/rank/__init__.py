"""Does the signal survive depth? Measures of its rank, chains that predict them, and the diagnosis of a network."""

from onlynorm.rank.chain import ACTIVATIONS, Chain, walk
from onlynorm.rank.chain_averages import Estimate
from onlynorm.rank.diagnose import diagnose
from onlynorm.rank.diagnosis import Diagnosis
from onlynorm.rank.drift import drift_of_eigenvalues, frobenius_drift
from onlynorm.rank.measures import (
    Cosines,
    as_matrix,
    cosines,
    effective_rank,
    exact_rank,
    rank_ratio,
    regularity,
    second_moments,
    soft_rank,
    top_eigenvalues,
    unit_rows,
    unit_scale,
)
from onlynorm.rank.repair import METHODS, Repaired, repair
from onlynorm.rank.signals import Layer, Signal, read_signal
from onlynorm.rank.simulation import ChainAverages, simulate
from onlynorm.rank.verdict import Thresholds, Verdict, judge

__all__ = [
    "ACTIVATIONS",
    "METHODS",
    "Chain",
    "ChainAverages",
    "Cosines",
    "Diagnosis",
    "Estimate",
    "Layer",
    "Repaired",
    "Signal",
    "Thresholds",
    "Verdict",
    "as_matrix",
    "cosines",
    "diagnose",
    "drift_of_eigenvalues",
    "effective_rank",
    "exact_rank",
    "frobenius_drift",
    "judge",
    "rank_ratio",
    "read_signal",
    "regularity",
    "repair",
    "second_moments",
    "simulate",
    "soft_rank",
    "top_eigenvalues",
    "unit_rows",
    "unit_scale",
    "walk",
]

from onlynorm.rank import checks_chain as _checks_chain  # noqa: F401
from onlynorm.rank import checks_law as _checks_law  # noqa: F401
from onlynorm.rank import checks_spectrum as _checks_spectrum  # noqa: F401
