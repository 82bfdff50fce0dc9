"""Data sets: the digits of scikit-learn, CIFAR-10 and Fashion-MNIST in their standard formats, and files of your own.

The data folder is `ONLYNORM_DATA`, else `shared/data` beside the checkout. Nothing is downloaded, nothing unpickled.
"""

from __future__ import annotations

import gzip
import math
import operator
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from onlynorm.errors import FormatError, MissingDataError, ShapeError, UnknownNameError, ValueRangeError

CIFAR_RECORD = 1 + 3 * 32 * 32
CIFAR_MEAN, CIFAR_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""What the pretrained CIFAR networks were trained with."""
FASHION_MEAN, FASHION_STD = 0.286, 0.353
"""Of the 60,000 training images, scaled to [0, 1]."""


@dataclass(frozen=True)
class Split:
    """A data set cut into a part to learn from and a part to judge by; without labels, those are empty."""

    name: str
    train_inputs: Float[Tensor, "n_train ..."]
    train_labels: Int[Tensor, " n_train"]
    test_inputs: Float[Tensor, "n_test ..."]
    test_labels: Int[Tensor, " n_test"]

    @property
    def has_labels(self) -> bool:
        """Whether the part to judge by says what is right."""
        return len(self.test_labels) > 0

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


def fashion_mnist() -> Split:
    """Fashion-MNIST images (1, 28, 28), normalised by `FASHION_MEAN` and `FASHION_STD`, from its gzipped idx files."""
    folder = find_data("fashion-mnist")
    parts: list[Tensor] = []
    for part in ("train", "t10k"):
        images = _read_idx(folder / f"{part}-images-idx3-ubyte.gz", (28, 28))
        labels = _read_idx(folder / f"{part}-labels-idx1-ubyte.gz", ())
        if len(images) != len(labels) or int(labels.max()) > 9:
            raise FormatError(
                f"Fashion-MNIST needs a label from 0 to 9 for every image; got {len(images)} images and {len(labels)} "
                f"labels up to {int(labels.max())} in its {part} files. Copy both files again."
            )
        parts += [(images[:, None].float() / 255.0 - FASHION_MEAN) / FASHION_STD, labels.long()]
    return Split("fashion_mnist", *parts)


DATA_SETS: dict[str, Callable[[], Split]] = {"digits": digits, "cifar10": cifar10, "fashion_mnist": fashion_mnist}
"""Data sets by name."""


def load_data(spec: str) -> Split:
    """The data set of this name, or the samples in a .safetensors or .npy file.

    A .safetensors file holds `inputs` and, if known, `labels`; `test_inputs` and `test_labels` are what to judge by,
    which is otherwise the same samples again. A .npy file holds the inputs.
    """
    if spec in DATA_SETS:
        return DATA_SETS[spec]()
    path = Path(spec)
    if path.suffix not in (".safetensors", ".npy"):
        raise UnknownNameError("data", spec, (*DATA_SETS, "FILE.safetensors", "FILE.npy"))
    if not path.is_file():
        raise MissingDataError(f"data needs a file; there is none at {path}. Check the path, or take the digits.")
    tensors = _read_npy(path) if path.suffix == ".npy" else _read_tensors(path)
    if "inputs" not in tensors:
        got = ", ".join(sorted(tensors)[:5]) or "nothing"
        raise FormatError(f"{path.name} needs a tensor named inputs; got {got}. Save it under that name.")
    inputs, labels = tensors["inputs"], tensors.get("labels")
    test_inputs, test_labels = tensors.get("test_inputs", inputs), tensors.get("test_labels")
    if "test_inputs" not in tensors and test_labels is None:
        test_labels = labels
    parts = (inputs, _labels_for(inputs, labels, path), test_inputs, _labels_for(test_inputs, test_labels, path))
    return Split(path.name, *parts)


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


def _read_idx(path: Path, sample: tuple[int, ...]) -> Tensor:
    """The bytes of a gzipped idx file whose samples have this shape: a magic number, the sizes, the numbers."""
    if not path.exists():
        raise MissingDataError(
            f"Fashion-MNIST needs {path.name} in {path.parent.name}; it is not there. Copy it there."
        )
    n_axes = 1 + len(sample)
    try:
        with gzip.open(path) as file:
            head = file.read(4 + 4 * n_axes)
            magic, *sizes = np.frombuffer(head, ">u4").tolist() if len(head) == 4 + 4 * n_axes else [0]
            # 8 in the third byte says unsigned bytes, the fourth byte counts the axes.
            if magic != 0x0800 + n_axes or tuple(sizes[1:]) != sample or not sizes[0]:
                raise FormatError(
                    f"{path.name} needs an idx head of unsigned bytes with samples of shape {sample}; got magic number "
                    f"{magic} and sizes {sizes}. Copy the file again."
                )
            wanted = math.prod(sizes)
            raw = file.read(wanted + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise FormatError(
            f"{path.name} needs to be a whole gzip file; got {type(error).__name__}: {error}. Copy the file again."
        ) from error
    if len(raw) != wanted:
        raise FormatError(
            f"{path.name} needs {wanted} bytes after its head; got {'more' if len(raw) > wanted else len(raw)}. "
            "Copy the file again."
        )
    return torch.from_numpy(np.frombuffer(raw, np.uint8).copy()).reshape(sizes)


def _read_npy(path: Path) -> dict[str, Tensor]:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise FormatError(
            f"{path.name} needs a whole .npy file of plain numbers; got {type(error).__name__}: {error}. "
            "Save it with numpy.save and without objects."
        ) from error
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f" or array.dtype.itemsize > 8:
        kind = getattr(array, "dtype", type(array).__name__)  # an .npz in disguise is no array at all
        raise FormatError(f"{path.name} needs floating-point numbers; got {kind}. Save array.astype('float32').")
    return {"inputs": torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))}


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise FormatError(f"{path.name} needs a whole safetensors file; got {error}. Save or copy it again.") from error


def _labels_for(inputs: Tensor, labels: Tensor | None, path: Path) -> Tensor:
    """The labels as whole numbers, one per sample, or none."""
    if not inputs.ndim or not len(inputs) or not inputs.dtype.is_floating_point:
        raise ShapeError(
            f"{path.name} needs floating-point inputs (samples, ...), one sample at least; got {inputs.dtype} of shape "
            f"{tuple(inputs.shape)}. Save inputs.float(), samples first."
        )
    if labels is None:
        return torch.empty(0, dtype=torch.long)
    if labels.shape != inputs.shape[:1] or labels.dtype.is_floating_point:
        raise ShapeError(
            f"{path.name} needs one whole-number label per sample, {len(inputs)}; got {labels.dtype} of shape "
            f"{tuple(labels.shape)}. Save labels.long(), or leave them out."
        )
    return labels.long()


def seeded(seed: int) -> torch.Generator:
    """A generator of its own for this seed, so that the global one stays as it is."""
    try:
        word = operator.index(seed)
    except TypeError:
        word = -1
    if not 0 <= word < 2**64:
        raise ValueRangeError(f"seed needs a whole number in [0, 2^64); got {seed!r}. Reduce it: seed % 2**64.")
    return torch.Generator().manual_seed(word)
