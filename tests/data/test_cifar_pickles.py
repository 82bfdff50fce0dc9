"""CIFAR as files for Python: read as every pickle protocol writes them, and no pickle gets to run anything."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onlynorm.data import CIFAR_MEAN, CIFAR_STD, cifar10, cifar100
from onlynorm.data.plain_pickle import read_plain
from onlynorm.errors import FormatError, MissingDataError


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
    with pytest.raises(MissingDataError, match=r"cifar-100-binary needs to be in the data folder"):
        cifar100()
    with pytest.raises(MissingDataError, match=r"cifar-10-batches-bin needs to be in the data folder"):
        cifar10()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"data": pixels(2), "fine_labels": [1]}, r"one label per image, 2; got 1 labels"),
        ({"data": pixels(2), "fine_labels": [1, 100]}, r"labels from 0 to 99; got 100\. Is it CIFAR-100"),
        ({"data": pixels(2), "fine_labels": [1, -1]}, r"one label per image"),
        ({"data": pixels(2), "fine_labels": [1, 10**30]}, r"one label per image"),
        ({"data": pixels(2), "fine_labels": [1, 0.5]}, r"fine_labels, .*; got 'data', 'fine_labels'"),
        ({"data": pixels(2), "labels": [1, 2]}, r"fine_labels, .*; got 'data', 'labels'"),
        ({"data": pixels(2)[:, 1:], "fine_labels": [1, 2]}, r"an array \(n, 3072\) of bytes"),
        ({"data": pixels(2).astype(np.float32), "fine_labels": [1, 2]}, r"an array that is not of bytes"),
        ({"data": np.array([{}, 1], dtype=object), "fine_labels": [1, 2]}, r"an array that is not of bytes"),
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
        (b"\x80\x02Nr\xff\xff\xff\x7f.", r"memo index 2147483647 after 2 operations"),
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


def test_names_and_arrays_inside_of_something_else_are_refused() -> None:
    for raw in (b"cnumpy\nndarray\n.", b"]cnumpy\nndarray\na.", b"\x80\x02}U\x01acnumpy\nndarray\n\x85s."):
        with pytest.raises(FormatError, match=r"an array or a name inside"):
            read_plain(raw, name="train")
    nested = pickle.dumps({"a": [pixels(1)]}, protocol=2)
    with pytest.raises(FormatError, match=r"an array or a name inside"):
        read_plain(nested, name="train")
    shared = b"\x80\x02]" + b"".join(
        b"q" + bytes([i]) + b"](h" + bytes([i]) + b"h" + bytes([i]) + b"e" for i in range(60)
    )
    assert isinstance(read_plain(shared + b".", name="x"), list)  # 2^60 lists, if each were looked at once per place


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
