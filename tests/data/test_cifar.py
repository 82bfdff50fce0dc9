"""CIFAR-10 files and the residual network for them; the real ones wherever the data folder is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from onlynorm.data import CIFAR_MEAN, CIFAR_RECORD, CIFAR_STD, cifar10, find_data
from onlynorm.errors import FormatError, MissingDataError, ShapeError
from onlynorm.models import CifarResNet, load_weights


def write_batch(path: Path, labels: list[int]) -> None:
    pixels = np.arange(len(labels) * (CIFAR_RECORD - 1)).reshape(len(labels), -1) % 256
    path.parent.mkdir(parents=True, exist_ok=True)
    np.concatenate([np.array(labels)[:, None], pixels], axis=1).astype(np.uint8).tofile(path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONLYNORM_DATA", str(tmp_path))
    batches = tmp_path / "cifar-10-batches-bin"
    write_batch(batches / "data_batch_1.bin", [3, 1])
    write_batch(batches / "data_batch_2.bin", [7])
    write_batch(batches / "test_batch.bin", [0, 9, 5])
    return batches


@pytest.mark.usefixtures("folder")
def test_any_number_of_batches_and_records_is_read() -> None:
    data = cifar10()
    assert data.train_labels.tolist() == [3, 1, 7]
    assert data.test_labels.tolist() == [0, 9, 5]
    assert data.train_inputs.shape == (3, 3, 32, 32)
    channel, row, column = 2, 5, 7
    pixel = (channel * 1024 + row * 32 + column) % 256 / 255.0
    wanted = (pixel - CIFAR_MEAN[channel]) / CIFAR_STD[channel]
    assert float(data.test_inputs[0, channel, row, column]) == pytest.approx(wanted, rel=1e-5)


def test_a_cut_file_is_refused(folder: Path) -> None:
    path = folder / "test_batch.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FormatError, match=r"whole records of 3073 bytes; got 9218 bytes.*Copy the file again"):
        cifar10()


def test_labels_beyond_nine_are_refused(folder: Path) -> None:
    write_batch(folder / "test_batch.bin", [10])
    with pytest.raises(FormatError, match=r"labels from 0 to 9; got 10"):
        cifar10()


def test_missing_files_say_where_they_belong(folder: Path) -> None:
    (folder / "test_batch.bin").unlink()
    with pytest.raises(MissingDataError, match=r"needs test_batch.bin in cifar-10-batches-bin"):
        cifar10()
    for path in folder.glob("data_batch_*.bin"):
        path.unlink()
    with pytest.raises(MissingDataError, match=r"needs data_batch_1.bin"):
        cifar10()
    with pytest.raises(MissingDataError, match=r"fashion needs to be in the data folder.*set ONLYNORM_DATA"):
        find_data("fashion")


def test_an_empty_data_folder_means_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONLYNORM_DATA", "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(MissingDataError, match=r"got nothing at .*\.cache.onlynorm.nowhere\."):
        find_data("nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    with pytest.raises(MissingDataError, match=r"got nothing at .elsewhere.onlynorm.nowhere\."):
        find_data("nowhere")


@pytest.mark.parametrize("depth", [0, 19, 21])
def test_a_depth_that_makes_no_residual_network_is_refused(depth: int) -> None:
    with pytest.raises(ShapeError, match=r"depth of 6 n \+ 2; got .*Try 20"):
        CifarResNet(depth)


def test_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    save_file({"linear.weight": torch.zeros(10, 64), "head": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(FormatError, match=r"missing .*1 unknown \(head\).*this architecture"):
        load_weights(CifarResNet(8), tmp_path / "other.safetensors")


def test_the_real_network_classifies_the_real_images() -> None:
    try:
        weights, data = find_data("weights/resnet20_cifar10.safetensors"), cifar10()
    except MissingDataError as error:
        pytest.skip(f"no real data: {error}")
    network = load_weights(CifarResNet(20), weights).eval()
    with torch.no_grad():
        right = network(data.test_inputs[:1000]).argmax(1) == data.test_labels[:1000]
    # 91.73 % on all 10,000: three standard errors of 1,000 images below.
    assert float(right.double().mean()) >= 0.9173 - 3 * (0.9173 * 0.0827 / 1000) ** 0.5
