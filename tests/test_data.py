"""The digits: what they look like, how they are cut, and that nobody else's random numbers are spent on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from onlynorm.data import Split, digits, seeded
from onlynorm.errors import ValueRangeError

N_DIGITS = 1797


def rows(split: Split) -> np.ndarray:
    """Every sample of both parts with its label behind it, in an order of their own."""
    inputs = torch.cat([split.train_inputs, split.test_inputs]).numpy()
    labels = torch.cat([split.train_labels, split.test_labels]).numpy()
    whole = np.column_stack([inputs, labels])
    return whole[np.lexsort(whole.T)]


def test_the_digits_have_64_pixels_in_the_unit_interval_and_ten_labels() -> None:
    split = digits()
    assert split.train_inputs.shape == (1438, 64)
    assert split.test_inputs.shape == (359, 64)
    assert split.train_inputs.dtype == split.test_inputs.dtype == torch.float32
    assert split.train_labels.dtype == split.test_labels.dtype == torch.int64
    for inputs in (split.train_inputs, split.test_inputs):
        assert inputs.min() == 0.0
        assert inputs.max() == 1.0
        assert torch.equal((inputs * 16).round(), inputs * 16)
    for labels in (split.train_labels, split.test_labels):
        assert labels.unique().tolist() == list(range(10))


@pytest.mark.parametrize("seed", [0, 7])
def test_every_digit_is_in_exactly_one_part_with_its_own_label(seed: int) -> None:
    raw = load_digits()
    whole = np.column_stack([(raw.data / 16.0).astype(np.float32), raw.target])
    np.testing.assert_array_equal(rows(digits(seed=seed)), whole[np.lexsort(whole.T)])


@settings(max_examples=20)
@given(st.floats(min_value=0.0, max_value=1.0, exclude_min=True, exclude_max=True))
def test_the_test_part_has_its_share_and_neither_part_is_empty(test_share: float) -> None:
    split = digits(test_share=test_share)
    n_train, n_test = len(split.train_inputs), len(split.test_inputs)
    assert n_train + n_test == N_DIGITS
    assert min(n_train, n_test) >= 1
    assert abs(n_test - test_share * N_DIGITS) <= 1.0
    assert len(split.train_labels) == n_train
    assert len(split.test_labels) == n_test


def test_equal_seeds_give_equal_splits_and_different_seeds_do_not() -> None:
    first, again, other = digits(seed=3), digits(seed=3), digits(seed=4)
    assert torch.equal(first.train_inputs, again.train_inputs)
    assert torch.equal(first.test_labels, again.test_labels)
    assert not torch.equal(first.train_inputs, other.train_inputs)


def test_the_global_generators_are_left_alone() -> None:
    before, before_numpy = torch.get_rng_state(), np.random.get_state()[1].copy()
    digits(seed=5)
    seeded(6)
    assert torch.equal(torch.get_rng_state(), before)
    np.testing.assert_array_equal(np.random.get_state()[1], before_numpy)


def test_a_split_says_its_name_sizes_and_shape() -> None:
    assert str(digits()) == "digits: 1438 train, 359 test samples of shape (64,)"


@pytest.mark.parametrize("test_share", [0.0, 1.0, -0.2, 1.5, float("nan")])
def test_a_share_outside_the_open_unit_interval_is_refused(test_share: float) -> None:
    with pytest.raises(ValueRangeError, match=r"test_share needs to lie in \(0, 1\); got .*Try 0\.2"):
        digits(test_share=test_share)


@pytest.mark.parametrize("seed", [-1, 2**64, 10**30, 0.5, "0", None])
def test_a_seed_that_is_no_word_of_64_bits_is_refused(seed: object) -> None:
    with pytest.raises(ValueRangeError, match=r"seed needs a whole number in \[0, 2\^64\); got "):
        digits(seed=seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [0, 2**64 - 1, np.int64(3)])
def test_seeded_starts_the_stream_of_its_seed(seed: int) -> None:
    reference = torch.Generator().manual_seed(int(seed))
    assert torch.equal(torch.rand(5, generator=seeded(seed)), torch.rand(5, generator=reference))
