"""Data sets: the digits that come with scikit-learn, and CIFAR-10 in its standard binary format from a data folder.

The folder is `ONLYNORM_DATA`, else `shared/data` beside the checkout. Nothing is downloaded and nothing unpickled.
"""

from __future__ import annotations

import operator
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from onlynorm.errors import FormatError, MissingDataError, ValueRangeError

CIFAR_RECORD = 1 + 3 * 32 * 32
CIFAR_MEAN, CIFAR_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""What the pretrained CIFAR networks were trained with."""


@dataclass(frozen=True)
class Split:
    """A data set cut into a part to learn from and a part to judge by."""

    name: str
    train_inputs: Float[Tensor, "n_train ..."]
    train_labels: Int[Tensor, " n_train"]
    test_inputs: Float[Tensor, "n_test ..."]
    test_labels: Int[Tensor, " n_test"]

    def __str__(self) -> str:
        shape = tuple(self.train_inputs.shape[1:])
        return f"{self.name}: {len(self.train_inputs)} train, {len(self.test_inputs)} test samples of shape {shape}"


def digits(*, seed: int = 0, test_share: float = 0.2) -> Split:
    """1,797 handwritten digits of 8 x 8 pixels, scaled to [0, 1], shuffled by `seed`."""
    from sklearn.datasets import load_digits  # a second to import, which only those who want the digits pay

    generator = seeded(seed)
    if not 0.0 < test_share < 1.0:
        raise ValueRangeError(f"test_share needs to lie in (0, 1); got {test_share}. Try 0.2.")
    raw = load_digits()
    inputs = torch.from_numpy(raw.data).float() / 16.0
    labels = torch.from_numpy(raw.target).long()
    order = torch.randperm(len(inputs), generator=generator)
    # Whatever the share, one sample at least to learn from and one to judge by.
    cut = min(max(round(len(inputs) * (1.0 - test_share)), 1), len(inputs) - 1)
    train, test = order[:cut], order[cut:]
    return Split("digits", inputs[train], labels[train], inputs[test], labels[test])


def cifar10() -> Split:
    """CIFAR-10 images (3, 32, 32), normalised by `CIFAR_MEAN` and `CIFAR_STD`, from however many batches are there."""
    folder = find_data("cifar-10-batches-bin")
    train = sorted(folder.glob("data_batch_*.bin"))
    if not train:
        raise MissingDataError(f"CIFAR-10 needs data_batch_1.bin and so on in {folder.name}; got none. Copy one there.")
    parts = [_read_cifar(path) for path in train]
    test_inputs, test_labels = _read_cifar(folder / "test_batch.bin")
    train_inputs, train_labels = (torch.cat(column) for column in zip(*parts, strict=True))
    return Split("cifar10", train_inputs, train_labels, test_inputs, test_labels)


def find_data(name: str) -> Path:
    """The file or folder of that name in the data folder, or an error that says where it was looked for."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = Path(os.environ["ONLYNORM_DATA"]) if "ONLYNORM_DATA" in os.environ else beside
    if not (folder / name).exists():
        raise MissingDataError(
            f"{name} needs to lie in the data folder; got nothing at {folder / name}. Put it there in its standard "
            "format, or set ONLYNORM_DATA to the folder that holds it."
        )
    return folder / name


def _read_cifar(path: Path) -> tuple[Tensor, Tensor]:
    """Images and labels of one binary batch: records of a label byte and 3,072 pixel bytes."""
    if not path.exists():
        raise MissingDataError(f"CIFAR-10 needs {path.name} in {path.parent.name}; it is not there. Copy it there.")
    raw = np.fromfile(path, dtype=np.uint8)
    if not raw.size or raw.size % CIFAR_RECORD:
        raise FormatError(
            f"{path.name} needs whole records of {CIFAR_RECORD} bytes; got {raw.size} bytes. Copy the file again."
        )
    records = torch.from_numpy(raw).reshape(-1, CIFAR_RECORD)
    if int(records[:, 0].max()) > 9:
        raise FormatError(f"{path.name} needs labels from 0 to 9; got {int(records[:, 0].max())}. Is it CIFAR-10?")
    images = records[:, 1:].reshape(-1, 3, 32, 32).float() / 255.0
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (CIFAR_MEAN, CIFAR_STD))
    return (images - mean) / std, records[:, 0].long()


def seeded(seed: int) -> torch.Generator:
    """A generator of its own for this seed, so that the global one stays as it is."""
    try:
        word = operator.index(seed)
    except TypeError:
        word = -1
    if not 0 <= word < 2**64:
        raise ValueRangeError(f"seed needs a whole number in [0, 2^64); got {seed!r}. Reduce it: seed % 2**64.")
    return torch.Generator().manual_seed(word)
