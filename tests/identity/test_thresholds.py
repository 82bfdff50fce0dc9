"""The order of the points to memorize and the thresholds between them, against slow references."""

from __future__ import annotations

import pytest
import torch
from samples import normals

from onlynorm.identity.memorization.thresholds import by_length, largest_later, lengths_of, separate


def test_by_length_no_later_point_hides_an_earlier_one_and_without_it_many_do() -> None:
    points = normals(300, 6)
    ordered = points[by_length(points)]
    own = ordered.square().sum(1)
    assert bool((largest_later(ordered, ordered) < own).all())
    products = points @ points.mT
    hidden = (products - torch.diag(torch.full((300,), torch.inf).double())).amax(1) >= points.square().sum(1)
    assert int(hidden.sum()) > 100


def test_the_gap_is_at_least_half_the_squared_distance_to_the_nearest_later_point() -> None:
    ordered = normals(200, 8)
    ordered = ordered[by_length(ordered)]
    gaps = ordered.square().sum(1) - largest_later(ordered, ordered)
    for i in range(199):
        nearest = (ordered[i] - ordered[i + 1 :]).square().sum(1).min()
        assert float(gaps[i]) >= float(nearest) / 2.0 * (1.0 - 1e-12)


def test_streamed_maxima_equal_those_of_the_whole_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    points = normals(97, 5)
    whole = (points @ points.mT).masked_fill(torch.ones(97, 97).tril().bool(), -torch.inf).amax(1)
    seen: list[tuple[int, int, str]] = []
    monkeypatch.setattr("onlynorm.identity.memorization.thresholds.CHUNK", 300)
    torch.testing.assert_close(largest_later(points, points, progress=lambda *at: seen.append(at)), whole)
    assert seen[-1][:2] == (97, 97)
    assert len(seen) > 10


def test_a_tilted_direction_leaves_a_gap_of_the_order_of_the_distance() -> None:
    points = normals(50, 20)
    points = torch.cat([points, points[:1] + 1e-9 * normals(1, 20, seed=1)])
    ordered = points[by_length(points)]
    noise = torch.full((51,), 1e-15).double()
    found = separate(ordered, noise=noise, names=torch.arange(51))
    assert found.n_tilted == 1
    lengths = torch.linalg.vector_norm(found.directions, dim=1)
    distance = float((points[50] - points[0]).norm())
    assert float((found.gaps / lengths).min()) >= 0.05 * distance  # the plain direction leaves distance^2, 1e-18
    for i in range(50):
        said = (ordered[i] - ordered[i + 1 :]) @ found.directions[i]
        assert float(said.min()) >= float(found.gaps[i]) * (1.0 - 1e-6)


@pytest.mark.parametrize("size", [1e-200, 1.0, 1e200])
def test_directions_have_length_one_and_gaps_grow_with_the_points(size: float) -> None:
    points = normals(80, 6)
    points = points[by_length(points)]
    plain = separate(points, noise=torch.zeros(80).double(), names=torch.arange(80))
    scaled = separate(size * points, noise=torch.zeros(80).double(), names=torch.arange(80))
    torch.testing.assert_close(torch.linalg.vector_norm(scaled.directions, dim=1), torch.ones(80).double())
    torch.testing.assert_close(scaled.gaps / size, plain.gaps, rtol=1e-9, atol=0)


def test_lengths_neither_overflow_nor_vanish() -> None:
    rows = torch.tensor([[3.0, 4.0], [3e300, 4e300], [3e-300, 4e-300], [0.0, 0.0]], dtype=torch.float64)
    expected = torch.tensor([5.0, 5e300, 5e-300, 0.0], dtype=torch.float64)
    torch.testing.assert_close(lengths_of(rows), expected, rtol=1e-14, atol=0)
