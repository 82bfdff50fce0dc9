"""Fashion-MNIST from its idx files, damaged ones refused; the real one wherever the data folder is."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from onlynorm.data import FASHION_MEAN, FASHION_STD, fashion_mnist
from onlynorm.errors import FormatError, MissingDataError


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
        ("images-idx3", lambda raw: gzip.compress(raw[:-1]), r"needs 2352 bytes after its header; got 2351\. Copy"),
        ("images-idx3", lambda raw: gzip.compress(raw + b"0"), r"needs 2352 bytes after its header; got more\. Copy"),
        ("images-idx3", lambda raw: gzip.compress(raw)[:-9], r"gzip file; got EOFError"),
        ("images-idx3", lambda raw: raw, r"gzip file; got BadGzipFile"),
        ("images-idx3", lambda raw: gzip.compress(raw[:7]), r"an idx header .*got magic number 0"),
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
