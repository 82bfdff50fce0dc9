"""Adapters: the values of a model's norms, and perhaps of its statistics and heads, as one tiny exact file.

    handle = only_norms(model, also=("head",), statistics="track")
    ...train...
    save_adapter(model, "task_a.safetensors")
    load_adapter(model, "task_a.safetensors")

An adapter holds values, not differences: loading it gives the trained model back to the last bit. It carries a
fingerprint of everything it does not hold, so that it cannot land on the wrong base model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, FormatError, UnknownNameError
from onlynorm.reconstruction.folding import folded_places
from onlynorm.storage import read_tensors, write_tensors
from onlynorm.tuning.fingerprint import fingerprint, need_same_base
from onlynorm.tuning.norms import find_norms

FORMAT = 1
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class Adapter:
    """Values for some tensors of a model: scales and shifts, heads, and running statistics if they are kept along."""

    tensors: dict[str, Tensor]
    heads: tuple[str, ...]
    has_statistics: bool
    base: str

    @property
    def n_numbers(self) -> int:
        """Numbers that the adapter holds."""
        return sum(t.numel() for t in self.tensors.values())

    def __str__(self) -> str:
        statistics = "with" if self.has_statistics else "without"
        heads = f", heads: {', '.join(self.heads)}" if self.heads else ""
        return f"adapter of {len(self.tensors)} tensors, {self.n_numbers:,} numbers, {statistics} statistics{heads}"


def take_adapter(model: nn.Module, *, statistics: bool | None = None) -> Adapter:
    """The present values of the model's norms (those that `only_norms` chose, else all) and heads, as an adapter.

    `statistics` says whether running statistics are kept along; None keeps them unless they were frozen.
    """
    trained, policy = _tuning(model)
    if statistics is None:
        statistics = policy != "freeze"
    state = model.state_dict()
    names = [name for name in state if name in trained]
    if statistics:
        names += [name for name in statistics_of(model) if name in state]
    norms = norm_tensors(model)
    heads = tuple(name for name in names if name not in norms)
    tensors = {name: state[name].detach().clone() for name in names}
    return Adapter(tensors, heads, statistics, fingerprint(model, norms | set(heads)))


def save_adapter(
    model: nn.Module, path: Path | str, *, statistics: bool | None = None, dtype: str | None = None
) -> Adapter:
    """Writes the model's norms as an adapter and returns it; `dtype` ("float16") rounds the numbers in the file."""
    adapter = take_adapter(model, statistics=statistics)
    write_adapter(adapter, path, dtype=dtype)
    return adapter


def write_adapter(adapter: Adapter, path: Path | str, *, dtype: str | None = None) -> None:
    """Writes an adapter, whole or not at all."""
    if dtype is not None and dtype not in DTYPES:
        raise UnknownNameError("dtype", dtype, DTYPES)
    tensors = {
        name: t.to("cpu", DTYPES[dtype]) if dtype and t.is_floating_point() else t.cpu()
        for name, t in adapter.tensors.items()
    }
    document = {"heads": list(adapter.heads), "statistics": adapter.has_statistics, "base": adapter.base}
    write_tensors(Path(path), tensors, kind="adapter", format=FORMAT, document=document)


def read_adapter(path: Path | str) -> Adapter:
    """The adapter in a file, checked for damage."""
    document, tensors = read_tensors(Path(path), kind="adapter", format=FORMAT, cure="Save the adapter again.")
    heads, statistics, base = (document.get(key) for key in ("heads", "statistics", "base"))
    is_sound = (
        isinstance(heads, list) and all(h in tensors for h in heads) and isinstance(statistics, bool)
    ) and isinstance(base, str)
    if not is_sound or not tensors:
        raise FormatError(
            f"an adapter needs heads, statistics and a base; {Path(path).name} lacks them. Save it again."
        )
    assert isinstance(heads, list)
    assert isinstance(statistics, bool)
    assert isinstance(base, str)
    return Adapter(tensors, tuple(heads), statistics, base)


def load_adapter(model: nn.Module, path: Path | str) -> Adapter:
    """Puts an adapter's values into the model, if it is the adapter's base model, and returns the adapter."""
    adapter = read_adapter(path)
    apply_adapter(model, adapter)
    return adapter


def apply_adapter(model: nn.Module, adapter: Adapter) -> None:
    """Puts the values into the model; nothing is changed unless all of them fit."""
    need_fit(model, adapter)
    for name, value in adapter.tensors.items():
        assign(model, name, value)


def need_fit(model: nn.Module, adapter: Adapter) -> None:
    """Raises ConversionError unless every tensor of the adapter has its place in the model and the base is the same."""
    if (gone := folded_places(model)) and any(name.rpartition(".")[0] in gone for name in adapter.tensors):
        raise ConversionError("the adapter needs the norms of the model; they are folded. Call unfold(model) first.")
    state = model.state_dict()
    missing = sorted(adapter.tensors.keys() - state.keys())
    odd = [
        f"{name} {tuple(t.shape)} for {tuple(state[name].shape)}"
        for name, t in adapter.tensors.items()
        if name in state and name not in adapter.heads and t.shape != state[name].shape
    ]
    if missing or odd:
        told = ", ".join(missing[:3]) if missing else ", ".join(odd[:3])
        what = "places for its tensors; the model has none for" if missing else "tensors of its own shapes; got"
        raise ConversionError(f"the adapter needs {what} {told}. Load it onto the model it was trained on.")
    need_same_base(model, norm_tensors(model) | set(adapter.heads), adapter.base)


@torch.no_grad()
def assign(model: nn.Module, name: str, value: Tensor) -> None:
    """Sets one tensor of the model; a head may change its shape."""
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    held = getattr(module, last)
    if held.shape == value.shape:
        held.copy_(value)
        return
    held.data = value.to(held.device, held.dtype, copy=True)
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape


def norm_tensors(model: nn.Module) -> set[str]:
    """The names of all scales, shifts and statistics in the state dict of the model."""
    return {
        f"{place}.{tensor}".lstrip(".")
        for norm in find_norms(model).norms
        for place in norm.names
        for tensor in (*norm.tensors, *_STATISTICS)
    } | set(statistics_of(model))


def statistics_of(model: nn.Module) -> Iterable[str]:
    """The names of the running statistics of the model, of norms without scale and shift too."""
    return [name for name, _ in model.named_buffers() if name.rpartition(".")[2] in _STATISTICS]


def _tuning(model: nn.Module) -> tuple[set[str], str]:
    """(names of trained tensors, policy) as `only_norms` left them; all norms if it was not used."""
    known = model.__dict__.get("onlynorm_tuning")
    if known is not None:
        return set(known["trained"]), known["statistics"]
    norms = find_norms(model).norms
    if not norms:
        raise ConversionError(
            f"an adapter needs a model with norms; got none in {type(model).__name__}. Insert norms first."
        )
    return {f"{place}.{t}".lstrip(".") for norm in norms for place in norm.names for t in norm.tensors}, "track"
