"""Benchmarks: what onlynorm promises, measured beside its competitors and judged by code."""

from onlynorm.bench.reconstruct import RECIPES, RebuiltRow, ReconstructBench, Sizes, bench_reconstruct
from onlynorm.bench.solve import DENSE, FIRST, LSMR, OURS, PAPERS, TOLERANCE, Bench, Goal, Row, bench_solve
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
    "RebuiltRow",
    "ReconstructBench",
    "Row",
    "Sizes",
    "TuneBench",
    "TuneRow",
    "bench_reconstruct",
    "bench_solve",
    "bench_tune",
]
