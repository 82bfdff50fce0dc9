"""Structured features: the closed forms against the matrix they never build."""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import onlynorm as on
from onlynorm.errors import InsufficientFeaturesError, ShapeError, ValueRangeError
from onlynorm.features import Features, draw, structured
from onlynorm.features.orthogonal import haar_matrix
from onlynorm.features.streams import Stream
from onlynorm.features.structured import IdCond, IdCondMinimal, OrthoCond, Structure

EPS = torch.finfo(torch.float64).eps
SHAPES = st.lists(st.integers(1, 4), min_size=2, max_size=4).map(tuple)
KERNELS = st.sampled_from(["first", "second"])
NAMES = ("id_cond", "id_cond_minimal", "ortho_cond", "fast_ortho_cond", "kron_normal")


def numbers(name: str, *shape: int) -> torch.Tensor:
    return torch.from_numpy(Stream(1, name, "test").normals(0, math.prod(shape))).reshape(shape)


def slow_matrix(features: Features) -> torch.Tensor:
    """M, built column by column from the source weights."""
    left, right = features.left(), features.right()
    return torch.einsum("if,fj->ijf", left, right).reshape(-1, features.n_features)


def structure_of(features: Features) -> Structure:
    assert features.structure is not None
    return features.structure


@given(name=st.sampled_from(NAMES), shape=SHAPES, kernel=KERNELS, n_batch=st.integers(0, 2), seed=st.integers(0, 9))
@settings(max_examples=120, deadline=None)
def test_apply_and_transpose_are_those_of_the_matrix(
    name: str, shape: tuple[int, ...], kernel: str, n_batch: int, seed: int
) -> None:
    features = draw(name, shape, kernel=kernel, seed=seed)
    structure, M = structure_of(features), slow_matrix(features)
    batch = (2, 3)[:n_batch]
    gamma = numbers("gamma", *batch, features.n_features)
    residual = numbers("residual", *batch, features.rows, features.cols)
    bound = 4 * features.equations * EPS
    forward = (gamma @ M.T).reshape(*batch, features.rows, features.cols)
    assert (structure.apply(gamma) - forward).abs().max() <= bound * gamma.abs().max()
    back = residual.flatten(-2) @ M
    assert (structure.transpose(residual) - back).abs().max() <= bound * residual.abs().max()


@given(
    name=st.sampled_from(["id_cond", "ortho_cond", "fast_ortho_cond"]),
    shape=SHAPES,
    kernel=KERNELS,
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_solve_returns_the_gammas_of_the_target(name: str, shape: tuple[int, ...], kernel: str, seed: int) -> None:
    features = draw(name, shape, kernel=kernel, seed=seed)
    target = numbers("target", 3, features.rows, features.cols)
    gamma = structure_of(features).solve(target)
    error = (structure_of(features).apply(gamma) - target).abs().max()
    assert error <= (0 if name == "id_cond" else 8 * features.equations * EPS * target.abs().max())
    M = slow_matrix(features)
    assert (M.T @ M - torch.eye(features.equations)).abs().max() <= 8 * features.equations * EPS


def test_id_cond_is_the_identity_and_counts_row_by_row() -> None:
    features = draw("id_cond", (3, 4))
    structure = structure_of(features)
    assert isinstance(structure, IdCond)
    assert torch.equal(slow_matrix(features), torch.eye(12, dtype=torch.float64))
    assert structure.output_of(torch.tensor([0, 3, 4, 11])).tolist() == [0, 0, 1, 2]
    assert structure.input_of(torch.tensor([0, 3, 4, 11])).tolist() == [0, 3, 0, 3]
    assert (int(structure.output_of(5)), int(structure.input_of(5))) == (1, 1)
    assert structure.output_of().tolist() == [i // 4 for i in range(12)]


@given(density=st.floats(0.2, 1.0), seed=st.integers(0, 50))
@settings(max_examples=40, deadline=None)
def test_sparse_id_cond_projects_the_target_on_its_features(density: float, seed: int) -> None:
    features = draw("id_cond", (6, 5), density=density, seed=seed)
    structure = structure_of(features)
    assert isinstance(structure, IdCond)
    target = numbers("target", 2, 6, 5)
    is_kept = torch.zeros(6, 5, dtype=torch.bool)
    is_kept[structure.output_of(), structure.input_of()] = True
    assert int(is_kept.sum()) == features.n_features
    assert torch.equal(structure.apply(structure.solve(target)), target * is_kept)
    M = slow_matrix(features)
    expected = (torch.linalg.pinv(M) @ target[0].flatten()).reshape(-1)
    assert (structure.solve(target)[0] - expected).abs().max() <= 30 * EPS * target.abs().max()


def test_sparse_id_cond_keeps_its_density_and_stores_small_indices() -> None:
    features = draw("id_cond", (100, 200), density=0.3)
    structure = structure_of(features)
    assert isinstance(structure, IdCond)
    assert abs(features.n_features - 6_000) <= 5 * math.sqrt(20_000 * 0.3 * 0.7)
    assert structure.kept is not None
    assert structure.kept.dtype == torch.int32


def test_gradients_of_id_cond_gammas_are_those_of_the_weights() -> None:
    structure = IdCond(3, 4)
    x, weight = numbers("x", 5, 4), numbers("w", 3, 4).requires_grad_()
    gamma = structure.solve(weight.detach()).requires_grad_()
    (x @ weight.T).square().sum().backward()
    (x @ structure.apply(gamma).T).square().sum().backward()
    assert weight.grad is not None
    assert gamma.grad is not None
    assert torch.equal(gamma.grad, weight.grad.flatten())


@given(shape=SHAPES, kernel=KERNELS, data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_minimum_width_reaches_every_target_without_zeros(
    shape: tuple[int, ...], kernel: str, data: st.DataObject
) -> None:
    n = math.prod(shape[1:])
    shared = data.draw(st.integers(0, n - 1))
    features = draw("id_cond_minimal", shape, kernel=kernel, shared_column=shared)
    structure = structure_of(features)
    assert isinstance(structure, IdCondMinimal)
    assert features.n_features == shape[0] * (n - 1) + 1
    target = numbers("target", 2, features.rows, features.cols)
    gamma, output_gamma = structure.solve(target)
    assert output_gamma.shape == (2, shape[0])
    error = (structure.apply(gamma, output_gamma) - target).abs()
    assert (error <= 2 * EPS * target.abs()).all()
    # the source network itself: scale outputs after left diag(gamma) right
    made = features.left() @ torch.diag(gamma[0]) @ features.right()
    scaled = (output_gamma[0][:, None] * made.reshape(shape[0], -1)).reshape_as(made)
    assert ((scaled - target[0]).abs() <= 4 * EPS * target[0].abs()).all()


def test_outputs_that_are_zero_throughout_are_switched_off() -> None:
    target = numbers("target", 3, 4)
    target[1] = 0
    gamma, output_gamma = IdCondMinimal(3, 4, 3).solve(target)
    assert float(output_gamma[1]) == 0.0
    assert torch.isfinite(gamma).all()
    assert torch.equal(IdCondMinimal(3, 4, 3).apply(gamma, output_gamma)[1], target[1])


def test_a_zero_at_the_shared_column_names_the_outputs_and_a_better_column() -> None:
    target = numbers("target", 8, 3)
    target[[2, 5], 0] = 0
    with pytest.raises(ValueRangeError, match=r"in column 0 .*got zeros in outputs 2, 5\. Draw with shared_column=1"):
        IdCondMinimal(8, 3, 8).solve(target)
    gamma, output_gamma = IdCondMinimal(8, 3, 8, shared_column=1).solve(target)
    assert (IdCondMinimal(8, 3, 8, 1).apply(gamma, output_gamma) - target).abs().max() <= 4 * EPS
    target[0, 1] = target[1, 2] = 0
    with pytest.raises(ValueRangeError, match=r"No column is free of zeros: draw id_cond"):
        IdCondMinimal(8, 3, 8).solve(target)
    target[:, 0] = 0
    with pytest.raises(ValueRangeError, match=r"got zeros in outputs 0, 1, 2, 3, 4 and 3 more"):
        IdCondMinimal(8, 3, 8).solve(target)


@pytest.mark.parametrize("shared", [-1, 4, True])
def test_a_shared_column_outside_the_target_is_refused(shared: int) -> None:
    with pytest.raises(ValueRangeError, match=r"shared_column .* in \[0, 4\); got"):
        draw("id_cond_minimal", (3, 4), shared_column=shared)


def test_ortho_cond_factors_are_haar_columns_and_rows() -> None:
    features = draw("ortho_cond", (3, 5), seed=4, layer="a")
    structure = structure_of(features)
    assert isinstance(structure, OrthoCond)
    for factor in (structure.left_factor, structure.right_factor):
        gram = factor @ factor.T
        assert (gram - torch.eye(len(gram))).abs().max() <= (2 * len(gram) + 8) * EPS
    # feature 7 = (q, d) = (1, 2)
    assert torch.equal(features.left(7, 8)[:, 0], structure.left_factor[:, 1])
    assert torch.equal(features.right(7, 8)[0], structure.right_factor[2])


def test_a_cast_structure_keeps_the_digest() -> None:
    for name in NAMES:
        small, full = draw(name, (3, 4), dtype=torch.float32), draw(name, (3, 4))
        assert small.weights_digest() == full.weights_digest()
    structure = structure_of(draw("ortho_cond", (3, 4), dtype=torch.float32))
    assert structure.apply(torch.ones(12)).dtype == torch.float32


def test_digests_tell_structures_apart() -> None:
    draws = [draw(name, shape) for name in NAMES for shape in ((3, 4), (4, 3), (2, 6))]
    draws += [draw("id_cond_minimal", (3, 4), shared_column=1), draw("ortho_cond", (3, 4), seed=1)]
    draws += [draw("fast_ortho_cond", (3, 4), seed=1), draw("fast_ortho_cond", (3, 4), layer="a")]
    draws += [draw("id_cond", (3, 4), density=0.5, seed=seed) for seed in range(3)]
    draws += [draw("id_cond_minimal", (2, 3, 3)), draw("id_cond_minimal", (2, 3, 3), kernel="second")]
    assert len({features.weights_digest() for features in draws}) == len(draws)


def test_a_density_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(InsufficientFeaturesError, match="id_cond needs at least one feature; got none of 6"):
        draw("id_cond", (2, 3), density=1e-12)


def test_a_feature_number_out_of_range_is_refused() -> None:
    with pytest.raises(ValueRangeError, match=r"feature indices .* in \[0, 12\); got 3 to 12"):
        IdCond(3, 4).output_of(torch.tensor([3, 12]))
    with pytest.raises(ValueRangeError, match=r"feature indices .* in \[0, 12\); got -1"):
        IdCond(3, 4).input_of(-1)


@pytest.mark.parametrize("name", NAMES)
def test_gammas_and_matrices_of_another_size_are_refused(name: str) -> None:
    features = draw(name, (3, 4))
    structure = structure_of(features)
    with pytest.raises(ShapeError, match=rf"{name} needs a last dimension of {features.n_features}; got \(7,\)"):
        structure.apply(torch.zeros(7))
    for refuses in (structure.transpose, structure.solve):
        with pytest.raises(ShapeError, match=rf"{name} needs a matrix \(\.\.\., 3, 4\); got shape \(4, 3\)"):
            refuses(torch.zeros(4, 3))


def test_output_gammas_of_another_size_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"output_gamma of id_cond_minimal needs a last dimension of 3; got \(2,\)"):
        IdCondMinimal(3, 4, 3).apply(torch.zeros(10), torch.zeros(2))


@pytest.mark.parametrize("name", NAMES)
def test_frozen_weights_are_laid_out_once(name: str) -> None:
    structure = structure_of(draw(name, (5, 7)))
    assert structure.left(2, 20).is_contiguous()
    assert structure.right(2, 20).is_contiguous()


def test_orthogonal_factors_are_drawn_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drawn = []

    def count(stream: Stream, n: int) -> Any:
        drawn.append((stream.layer, n))
        return haar_matrix(stream, n)

    monkeypatch.setattr(structured, "haar_matrix", count)
    monkeypatch.setattr(structured, "_drawn", OrderedDict())
    target = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).eval()
    result = on.reconstruct(target, torch.rand(4, 7), on.Wide(features="ortho_cond", activation=nn.ReLU()))
    on.save(result, tmp_path / "net")
    loaded = on.load(tmp_path / "net", like=target)
    assert on.verify(target, loaded, torch.rand(4, 7)).is_reproducible
    assert sorted(drawn) == [("0", 5), ("0", 7), ("1", 3), ("1", 5)]


def test_factors_that_were_changed_are_drawn_again() -> None:
    first = OrthoCond.draw(3, 2, seed=0, layer="changed")
    wanted = first.right_factor.clone()
    first.right_factor.mT[0, 1] += 1.0
    again = OrthoCond.draw(3, 2, seed=0, layer="changed")
    assert torch.equal(again.right_factor, wanted)
    assert OrthoCond.draw(3, 2, seed=0, layer="changed") is again


def test_cached_factors_are_bounded_and_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "_drawn", cache := OrderedDict())
    monkeypatch.setattr(structured, "memory_budget", lambda: 8 * 8 * 2 * (16 + 16))
    first, second = (OrthoCond.draw(4, 4, seed=0, layer=name) for name in "ab")
    assert OrthoCond.draw(4, 4, seed=0, layer="a") is first
    OrthoCond.draw(4, 4, seed=0, layer="c")
    assert [key[-1] for key in cache] == ["a", "c"]
    again = OrthoCond.draw(4, 4, seed=0, layer="b")
    assert again is not second
    assert torch.equal(again.left_factor, second.left_factor)
    OrthoCond.draw(40, 40, seed=0, layer="too large to stay")
    assert not cache
