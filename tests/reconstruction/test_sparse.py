"""What sparse features cannot reach, against ranks of the materialised matrix."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tensors import normal
from torch import Tensor

from onlynorm.features import Features, draw
from onlynorm.features.matching import reaches
from onlynorm.reconstruction.constructions import unreached
from onlynorm.reconstruction.constructions.unreached import find_unreached


def matrix_of(features: Features) -> Tensor:
    return torch.einsum("if,fj->ijf", features.left(), features.right()).flatten(0, 1)


def rank(matrix: Tensor) -> int:
    return int(torch.linalg.matrix_rank(matrix, rtol=1e-10))


def pruned(shape: tuple[int, ...], seed: int) -> Tensor:
    """A target of which half of the weights are zero."""
    return normal(*shape, seed=seed) * (normal(*shape, seed=seed + 1000) > 0)


@pytest.mark.parametrize("shape", [(3, 4), (5, 5), (2, 2, 3)])
def test_a_target_counts_as_reached_exactly_if_it_lies_in_the_span_of_the_features(shape: tuple[int, ...]) -> None:
    answers = []
    for seed in range(40):
        features = draw("er_normal", shape, excess=1.25, density=0.25 + 0.01 * seed, seed=seed)
        target = normal(*shape, seed=seed) if seed % 2 else pruned(shape, seed)
        M, t = matrix_of(features), features.as_matrix(target).reshape(-1, 1)
        is_reached = rank(torch.cat([M, t], 1)) == rank(M)
        assert (find_unreached(features, target) is None) == is_reached
        answers.append(is_reached)
    assert len(set(answers)) == 2


def test_at_the_minimum_width_the_scales_of_the_outputs_count_too() -> None:
    answers = []
    for seed in range(60):
        features = draw("er_normal", (4, 4), n_features=14, density=0.3 + 0.01 * seed, seed=seed)
        target = normal(4, 4, seed=seed)
        if seed % 3 == 0:
            target[1] = 0.0
        on = target.any(1)
        # left diag(gamma) right - diag(s) T = 0 must have a solution in which no scale s is zero.
        scales = -torch.einsum("ik,ij->ijk", torch.eye(4, dtype=torch.float64), target)[on][..., on].flatten(0, 1)
        M = torch.einsum("if,fj->ijf", features.left()[on], features.right()).flatten(0, 1)
        _, S, V = torch.linalg.svd(torch.cat([M, scales], 1))
        kernel = V[int((1e-10 * S[0] < S).sum()) :]
        is_reached = bool((kernel[:, M.shape[1] :].norm(dim=0) > 1e-8).all())
        assert (find_unreached(features, target, minimum_width=True) is None) == is_reached
        answers.append(is_reached)
    assert len(set(answers)) == 2


def test_the_density_named_is_the_smallest_that_reaches_the_target() -> None:
    n_found = 0
    for seed in range(8):
        features, target = draw("er_normal", (6, 6), excess=1.25, density=0.25, seed=seed), normal(6, 6)
        found = find_unreached(features, target)
        if found is None:
            continue
        n_found += 1
        assert find_unreached(dataclasses.replace(features, density=found.enough), target) is None
        if found.enough > 0.26:
            less = dataclasses.replace(features, density=found.enough - 0.01)
            assert find_unreached(less, target) is not None
        assert f"density {found.enough:g} reaches all" in str(found)
    assert n_found >= 4


@pytest.mark.parametrize("kernel", ["first", "second"])
def test_weights_are_named_by_output_input_and_kernel_position(kernel: str) -> None:
    features = draw("id_cond", (3, 2, 2, 2), density=0.8, kernel=kernel)
    target = normal(3, 2, 2, 2)
    found = find_unreached(features, target, first_output=9)
    assert found is not None
    assert found.enough == 1.0 or found.enough > 0.8
    made = features.as_weight(features.left() @ (torch.ones(features.n_features).double()[:, None] * features.right()))
    assert {tuple(weight) for weight in found.weights} == {
        (9 + i, *rest) for i, *rest in (made == 0).nonzero().tolist()
    }
    assert f"{len(found.weights)} of 24 weights" in str(found)
    target[made == 0] = 0.0  # what no feature makes is not needed
    assert find_unreached(features, target) is None


def test_dense_features_are_not_asked() -> None:
    assert find_unreached(draw("he_normal", (3, 3)), normal(3, 3)) is None
    assert find_unreached(draw("er_normal", (3, 3), density=1.0), normal(3, 3)) is None
    assert find_unreached(draw("id_cond", (3, 3)), normal(3, 3)) is None


def test_thinned_masks_decide_as_the_whole_ones_would(monkeypatch: pytest.MonkeyPatch) -> None:
    features, target = draw("er_normal", (40, 30), excess=1.0, density=0.9), normal(40, 30)
    sizes = []

    def spy(left: Tensor, right: Tensor) -> object:
        sizes.append(int((left.sum(0) * right.sum(1)).sum()))
        return matched(left, right)

    matched = unreached.structural_rank
    monkeypatch.setattr(unreached, "structural_rank", spy)
    assert find_unreached(features, target) is None
    whole = int((features.mask_left().sum(0) * features.mask_right().sum(1)).sum())
    assert sizes[0] < 0.2 * whole
    assert matched(features.mask_left(), features.mask_right()).is_full


def test_a_pattern_that_is_too_large_is_left_to_the_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    features, target = draw("er_normal", (6, 6), density=0.1), normal(6, 6)
    assert find_unreached(features, target) is not None
    monkeypatch.setattr(unreached, "MAX_NONZEROS", 3)
    assert find_unreached(features, target) is None


def test_a_target_that_avoids_the_gaps_of_a_pattern_is_reached() -> None:
    left = torch.tensor([[True, True], [False, False]])
    right = torch.tensor([[True, False], [True, True]])
    assert reaches(left, right, torch.tensor([[True, True], [False, False]]))
    assert not reaches(left, right, torch.tensor([[True, True], [False, True]]))
