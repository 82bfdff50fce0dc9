"""A folder of images as data to learn from and data to judge by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from onlynorm.data import CIFAR_MEAN, CIFAR_STD, Split, seeded
from onlynorm.errors import FormatError, ValueRangeError
from onlynorm.tuning.batches import ImageFolder, Pairs, TensorPairs

TEST_SHARE = 0.2
"""What is put aside to judge by where a folder is not cut in two already."""


@dataclass(frozen=True)
class Parts:
    """Samples to learn from and samples to judge by, the number of classes, and images that were left out."""

    train: Pairs
    test: Pairs
    n_classes: int
    unreadable: tuple[Path, ...] = ()


class _Part:
    """Chosen images of a folder, normalised as the networks for CIFAR and ImageNet expect them."""

    def __init__(self, images: ImageFolder, chosen: Sequence[int]) -> None:
        self._images, self._chosen = images, chosen
        self._mean, self._std = (torch.tensor(values).reshape(3, 1, 1) for values in (CIFAR_MEAN, CIFAR_STD))

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self._images[self._chosen[index]]
        return (image - self._mean) / self._std, label


def folder_parts(folder: Path, *, size: int, seed: int, skip_unreadable: bool) -> Parts:
    """The images below train/ and test/, or those of one folder of classes with a fifth, drawn by seed, to judge by."""
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        train, test = (
            ImageFolder(folder / part, size=size, skip_unreadable=skip_unreadable) for part in ("train", "test")
        )
        if train.classes != test.classes:
            odd = sorted(set(train.classes) ^ set(test.classes))
            raise FormatError(
                f"train and test need the same classes; got {', '.join(odd[:3])} in one of them only. Add an empty "
                "folder to the other, or remove it."
            )
        return Parts(
            _Part(train, range(len(train))), _Part(test, range(len(test))), len(train.classes),
            (*train.unreadable, *test.unreadable),
        )  # fmt: skip
    images = ImageFolder(folder, size=size, skip_unreadable=skip_unreadable)
    if len(images) < 2:
        raise ValueRangeError(f"a folder needs two images or more to be cut in two; got one below {folder}. Add some.")
    order = torch.randperm(len(images), generator=seeded(seed)).tolist()
    cut = min(max(round(len(images) * (1.0 - TEST_SHARE)), 1), len(images) - 1)
    return Parts(_Part(images, order[:cut]), _Part(images, order[cut:]), len(images.classes), tuple(images.unreadable))


def split_parts(split: Split) -> Parts:
    """The two parts of a data set with labels."""
    if not split.has_labels or not len(split.train_labels):
        raise ValueRangeError(
            f"training needs labels in both parts; {split.name} has none. Save labels and test_labels beside inputs."
        )
    n_classes = 1 + int(torch.cat([split.train_labels, split.test_labels]).max())
    train, test = TensorPairs(split.train_inputs, split.train_labels), TensorPairs(split.test_inputs, split.test_labels)
    return Parts(train, test, n_classes)
