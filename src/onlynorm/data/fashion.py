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
"""Of the 60,000 training images, scaled to [0, 1]."""


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


def _read_idx(path: Path, sample: tuple[int, ...]) -> Tensor:
    """The bytes of a gzipped idx file whose samples have this shape: a magic number, the sizes, the numbers."""
    if not path.exists():
        raise MissingDataError(
            f"Fashion-MNIST needs {path.name} in {path.parent.name}; it is not there. Copy it there."
        )
    n_axes = 1 + len(sample)
    n_head = 4 + 4 * n_axes
    head = inflate(path, n_head)
    magic, *sizes = np.frombuffer(head, ">u4").tolist() if len(head) == n_head else [0]
    # 8 in the third byte says unsigned bytes, the fourth byte counts the axes.
    if magic != 0x0800 + n_axes or tuple(sizes[1:]) != sample or not sizes[0]:
        raise FormatError(
            f"{path.name} needs an idx head of unsigned bytes with samples of shape {sample}; got magic number "
            f"{magic} and sizes {sizes}. Copy the file again."
        )
    wanted = math.prod(sizes)
    raw = inflate(path, n_head + wanted + 1)[n_head:]
    if len(raw) != wanted:
        raise FormatError(
            f"{path.name} needs {wanted} bytes after its head; got {'more' if len(raw) > wanted else len(raw)}. "
            "Copy the file again."
        )
    return torch.from_numpy(np.frombuffer(raw, np.uint8).copy()).reshape(sizes)
