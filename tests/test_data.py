"""Data sets: what they look like, how they are cut, files that are refused, and nobody else's random numbers spent."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from sklearn.datasets import load_digits

from onlynorm.data import FASHION_MEAN, FASHION_STD, Split, digits, fashion_mnist, load_data, seeded
from onlynorm.errors import FormatError, MissingDataError, ShapeError, UnknownNameError, ValueRangeError

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


# ---------------------------------------------------------------------------------------------- Fashion-MNIST


def idx(values: np.ndarray, *, magic: int | None = None) -> bytes:
    """The bytes of an idx file: magic number, sizes, numbers."""
    head = [0x0800 + values.ndim if magic is None else magic, *values.shape]
    return np.array(head, ">u4").tobytes() + values.astype(np.uint8).tobytes()


@pytest.fixture
def fashion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small Fashion-MNIST in a data folder of its own."""
    monkeypatch.setenv("ONLYNORM_DATA", str(tmp_path))
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    for part, labels in (("train", [3, 1, 9]), ("t10k", [0, 5])):
        images = np.arange(len(labels) * 784).reshape(-1, 28, 28) % 256
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.array(labels))))
    return folder


@pytest.mark.usefixtures("fashion")
def test_fashion_mnist_is_read_from_its_idx_files() -> None:
    split = fashion_mnist()
    assert split.train_labels.tolist() == [3, 1, 9]
    assert split.test_labels.tolist() == [0, 5]
    assert split.train_inputs.shape == (3, 1, 28, 28)
    sample, row, column = 1, 5, 7
    pixel = (sample * 784 + row * 28 + column) % 256 / 255.0
    wanted = (pixel - FASHION_MEAN) / FASHION_STD
    assert float(split.train_inputs[sample, 0, row, column]) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("part", "damage", "message"),
    [
        ("images-idx3", lambda raw: gzip.compress(raw[:-1]), r"needs 2352 bytes after its head; got 2351\. Copy"),
        ("images-idx3", lambda raw: gzip.compress(raw + b"0"), r"needs 2352 bytes after its head; got more\. Copy"),
        ("images-idx3", lambda raw: gzip.compress(raw)[:-9], r"whole gzip file; got EOFError"),
        ("images-idx3", lambda raw: raw, r"whole gzip file; got BadGzipFile"),
        ("images-idx3", lambda raw: gzip.compress(raw[:7]), r"an idx head .*got magic number 0"),
        ("images-idx3", lambda raw: gzip.compress(idx(np.zeros((3, 28, 27)))), r"shape \(28, 28\).*\[3, 28, 27\]"),
        ("images-idx3", lambda raw: gzip.compress(idx(np.zeros((3, 28, 28)), magic=0x0D03)), r"magic number 3331"),
        ("labels-idx1", lambda raw: gzip.compress(idx(np.array([1, 2]))), r"got 3 images and 2 labels up to 2"),
        ("labels-idx1", lambda raw: gzip.compress(idx(np.array([1, 2, 10]))), r"from 0 to 9 .* labels up to 10"),
        ("labels-idx1", lambda raw: gzip.compress(idx(np.zeros(0))), r"sizes \[0\]"),
    ],
)
def test_a_damaged_idx_file_is_refused(fashion: Path, part: str, damage: object, message: str) -> None:
    path = fashion / f"train-{part}-ubyte.gz"
    path.write_bytes(damage(gzip.decompress(path.read_bytes())))  # type: ignore[operator]
    with pytest.raises(FormatError, match=message):
        fashion_mnist()


def test_a_missing_idx_file_says_where_it_belongs(fashion: Path) -> None:
    (fashion / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(MissingDataError, match=r"needs t10k-labels-idx1-ubyte.gz in fashion-mnist"):
        fashion_mnist()


def test_the_real_fashion_mnist_has_the_statistics_it_is_normalised_by() -> None:
    try:
        split = fashion_mnist()
    except MissingDataError as error:
        pytest.skip(f"no real data: {error}")
    assert (len(split.train_inputs), len(split.test_inputs)) == (60_000, 10_000)
    assert split.train_labels.bincount().tolist() == [6000] * 10
    # Mean and deviation are given to three digits, relative to a deviation of 0.353.
    assert abs(float(split.train_inputs.mean())) <= 0.0005 / FASHION_STD
    assert abs(float(split.train_inputs.std()) - 1.0) <= 0.0005 / FASHION_STD


# ---------------------------------------------------------------------------------------------- by name and by file


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
        ({"inputs": torch.rand(0, 3)}, ShapeError, r"one sample at least; got torch.float32 of shape \(0, 3\)"),
        ({"inputs": torch.rand(2, 3), "labels": torch.arange(3)}, ShapeError, r"label per sample, 2; got .*\(3,\)"),
        ({"inputs": torch.rand(2, 3), "labels": torch.rand(2)}, ShapeError, r"whole-number label.*got torch.float32"),
    ],
)
def test_tensors_that_are_no_data_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], error: type[Exception], message: str
) -> None:
    save_file(tensors, tmp_path / "own.safetensors")
    with pytest.raises(error, match=message):
        load_data(str(tmp_path / "own.safetensors"))


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"data needs a file; there is none at .*own.npy"):
        load_data(str(tmp_path / "own.npy"))
    for name in ("own.npy", "own.safetensors"):
        (tmp_path / name).write_bytes(b"no such format")
        with pytest.raises(FormatError, match=f"{name} needs a whole"):
            load_data(str(tmp_path / name))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([{"a": 1}], dtype=object), r"plain numbers; got ValueError.*without objects"),
        (np.arange(6).reshape(2, 3), r"floating-point numbers; got int64\. Save array.astype"),
        (np.array(["a", "b"]), r"floating-point numbers; got <U1"),
    ],
)
def test_arrays_of_anything_but_numbers_are_refused_and_never_unpickled(
    tmp_path: Path, array: np.ndarray, message: str
) -> None:
    np.save(tmp_path / "own.npy", array, allow_pickle=True)
    with pytest.raises(FormatError, match=message):
        load_data(str(tmp_path / "own.npy"))
