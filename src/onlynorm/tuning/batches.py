"""Batches whose order and augmentation depend on (seed, epoch) only, so that an interrupted run can resume.

Data are tensors (inputs, labels), or a map-style dataset of such pairs. `ImageFolder` reads a folder with one subfolder
per class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from onlynorm.errors import FormatError, MissingDataError, ShapeError, ValueRangeError, first_line
from onlynorm.seeds import seeded
from onlynorm.storage import open_file
from onlynorm.validate import as_tensor, need_choice, need_integer

_NOT_DATA_SETS = (str, bytes, dict, type, Tensor, np.ndarray, torch.jit.ScriptModule)
AUGMENTATIONS = ("none", "flip", "crop-flip")
MAX_PIXELS = 2**26
"""Maximum number of pixels of an image: a compressed file of a few kB can expand to more than the memory."""
_FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "PPM", "GIF", "TIFF")  # Pillow detects the format from the content
_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".gif", ".tif", ".tiff")


@runtime_checkable
class Pairs(Sized, Protocol):
    """A map-style dataset of pairs (input, label)."""

    def __getitem__(self, index: int, /) -> Any: ...


class TensorPairs:
    """A dataset of two tensors, inputs and labels; NumPy arrays are converted."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        inputs, labels = as_tensor("inputs", inputs), as_tensor("labels", labels)
        if not inputs.ndim or not labels.ndim or len(inputs) != len(labels) or not len(inputs):
            sizes = [len(t) if t.ndim else 0 for t in (labels, inputs)]
            raise ShapeError(
                f"training needs as many labels as inputs, at least one; got {sizes[0]} labels for {sizes[1]} "
                "inputs. Pass tensors of the same length."
            )
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.labels[index]


class ImageFolder:
    """A dataset of images with one subfolder per class, sorted by name; images are resized and scaled to [0, 1].

    An unreadable image raises `FormatError`, or is skipped with `skip_unreadable`; `unreadable` lists skipped images.
    Every file is read once in the constructor, so that a run does not fail later.
    """

    def __init__(self, folder: Path | str, *, size: int = 32, skip_unreadable: bool = False) -> None:
        folder = Path(folder)
        if not folder.is_dir():
            raise MissingDataError(
                f"an image folder needs to be a folder; got {folder}. Pass the parent folder of the classes."
            )
        self.classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        self.size = size
        self.unreadable: list[Path] = []
        self._files: list[tuple[Path, int]] = []
        for label, name in enumerate(self.classes):
            for path in sorted((folder / name).rglob("*")):
                if path.suffix.lower() in _SUFFIXES and self._is_readable(path, skip_unreadable):
                    self._files.append((path, label))
        if not self._files:
            raise MissingDataError(
                f"an image folder needs one subfolder of images per class; got no readable image below {folder}. "
                f"Supported extensions: {', '.join(_SUFFIXES)}."
            )

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self._files[index]
        return self._read(path), label

    def _is_readable(self, path: Path, skip: bool) -> bool:
        try:
            self._read(path)
        except FormatError:
            if not skip:
                raise
            self.unreadable.append(path)
            return False
        return True

    def _read(self, path: Path) -> Float[Tensor, "3 size size"]:
        from PIL import Image

        try:
            with open_file(path) as file, Image.open(file, formats=_FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise ValueError(f"{image.width} x {image.height} pixels, more than {MAX_PIXELS:,}")
                pixels = np.asarray(image.convert("RGB").resize((self.size, self.size)), dtype=np.float32)
        except Exception as error:  # Pillow raises many kinds of errors for damaged files
            raise FormatError(
                f"an image folder needs readable images; {path} is not ({error}). Remove it, or pass "
                "skip_unreadable=True."
            ) from error
        return torch.from_numpy(pixels / 255.0).permute(2, 0, 1)


def as_pairs(data: Any) -> Pairs:
    """(inputs, labels) as a dataset, or the given dataset if it holds pairs."""
    if isinstance(data, TensorPairs):
        return data
    if isinstance(data, tuple) and len(data) == 2 and not isinstance(data[0], tuple):
        return TensorPairs(*data)
    # A compiled nn.Sequential has these methods, but cannot be indexed.
    has_items = isinstance(data, Pairs) and hasattr(type(data), "__getitem__")
    if not has_items or isinstance(data, _NOT_DATA_SETS):
        raise ShapeError(
            f"training needs (inputs, labels) or a dataset of such pairs; got a {type(data).__name__}. Pass a tuple "
            "of two tensors."
        )
    if not len(data):
        raise ValueRangeError("training needs at least one sample; got none. Pass another dataset.")
    collate(data, [0])
    return data


def order_of(n_samples: int, *, seed: int, epoch: int) -> Tensor:
    """The permutation of the samples in an epoch."""
    return torch.randperm(n_samples, generator=_stream(seed, epoch, 0))


def epoch_batches(
    data: Pairs, *, batch_size: int, seed: int, epoch: int, skip: int = 0, rank: int = 0, world: int = 1
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(batch index, inputs, labels) of an epoch from batch `skip` on, split among `world` processes."""
    batch_size = need_integer("batch_size", batch_size, low=1, cure="Try 128.")
    order = order_of(len(data), seed=seed, epoch=epoch)
    for number in range(skip, n_batches(len(data), batch_size)):
        chosen = order[number * batch_size : (number + 1) * batch_size][rank::world]
        if len(chosen):
            yield number, *collate(data, chosen.tolist())


def n_batches(n_samples: int, batch_size: int) -> int:
    """Number of batches in an epoch; the last one may be smaller."""
    return -(-n_samples // batch_size)


def collate(data: Pairs, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(inputs, labels) of the samples with these indices, as one batch."""
    if isinstance(data, TensorPairs):
        return data.inputs[list(chosen)], data.labels[list(chosen)]
    pairs = [data[index] for index in chosen]
    try:
        inputs, labels = (torch.stack([torch.as_tensor(pair[place]) for pair in pairs]) for place in (0, 1))
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError) as error:
        raise ShapeError(
            f"a dataset needs pairs (input, label) of numeric values, all of one shape; got {type(error).__name__}: "
            f"{first_line(error)}. Return two tensors, or a tensor and an integer."
        ) from error
    return inputs, labels


def augment(inputs: Tensor, how: str, *, seed: int, step: int) -> Tensor:
    """Random horizontal flips of images (n, channels, height, width); "crop-flip" also pads by an eighth and crops."""
    need_choice("augmentation", how, AUGMENTATIONS)
    if how == "none":
        return inputs
    if inputs.ndim != 4:
        raise ShapeError(
            f"augmentation needs images (n, channels, height, width); got {tuple(inputs.shape)}. Leave it out."
        )
    generator = _stream(seed, step, 1)
    if how == "crop-flip":
        inputs = _crop(inputs, max(1, inputs.shape[-1] // 8), generator)
    flipped = torch.rand(len(inputs), generator=generator) < 0.5
    return torch.where(flipped.to(inputs.device)[:, None, None, None], inputs.flip(-1), inputs)


def _crop(images: Tensor, margin: int, generator: torch.Generator) -> Tensor:
    n, _, height, width = images.shape
    padded = functional.pad(images, (margin,) * 4)
    down, right = (torch.randint(0, 2 * margin + 1, (n, 1), generator=generator).to(images.device) for _ in range(2))
    rows = down + torch.arange(height, device=images.device)
    columns = right + torch.arange(width, device=images.device)
    sample = torch.arange(n, device=images.device)[:, None, None]
    return padded.movedim(1, -1)[sample, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


def _stream(seed: int, position: int, purpose: int) -> torch.Generator:
    """A generator for the order of an epoch or the augmentation of a step, with well-mixed seeds."""
    mixed = (seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9 + purpose * 0x94D049BB133111EB) % 2**63
    return seeded(mixed)
