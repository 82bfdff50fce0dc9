"""The figures of daneshmand2020 that need no training: whole artifacts at tiny sizes, and their pieces."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from onlynorm.evidence.artifacts import Artifact, artifacts
from onlynorm.evidence.bench.races.chain import EVERY, GAMMAS, N_LAYERS, WIDTHS, chains_for
from onlynorm.evidence.papers.daneshmand2020.chains import (
    _slope,
    averages_over_depth,
    eigenvalues_over_depth,
    growing_averages,
    rank_over_depth,
)
from onlynorm.evidence.papers.reproduce import reproduce
from onlynorm.evidence.records import Record
from onlynorm.rank import Chain, exact_rank, simulate, walk
from onlynorm.rank.chains.quantities import USUAL

FIGURES = ("fig-1", "fig-2", "fig-3", "fig-4", "fig-9", "fig-10", "fig-11-chain", "table-1")
TINY: dict[str, Any] = {
    "widths": [8, 12, 16],
    "width": 12,
    "n_layers": 64,
    "n_numbers": 64,
    "every": 8,
    "burn_in": 24,
    "n_chains": 2,
    "depths": [0, 4, 40],
    "lengths": [16, 64],
    "gammas": [0.5, math.inf],
}


def shrink(one: Artifact) -> Artifact:
    tiny = {**TINY, "depths": [1, 4, 40], "gammas": [0.5, 1.0]} if one.id.endswith("fig-1") else TINY
    sizes = {scale: {**table, **{k: v for k, v in tiny.items() if k in table}} for scale, table in one.sizes.items()}
    return dataclasses.replace(one, sizes=sizes)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    """All artifacts with their own expectations at tiny sizes."""
    known = artifacts()
    small = [shrink(known[f"daneshmand2020:{figure}"]) for figure in FIGURES]
    made = reproduce(small, out=tmp_path_factory.mktemp("records"))
    return {record.artifact.partition(":")[2]: record for record in made}


@pytest.mark.parametrize("figure", FIGURES)
def test_an_artifact_measures_every_value_its_expectations_name(records: dict[str, Record], figure: str) -> None:
    record = records[figure]
    assert not any("stopped" in reason for reason in record.reasons), str(record)
    assert all(check.ours is not None and math.isfinite(check.ours) for check in record.checks)
    assert {check.name for check in record.checks} == set(record.values)


def test_every_panel_has_its_curves(records: dict[str, Record]) -> None:
    for figure, record in records.items():
        if figure == "table-1":
            assert record.table is not None
            assert [row[:2] for row in record.table.rows] == [
                (norm, F) for norm in ("no norms", "batch norms") for F in ("linear", "tanh")
            ]
            continue
        assert record.panels
        for panel in record.panels:
            drawn = [curve for curve in record.curves if curve.panel == panel.name]
            assert len(drawn) >= 2
            assert len({curve.label for curve in drawn}) == len(drawn)


def test_the_paper_scale_keeps_what_the_paper_states() -> None:
    sizes = {name: artifacts()[f"daneshmand2020:{name}"].sizes["paper"] for name in FIGURES}
    assert sizes["fig-1"]["width"] == 32
    assert sizes["fig-1"]["threshold"] == 1e-9
    assert len(sizes["fig-1"]["gammas"]) == 2
    assert sizes["fig-2"]["n_layers"] == 1_000_000
    assert (sizes["fig-2"]["widths"][0], sizes["fig-2"]["widths"][-1]) == (8, 256)
    assert math.inf in sizes["fig-2"]["gammas"]
    assert sizes["fig-3"]["k"] == 10
    assert sizes["fig-9"]["n_layers"] == sizes["fig-10"]["n_layers"] == 100_000


def test_the_benchmark_predicts_the_time_of_figure_2() -> None:
    sizes = artifacts()["daneshmand2020:fig-2"].sizes["paper"]
    assert (tuple(sizes["widths"]), tuple(sizes["gammas"])) == (WIDTHS, GAMMAS)
    assert (sizes["n_layers"], sizes["every"]) == (N_LAYERS, EVERY)
    assert [max(1, sizes["n_numbers"] // d) for d in WIDTHS] == [chains_for(d) for d in WIDTHS]


# ------------------------------------------------------------------------------- pieces


def test_ranks_over_depth_are_those_of_the_chain() -> None:
    settings: dict[str, Any] = {"width": 6, "gamma": 0.8, "norm": "none", "n_chains": 2, "seed": 1}
    found = rank_over_depth(depths=[1, 100], threshold=1e-9, **settings)
    chain = Chain(6, 0.8, norm="none", n_chains=2, seed=1, dtype="float64")
    expected = [float(exact_rank(H, tolerance=1e-9).double().log().mean()) for _, H in walk(chain, [1, 100])]
    assert found == pytest.approx(expected)
    assert found[0] == pytest.approx(math.log(6))
    assert found[1] < found[0]


def test_averages_grow_out_of_one_run() -> None:
    settings: dict[str, Any] = {"width": 6, "gamma": 0.5, "n_chains": 2, "every": 4, "seed": 0}
    growing = growing_averages(activation="tanh", lengths=[8, 32, 80], **settings)
    for n, row in zip((8, 32, 80), growing, strict=True):
        whole = averages_over_depth(n_layers=n, activation="tanh", quantities=USUAL, **settings)
        assert row["r"]["value"] == pytest.approx(whole["r"]["value"], rel=1e-12)
        assert row["layers"] == whole["layers"] == n
    made = simulate(Chain(6, 0.5, activation="tanh", n_chains=2), 80, every=4)
    assert whole["alpha"]["value"] == pytest.approx(made["alpha"].value, rel=1e-12)


def test_inputs_of_figure_3_are_almost_rank_one() -> None:
    made = eigenvalues_over_depth(width=8, gamma=0.1, spread=0.01, depths=[0], n_chains=3, k=4, seed=0)
    (first,) = made["eigenvalues"]
    assert made["cosine"] > 0.99
    assert 7.9 < first[0] < 8.0
    assert first == sorted(first, reverse=True)
    assert first[1] < 0.01


def test_the_slope_is_an_exponent() -> None:
    widths = torch.tensor([4.0, 8.0, 32.0])
    assert _slope(widths.tolist(), (3 * widths**0.7).tolist()) == pytest.approx(0.7, rel=1e-6)
