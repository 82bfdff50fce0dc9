"""Measures of rank against singular values and loops, on batches, with gradients, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensors import normal
from torch import Tensor

from onlynorm.errors import ShapeError, UnknownNameError, ValueRangeError
from onlynorm.rank import (
    as_matrix,
    cosines,
    effective_rank,
    exact_rank,
    rank_ratio,
    regularity,
    second_moments,
    soft_rank,
    top_eigenvalues,
    unit_rows,
    unit_scale,
)
from onlynorm.rank.measures import count_at_least

EPS = torch.finfo(torch.float64).eps


def of_rank(d: int, n: int, rank: int, seed: int = 0) -> Tensor:
    return normal(d, rank, seed=seed) @ normal(rank, n, seed=seed + 1)


# ------------------------------------------------------------------------------- values


@pytest.mark.parametrize(("d", "n"), [(5, 9), (9, 5), (6, 6), (1, 4)])
def test_measures_agree_with_singular_values(d: int, n: int) -> None:
    H = normal(3, 2, d, n)
    sigma = torch.linalg.svdvals(H)
    eigenvalues = sigma.square() / n
    close = {"rtol": 64 * EPS, "atol": 0.0}
    torch.testing.assert_close(rank_ratio(H), eigenvalues.sum(-1).square() / eigenvalues.square().sum(-1), **close)
    torch.testing.assert_close(top_eigenvalues(H, 1), eigenvalues[..., :1], **close)
    shares = sigma / sigma.sum(-1, keepdim=True)
    torch.testing.assert_close(effective_rank(H), (-(shares * shares.log()).sum(-1)).exp(), **close)
    for tau in (0.05, 0.5, 1.0, 3.0):
        assert torch.equal(soft_rank(H, tau), (eigenvalues >= tau).sum(-1))
    assert torch.equal(soft_rank(H, 0.0), torch.full((3, 2), d))
    assert torch.equal(exact_rank(H), torch.full((3, 2), min(d, n)))


def test_a_batch_gives_what_its_matrices_give_alone() -> None:
    H = normal(4, 6, 7)
    for measure in (rank_ratio, effective_rank, exact_rank, lambda X: soft_rank(X, 0.7), top_eigenvalue):
        torch.testing.assert_close(measure(H), torch.stack([measure(one) for one in H]), rtol=64 * EPS, atol=0.0)


def top_eigenvalue(H: Tensor) -> Tensor:
    return top_eigenvalues(H, 1)


@given(d=st.integers(1, 7), n=st.integers(2, 9), tau=st.floats(0.0, 1.0), seed=st.integers(0, 10_000))
def test_ratio_effective_rank_and_rank_stand_in_order(d: int, n: int, tau: float, seed: int) -> None:
    """Theory: daneshmand2020:lemma-1 and daneshmand2020:lemma-2"""
    rank = 1 + seed % min(d, n)
    H = unit_rows(of_rank(d, n, rank, seed))
    r, effective, exact = float(rank_ratio(H)), float(effective_rank(H)), int(exact_rank(H))
    slack = 1 + 1e-7  # singular values that are zero but for rounding add to the effective rank
    assert r * slack >= 1
    assert r <= effective * slack
    assert effective <= exact * (1 + 1e-6)
    assert exact == rank
    assert int(soft_rank(H, tau)) >= (1 - tau) ** 2 * r * (1 - 1e-12)


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_equal_singular_values_make_every_measure_the_rank(rank: int) -> None:
    Q = torch.linalg.qr(normal(8, 8))[0][:, :rank]
    P = torch.linalg.qr(normal(12, 12, seed=1))[0][:, :rank]
    H = Q @ P.mT
    assert float(rank_ratio(H)) == pytest.approx(rank, rel=1e-12)
    assert float(effective_rank(H)) == pytest.approx(rank, rel=1e-9)
    assert int(exact_rank(H)) == rank
    assert int(soft_rank(unit_scale(H), 0.5)) == rank


def test_ratio_and_effective_rank_do_not_depend_on_the_scale() -> None:
    H = normal(5, 8)
    for scale in (1e-150, 1e150):
        assert float(rank_ratio(scale * H)) == pytest.approx(float(rank_ratio(H)), rel=1e-12)
        assert float(effective_rank(scale * H)) == pytest.approx(float(effective_rank(H)), rel=1e-12)


def test_second_moments_and_the_two_ways_of_scaling() -> None:
    H = 7.0 * normal(2, 5, 8)
    torch.testing.assert_close(second_moments(H)[1], sum(torch.outer(h, h) for h in H[1].T) / 8)  # type: ignore[arg-type]
    diagonal = second_moments(unit_rows(H)).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(diagonal, torch.ones_like(diagonal))
    scaled = unit_scale(H)
    torch.testing.assert_close(
        second_moments(scaled).diagonal(dim1=-2, dim2=-1).sum(-1), torch.full((2,), 5.0).double()
    )
    torch.testing.assert_close(scaled / H, (scaled / H)[:, :1, :1].expand_as(H))


# ------------------------------------------------------------------------------- counting without eigenvalues


@given(d=st.integers(1, 24), tau=st.floats(0.01, 3.0), seed=st.integers(0, 10_000), single=st.booleans())
def test_inertia_counts_what_eigenvalues_count(d: int, tau: float, seed: int, single: bool) -> None:
    H = normal(d, d, seed=seed).to(torch.float32 if single else torch.float64)
    M = second_moments(H) if d > 1 else H.square()
    eigenvalues = torch.linalg.eigvalsh(M)
    sure = (eigenvalues - tau).abs() > 64 * d * torch.finfo(M.dtype).eps * float(eigenvalues.abs().max())
    counted = int(count_at_least(M, tau, method="inertia"))
    assert counted == int((eigenvalues >= tau).sum()) or not bool(sure.all())


def test_blocks_of_two_pivots_are_counted_once_on_each_side() -> None:
    """A zero diagonal forces 2 x 2 pivots; eigenvalues are +-1 and +-3."""
    M = torch.zeros(4, 4, dtype=torch.float64)
    M[0, 1] = M[1, 0] = 1.0
    M[2, 3] = M[3, 2] = 3.0
    shifted = M + 0.5 * torch.eye(4, dtype=torch.float64)
    assert int(count_at_least(shifted, 0.5, method="inertia")) == 2
    assert int((torch.linalg.ldl_factor(M).pivots < 0).sum()) == 4, "the case that is meant"
    assert count_at_least(torch.stack([shifted, -shifted]), 0.6, method="inertia").tolist() == [2, 1]


def test_an_eigenvalue_equal_to_tau_counts() -> None:
    H = math.sqrt(2.0) * torch.eye(4, dtype=torch.float64)[:, :4]
    assert int(soft_rank(H, 0.5, method="eigenvalues")) == int(soft_rank(H, 0.5, method="inertia")) == 4


# ------------------------------------------------------------------------------- regularity and cosines


def test_regularity_is_the_quotient_of_the_two_averages() -> None:
    H = unit_rows(normal(7, 5, 9))
    above = below = 0.0
    for one in H:
        M = one @ one.T / 9
        above += float(torch.diag(torch.diag(M @ M) ** 2).trace())
        below += float((M @ M @ M).trace())
    assert float(regularity(3.0 * H)) == pytest.approx(above / below, rel=1e-12)
    assert float(regularity(H)) < 1.0
    orthogonal = torch.eye(4, dtype=torch.float64) * 2.0
    assert float(regularity(orthogonal)) == pytest.approx(1.0, rel=1e-14)


@pytest.mark.parametrize("between", ["samples", "features"])
def test_cosines_agree_with_a_loop_and_leave_zero_vectors_out(between: str) -> None:
    H = normal(4, 6)
    H[:, 2] = 0.0
    H[1] = 0.0
    vectors = list(H.T if between == "samples" else H)
    kept = [v / v.norm() for v in vectors if float(v.norm()) > 0]
    angles = torch.stack([a @ b for i, a in enumerate(kept) for j, b in enumerate(kept) if i != j])
    found = cosines(torch.stack([H, H]), between=between)
    for value, expected in (
        (found.mean, angles.mean()),
        (found.mean_absolute, angles.abs().mean()),
        (found.largest, angles.abs().max()),
    ):
        torch.testing.assert_close(value, expected.expand(2))
    assert found.n_zero.tolist() == [1, 1]
    assert between in str(found)
    assert "2 zero vectors" in str(found)


def test_cosines_without_two_vectors_are_no_numbers() -> None:
    H = torch.zeros(3, 4)
    H[:, 0] = 1.0
    found = cosines(H)
    assert all(bool(value.isnan()) for value in (found.mean, found.mean_absolute, found.largest))
    assert int(found.n_zero) == 3


# ------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize(
    "measure",
    [rank_ratio, effective_rank, lambda H: top_eigenvalues(H, 2), regularity, lambda H: cosines(H).mean],
    ids=["ratio", "effective", "top", "regularity", "cosines"],
)
def test_gradients_are_those_of_finite_differences(measure: Callable[[Tensor], Tensor]) -> None:
    H = normal(2, 4, 5).requires_grad_()
    assert torch.autograd.gradcheck(measure, (H,))


def test_ascent_on_the_ratio_raises_the_rank() -> None:
    H = (of_rank(6, 10, 1) + 0.1 * normal(6, 10)).requires_grad_()
    before = float(rank_ratio(H.detach()))
    for _ in range(50):
        (step,) = torch.autograd.grad(rank_ratio(H), H)
        H = (H + 0.1 * step / step.norm() * H.norm()).detach().requires_grad_()
    assert float(rank_ratio(H.detach())) > before + 2


# ------------------------------------------------------------------------------- activations


def test_activations_become_features_times_columns() -> None:
    flat = normal(5, 3)
    assert torch.equal(as_matrix(flat), flat.T)
    images = normal(5, 3, 2, 4)
    pooled, whole = as_matrix(images), as_matrix(images, positions="samples")
    assert pooled.shape == (3, 40)
    assert whole.shape == (24, 5)
    columns = {tuple(column.tolist()) for column in pooled.T}
    assert columns == {tuple(images[s, :, i, j].tolist()) for s in range(5) for i in range(2) for j in range(4)}
    assert torch.equal(whole.T, images.flatten(1))
    tokens = normal(5, 7, 3)
    assert torch.equal(as_matrix(tokens, channels=-1), tokens.reshape(35, 3).T)
    torch.testing.assert_close(
        rank_ratio(as_matrix(tokens, channels=-1, positions="samples")), rank_ratio(tokens.flatten(1).T)
    )


def test_wide_activations_never_need_the_large_matrix() -> None:
    """200,000 rows: M would take 320 GB."""
    H = normal(200_000, 3).float()
    assert 2.9 < float(rank_ratio(H)) <= 3.0
    assert int(soft_rank(unit_scale(H), 0.5)) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_measured_in_float32(dtype: torch.dtype) -> None:
    H = (300.0 * normal(4, 6)).to(dtype)
    assert rank_ratio(H).dtype == torch.float32
    assert float(rank_ratio(H)) == pytest.approx(float(rank_ratio(H.double())), rel=1e-5)


# ------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("measure", [rank_ratio, effective_rank, exact_rank, regularity, second_moments, cosines])
def test_bad_numbers_and_batches_of_one_are_refused(measure: Callable[[Tensor], object]) -> None:
    with pytest.raises(ShapeError, match=r"needs .*two samples.*got \(3, 1\).*larger batch"):
        measure(torch.ones(3, 1))
    H = torch.ones(3, 4)
    H[1, 2], H[0, 0] = math.nan, math.inf
    with pytest.raises(ValueRangeError, match="got 2 NaN or infinite of 12"):
        measure(H)


@pytest.mark.usefixtures("unchecked")
def test_wrong_shapes_types_and_names_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"features, samples.*got \(4,\)"):
        rank_ratio(torch.ones(4))
    with pytest.raises(ShapeError, match=r"got \(0, 4\)"):
        rank_ratio(torch.ones(0, 4))
    with pytest.raises(ValueRangeError, match=r"got torch.int64"):
        rank_ratio(torch.ones(3, 4, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"as_matrix needs activations.*got \(4,\)"):
        as_matrix(torch.ones(4))
    for axis in (0, 3, -3):
        with pytest.raises(ShapeError, match=f"channels={axis}"):
            as_matrix(torch.ones(4, 3, 2), channels=axis)
    with pytest.raises(UnknownNameError, match=r"positions needs a known name; got 'pooled'\. Did you mean 'pool'"):
        as_matrix(torch.ones(4, 3), positions="pooled")
    with pytest.raises(UnknownNameError, match="between"):
        cosines(torch.ones(4, 3), between="rows")
    with pytest.raises(UnknownNameError, match="method"):
        soft_rank(torch.ones(4, 3), 0.5, method="svd")
    with pytest.raises(ShapeError, match="two samples"):
        as_matrix(torch.ones(1, 3))


def test_zero_matrices_and_rows_have_no_ratio() -> None:
    H = torch.zeros(2, 3, 4)
    H[0] = 1.0
    for measure in (rank_ratio, effective_rank, unit_scale):
        with pytest.raises(ValueRangeError, match="got 1 zero matrices of shape"):
            measure(H)
    assert exact_rank(H).tolist() == [1, 0]
    assert soft_rank(H, 0.5).tolist() == [1, 0]
    with pytest.raises(ValueRangeError, match=r"got 3 zero rows of 6 .*dead units"):
        unit_rows(H)
    dead = torch.ones(3, 4)
    dead[1] = 0.0
    assert float(rank_ratio(dead)) == pytest.approx(1.0)


def test_limits_of_tau_and_k_are_said() -> None:
    with pytest.raises(ValueRangeError, match=r"tau of soft_rank .* in \[0, inf\); got -1"):
        soft_rank(torch.ones(3, 4), -1.0)
    with pytest.raises(ValueRangeError, match=r"k of top_eigenvalues .* from 1 to 3; got 4"):
        top_eigenvalues(torch.ones(3, 5), 4)
