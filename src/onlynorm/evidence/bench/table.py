"""The table of all benchmarks."""

from typing import Any

from onlynorm.evidence.bench.races.align import race as align
from onlynorm.evidence.bench.races.chain import race as chain
from onlynorm.evidence.bench.races.diagnose import race as diagnose
from onlynorm.evidence.bench.races.norm_only import race as layers
from onlynorm.evidence.bench.races.reconstruct import race as reconstruct
from onlynorm.evidence.bench.races.solve import race as solve
from onlynorm.evidence.bench.races.tune import race as tune
from onlynorm.evidence.bench.sweeps.adapt import sweep as adapt
from onlynorm.evidence.bench.sweeps.frozen import sweep as frozen
from onlynorm.evidence.bench.sweeps.predict import sweep as predict
from onlynorm.evidence.bench.sweeps.repair import sweep as repair
from onlynorm.evidence.bench.sweeps.scaled import sweep as scaled
from onlynorm.evidence.bench.sweeps.scratch import sweep as scratch
from onlynorm.evidence.bench.sweeps.text import sweep as text
from onlynorm.evidence.harness import Benchmark

BENCHMARKS: dict[str, Benchmark[Any]] = {
    one.name: one
    for one in (
        solve, reconstruct, tune, adapt, frozen, chain, align, diagnose, layers, predict, repair, scaled,
        scratch, text,
    )
}  # fmt: skip
"""Benchmarks by name, in the order of the help."""
