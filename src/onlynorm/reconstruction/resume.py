"""A reconstruction that may be interrupted: every finished layer is kept in a folder, one sealed file each.

A layer is written once, whole or not at all, so a run that is killed anywhere loses at most the layer it was at. Each
file says of which run it is: the recipe, digests of the target and of the calibration batch, the versions. A run with
other arguments is refused, never mixed in. The folder stays until `save` has put the finished network on the disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.errors import FormatError, StorageError
from onlynorm.frozen.checkpoint import (
    count_hooks,
    describe_activation,
    describe_block,
    describe_structure,
    make_block,
    parse_entry,
)
from onlynorm.frozen.form import Block
from onlynorm.modules.layers import TargetLayer
from onlynorm.reconstruction.constructions.base import Recipe
from onlynorm.storage import claim, digest, from_plain, read_tensors, tensors_digest, to_plain, version, write_tensors

FORMAT = 1
KIND = "layer of a partial reconstruction"


def fingerprint(recipe: Recipe, target: nn.Module, inputs: tuple[Tensor, ...], **others: object) -> dict[str, Any]:
    """What a run depends on, in JSON types: equal fingerprints, equal results on the same machine."""
    fields = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    fields["activation"] = describe_activation(recipe.activation)
    plain: dict[str, Any] = to_plain(
        {
            **fields, **others, "architecture": digest([describe_structure(target), count_hooks(target)]),
            "target network": tensors_digest(target.state_dict()),
            "calibration batch": tensors_digest({str(i): x for i, x in enumerate(inputs)}),
            "onlynorm": version(), "torch": torch.__version__,
        }
    )  # fmt: skip
    return plain


class Partial:
    """The folder of one run: `keep` writes a finished layer, `find` reads it again, `remove` clears it away."""

    def __init__(self, folder: Path, run: Mapping[str, Any]) -> None:
        self.folder = folder
        self.run = dict(run)
        if folder.exists() and not folder.is_dir():
            raise StorageError(f"partial needs the path of a folder; {folder} is a file. Choose another path.")

    def keep(self, number: int, target: TargetLayer, block: Block, evidence: Mapping[str, Any]) -> None:
        """Writes the layer with this number."""
        entry = describe_block(block, target.names)
        document = {"run": self.run, "block": entry.as_dict(), "evidence": evidence}
        tensors = {name: value.detach().cpu().contiguous() for name, value in block.state_dict().items()}
        write_tensors(self._path(number), tensors, kind=KIND, format=FORMAT, document=document)

    def find(
        self, number: int, target: TargetLayer, layer: nn.Module, recipe: Recipe
    ) -> tuple[Block, dict[str, Any]] | None:
        """Block and evidence of the layer with this number, if an earlier run of the same kind finished it."""
        path = self._path(number)
        if not path.exists():
            return None
        cure = f"Delete the folder {self.folder} to start again."
        document, tensors = read_tensors(path, kind=KIND, format=FORMAT, cure=cure)
        run, evidence = document.get("run"), document.get("evidence")
        if not isinstance(run, dict) or not isinstance(evidence, dict):
            raise FormatError(f"a {KIND} needs its run and its evidence; {path.name} lacks them. {cure}")
        self._need_same(run, cure)
        entry = parse_entry(document.get("block"))
        if entry.places != target.names or evidence.get("shape") != list(target.shape):
            raise FormatError(f"{path.name} needs to hold {target.name!r}; it holds {entry.name!r}. {cure}")
        return make_block(entry, tensors, layer=layer, storage=recipe.storage, activation=recipe.activation), evidence

    def _need_same(self, run: dict[str, Any], cure: str) -> None:
        now = from_plain(self.run)
        other = [name for name in {**run, **now} if run.get(name) != now.get(name)]
        if other:
            listed = "; ".join(f"{name} ({_short(run.get(name))} then, {_short(now.get(name))} now)" for name in other)
            raise FormatError(f"resuming needs the arguments of the run in {self.folder}; got another {listed}. {cure}")

    def _path(self, number: int) -> Path:
        return self.folder / f"layer-{number:04d}.safetensors"


def remove(folder: Path) -> None:
    """Deletes what a partial reconstruction wrote, and the folder if nothing else is in it."""
    with contextlib.suppress(OSError), claim(folder):  # a run that goes on there keeps its layers
        for path in (*folder.glob("layer-*.safetensors"), *folder.glob(".layer-*.safetensors.*.tmp")):
            path.unlink()
        folder.rmdir()


def _short(value: object) -> str:
    return f"{value!s:.32}"
