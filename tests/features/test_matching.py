"""The structural rank of sparse features against exact ranks of random weights with their pattern."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onlynorm.errors import MemoryLimitError, ShapeError
from onlynorm.features import draw, is_generically_invertible, matching, structural_rank

PRIME = 2**31 - 1


def rank_modulo_prime(M: np.ndarray) -> int:
    """Exact rank over the field with PRIME elements, by elimination in integers."""
    M, rank = M.astype(np.int64) % PRIME, 0
    for column in range(M.shape[1]):
        pivots = np.flatnonzero(M[rank:, column])
        if not len(pivots):
            continue
        M[[rank, rank + pivots[0]]] = M[[rank + pivots[0], rank]]
        M[rank] = M[rank] * pow(int(M[rank, column]), -1, PRIME) % PRIME
        factors = M[rank + 1 :, column].copy()
        M[rank + 1 :] = (M[rank + 1 :] - factors[:, None] * M[rank] % PRIME) % PRIME
        rank += 1
        if rank == len(M):
            break
    return rank


def khatri_rao(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """M modulo PRIME, one column per feature."""
    return (left[:, None, :] * right.T[None, :, :] % PRIME).reshape(-1, left.shape[1])


def random_masks(
    rng: np.random.Generator, rows: int, cols: int, n_features: int, density: float
) -> tuple[np.ndarray, np.ndarray]:
    return rng.random((rows, n_features)) < density, rng.random((n_features, cols)) < density


@given(
    rows=st.integers(1, 5),
    cols=st.integers(1, 5),
    surplus=st.integers(-3, 3),
    density=st.floats(0.05, 1.0),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=400, deadline=None)
def test_the_structural_rank_is_the_rank_of_almost_all_weights(
    rows: int, cols: int, surplus: int, density: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    n_features = max(1, rows * cols + surplus)
    left_mask, right_mask = random_masks(rng, rows, cols, n_features, density)
    found = structural_rank(torch.from_numpy(left_mask), torch.from_numpy(right_mask))
    left = left_mask * rng.integers(1, PRIME, left_mask.shape)
    right = right_mask * rng.integers(1, PRIME, right_mask.shape)
    # A nonzero minor of degree 2 rank vanishes with probability below 2 rank / PRIME (Schwartz and Zippel).
    assert rank_modulo_prime(khatri_rao(left, right)) == found.rank
    assert found.equations - found.rank == len(found.unmatched_rows)
    assert found.is_full == is_generically_invertible(torch.from_numpy(left_mask), torch.from_numpy(right_mask))


def test_real_weights_of_a_larger_layer_have_the_structural_rank() -> None:
    n_full = 0
    for seed in range(12):
        features = draw("er_normal", (9, 9), excess=1.0, density=0.3 + 0.03 * seed, seed=seed)
        found = structural_rank(features.mask_left(), features.mask_right())
        M = torch.einsum("if,fj->ijf", features.left(), features.right()).reshape(81, 81)
        assert int(torch.linalg.matrix_rank(M)) == found.rank
        n_full += found.is_full
    assert 0 < n_full < 12  # both sides of the threshold were seen


def test_signs_can_be_singular_although_a_matching_exists() -> None:
    ones = torch.ones(2, 4, dtype=torch.bool)
    assert is_generically_invertible(ones, ones.T)
    ranks = set()
    for seed in range(20):
        features = draw("er_sign", (2, 2), excess=1.0, density=1.0, seed=seed)
        M = torch.einsum("if,fj->ijf", features.left(), features.right()).reshape(4, 4)
        ranks.add(int(torch.linalg.matrix_rank(M)))
    assert max(ranks) <= 4
    assert min(ranks) < 4


@given(rows=st.integers(1, 6), cols=st.integers(1, 6), n_features=st.integers(1, 12), seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_the_pattern_is_that_of_the_matrix(rows: int, cols: int, n_features: int, seed: int) -> None:
    left_mask, right_mask = random_masks(np.random.default_rng(seed), rows, cols, n_features, 0.5)
    expected = (left_mask[:, None, :] & right_mask.T[None, :, :]).reshape(-1, n_features)
    assert np.array_equal(matching._pattern(left_mask, right_mask).toarray().T.astype(bool), expected)


def test_unmatched_equations_are_named() -> None:
    left, right = torch.ones(2, 6, dtype=torch.bool), torch.ones(6, 3, dtype=torch.bool)
    assert structural_rank(left, right).is_full
    assert "every target" in str(structural_rank(left, right))
    left[1] = False  # nothing feeds output 1
    found = structural_rank(left, right)
    assert found.rank == 3
    assert found.unmatched_rows == ((1, 0), (1, 1), (1, 2))
    assert str(found) == (
        "structural rank 3 of 6 equations with 6 features: unmatched (output, input) (1, 0), (1, 1), (1, 2)"
    )
    nothing = structural_rank(torch.zeros_like(left), right)
    assert nothing.rank == 0
    assert str(nothing).endswith("(1, 1) and 1 more")


def test_too_few_features_are_never_invertible() -> None:
    ones = torch.ones(2, 5, dtype=torch.bool)
    assert not is_generically_invertible(ones, torch.ones(5, 3, dtype=torch.bool))


@pytest.mark.parametrize("name", ["id_cond", "ortho_cond", "fast_ortho_cond", "kron_normal", "he_normal"])
def test_dense_and_structured_features_have_full_structural_rank(name: str) -> None:
    features = draw(name, (3, 4))
    assert is_generically_invertible(features.mask_left(), features.mask_right())


def test_a_pattern_beyond_the_memory_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "MAX_NONZEROS", 23)
    ones = torch.ones(2, 4, dtype=torch.bool)
    assert structural_rank(ones, torch.ones(4, 2, dtype=torch.bool)).is_full
    with pytest.raises(MemoryLimitError, match=r"at most 23 nonzeros; got 24 for 6 equations"):
        structural_rank(ones, torch.ones(4, 3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("left", "right"),
    [((2, 4), (3, 4)), ((4,), (4, 3)), ((2, 4), (4, 3, 1))],
)
def test_masks_that_do_not_fit_are_refused(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    masks = torch.ones(left, dtype=torch.bool), torch.ones(right, dtype=torch.bool)
    with pytest.raises(ShapeError, match=r"a pattern needs bool masks .* with equal feat; got"):
        matching._check_masks(*masks)


def test_weights_in_place_of_masks_are_refused() -> None:
    features = draw("er_normal", (2, 3))
    with pytest.raises(ShapeError, match=r"got \(2, 8\) torch\.float64 and .*left != 0 and right != 0"):
        matching._check_masks(features.left(), features.right())
