"""Training and test data from a name, a file, a folder of images or a factory function."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch
from rich.markup import escape
from torch import Tensor
from torch.utils.data import Subset

from onlynorm.cli.help import MODEL_AND_DATA, option
from onlynorm.cli.terminal import errors
from onlynorm.data import (
    CIFAR_MEAN,
    CIFAR_STD,
    DATA_SETS,
    FASHION_MEAN,
    FASHION_STD,
    Split,
    corrupt,
    load_data,
)
from onlynorm.errors import FormatError, MissingDataError, ShapeError, ValueRangeError
from onlynorm.models import BUILT_IN, run_factory
from onlynorm.seeds import seeded
from onlynorm.tuning import batches

if TYPE_CHECKING:
    from torch.utils.data import Dataset


def find_split(data: str | None, model: str) -> Split:
    """The given data set, or the default one of a built-in model."""
    if data is None and model not in BUILT_IN:
        raise ValueRangeError(
            f"{model} needs data to run on; got none. Pass --data digits, cifar10, fashion_mnist or a file of inputs."
        )
    if data is not None:
        need_source(data)
    return load_data(BUILT_IN[model].data if data is None else data)


def need_source(
    data: str, *, endings: tuple[str, ...] = (".safetensors", ".npy"), is_folder_read: bool = False
) -> None:
    """Raises if this is neither a data set nor an existing file of tensors; names similar to a data set pass."""
    path = Path(data)
    if data in DATA_SETS or path.suffix.lower() in endings or difflib.get_close_matches(data, DATA_SETS, cutoff=0.6):
        return
    kinds = f"a {' or '.join(endings)} file" + (" or a folder of images" if is_folder_read else "")
    needed = f"data needs the name of a data set ({', '.join(DATA_SETS)}) or {kinds}"
    if path.is_dir():
        raise ValueRangeError(
            f"{needed}; {data} is a folder. Only tune, diagnose and repair read folders of images; save the images "
            f"as a {endings[0]} file."
        )
    if path.is_file():
        raise FormatError(f"{needed}; got {data}. Save it as {path.with_suffix(endings[0])}.")
    raise MissingDataError(f"{needed}; there is no file or folder {data}. Check the path.")


AnyData = Annotated[
    str | None,
    option(
        MODEL_AND_DATA,
        "DATA",
        f"{', '.join(DATA_SETS)}, a .safetensors or .npy file, a folder of images, or "
        "package.module:factory of a Dataset; default: that of the model.",
        choices=DATA_SETS,
    ),
]
ImageSize = Annotated[
    int | None,
    option(
        MODEL_AND_DATA, "N", "Size to which images of a folder are scaled (default: that of the model, or 32).", min=1
    ),
]
_CIFAR = ((3, 32, 32), CIFAR_MEAN, CIFAR_STD)
IMAGES: dict[str, tuple[tuple[int, ...], Sequence[float], Sequence[float]]] = {
    "digits": ((1, 8, 8), (0.0,), (1.0,)),
    "cifar10": _CIFAR,
    "cifar100": _CIFAR,
    "fashion_mnist": ((1, 28, 28), (FASHION_MEAN,), (FASHION_STD,)),
}
"""Shape and normalization of the data sets of images."""
TEST_FRACTION = 0.2
"""Fraction of samples in the test set if the data has no train/test split."""


@dataclass(frozen=True)
class TrainTest:
    """Training and test samples, the number of classes, and paths of unreadable images."""

    train: batches.Pairs
    test: batches.Pairs
    n_classes: int
    unreadable: tuple[Path, ...] = ()


class _Images:
    """Images of a folder, normalized as expected by networks for CIFAR and ImageNet."""

    def __init__(self, images: batches.ImageFolder) -> None:
        self._images = images
        self._mean, self._std = (torch.tensor(values).reshape(3, 1, 1) for values in (CIFAR_MEAN, CIFAR_STD))

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self._images[index]
        return (image - self._mean) / self._std, label


def is_own(data: str | None) -> bool:
    """Whether this is a folder of images or a factory, not a name or a file of tensors."""
    return data is not None and (Path(data).is_dir() or (":" in data and not Path(data).exists()))


def find_parts(
    data: str | None,
    model: str,
    *,
    image_size: int | None = None,
    seed: int = 0,
    skip_unreadable: bool = False,
    alter: Callable[[Split], Split] | None = None,
) -> TrainTest:
    """The given data set, or the default one of a built-in model; images are scaled to its input size.

    `alter` is applied to a data set by name.
    """
    if data is None or not is_own(data):
        if data is not None:
            need_source(data, is_folder_read=True)
        split = find_split(data, model)
        return split_parts(split if alter is None else alter(split))
    if alter is not None:
        raise ValueRangeError(
            f"--corrupt needs a data set of images by name, {', '.join(IMAGES)}; got {data}. Pass one of them."
        )
    if not Path(data).is_dir():
        return factory_parts(data, seed=seed)
    usual = BUILT_IN[model].input_shape[-1] if model in BUILT_IN else 32
    return folder_parts(Path(data), size=image_size or usual, seed=seed, skip_unreadable=skip_unreadable)


def corrupt_split(split: Split, kind: str, *, severity: float, seed: int) -> Split:
    """The data set with corrupted training and test images."""
    if split.name not in IMAGES:
        raise ValueRangeError(
            f"--corrupt needs a data set of images by name, {', '.join(IMAGES)}; got {split.name}. Pass one of them, "
            "or corrupt the images with onlynorm.data.corrupt."
        )
    shape, mean, std = IMAGES[split.name]
    train, test = (
        corrupt(
            inputs.reshape(-1, *shape), kind, severity=severity, seed=seed + offset, mean=mean, std=std
        ).reshape(inputs.shape)
        for offset, inputs in ((1, split.train_inputs), (0, split.test_inputs))
    )  # fmt: skip
    return replace(split, train_inputs=train, test_inputs=test)


def find_batch(
    data: str | None, model: str, *, n_samples: int, image_size: int | None = None, seed: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Random training samples, with their labels if there are any."""
    if is_own(data):
        pairs = find_parts(data, model, image_size=image_size, seed=seed).train
        return batches.collate(pairs, draw_indices(len(pairs), n_samples, seed))
    if data is not None:
        need_source(data, is_folder_read=True)
    split = find_split(data, model)
    chosen = draw_indices(len(split.train_inputs), n_samples, seed)
    if not len(split.train_labels):
        errors.print(f"{escape(split.name)} has no labels: gradients are not measured.", highlight=False)
        return split.train_inputs[chosen], None
    return split.train_inputs[chosen], split.train_labels[chosen]


def draw_indices(n_samples: int, n_drawn: int, seed: int) -> list[int]:
    """Sorted indices of a random subset of the samples."""
    return sorted(torch.randperm(n_samples, generator=seeded(seed))[:n_drawn].tolist())


def folder_parts(folder: Path, *, size: int, seed: int, skip_unreadable: bool) -> TrainTest:
    """The images in train/ and test/, or one folder of classes with a random fifth as the test set."""
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        train, test = (
            batches.ImageFolder(folder / part, size=size, skip_unreadable=skip_unreadable) for part in ("train", "test")
        )
        if train.classes != test.classes:
            odd = sorted(set(train.classes) ^ set(test.classes))
            raise FormatError(
                f"train and test need the same classes; got {', '.join(odd[:3])} in one of them only. Add an empty "
                "folder to the other, or remove it."
            )
        return TrainTest(_Images(train), _Images(test), len(train.classes), (*train.unreadable, *test.unreadable))
    images = batches.ImageFolder(folder, size=size, skip_unreadable=skip_unreadable)
    return TrainTest(
        *_split(_Images(images), seed=seed, where=str(folder)), len(images.classes), tuple(images.unreadable)
    )


def factory_parts(spec: str, *, seed: int) -> TrainTest:
    """The result of "package.module:factory": (train, test), or one data set with a random fifth as the test set.

    A data set has a length and returns (input, label) by index, or is a pair of tensors (inputs, labels).
    """
    made = run_factory(spec, what="a data set")
    if isinstance(made, Split):
        return split_parts(made)
    is_split = isinstance(made, tuple) and len(made) == 2 and not isinstance(made[0], Tensor)
    if is_split:
        train, test = (_data_set(part, spec) for part in made)
    else:
        train, test = _split(_data_set(made, spec), seed=seed, where=spec)
    classes = getattr(made[0] if is_split else made, "classes", None)
    n_classes = len(classes) if classes is not None else 1 + max(_labels(train, spec) | _labels(test, spec))
    return TrainTest(train, test, n_classes)


def split_parts(split: Split) -> TrainTest:
    """Training and test samples of a split with labels."""
    if not split.has_labels or not len(split.train_labels):
        raise ValueRangeError(
            f"training needs labels of the training and test set; {split.name} has none. Save labels and test_labels "
            "in the same file."
        )
    n_classes = 1 + int(torch.cat([split.train_labels, split.test_labels]).max())
    train, test = (
        batches.TensorPairs(split.train_inputs, split.train_labels),
        batches.TensorPairs(split.test_inputs, split.test_labels),
    )
    return TrainTest(train, test, n_classes)


def _split(pairs: batches.Pairs, *, seed: int, where: str) -> tuple[batches.Pairs, batches.Pairs]:
    """A random train/test split."""
    n_samples = len(pairs)
    if n_samples < 2:
        raise ValueRangeError(
            f"a train/test split needs at least two samples; got {n_samples} from {where}. Add samples, or pass both "
            "sets."
        )
    order = torch.randperm(n_samples, generator=seeded(seed)).tolist()
    n_train = min(max(round(n_samples * (1.0 - TEST_FRACTION)), 1), n_samples - 1)
    whole = cast("Dataset[Any]", pairs)  # Subset only needs __getitem__
    return Subset(whole, order[:n_train]), Subset(whole, order[n_train:])


def _data_set(made: Any, spec: str) -> batches.Pairs:
    if isinstance(made, tuple) and len(made) == 2 and all(isinstance(part, Tensor) for part in made):
        return batches.TensorPairs(*made)
    if not isinstance(made, batches.Pairs) or isinstance(made, Tensor | str | dict) or not len(made):
        what = "nothing" if made is None else f"a {type(made).__name__}"
        raise ShapeError(
            f"a data set needs a length and (input, label) by index; got {what} from {spec}. Return a Dataset, "
            "(inputs, labels), or a training and a test set."
        )
    return made


def _labels(pairs: batches.Pairs, spec: str) -> set[int]:
    """The set of all labels; reads every sample once, so that errors are raised before training."""
    try:
        return {int(pairs[i][1]) for i in range(len(pairs))}
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise ShapeError(
            f"a data set needs (input, label) with an integer label; {spec} raised {type(error).__name__}: "
            f"{error}. Add an attribute `classes` if labels cannot be read in advance."
        ) from error
