"""Data sets: what they look like, how they are cut, files of one's own, and nobody else's random numbers spent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from sklearn.datasets import load_digits

from onlynorm.data import DATA_SETS, Split, digits, load_data, teacher
from onlynorm.errors import FormatError, MissingDataError, ShapeError, UnknownNameError, ValueRangeError
from onlynorm.seeds import seeded

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


def test_images_are_averaged_down_and_never_up() -> None:
    images, labels = torch.randn(6, 3, 8, 8, generator=seeded(0)), torch.arange(6)
    split = Split("toy", images[:4], labels[:4], images[4:], labels[4:])
    made = split.smaller(4)
    assert (made.train_inputs.shape, made.test_inputs.shape) == ((4, 3, 4, 4), (2, 3, 4, 4))
    assert torch.allclose(made.test_inputs[1, 1, 0, 2], images[5, 1, 0:2, 4:6].mean())
    assert made.train_labels is split.train_labels
    assert split.smaller(16) is split
    tall = Split("tall", images.reshape(6, 3, 16, 4)[:4], labels[:4], images.reshape(6, 3, 16, 4)[4:], labels[4:])
    assert tall.smaller(2).train_inputs.shape == (4, 3, 8, 2)


def test_a_split_says_its_name_sizes_and_shape() -> None:
    assert str(digits()) == "digits: 1438 train, 359 test samples of shape (64,)"


@pytest.mark.parametrize("test_share", [0.0, 1.0, -0.2, 1.5, float("nan")])
def test_a_share_outside_the_open_unit_interval_is_refused(test_share: float) -> None:
    with pytest.raises(ValueRangeError, match=r"test_share .* in \(0, 1\); got .*Try 0\.2"):
        digits(test_share=test_share)


@pytest.mark.parametrize("seed", [-1, 2**64, 10**30, 0.5, "0", None])
def test_a_seed_that_is_no_word_of_64_bits_is_refused(seed: object) -> None:
    with pytest.raises(ValueRangeError, match=r"seed .* integer in \[0, 2\^64\); got "):
        digits(seed=seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [0, 2**64 - 1, np.int64(3)])
def test_seeded_starts_the_stream_of_its_seed(seed: int) -> None:
    reference = torch.Generator().manual_seed(int(seed))
    assert torch.equal(torch.rand(5, generator=seeded(seed)), torch.rand(5, generator=reference))


# ---------------------------------------------------------------------------------------------- teachers


def test_a_teacher_labels_gaussian_inputs_by_a_function_of_them() -> None:
    split = teacher((20, 16, 4), n_train=3000, n_test=500, seed=2)
    assert split.train_inputs.shape == (3000, 20)
    assert split.test_inputs.shape == (500, 20)
    assert split.train_labels.unique().tolist() == [0, 1, 2, 3]
    # 60,000 numbers: mean and deviation within five standard errors.
    assert abs(float(split.train_inputs.mean())) <= 5 / 60_000**0.5
    assert abs(float(split.train_inputs.std()) - 1.0) <= 5 / 120_000**0.5
    longer = teacher((20, 16, 4), n_train=4000, n_test=600, seed=2)
    assert torch.equal(longer.train_inputs[:3000], split.train_inputs)
    assert torch.equal(longer.train_labels[:3000], split.train_labels)
    assert torch.equal(longer.test_labels[:500], split.test_labels)


def test_a_teacher_without_hidden_layers_is_linear() -> None:
    split = teacher((6, 2), n_train=2000, n_test=10, seed=1)
    signs = split.train_labels.double() * 2 - 1
    solution = torch.linalg.lstsq(split.train_inputs.double(), signs[:, None]).solution
    agreement = ((split.train_inputs.double() @ solution).squeeze() > 0) == (signs > 0)
    assert float(agreement.double().mean()) >= 0.97, "a line through the origin almost separates the classes"


def test_a_teacher_is_a_function_of_its_seed_and_moves_no_other_generator() -> None:
    before = torch.get_rng_state()
    first, again, other = (teacher((5, 3), n_train=50, n_test=5, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.train_inputs, again.train_inputs)
    assert torch.equal(first.train_labels, again.train_labels)
    assert not torch.equal(first.train_inputs, other.train_inputs)
    assert not torch.equal(first.train_inputs[:5], first.test_inputs)


@pytest.mark.parametrize("options", [{"widths": (3,)}, {"widths": (3, 1)}, {"widths": (0, 2)}, {"n_test": 0}])
def test_teachers_that_teach_nothing_are_refused(options: dict[str, Any]) -> None:
    message = rf"{next(iter(options))} (needs|must)|two classes; got \(3, 1\)"
    with pytest.raises((ShapeError, ValueRangeError), match=message):
        teacher(**options)


# ---------------------------------------------------------------------------------------------- by name and by file


def test_every_data_set_is_known_by_its_name() -> None:
    assert set(DATA_SETS) == {"digits", "cifar10", "cifar100", "fashion_mnist", "teacher"}
    assert load_data("teacher").train_inputs.shape == (4000, 64)


def test_a_name_gives_its_data_set() -> None:
    assert torch.equal(load_data("digits").test_inputs, digits().test_inputs)
    with pytest.raises(UnknownNameError, match=r"data needs a known name; got 'digit'\. Did you mean 'digits'"):
        load_data("digit")


def test_a_file_of_tensors_is_data(tmp_path: Path) -> None:
    path = tmp_path / "own.safetensors"
    inputs, labels = torch.rand(5, 3), torch.arange(5)
    save_file({"inputs": inputs, "labels": labels}, path)
    split = load_data(str(path))
    assert torch.equal(split.train_inputs, inputs)
    assert torch.equal(split.test_inputs, inputs)
    assert torch.equal(split.test_labels, labels)
    assert split.has_labels
    save_file({"inputs": inputs, "labels": labels, "test_inputs": inputs[:2].clone()}, path)
    split = load_data(str(path))
    assert torch.equal(split.test_inputs, inputs[:2])
    assert not split.has_labels  # the labels belong to the other samples


@pytest.mark.parametrize("kind", ["<f4", ">f8"])
def test_a_file_of_one_array_is_inputs(tmp_path: Path, kind: str) -> None:
    array = np.linspace(0.0, 1.0, 12).reshape(4, 3).astype(kind)
    np.save(tmp_path / "own.npy", array)
    split = load_data(str(tmp_path / "own.npy"))
    np.testing.assert_array_equal(split.train_inputs.numpy(), array)
    assert not split.has_labels


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({"x": torch.rand(2, 3)}, FormatError, r"needs a tensor named inputs; got x\. Save it under that name"),
        ({"inputs": torch.ones(2, 3, dtype=torch.uint8)}, ShapeError, r"floating-point inputs .*got torch.uint8"),
        ({"inputs": torch.rand(0, 3)}, ShapeError, r"at least one; got torch.float32 of shape \(0, 3\)"),
        ({"inputs": torch.rand(2, 3), "labels": torch.arange(3)}, ShapeError, r"label per sample, 2; got .*\(3,\)"),
        ({"inputs": torch.rand(2, 3), "labels": torch.rand(2)}, ShapeError, r"label.*got torch.float32"),
    ],
)
def test_tensors_that_are_no_data_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], error: type[Exception], message: str
) -> None:
    save_file(tensors, tmp_path / "own.safetensors")
    with pytest.raises(error, match=message):
        load_data(str(tmp_path / "own.safetensors"))


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"data needs a file; got none at .*own.npy"):
        load_data(str(tmp_path / "own.npy"))
    for name in ("own.npy", "own.safetensors"):
        (tmp_path / name).write_bytes(b"no such format")
        with pytest.raises(FormatError, match=f"{name} needs "):
            load_data(str(tmp_path / name))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([{"a": 1}], dtype=object), r"; got ValueError.*without objects"),
        (np.arange(6).reshape(2, 3), r"floating-point .*; got int64\. Save array.astype"),
        (np.array(["a", "b"]), r"; got ValueError: <U1 instead of real"),
    ],
)
def test_arrays_of_anything_but_numbers_are_refused_and_never_unpickled(
    tmp_path: Path, array: np.ndarray, message: str
) -> None:
    np.save(tmp_path / "own.npy", array, allow_pickle=True)
    with pytest.raises(FormatError, match=message):
        load_data(str(tmp_path / "own.npy"))
