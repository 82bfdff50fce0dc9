"""The rank of signals in deep networks: measures, random chains that predict them, diagnosis and repair.

Read `measures`, then `chains`, `diagnosis`, `trained` and `coverage`, and `repairs`.
"""

from onlynorm.rank.chains.averages import Estimate
from onlynorm.rank.chains.chain import ACTIVATIONS, Chain, walk
from onlynorm.rank.chains.simulate import ChainAverages, ChainState, simulate
from onlynorm.rank.diagnosis.diagnose import MODES, diagnose
from onlynorm.rank.diagnosis.result import Diagnosis
from onlynorm.rank.diagnosis.signals import Layer, Signal, read_signal
from onlynorm.rank.diagnosis.verdict import HealthVerdict, Thresholds, judge
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
from onlynorm.rank.repairs.repair import MAX_RATIO, METHODS, Repaired, repair

__all__ = [
    "ACTIVATIONS",
    "MAX_RATIO",
    "METHODS",
    "MODES",
    "Chain",
    "ChainAverages",
    "ChainState",
    "Cosines",
    "Diagnosis",
    "Estimate",
    "HealthVerdict",
    "Layer",
    "Repaired",
    "Signal",
    "Thresholds",
    "as_matrix",
    "cosines",
    "diagnose",
    "effective_rank",
    "exact_rank",
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
