"""Train/test splits, and the data folder."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from onlynorm.display import Result
from onlynorm.errors import MissingDataError, ShapeError
from onlynorm.validate import need_integer, need_path, need_text


@dataclass(frozen=True)
class Split(Result):
    """A train/test split; without labels, the label tensors are empty."""

    name: str
    train_inputs: Float[Tensor, "n_train ..."]
    train_labels: Int[Tensor, " n_train"]
    test_inputs: Float[Tensor, "n_test ..."]
    test_labels: Int[Tensor, " n_test"]

    @property
    def train(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels of the training set."""
        return self.train_inputs, self.train_labels

    @property
    def test(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels of the test set."""
        return self.test_inputs, self.test_labels

    @property
    def has_labels(self) -> bool:
        """Whether the test set has labels."""
        return len(self.test_labels) > 0

    def smaller(self, side: int) -> Split:
        """The split with images average-pooled to a width of `side` pixels, with the same aspect ratio.

        Smaller images are not changed.
        """
        side = need_integer("side", side, low=1, cure="Pass a width in pixels, such as 16.")
        if self.train_inputs.ndim != 4:
            raise ShapeError(
                f"smaller needs images (n, channels, height, width); {self.name} has samples of shape "
                f"{tuple(self.train_inputs.shape[1:])}. Use a data set of images."
            )
        height, width = self.train_inputs.shape[-2:]
        if width <= side:
            return self
        size = (max(1, height * side // width), side)
        train, test = (adaptive_avg_pool2d(images, size) for images in (self.train_inputs, self.test_inputs))
        return replace(self, train_inputs=train, test_inputs=test)

    def __str__(self) -> str:
        shape = tuple(self.train_inputs.shape[1:])
        return f"{self.name}: {len(self.train_inputs)} train, {len(self.test_inputs)} test samples of shape {shape}"


def data_folder() -> Path:
    """The folder of `ONLYNORM_DATA`, else `onlynorm` in the user's cache folder.

    Examples:
        >>> import os
        >>> from onlynorm.data import data_folder
        >>> os.environ["ONLYNORM_DATA"] = "my_data"
        >>> data_folder().name
        'my_data'
    """
    given = os.environ.get("ONLYNORM_DATA")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(given) if given else Path(cache) / "onlynorm"


def find_data(name: str, *, get: str | None = None) -> Path:
    """The path of a file or folder in the data folder; raises `MissingDataError` if it does not exist.

    `get` is the name by which `onlynorm data get` knows it, for the message of the error.

    Examples:
        >>> import os
        >>> from pathlib import Path
        >>> from onlynorm.data import find_data
        >>> os.environ["ONLYNORM_DATA"] = "my_data"
        >>> Path("my_data").mkdir()
        >>> Path("my_data", "photos").mkdir()
        >>> find_data("photos").name
        'photos'
    """
    need_text("find_data", name, cure="Pass the name of a file or folder of the data folder.")
    folder = data_folder()
    if not need_path("find_data", folder / name).exists():
        if get is None:
            cure = "Copy it there in its standard format"
        else:
            get = need_text("get", get, cure="Pass a name that onlynorm data get knows.")
            cure = f"Run `onlynorm data get {get}`, which downloads it or copies it with --from FOLDER"
        raise MissingDataError(
            f"{name} needs to be in the data folder; got nothing at {folder / name}. {cure}, or set ONLYNORM_DATA to "
            "the folder that contains it."
        )
    return folder / name
