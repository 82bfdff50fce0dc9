"""Alignment with what people have at hand: parameters that train, numbers of any size, seeds of any kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensors import normal
from torch import nn

from onlynorm.alignment import align
from onlynorm.errors import ConversionError, ValueRangeError
from onlynorm.features import draw


@pytest.mark.parametrize("features", [draw("he_normal", (4, 6), excess=0.5), draw("id_cond", (4, 6), density=0.5)])
def test_tensors_that_train_are_aligned_as_their_numbers(features: Any) -> None:
    target = nn.Parameter(normal(4, 6))
    left, right = features.left().requires_grad_(), features.right().requires_grad_()
    found = align(target, left, right)
    wanted = align(target.detach(), features.left(), features.right())
    assert found.permutation.tolist() == wanted.permutation.tolist()
    assert not found.permutation.requires_grad


@pytest.mark.parametrize("size", [1e200, 1e-200])
def test_sizes_that_float64_cannot_square_are_refused(size: float) -> None:
    left, right = normal(4, 10), normal(10, 6, seed=1)
    with pytest.raises(ValueRangeError, match=r"sum of squares .*float64.*Divide the target"):
        align(size * normal(4, 6), left, right)
    with pytest.raises(ValueRangeError, match=r"float64.*feature 0"):
        align(normal(4, 6), size * left, size * right)


@pytest.mark.parametrize("dead", ["left", "right"])
def test_features_that_are_all_zero_miss_everything(dead: str) -> None:
    left, right, target = normal(4, 10), normal(10, 6), normal(4, 6, seed=1)
    found = align(target, left * (dead != "left"), right * (dead != "right"))
    assert found.n_missed == 24
    assert found.error == pytest.approx(1.0)


@pytest.mark.parametrize("seed", [-1, 1.5, True, None, 2**70])
@pytest.mark.parametrize("name", ["he_normal", "id_cond"])
@pytest.mark.usefixtures("unchecked")
def test_a_seed_that_is_none_is_refused_whatever_the_method(seed: Any, name: str) -> None:
    features = draw(name, (4, 6), **({"density": 0.5} if name == "id_cond" else {"excess": 0.5}))
    with pytest.raises(ValueRangeError, match=r"seed .* integer"):
        align(normal(4, 6), features.left(), features.right(), seed=seed)


@pytest.mark.usefixtures("unchecked")
def test_numpy_arrays_are_aligned_and_what_is_not_real_is_named() -> None:
    left, right = normal(2, 3), normal(3, 2)
    found = align(normal(2, 2).numpy(), left.numpy(), right.numpy())  # type: ignore[arg-type]
    assert found.objective == align(normal(2, 2), left, right).objective
    with pytest.raises(ConversionError, match=r"left .*tensor; got 'nope'"):
        align(normal(2, 2), "nope", right)  # type: ignore[arg-type]
    with pytest.raises(ValueRangeError, match=r"target .*real.*; got torch.complex128"):
        align(normal(2, 2).to(torch.complex128), left, right)
