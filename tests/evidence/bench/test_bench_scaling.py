"""Cost against the number of weights: one small network goes through everything, and goals that can be missed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from onlynorm.evidence.bench.networks import bottleneck_network
from onlynorm.evidence.bench.races.reconstruct import race
from onlynorm.evidence.bench.scaling import ScalingRow, scaling_row
from onlynorm.evidence.harness import is_met


def test_a_bottleneck_network_goes_through_everything(tmp_path: Path) -> None:
    told: list[str] = []
    row = scaling_row(2, tmp_path, told.append, size=32, n_samples=3)
    weights = [m.weight for m in bottleneck_network(2).modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert row.n_weights == sum(weight.numel() for weight in weights)
    assert len(weights) == 54
    assert row.error <= 1e-3
    assert 2.0 <= row.stored <= 4.0  # narrow layers have almost as many norms and names as weights
    assert told == ["id_cond at width 2: plan, reconstruct, save, load, verify"]
    assert not list(tmp_path.iterdir())
    (table,) = race.result([("scaling", row)]).tables()
    assert table.rows[0][0] == "2"


def test_resnet_50_has_25_million_weights() -> None:
    with torch.device("meta"):
        network = bottleneck_network(64)
    assert sum(p.numel() for p in network.parameters()) == 25_557_032


@pytest.mark.parametrize(
    ("change", "kept"), [({}, True), ({"seconds": 7.0}, False), ({"memory": 700}, False), ({"stored": 2.06}, False)]
)
def test_cost_has_to_grow_with_the_weights_and_no_faster(change: dict[str, float], kept: bool) -> None:
    small = ScalingRow(8, 100, 0.1, 1.0, 0.1, 0.1, 0.1, 100, 2.1, 1e-6)
    large = dataclasses.replace(small, width=16, n_weights=400, seconds=4.0, memory=400, stored=2.04)
    bench = race.result([("scaling", one) for one in (small, dataclasses.replace(large, **change))])
    assert is_met(bench) is kept
    assert not race.result([("scaling", small)]).goals
