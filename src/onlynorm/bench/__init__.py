"""Benchmarks: what onlynorm promises, measured beside its competitors and judged by code."""

from onlynorm.bench.goals import Goal, Measured, Table, is_met
from onlynorm.bench.reconstruct import RECIPES, RebuiltRow, ReconstructBench, Sizes, bench_reconstruct
from onlynorm.bench.solve import DENSE, FIRST, LSMR, OURS, PAPERS, TOLERANCE, Bench, Row, bench_solve
from onlynorm.bench.tune import TuneBench, TuneRow, bench_tune

__all__ = [
    "DENSE",
    "FIRST",
    "LSMR",
    "OURS",
    "PAPERS",
    "RECIPES",
    "TOLERANCE",
    "Bench",
    "Goal",
    "Measured",
    "RebuiltRow",
    "ReconstructBench",
    "Row",
    "Sizes",
    "Table",
    "TuneBench",
    "TuneRow",
    "bench_reconstruct",
    "bench_solve",
    "bench_tune",
    "is_met",
]
