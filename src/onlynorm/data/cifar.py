"""CIFAR-10 and CIFAR-100, from their binary or Python versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onlynorm.data.plain_pickle import read_plain
from onlynorm.data.split import Split, find_data
from onlynorm.errors import FormatError, MissingDataError
from onlynorm.storage import read_file

_PIXELS = 3 * 32 * 32
CIFAR_RECORD = 1 + _PIXELS
CIFAR_MEAN, CIFAR_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Normalization of the pretrained CIFAR networks."""


def cifar10() -> Split:
    """CIFAR-10 images (3, 32, 32), normalized by `CIFAR_MEAN` and `CIFAR_STD`, from all available batches.

    The folder is `cifar-10-batches-bin`, else `cifar-10-batches-py`.

    Examples:
        >>> import onlynorm as on
        >>> from onlynorm.data import cifar10
        >>> try:
        ...     print(cifar10().train_inputs.shape)
        ... except on.errors.MissingDataError as error:  # unless `onlynorm data get cifar10` was run
        ...     print(error)
        cifar-10-batches-bin needs to be in the data folder; got nothing at ... Run `onlynorm data get cifar10`...
    """
    folder, is_binary = _find("cifar-10-batches-bin", "cifar-10-batches-py", get="cifar10")
    ending = ".bin" if is_binary else ""
    train = sorted(path for path in folder.glob(f"data_batch_*{ending}") if is_binary or not path.suffix)
    if not train:
        raise MissingDataError(
            f"CIFAR-10 needs data_batch_1{ending} or more in {folder.name}; got none. Run `onlynorm data get "
            "cifar10`, or copy one there."
        )
    files = [*train, folder / f"test_batch{ending}"]
    parts = [
        _read_binary(path, what="CIFAR-10", n_classes=10) if is_binary
        else _read_python(path, what="CIFAR-10", labels="labels", n_classes=10)
        for path in files
    ]  # fmt: skip
    train_inputs, train_labels = (torch.cat(column) for column in zip(*parts[:-1], strict=True))
    return Split("cifar10", train_inputs, train_labels, *parts[-1])


def cifar100(*, coarse: bool = False) -> Split:
    """CIFAR-100 images (3, 32, 32), normalized as in `cifar10`, with 100 fine or 20 coarse labels.

    The folder is `cifar-100-binary`, else `cifar-100-python`.

    Examples:
        >>> import onlynorm as on
        >>> from onlynorm.data import cifar100
        >>> try:
        ...     print(cifar100(coarse=True).train_inputs.shape)
        ... except on.errors.MissingDataError as error:  # unless `onlynorm data get cifar100` was run
        ...     print(error)
        cifar-100-binary needs to be in the data folder; got nothing at ... Run `onlynorm data get cifar100`...
    """
    folder, is_binary = _find("cifar-100-binary", "cifar-100-python", get="cifar100")
    n_classes, column = (20, 0) if coarse else (100, 1)
    name = "cifar100_coarse" if coarse else "cifar100"
    if is_binary:
        parts = [
            _read_binary(folder / f"{part}.bin", what="CIFAR-100", n_classes=n_classes, n_labels=2, column=column)
            for part in ("train", "test")
        ]
    else:
        labels = "coarse_labels" if coarse else "fine_labels"
        parts = [
            _read_python(folder / part, what="CIFAR-100", labels=labels, n_classes=n_classes)
            for part in ("train", "test")
        ]
    return Split(name, *parts[0], *parts[1])


def _find(binary: str, python: str, *, get: str) -> tuple[Path, bool]:
    """(folder, is_binary); the binary folder if both or neither exist."""
    try:
        return find_data(binary), True
    except MissingDataError:
        try:
            return find_data(python), False
        except MissingDataError:
            return find_data(binary, get=get), True  # raises with the name of the preferred folder


def _read_binary(path: Path, *, what: str, n_classes: int, n_labels: int = 1, column: int = 0) -> tuple[Tensor, Tensor]:
    """Images and labels of one binary file: records of label bytes and 3,072 pixel bytes."""
    _need_file(path, what)
    raw = np.frombuffer(bytearray(read_file(path, what=what)), dtype=np.uint8)
    record = n_labels + _PIXELS
    if not raw.size or raw.size % record:
        raise FormatError(
            f"{path.name} needs whole records of {record} bytes; got {raw.size} bytes. Copy the file again."
        )
    records = torch.from_numpy(raw).reshape(-1, record)
    labels = records[:, column].long()
    _need_labels(labels, path, what, n_classes)
    return _normalize(records[:, n_labels:]), labels


def _read_python(path: Path, *, what: str, labels: str, n_classes: int) -> tuple[Tensor, Tensor]:
    """Images and labels of one Python file: a pickled dict with an array of pixels and a list of labels."""
    _need_file(path, what)
    found = read_plain(read_file(path, what=what), name=path.name)
    content: dict[Any, Any] = found if isinstance(found, dict) else {}
    pixels, given = (content.get(key.encode(), content.get(key)) for key in ("data", labels))
    is_sound = isinstance(pixels, np.ndarray) and pixels.shape[1:] == (_PIXELS,) and len(pixels) > 0
    if not is_sound or not isinstance(given, list) or not all(type(label) is int for label in given):
        raise FormatError(
            f"{path.name} needs a dict with data, an array (n, {_PIXELS}) of bytes, and {labels}, a list of integers; "
            f"got {_keys(content) or type(found).__name__}. Copy the file again."
        )
    assert isinstance(pixels, np.ndarray)
    if len(given) != len(pixels) or max(given) >= 2**31 or min(given) < 0:
        raise FormatError(
            f"{path.name} needs one label per image, {len(pixels)}; got {len(given)} labels. Copy the file again."
        )
    made = torch.tensor(given)
    _need_labels(made, path, what, n_classes)
    return _normalize(torch.from_numpy(np.array(pixels, order="C"))), made


def _keys(content: dict[Any, Any]) -> str:
    return ", ".join(repr(key)[:40] for key in list(content)[:5] if isinstance(key, bytes | str))


def _normalize(pixels: Tensor) -> Tensor:
    """Normalized images from bytes in channel, row, column order."""
    images = pixels.reshape(-1, 3, 32, 32).float() / 255.0
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (CIFAR_MEAN, CIFAR_STD))
    return (images - mean) / std


def _need_file(path: Path, what: str) -> None:
    if not path.exists():
        raise MissingDataError(
            f"{what} needs {path.name} in {path.parent.name}; got none. Run `onlynorm data get "
            f"{what.lower().replace('-', '')}`, or copy it there."
        )


def _need_labels(labels: Tensor, path: Path, what: str, n_classes: int) -> None:
    if int(labels.max()) >= n_classes:
        raise FormatError(f"{path.name} needs labels from 0 to {n_classes - 1}; got {int(labels.max())}. Is it {what}?")
