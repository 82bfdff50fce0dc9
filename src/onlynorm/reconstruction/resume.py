"""Resumable reconstructions: every finished layer is saved in a folder, in one sealed file each.

Files are written atomically, so a killed run loses at most the current layer. Each file identifies its run by the
options, digests of the target and of the calibration batch, and the versions; a run with other arguments raises. The
folder is deleted after `save` has written the finished network.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.errors import FormatError, StorageError
from onlynorm.frozen.checkpoint import (
    describe_activation,
    describe_layer,
    describe_structure,
    make_layer,
    parse_entry,
)
from onlynorm.frozen.form import FrozenBlock
from onlynorm.modules.layers import TargetLayer
from onlynorm.reconstruction.constructions.options import Construction, Settings
from onlynorm.storage import (
    changed_settings,
    claim,
    digest,
    from_plain,
    read_tensors,
    tensors_digest,
    to_plain,
    version,
    write_tensors,
)

FORMAT = 2
"""Format 1 had other options."""
KIND = "layer of a partial reconstruction"
ARGUMENTS = ".arguments-"
"""Prefix of the temporary folder from which workers read the model; a killed run leaves it."""


def fingerprint(
    construction: Construction, settings: Settings, model: nn.Module, inputs: tuple[Tensor, ...], **others: object
) -> dict[str, Any]:
    """Everything that a run depends on, in JSON types; equal fingerprints give equal results on the same machine."""
    box = settings.ranges.box
    fields = construction.as_dict() | settings.as_dict()
    fields["activation"] = describe_activation(construction.activation)
    fields["box"] = None if box is None else tensors_digest({"low": box.low, "high": box.high})
    plain: dict[str, Any] = to_plain(
        {
            **fields, **others, "architecture": digest(describe_structure(model)),
            "target network": tensors_digest(model.state_dict()),
            "calibration batch": tensors_digest({str(i): x for i, x in enumerate(inputs)}),
            "onlynorm": version(), "torch": torch.__version__,
        }
    )  # fmt: skip
    return plain


class Partial:
    """The folder of one run: `save` writes a finished layer, `load` reads it."""

    def __init__(self, folder: Path, run: Mapping[str, Any]) -> None:
        self.folder = folder
        self.run = dict(run)
        if folder.exists() and not folder.is_dir():
            raise StorageError(f"partial needs the path of a folder; {folder} is a file. Choose another path.")

    def save(self, number: int, target: TargetLayer, block: FrozenBlock, evidence: Mapping[str, Any]) -> None:
        """Writes the layer with this index."""
        entry, _ = describe_layer(block, target.names)
        document = {"run": self.run, "block": entry.as_dict(), "evidence": evidence}
        tensors = {name: value.detach().cpu().contiguous() for name, value in block.state_dict().items()}
        write_tensors(self._path(number), tensors, kind=KIND, format=FORMAT, document=document)

    def load(
        self, number: int, target: TargetLayer, layer: nn.Module, *, storage: str, activation: nn.Module | None
    ) -> tuple[FrozenBlock, dict[str, Any]] | None:
        """Block and evidence of the layer with this index; None if it is not finished."""
        path = self._path(number)
        if not path.exists():
            return None
        cure = f"Delete the folder {self.folder} to start again."
        document, tensors = read_tensors(path, kind=KIND, format=FORMAT, cure=cure)
        if document["format"] != FORMAT:
            raise FormatError(
                f"resuming needs layers of format {FORMAT}; {path.name} has format {document['format']} of an earlier "
                f"version. {cure}"
            )
        run, evidence = document.get("run"), document.get("evidence")
        if not isinstance(run, dict) or not isinstance(evidence, dict):
            raise FormatError(f"a {KIND} needs its run and its evidence; {path.name} has none. {cure}")
        self._need_same(run, cure)
        entry = parse_entry(document.get("block"))
        if entry.places != target.names or evidence.get("shape") != list(target.shape):
            raise FormatError(f"{path.name} needs to hold {target.name!r}; it holds {entry.name!r}. {cure}")
        block = make_layer(entry, tensors, layer=layer, storage=storage, activation=activation)
        assert isinstance(block, FrozenBlock)
        return block, evidence

    def _need_same(self, run: dict[str, Any], cure: str) -> None:
        if other := changed_settings(run, from_plain(self.run)):
            listed = "; ".join(other.values())
            raise FormatError(f"resuming needs the arguments of the run in {self.folder}; got another {listed}. {cure}")

    def _path(self, number: int) -> Path:
        return self.folder / f"layer-{number:04d}.safetensors"


def remove(folder: Path) -> None:
    """Deletes the files of a partial reconstruction, and the folder if it is then empty."""
    with contextlib.suppress(OSError), claim(folder):  # nothing is deleted while a run uses the folder
        for path in (*folder.glob("layer-*.safetensors"), *folder.glob(".layer-*.safetensors.*.tmp")):
            path.unlink()
        remove_arguments(folder)
        folder.rmdir()


def remove_arguments(folder: Path) -> None:
    """Deletes what workers of a killed run read."""
    for left in folder.glob(f"{ARGUMENTS}*"):
        shutil.rmtree(left, ignore_errors=True)
