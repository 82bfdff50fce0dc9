"""Fashion-MNIST from its gzipped idx files."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from onlynorm.data.split import Split, find_data
from onlynorm.data.tensor_files import inflate
from onlynorm.errors import FormatError, MissingDataError

FASHION_MEAN, FASHION_STD = 0.286, 0.353
"""Mean and standard deviation of the 60,000 training images, scaled to [0, 1]."""


def fashion_mnist() -> Split:
    """Fashion-MNIST images (1, 28, 28), normalized by `FASHION_MEAN` and `FASHION_STD`, from its gzipped idx files.

    Examples:
        >>> import onlynorm as on
        >>> from onlynorm.data import fashion_mnist
        >>> try:
        ...     print(fashion_mnist().train_inputs.shape)
        ... except on.errors.MissingDataError as error:  # unless `onlynorm data get fashion_mnist` was run
        ...     print(error)
        fashion-mnist needs to be in the data folder; got nothing at ... Run `onlynorm data get fashion_mnist`...
    """
    folder = find_data("fashion-mnist", get="fashion_mnist")
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


def _read_idx(path: Path, sample: tuple[int, ...]) -> Tensor:
    """The array in a gzipped idx file (magic number, sizes, values) with samples of this shape."""
    if not path.exists():
        raise MissingDataError(
            f"Fashion-MNIST needs {path.name} in {path.parent.name}; got none. Run `onlynorm data get "
            "fashion_mnist`, or copy it there."
        )
    n_axes = 1 + len(sample)
    n_head = 4 + 4 * n_axes
    head = inflate(path, n_head)
    magic, *sizes = np.frombuffer(head, ">u4").tolist() if len(head) == n_head else [0]
    # The third byte is 8 for unsigned bytes, the fourth is the number of dimensions.
    if magic != 0x0800 + n_axes or tuple(sizes[1:]) != sample or not sizes[0]:
        raise FormatError(
            f"{path.name} needs an idx header of unsigned bytes with samples of shape {sample}; got magic number "
            f"{magic} and sizes {sizes}. Copy the file again."
        )
    n_bytes = math.prod(sizes)
    raw = inflate(path, n_head + n_bytes + 1)[n_head:]
    if len(raw) != n_bytes:
        raise FormatError(
            f"{path.name} needs {n_bytes} bytes after its header; got {'more' if len(raw) > n_bytes else len(raw)}. "
            "Copy the file again."
        )
    return torch.from_numpy(np.frombuffer(raw, np.uint8).copy()).reshape(sizes)
