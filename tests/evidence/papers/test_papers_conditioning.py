"""Figure 2 of random_features: its three ways on small systems, and its verdicts at quick scale."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import onlynorm as on
from onlynorm.evidence.artifacts import artifacts
from onlynorm.evidence.bench.papers_method import lbfgs
from onlynorm.evidence.papers.random_features.conditioning import (
    OURS,
    PLAIN,
    SCALED,
    SOLVED,
    make_system,
    measured_condition,
    reconstruction_errors,
    relative_error,
)
from onlynorm.evidence.papers.reproduce import reproduce
from onlynorm.evidence.records import RecordVerdict

PANELS = ("a", "b", "c", "d")


@pytest.mark.parametrize("panel", PANELS)
def test_quick_scale_meets_every_hard_expectation(panel: str, tmp_path: Path) -> None:
    (record,) = reproduce(f"random_features:fig-2-{panel}", scale="quick", out=tmp_path)
    assert record.verdict is RecordVerdict.CAVEAT, str(record)
    assert all(item.is_met for item in record.checks if not item.is_soft), str(record)
    assert [p.name for p in record.panels] == ["exact number of features", "+10 features", "+100 features"]
    assert record.table is not None
    assert all(len(row) == len(record.table.columns) for row in record.table.rows)


def test_the_paper_scale_has_every_distribution_and_width() -> None:
    for panel in PANELS:
        sizes = artifacts()[f"random_features:fig-2-{panel}"].sizes["paper"]
        assert sizes["extra"] == [0, 10, 100]
        assert len(sizes["distributions"]) == 5
        assert sizes["sides"][-1] == 50


@pytest.mark.parametrize("name", ["he_normal", "orthogonal", "er_sign", "id_cond", "ortho_cond"])
def test_a_system_has_the_features_it_is_named_for(name: str) -> None:
    left, right, target = make_system(name, 6, 10, 0)
    n_features = 36 if name in ("id_cond", "ortho_cond") else 46
    assert left.shape == (6, n_features)
    assert right.shape == (n_features, 6)
    assert target.shape == (6, 6)
    assert float(target.abs().max()) > 0


def test_the_error_is_that_of_the_materialised_product() -> None:
    left, right, target = make_system("he_normal", 4, 0, 0)
    gamma = torch.ones(16, dtype=torch.float64)
    made = left @ torch.diag(gamma) @ right
    expected = float((made - target).square().mean().sqrt() / target.square().mean().sqrt())
    assert relative_error(left, right, gamma, target) == pytest.approx(expected, rel=1e-12)


def test_lbfgs_solves_a_well_conditioned_system() -> None:
    matrix = torch.linalg.qr(torch.randn(20, 20, generator=torch.Generator().manual_seed(0)))[0]
    wanted = torch.arange(20.0)
    z, _ = lbfgs(matrix.mv, matrix.mT.mv, wanted, torch.zeros(20), max_iterations=20)
    # float32: some roundings of the norm of the right-hand side
    assert float((matrix @ z - wanted).norm() / wanted.norm()) < 1e-5


def test_every_way_starts_from_the_same_system_and_ours_lies_below() -> None:
    errors = reconstruction_errors(
        distribution="he_normal", side=8, n_extra=10, seed=0, methods=[PLAIN, SCALED, SOLVED, OURS], n_iterations=50
    )
    assert set(errors) == {PLAIN, SCALED, SOLVED, OURS}
    assert all(errors[OURS] < errors[way] for way in (PLAIN, SCALED, SOLVED))
    assert errors[SCALED] < errors[PLAIN]


def test_only_the_ways_asked_for_are_run() -> None:
    errors = reconstruction_errors(distribution="id_cond", side=5, n_extra=0, seed=0, methods=[PLAIN], n_iterations=10)
    assert list(errors) == [PLAIN]


def test_the_condition_number_is_that_of_the_matrix() -> None:
    left, right, _ = make_system("he_normal", 6, 4, 1)
    expected = float(torch.linalg.cond(on.solvers.KhatriRao(left, right).materialise()))
    found = measured_condition(distribution="he_normal", side=6, n_extra=4, seed=1)
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_singular_system_has_no_condition_number() -> None:
    # 4 x 4 features of which half of the weights are zero: dead ones are common.
    found = [measured_condition(distribution="er_normal", side=3, n_extra=0, seed=seed) for seed in range(12)]
    assert any(math.isnan(one) for one in found)
