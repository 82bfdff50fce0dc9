"""The landscape of linear residual networks: gradient, inequality 2.3, descents, the standard one beside it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onlynorm.errors import ShapeError, TrainingError, ValueRangeError
from onlynorm.evidence.papers.hardt_ma2017.landscape import covariance, critical_point, layers_within
from onlynorm.identity import Landscape, factorize, random_matrix

EPS = torch.finfo(torch.float64).eps


def eye(dim: int) -> Tensor:
    return torch.eye(dim, dtype=torch.float64)


def loop_risk(landscape: Landscape, layers: Tensor) -> float:
    """The slow reference: the product layer by layer, and the square root of the covariance."""
    product = eye(len(landscape.target))
    for layer in layers:
        product = (layer + eye(len(layer)) if landscape.is_residual else layer) @ product
    values, vectors = torch.linalg.eigh(landscape.sigma)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.mT
    return float(((product - landscape.target) @ root).square().sum()) + landscape.noise


@settings(max_examples=20)
@given(depth=st.integers(1, 5), dim=st.integers(1, 4), seed=st.integers(0, 10**6), is_residual=st.booleans())
def test_risk_and_gradient_are_those_of_the_slow_way(depth: int, dim: int, seed: int, is_residual: bool) -> None:
    landscape = Landscape(random_matrix(dim, seed=seed), covariance(dim, seed), noise=1.5, is_residual=is_residual)
    layers = layers_within(0.8, depth=depth, dim=dim, seed=seed)
    assert float(landscape.risk(layers)) == pytest.approx(loop_risk(landscape, layers), rel=1e-11)
    free = layers.clone().requires_grad_()
    (expected,) = torch.autograd.grad(landscape.risk(free), free)
    assert float((landscape.gradient(layers) - expected).norm()) <= 1e4 * EPS * (1.0 + float(expected.norm()))


def test_a_batch_of_points_has_the_risks_of_its_points() -> None:
    landscape = Landscape(random_matrix(3))
    layers = torch.stack([layers_within(0.5, depth=2, dim=3, seed=seed) for seed in range(4)]).reshape(2, 2, 2, 3, 3)
    risks = landscape.risk(layers)
    assert risks.shape == (2, 2)
    assert float(risks[1, 0]) == pytest.approx(float(landscape.risk(layers[1, 0])), rel=1e-14)


@settings(max_examples=20)
@given(depth=st.integers(1, 5), tau=st.floats(0.0, 0.95), seed=st.integers(0, 10**6), scale=st.floats(0.1, 10.0))
def test_the_gradient_dominates_the_risk_near_the_identity(depth: int, tau: float, seed: int, scale: float) -> None:
    landscape = Landscape(random_matrix(3, seed=seed), scale * covariance(3, seed), noise=3.0)
    seen = landscape.dominance(layers_within(tau, depth=depth, dim=3, seed=seed))
    assert seen.tau == pytest.approx(tau, abs=1e-12)
    assert seen.ratio >= 1.0 - 1e-9
    assert seen.printed == pytest.approx(seen.bound * landscape.least_variance, rel=1e-9)


def test_from_tau_one_on_nothing_is_claimed() -> None:
    seen = Landscape(random_matrix(2)).dominance(-eye(2).repeat(2, 1, 1))
    assert (seen.gradient, seen.bound, seen.ratio) == (0.0, 0.0, float("inf"))


def test_the_global_minimum_is_a_factorization() -> None:
    target = eye(3) + 0.5 * random_matrix(3, seed=2)
    landscape = Landscape(target, covariance(3, 0), noise=3.0)
    layers = factorize(target, 12).factors()
    assert float(landscape.risk(layers)) == pytest.approx(3.0, abs=1e-24)
    assert float(landscape.gradient(layers).abs().max()) <= 1e-12


# ------------------------------------------------------------------------------- descents


def test_descent_from_zero_reaches_the_minimum_and_obeys_the_inequality_all_the_way() -> None:
    landscape = Landscape(eye(4) + 0.5 * random_matrix(4, seed=1))
    down = landscape.descend(torch.zeros(6, 4, 4), n_steps=150)
    assert len(down.risks) == len(down.gradients) == len(down.norms) == len(down.bounds) == 151
    assert down.risks[-1] <= 1e-3 * down.risks[0]
    assert all(after < before for before, after in zip(down.risks, down.risks[1:], strict=False))
    assert max(down.norms) < 1.0
    assert min(down.ratios) >= 1.0 - 1e-9
    assert down.ratios[0] == pytest.approx(1.0)  # at zero, with Sigma = I, both sides are equal
    assert down.path is None
    assert float(landscape.risk(down.end)) == down.risks[-1]
    assert "150 steps with learning rate" in str(down)


def test_the_standard_parameterization_is_stuck_at_zero_where_the_residual_one_is_not() -> None:
    target, start = eye(4) + 0.5 * random_matrix(4, seed=1), torch.zeros(3, 4, 4)
    plain, near = Landscape(target, is_residual=False), Landscape(target)
    assert float(plain.gradient(start.double()).abs().max()) == 0.0
    assert float(plain.risk(start.double())) == pytest.approx(float(target.square().sum()))
    assert float(near.gradient(start.double()).abs().max()) > 0.1
    close = 1e-2 * torch.stack([random_matrix(4, name=str(place)) for place in range(3)])
    stuck, free = (one.descend(close, n_steps=60, rate=0.01) for one in (plain, near))
    assert stuck.risks[-1] > 0.99 * stuck.risks[0]
    assert free.risks[-1] < 0.2 * free.risks[0]
    assert stuck.ratios == ()
    assert "undefined" in str(stuck)


def test_a_target_of_negative_determinant_drives_the_descent_out_of_the_ball() -> None:
    # Inside it every product has positive determinant, and by theorem 2.2 there is no critical point to stop at.
    landscape = Landscape(torch.diag(torch.tensor([1.0, -1.0])).double())
    down = landscape.descend(
        0.05 * torch.stack([random_matrix(2, name=str(i)) for i in range(2)]), n_steps=400, rate=0.05
    )
    assert max(down.norms) > 1.0


def test_a_path_is_kept_where_it_is_asked_for() -> None:
    landscape = Landscape(torch.tensor([[2.0]]).double())
    down = landscape.descend(torch.zeros(2, 1, 1), n_steps=5, keep_path=True)
    assert down.path is not None
    assert down.path.shape == (6, 2, 1, 1)
    assert torch.equal(down.path[-1], down.end)
    assert landscape.risk(down.path).tolist() == pytest.approx(list(down.risks))


def test_progress_is_told_of_every_step() -> None:
    told: list[int] = []
    Landscape(eye(2)).descend(torch.zeros(1, 2, 2), n_steps=3, on_step=lambda step, _: told.append(step))
    assert told == [0, 1, 2, 3]


def test_a_rate_that_is_too_large_is_an_error_with_the_cure() -> None:
    with pytest.raises(TrainingError, match=r"needs a learning rate .*; at 5 it rose .*smaller learning rate"):
        Landscape(3.0 * eye(2)).descend(torch.zeros(3, 2, 2), n_steps=50, rate=5.0)


def test_a_plane_has_the_risks_of_its_points() -> None:
    landscape = Landscape(random_matrix(2))
    across, up = layers_within(1.0, depth=2, dim=2, seed=0), layers_within(1.0, depth=2, dim=2, seed=1)
    places, risks = landscape.on_plane(across, up, reach=0.5, n_places=5)
    assert places.tolist() == [-0.5, -0.25, 0.0, 0.25, 0.5]
    expected = landscape.risk(places[3] * across + places[1] * up)
    assert float(risks[1, 3]) == pytest.approx(float(expected), rel=1e-13)


def test_a_search_for_critical_points_finds_bad_ones_outside_the_ball() -> None:
    landscape = Landscape(eye(2) + 0.3 * random_matrix(2))
    found = critical_point(landscape, -0.95 * eye(2).repeat(2, 1, 1))
    assert found is not None
    assert float(landscape.risk(found)) > 0.1
    assert float(torch.linalg.matrix_norm(found, 2).max()) > 1.0 - 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_layers_of_any_precision_count_as_the_numbers_they_are(dtype: torch.dtype) -> None:
    landscape = Landscape(random_matrix(3).to(dtype), noise=0.5)
    layers = layers_within(0.3, depth=3, dim=3, seed=0).to(dtype)
    assert torch.equal(landscape.gradient(layers), landscape.gradient(layers.double()))
    assert torch.equal(landscape.risk(layers), landscape.risk(layers.double()))
    assert landscape.dominance(layers).ratio == landscape.dominance(layers.double()).ratio
    assert landscape.descend(layers, n_steps=3).risks == landscape.descend(layers.double(), n_steps=3).risks
    assert torch.equal(landscape.gradient(layers.double().numpy()), landscape.gradient(layers))
    places, risks = landscape.on_plane(layers, layers, n_places=3)
    assert (places.dtype, risks.dtype) == (torch.float64, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "dim"), [(3, 8), (40, 8), (50_000, 5)])
def test_a_measured_covariance_is_taken_as_it_is_rounded(n: int, dim: int, dtype: torch.dtype) -> None:
    x = 3.0 * torch.randn(n, dim, generator=torch.Generator().manual_seed(0)).to(dtype) + 1.0
    for measured in (x.mT @ x / len(x), (x - x.mean(0)).mT @ (x - x.mean(0)) / len(x)):
        landscape = Landscape(random_matrix(dim), measured)
        assert torch.equal(landscape.sigma, landscape.sigma.mT)
        assert landscape.least_variance >= 0.0
        assert float((landscape.sigma - measured.double()).abs().max()) <= 4 * float(
            torch.finfo(dtype).eps
        ) ** 0.5 * float(measured.abs().max())


# ------------------------------------------------------------------------------- what is refused


@pytest.mark.usefixtures("unchecked")
def test_misuse_is_refused_with_the_cure() -> None:
    landscape = Landscape(eye(2))
    with pytest.raises(ShapeError, match=r"a landscape needs a square matrix"):
        Landscape(torch.ones(2, 3))
    with pytest.raises(ShapeError, match=r"a covariance of the shape of R, \(2, 2\); got \(3, 3\)"):
        Landscape(eye(2), eye(3))
    with pytest.raises(
        ValueRangeError, match=r"symmetric without negative eigenvalues; got the smallest eigenvalue -1"
    ):
        Landscape(eye(2), -eye(2))
    with pytest.raises(ValueRangeError, match=r"noise of a landscape.* got -1"):
        Landscape(eye(2), noise=-1.0)
    with pytest.raises(ShapeError, match=r"needs layers \(depth, 2, 2\), .*; got \(0, 2, 2\)"):
        landscape.risk(torch.zeros(0, 2, 2))
    with pytest.raises(ValueRangeError, match=r"n_steps of a descent.* got 0"):
        landscape.descend(torch.zeros(1, 2, 2), n_steps=0)
    with pytest.raises(ValueRangeError, match=r"rate of a descent.* got 0"):
        landscape.descend(torch.zeros(1, 2, 2), rate=0.0)
    with pytest.raises(ValueRangeError, match=r"n_places of a plane.* got 1"):
        landscape.on_plane(torch.zeros(1, 2, 2), torch.zeros(1, 2, 2), n_places=1)
    with pytest.raises(ValueRangeError, match=r"difference of 0\.1 from its transpose"):
        Landscape(eye(2), torch.tensor([[1.0, 0.1], [0.0, 1.0]]))
    with pytest.raises(ShapeError, match=r"two directions of .*shape; got \(1, 2, 2\) and \(2, 2, 2\)"):
        landscape.on_plane(torch.zeros(1, 2, 2), torch.zeros(2, 2, 2))
    with pytest.raises(ShapeError, match=r"needs layers \(depth, 2, 2\)"):
        landscape.gradient(torch.zeros(3, 1, 2, 2))
