"""Benchmarks: what onlynorm promises, measured beside its competitors and judged by code."""

from onlynorm.bench.adapt import bench_adapt
from onlynorm.bench.adapt_results import AdaptBench, AdaptRun, AdaptSizes
from onlynorm.bench.align import bench_align
from onlynorm.bench.chain import ChainBench, ChainRow, bench_chain
from onlynorm.bench.diagnose import DiagnoseBench, DiagnoseRow, bench_diagnose
from onlynorm.bench.frozen import NETWORKS, bench_frozen
from onlynorm.bench.frozen_results import FrozenBench, FrozenRun, FrozenSizes
from onlynorm.bench.goals import Goal, Measured, Table, is_met
from onlynorm.bench.layers import LayersBench, bench_layers
from onlynorm.bench.predict import PredictSizes, bench_predict
from onlynorm.bench.predict_results import PredictBench, PredictRow
from onlynorm.bench.reconstruct import RECIPES, RebuiltRow, ReconstructBench, Sizes, bench_reconstruct
from onlynorm.bench.repair import bench_repair
from onlynorm.bench.repair_results import RepairBench, RepairRun, RepairSizes
from onlynorm.bench.rivals import LU, OURS, PAPERS
from onlynorm.bench.scaled import bench_scaled
from onlynorm.bench.scaled_results import ScaledBench, ScaledRun, ScaledSizes
from onlynorm.bench.scratch import bench_scratch
from onlynorm.bench.scratch_results import ScratchBench, ScratchRun, ScratchTrial
from onlynorm.bench.solve import FAMILIES, TOLERANCE, Bench, Row, bench_solve
from onlynorm.bench.text import TextBench, TextRow, TextRun, TextSizes, bench_text
from onlynorm.bench.tune import TuneBench, TuneRow, bench_tune

__all__ = [
    "FAMILIES",
    "LU",
    "NETWORKS",
    "OURS",
    "PAPERS",
    "RECIPES",
    "TOLERANCE",
    "AdaptBench",
    "AdaptRun",
    "AdaptSizes",
    "Bench",
    "ChainBench",
    "ChainRow",
    "DiagnoseBench",
    "DiagnoseRow",
    "FrozenBench",
    "FrozenRun",
    "FrozenSizes",
    "Goal",
    "LayersBench",
    "Measured",
    "PredictBench",
    "PredictRow",
    "PredictSizes",
    "RebuiltRow",
    "ReconstructBench",
    "RepairBench",
    "RepairRun",
    "RepairSizes",
    "Row",
    "ScaledBench",
    "ScaledRun",
    "ScaledSizes",
    "ScratchBench",
    "ScratchRun",
    "ScratchTrial",
    "Sizes",
    "Table",
    "TextBench",
    "TextRow",
    "TextRun",
    "TextSizes",
    "TuneBench",
    "TuneRow",
    "bench_adapt",
    "bench_align",
    "bench_chain",
    "bench_diagnose",
    "bench_frozen",
    "bench_layers",
    "bench_predict",
    "bench_reconstruct",
    "bench_repair",
    "bench_scaled",
    "bench_scratch",
    "bench_solve",
    "bench_text",
    "bench_tune",
    "is_met",
]
