"""Bad arguments of benchmarks and of `reproduce` are refused by our own errors, before any work."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onlynorm.errors import ConversionError, OnlynormError, UnknownNameError, ValueRangeError
from onlynorm.evidence.arguments import listener, need_counts, need_names
from onlynorm.evidence.bench.races.align import bench_align
from onlynorm.evidence.bench.races.chain import bench_chain
from onlynorm.evidence.bench.races.diagnose import bench_diagnose
from onlynorm.evidence.bench.races.norm_only import bench_layers
from onlynorm.evidence.bench.races.reconstruct import Sizes, bench_reconstruct
from onlynorm.evidence.bench.races.solve import bench_solve
from onlynorm.evidence.bench.races.tune import bench_tune
from onlynorm.evidence.bench.sweeps import text as text_module
from onlynorm.evidence.bench.sweeps.adapt import AdaptSizes, bench_adapt
from onlynorm.evidence.bench.sweeps.frozen import FrozenSizes, bench_frozen
from onlynorm.evidence.bench.sweeps.predict import PredictSizes, bench_predict
from onlynorm.evidence.bench.sweeps.repair import RepairSizes, bench_repair
from onlynorm.evidence.bench.sweeps.scaled import ScaledSizes, bench_scaled
from onlynorm.evidence.bench.sweeps.scratch import bench_scratch
from onlynorm.evidence.bench.sweeps.text import TextSizes, bench_text
from onlynorm.evidence.papers.reproduce import reproduce

FUNCTIONS: list[Callable[..., Any]] = [
    bench_adapt, bench_align, bench_chain, bench_diagnose, bench_frozen, bench_layers, bench_predict, bench_reconstruct,
    bench_repair, bench_scaled, bench_scratch, bench_solve, bench_text, bench_tune, reproduce,
]  # fmt: skip
NO_COUNT = [0, -1, 1.5, "a", math.nan, [1], object(), True]
NO_NAMES = [1.5, object(), ["nothing"], [None], "nothing", {"a": 1}, b"x"]
NO_FUNCTION = [1, "a", object()]
BAD: dict[str, list[Any]] = {
    "repeats": [*NO_COUNT, None],
    "n_seeds": NO_COUNT,
    "n_trials": [*NO_COUNT, None],
    "epochs": NO_COUNT,
    "severity": [-1, "a", None, math.nan, math.inf, object()],
    "corruptions": [*NO_NAMES, None],
    "features": [*NO_NAMES, None],
    "data": NO_NAMES,
    "laws": NO_NAMES,
    "networks": [1.5, object(), ["nothing"], [None], "nothing", [(1, 2, 3)], [(0, 0)], [("a", "b")]],
    "ids": NO_NAMES,
    "scale": [1.5, None, "a", object()],
    "sizes": [1, "a", object(), {"a": 1}],
    "out": [None, 1, object(), "", b"x"],
    "progress": NO_FUNCTION,
    "on_row": NO_FUNCTION,
    "on_duel": NO_FUNCTION,
    "families": [*NO_NAMES, None],
}
CALLS = [
    (function, name, value)
    for function in FUNCTIONS
    for name in inspect.signature(function).parameters
    for value in BAD.get(name, ())
]


@pytest.mark.parametrize(
    ("function", "name", "value"),
    CALLS,
    ids=[f"{function.__name__}-{name}-{value!r:.20}" for function, name, value in CALLS],
)
def test_a_bad_argument_is_refused_before_any_work(
    function: Callable[..., Any], name: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StartedError(Exception):
        pass

    def start(*_: object, **__: object) -> None:
        raise StartedError

    for module in ("sweeps.adapt", "sweeps.frozen", "races.reconstruct"):
        monkeypatch.setattr(f"onlynorm.evidence.bench.{module}.cifar10", start)
    monkeypatch.setattr("onlynorm.evidence.bench.sweeps.repair.fashion_mnist", start)
    monkeypatch.setattr("onlynorm.evidence.bench.sweeps.scaled.images_of", start)
    monkeypatch.setattr("onlynorm.evidence.bench.sweeps.scratch._Lab", start)
    monkeypatch.setattr("onlynorm.evidence.bench.sweeps.predict.diagnose_network", start)
    monkeypatch.setattr(text_module, "read_reviews", start)
    known = inspect.signature(function).parameters
    usual: dict[str, Any] = {"out": tmp_path, "progress": start, "quick": True}
    with pytest.raises(OnlynormError, match=r"needs|unknown"):
        function(**{key: one for key, one in usual.items() if key in known} | {name: value})
    assert list(tmp_path.iterdir()) == []


def test_every_argument_of_a_benchmark_is_tried() -> None:
    flags = {"quick", "force", "trainings"}
    assert {name for function in FUNCTIONS for name in inspect.signature(function).parameters} <= {*BAD, *flags}


@pytest.mark.parametrize("kind", [AdaptSizes, FrozenSizes, PredictSizes, RepairSizes, ScaledSizes, Sizes, TextSizes])
def test_the_usual_sizes_are_accepted(kind: Any) -> None:
    assert need_counts(kind(), kind) == kind()
    assert need_counts(kind.quick(), kind) == kind.quick()


@pytest.mark.parametrize("changes", [{"n_train": 0}, {"epochs": 1.5}, {"rate": -0.1}, {"weight_decay": math.nan}])
def test_sizes_are_positive_counts_and_rates(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(ValueRangeError, match=f"sizes.{name} needs"):
        need_counts(FrozenSizes(**changes), FrozenSizes)


def test_one_name_is_a_list_of_one() -> None:
    assert need_names("features", "id_cond", ("id_cond", "he_normal")) == ("id_cond",)
    assert need_names("features", iter(["he_normal"]), ("id_cond", "he_normal")) == ("he_normal",)
    with pytest.raises(UnknownNameError, match="id_con"):
        need_names("features", ["id_con"], ("id_cond",))


def test_a_listener_that_is_left_out_hears_nothing() -> None:
    assert listener("progress", None)("a", 1) is None
    with pytest.raises(ConversionError, match="progress needs a function; got 3"):
        listener("progress", 3)
