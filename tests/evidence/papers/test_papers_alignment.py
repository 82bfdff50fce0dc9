"""Figure 4 of random_features: its targets and features, and its verdict at quick scale."""

from __future__ import annotations

import pytest
import torch

import onlynorm as on
from onlynorm.alignment import find_directions
from onlynorm.evidence.artifacts import artifacts
from onlynorm.evidence.papers.random_features.alignment import (
    BEST,
    GREEDY,
    PLAIN,
    aligned_low_rank,
    aligned_sparse,
    errors_of,
    low_rank_target,
    some_features,
    sparse_target,
)
from onlynorm.evidence.papers.reproduce import reproduce
from onlynorm.evidence.records import Record, RecordVerdict


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    (made,) = reproduce("random_features:fig-4", scale="quick", out=tmp_path_factory.mktemp("records"))
    return made


def test_quick_scale_meets_every_hard_expectation(record: Record) -> None:
    assert record.verdict is RecordVerdict.CAVEAT, str(record)
    assert all(item.is_met for item in record.checks if not item.is_soft), str(record)


def test_the_figure_has_three_panels_and_the_table_every_cell(record: Record) -> None:
    assert [panel.name for panel in record.panels] == ["left", "middle", "right"]
    assert record.table is not None
    n = len(record.sizes["distributions"])
    low_rank = 2 * n * n
    assert len(record.table.rows) == low_rank + len(record.sizes["sparse_features"]) * len(record.sizes["densities"])


def test_the_paper_scale_is_the_papers_own() -> None:
    one = artifacts()["random_features:fig-4"]
    sizes = one.sizes["paper"]
    assert (sizes["side"], sizes["left"], sizes["middle"]) == (50, [100, 2440], [300, 2400])
    assert len(one.seeds) == 10


@pytest.mark.parametrize("name", ["he_normal", "id_cond", "ortho_cond"])
def test_so_many_features_are_drawn_and_they_are_independent(name: str) -> None:
    left, right = some_features(name, 5, 22, 0)
    assert left.shape == (5, 22)
    matrix = on.solvers.KhatriRao(left.contiguous(), right).materialise()
    assert int(torch.linalg.matrix_rank(matrix)) == 22
    again = some_features(name, 5, 22, 1)
    assert not torch.equal(left, again[0]) or not torch.equal(right, again[1])


def test_targets_are_products_of_their_distribution() -> None:
    target = low_rank_target("he_normal", 8, 3, 0)
    assert int(torch.linalg.matrix_rank(target)) == 3
    assert int((low_rank_target("id_cond", 8, 5, 0) != 0).sum()) == 5


def test_sparse_targets_have_their_density_and_are_never_empty() -> None:
    share = float((sparse_target(0.3, 40, 0) != 0).double().mean())
    assert share == pytest.approx(0.3, abs=4 * (0.21 / 1600) ** 0.5)
    assert int((sparse_target(1e-9, 4, 0) != 0).sum()) == 1


def test_errors_fall_from_one_way_to_the_next() -> None:
    directions = find_directions(*some_features("he_normal", 8, 60, 0))
    errors = errors_of(low_rank_target("he_normal", 8, 20, 0), directions, with_best=True, seed=0)
    assert errors[PLAIN] > errors[GREEDY] >= errors[BEST] > 0


def test_pieces_hold_every_target() -> None:
    low = aligned_low_rank(
        features="er_sign", targets=["he_normal", "id_cond"], side=6, rank=8, n_features=33, seed=0, with_best=False
    )
    assert list(low) == ["he_normal", "id_cond"]
    assert BEST not in low["he_normal"]
    sparse = aligned_sparse(features="id_cond", densities=[0.1, 1.0], side=6, n_features=33, seed=0, with_best=True)
    assert len(sparse) == 2
    assert all(row[PLAIN] >= row[GREEDY] >= row[BEST] for row in sparse)
