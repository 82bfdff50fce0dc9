"""Data sets: what they look like, how they are cut, files that are refused, and nobody else's random numbers spent."""

from __future__ import annotations

import gzip
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from sklearn.datasets import load_digits

from onlynorm.data import (
    CIFAR_MEAN,
    CIFAR_STD,
    DATA_SETS,
    FASHION_MEAN,
    FASHION_STD,
    Split,
    cifar10,
    cifar100,
    digits,
    fashion_mnist,
    load_data,
    seeded,
    teacher,
)
from onlynorm.data.plain_pickle import read_plain
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


# ---------------------------------------------------------------------------------------------- CIFAR


def pixels(n: int) -> np.ndarray:
    """Pixels of n images, every byte occurring."""
    return (np.arange(n * 3072) * 7 % 256).astype(np.uint8).reshape(n, 3072)


def images(n: int) -> torch.Tensor:
    """The same as they should come out."""
    raw = torch.from_numpy(pixels(n)).reshape(n, 3, 32, 32).float() / 255.0
    return (raw - torch.tensor(CIFAR_MEAN).reshape(3, 1, 1)) / torch.tensor(CIFAR_STD).reshape(3, 1, 1)


def as_python_2(content: dict[str, Any]) -> bytes:
    """A pickle as Python 2 with an old numpy wrote it: byte strings for text and for pixels."""
    out = io.BytesIO()
    out.write(b"\x80\x02}q\x01(")
    for key, value in content.items():
        out.write(b"U" + bytes([len(key)]) + key.encode())
        if isinstance(value, np.ndarray):
            out.write(
                b"cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85U\x01b\x87Rq\x04(K\x01"
            )
            out.write(b"M" + len(value).to_bytes(2, "little") + b"M" + (3072).to_bytes(2, "little") + b"\x86")
            out.write(
                b"cnumpy\ndtype\nq\x05U\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
            )
            out.write(b"\x89T" + value.size.to_bytes(4, "little") + value.tobytes() + b"tb")
        else:
            out.write(b"](" + b"".join(b"K" + bytes([label]) for label in value) + b"e")
    out.write(b"u.")
    return out.getvalue()


PICKLERS = {
    "python 2": as_python_2,
    **{f"protocol {n}": lambda content, n=n: pickle.dumps(content, protocol=n) for n in range(6)},
    "byte keys": lambda content: pickle.dumps({key.encode(): value for key, value in content.items()}, protocol=2),
    "fortran": lambda content: pickle.dumps(
        {k: np.asfortranarray(v) if isinstance(v, np.ndarray) else v for k, v in content.items()}, protocol=4
    ),
}


@pytest.fixture
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder."""
    monkeypatch.setenv("ONLYNORM_DATA", str(tmp_path))
    return tmp_path


def test_the_pickle_of_python_2_is_one_that_pickle_itself_reads() -> None:
    read = pickle.loads(as_python_2({"data": pixels(2), "labels": [3, 9]}), encoding="bytes")
    np.testing.assert_array_equal(read[b"data"], pixels(2))
    assert read[b"labels"] == [3, 9]


@pytest.mark.parametrize("how", PICKLERS)
def test_cifar_10_is_read_from_the_files_for_python(data_folder: Path, how: str) -> None:
    folder = data_folder / "cifar-10-batches-py"
    folder.mkdir()
    for name, labels in (("data_batch_1", [3, 1]), ("data_batch_2", [7]), ("test_batch", [0, 9, 5])):
        content = {"data": pixels(len(labels)), "labels": labels}
        (folder / name).write_bytes(PICKLERS[how](content))
    (folder / "data_batch_1.html").write_text("not a batch")
    split = cifar10()
    assert split.train_labels.tolist() == [3, 1, 7]
    assert split.test_labels.tolist() == [0, 9, 5]
    assert torch.equal(split.test_inputs, images(3))
    assert torch.equal(split.train_inputs, torch.cat([images(2), images(1)]))


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("is_binary", [False, True])
def test_cifar_100_has_fine_and_coarse_labels_in_both_formats(data_folder: Path, coarse: bool, is_binary: bool) -> None:
    folder = data_folder / ("cifar-100-binary" if is_binary else "cifar-100-python")
    folder.mkdir()
    for name, rough, fine in (("train", [19, 0, 4], [99, 0, 51]), ("test", [2, 3], [10, 20])):
        if is_binary:
            records = np.column_stack([rough, fine, pixels(len(fine))]).astype(np.uint8)
            records.tofile(folder / f"{name}.bin")
        else:
            content = {"data": pixels(len(fine)), "fine_labels": fine, "coarse_labels": rough}
            (folder / name).write_bytes(as_python_2(content))
    split = cifar100(coarse=coarse)
    assert split.train_labels.tolist() == ([19, 0, 4] if coarse else [99, 0, 51])
    assert split.test_labels.tolist() == ([2, 3] if coarse else [10, 20])
    assert torch.equal(split.train_inputs, images(3))
    assert torch.equal(split.test_inputs, images(2))


@pytest.mark.usefixtures("data_folder")
def test_without_cifar_the_binary_folder_is_asked_for() -> None:
    with pytest.raises(MissingDataError, match=r"cifar-100-binary needs to lie in the data folder"):
        cifar100()
    with pytest.raises(MissingDataError, match=r"cifar-10-batches-bin needs to lie in the data folder"):
        cifar10()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"data": pixels(2), "fine_labels": [1]}, r"one label per image, 2; got 1 labels"),
        ({"data": pixels(2), "fine_labels": [1, 100]}, r"labels from 0 to 99; got 100\. Is it CIFAR-100"),
        ({"data": pixels(2), "fine_labels": [1, -1]}, r"one label per image"),
        ({"data": pixels(2), "fine_labels": [1, 10**30]}, r"one label per image"),
        ({"data": pixels(2), "fine_labels": [1, 0.5]}, r"fine_labels, a list of numbers; got 'data', 'fine_labels'"),
        ({"data": pixels(2), "labels": [1, 2]}, r"fine_labels, a list of numbers; got 'data', 'labels'"),
        ({"data": pixels(2)[:, 1:], "fine_labels": [1, 2]}, r"an array \(n, 3072\) of bytes"),
        ({"data": pixels(2).astype(np.float32), "fine_labels": [1, 2]}, r"an array of something other than bytes"),
        ({"data": np.array([{}, 1], dtype=object), "fine_labels": [1, 2]}, r"an array of something other than bytes"),
        ([1, 2], r"got list"),
    ],
)
def test_files_for_python_that_are_not_cifar_are_refused(data_folder: Path, content: object, message: str) -> None:
    folder = data_folder / "cifar-100-python"
    folder.mkdir()
    (folder / "train").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(FormatError, match=message):
        cifar100()


class Runs:
    """Unpickling it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_would_run_something_is_refused_unrun(tmp_path: Path, protocol: int) -> None:
    raw = pickle.dumps({"data": pixels(1), "labels": [Runs(tmp_path / "ran")]}, protocol=protocol)
    with pytest.raises(FormatError, match=r"train needs a pickle of plain lists, dicts and arrays; got Unpickling"):
        read_plain(raw, name="train")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", r"the name os\.system"),
        (b"cbuiltins\neval\n(S'1'\ntR.", r"the name builtins\.eval"),
        (b"(S'true'\nios\nsystem\n.", r"the operation INST"),
        (b"(cos\nsystem\nS'true'\no.", r"the operation OBJ"),
        (b"\x80\x02cnumpy\nndarray\n)\x81.", r"the operation NEWOBJ"),
        (b"\x80\x02cnumpy\nndarray\n)R.", r"a call of ndarray"),
        (b"\x80\x02cnumpy\ndtype\n}(U\x01aK\x01ub.", r"a change of a name"),
        (b"\x80\x02c_codecs\nencode\nU\x01aU\x03zip\x86R.", r"a call of encode"),
        (b"\x80\x02cbuiltins\nbytes\nJ\xff\xff\xff\x7f\x85R.", r"a call of bytes"),
        (b"\x80\x02Nr\xff\xff\xff\x7f.", r"place 2147483647 of the memo after 2 operations"),
        (b"\x80\x02\x82\x01.", r"the operation EXT1"),
        (b"\x80\x02Pname\n.", r"the operation PERSID"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\x00\x00\x00.", r"got ValueError: expected"),
        (b"\x80\x02]", r"got ValueError"),
        (b"\x80\x02h\x05.", r"got UnpicklingError: Memo value not found"),
        (b"\x80\x02t.", r"got UnpicklingError"),
        (b"", r"got ValueError"),
        (b"no pickle at all", r"needs a pickle of plain"),
    ],
)
def test_hostile_and_broken_pickles_are_refused(raw: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read_plain(raw, name="train")


def is_plain(value: object) -> bool:
    """Whether there is nothing but numbers, texts, bytes, arrays and containers of them."""
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | bytes | bytearray | np.ndarray)


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_pickle_is_read_or_refused_and_nothing_else(draw: st.DataObject) -> None:
    raw = bytearray(as_python_2({"data": pixels(1), "labels": [3]}))
    heads = [i for i in range(len(raw)) if i < 150 or i > len(raw) - 20]
    for place in draw.draw(st.lists(st.sampled_from(heads), min_size=1, max_size=3)):
        raw[place] = draw.draw(st.integers(0, 255))
    try:
        found = read_plain(bytes(raw), name="train")
    except FormatError:
        return
    assert is_plain(found)


def test_an_array_is_as_long_as_it_says() -> None:
    raw = as_python_2({"data": pixels(2)}).replace(b"M\x02\x00M", b"M\x03\x00M")
    with pytest.raises(FormatError, match=r"6144 bytes for an array of shape \(3, 3072\)"):
        read_plain(raw, name="train")


@settings(max_examples=50)
@given(
    st.dictionaries(
        st.text(max_size=5),
        st.one_of(
            st.integers(), st.text(), st.binary(), st.floats(allow_nan=False), st.lists(st.integers()), st.none()
        ),
    ),
    st.integers(3, 5),
)
def test_plain_content_is_read_as_pickle_reads_it(content: dict[str, Any], protocol: int) -> None:
    assert read_plain(pickle.dumps(content, protocol=protocol), name="x") == content


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
    with pytest.raises(ValueRangeError, match=r"teacher needs two widths or more.*Try \(64, 64, 10\)"):
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
