"""Adapters: the norms of a model, optionally with running statistics and heads, as a small file.

    handle = only_norms(model, also=("head",), statistics="track")
    ...train...
    save_adapter(model, "task_a.safetensors")
    load_adapter(model, "task_a.safetensors")

An adapter holds values, not differences: the base model with the adapter is bit-identical to the trained model. It
stores a fingerprint of all other tensors, so that it cannot be loaded into a different base model. Saving raises if any
other tensor changed since `only_norms` was called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.display import Result
from onlynorm.errors import ConversionError, FormatError, StorageError
from onlynorm.frozen.options import need_precision
from onlynorm.modules.norms import (
    add_affine,
    affine_shape,
    can_get_affine,
    find_norms,
    folded_places,
    is_statistic,
    need_module,
    plain_name,
    reference_tensor,
)
from onlynorm.modules.walk import need_open
from onlynorm.storage import read_tensors, write_tensors
from onlynorm.tuning.fingerprint import (
    Digests,
    digests,
    encode,
    few,
    hidden_buffers,
    is_plain,
    need_same_base,
    state_of,
    ties,
)
from onlynorm.tuning.only_norms import Preparation, need_own_preparation, preparation_of
from onlynorm.validate import need_flag, need_instance, need_path

KIND = "adapter"
FORMAT = 2
_FREE = ("statistics", "norms")
"""Groups of tensors that an adapter may exclude from the fingerprint."""
_OUTPUTS: tuple[tuple[Any, str], ...] = (
    (nn.Linear, "out_features"), (nn.modules.conv._ConvNd, "out_channels"), (nn.Embedding, "num_embeddings")
)  # fmt: skip
"""Attributes with the number of outputs of a layer, updated if a head changes its shape."""


@dataclass(frozen=True)
class Adapter(Result):
    """Values for some tensors of a model: scales and shifts, heads, and optionally running statistics.

    `buffers` names other buffers that training changed, such as the vectors of a spectral norm. `added` names norms
    without scale and shift in the base model. `tied` maps other names of a tied tensor to its name in `tensors`. `base`
    is the fingerprint of all other tensors except those in `free`: names, or "statistics" for all running statistics,
    or "norms" (files of format 1) for all tensors of norms.
    """

    tensors: dict[str, Tensor]
    heads: tuple[str, ...]
    has_statistics: bool
    base: str
    buffers: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    tied: dict[str, str] = field(default_factory=dict)
    free: tuple[str, ...] | str = ()

    @property
    def n_entries(self) -> int:
        """Number of entries of all tensors in the adapter."""
        return sum(t.numel() for t in self.tensors.values())

    @property
    def values(self) -> dict[str, Tensor]:
        """All tensors that the adapter sets, with tied tensors under each of their names."""
        return {**self.tensors, **{name: self.tensors[first] for name, first in self.tied.items()}}

    def __str__(self) -> str:
        statistics = "with" if self.has_statistics else "without"
        heads = f", heads: {', '.join(self.heads)}" if self.heads else ""
        return f"adapter of {len(self.tensors)} tensors, {self.n_entries:,} entries, {statistics} statistics{heads}"


def take_adapter(model: nn.Module, *, statistics: bool | None = None) -> Adapter:
    """The current norms and heads of the model as an adapter: those selected by `only_norms`, else all norms.

    `statistics` selects whether running statistics are included; by default they are, unless they are frozen and
    unchanged. Other buffers that changed since `only_norms` are always included, except non-persistent ones whose shape
    changed (caches). Raises `ConversionError` if a parameter changed that was not selected for training. Wrappers (DDP,
    DataParallel, torch.compile) are removed first.

    Examples:
        >>> from onlynorm.models import mlp
        >>> from onlynorm.tuning import take_adapter
        >>> adapter = take_adapter(mlp((8, 4, 2), norm="batch"))
        >>> sorted(adapter.tensors)
        ['1.bias', '1.num_batches_tracked', '1.running_mean', '1.running_var', '1.weight']
    """
    model = need_module("an adapter", model)
    need_own_preparation("an adapter", model)
    if statistics is not None:
        statistics = need_flag("statistics", statistics)
    hidden = hidden_buffers(model)
    state = state_of(model) | hidden
    before = preparation_of(model)
    trained = set(before.trained) & state.keys() if before is not None else _all_norms(model)
    found = digests({name: value for name, value in state.items() if name not in trained})
    changed = set() if before is None else _changed(model, state, found, before, hidden)
    running = {name for name in statistics_of(model) if name in state}
    buffers = changed - running
    is_unchanged = before is not None and before.statistics == "freeze" and not changed & running
    if statistics is None:
        statistics = not is_unchanged
    held = trained | buffers | (running if statistics else set())
    is_free = not statistics and not is_unchanged
    excluded = held | hidden.keys() | (running if is_free else set())
    outside = {name: value for name, value in found.items() if name not in excluded}
    norms = norm_tensors(model)
    tensors, tied = _untie({name: value for name, value in state.items() if name in held})
    return Adapter(
        tensors,
        heads=tuple(name for name in tensors if name in trained and name not in norms),
        has_statistics=statistics,
        base=encode(outside),
        buffers=tuple(name for name in tensors if name in buffers),
        added=before.added if before is not None else (),
        tied=tied,
        free="statistics" if is_free else (),
    )


def save_adapter(
    model: nn.Module, path: Path | str, *, statistics: bool | None = None, dtype: torch.dtype | None = None
) -> Adapter:
    """Saves the norms of the model as an adapter and returns it; `dtype` (torch.float16) rounds its tensors.

    `statistics` as in `take_adapter`.

    Examples:
        >>> import onlynorm as on
        >>> from onlynorm.data import digits
        >>> from onlynorm.models import load_model
        >>> model, data = load_model("digits_cnn"), digits()
        >>> handle = on.only_norms(model)
        >>> inverted = (1 - data.train_inputs, data.train_labels)
        >>> fit = on.fit(model, inverted, schedule=on.Schedule(epochs=1))
        >>> sorted(on.save_adapter(model, "inverted.safetensors").tensors)[:3]
        ['2.bias', '2.num_batches_tracked', '2.running_mean']
    """
    if dtype is not None:
        need_precision("dtype", dtype)
    adapter = take_adapter(model, statistics=statistics)
    write_adapter(adapter, path, dtype=dtype)
    return adapter


def write_adapter(adapter: Adapter, path: Path | str, *, dtype: torch.dtype | None = None) -> None:
    """Writes an adapter to a file atomically."""
    tensors = {
        name: t.to("cpu", dtype) if dtype is not None and t.is_floating_point() else t.cpu()
        for name, t in adapter.tensors.items()
    }
    document: dict[str, Any] = {
        "heads": list(adapter.heads), "statistics": adapter.has_statistics, "base": adapter.base
    }  # fmt: skip
    rare = {"buffers": list(adapter.buffers), "added": list(adapter.added), "tied": adapter.tied, "free": adapter.free}
    document |= {key: value for key, value in rare.items() if value}  # no empty fields, to keep files small
    path = need_path("path", path)
    if path.is_dir():
        raise StorageError(f"an adapter needs a file name; {path} is a folder. Add a file name.")
    write_tensors(path, tensors, kind=KIND, format=FORMAT, document=document)


def read_adapter(path: Path | str) -> Adapter:
    """The adapter in a file; raises `FormatError` if the file is damaged."""
    path = need_path("path", path)
    document, tensors = read_tensors(path, kind=KIND, format=FORMAT, cure="Save the adapter again.")
    statistics, base, tied = document.get("statistics"), document.get("base"), document.get("tied", {})
    free = "norms" if document["format"] == 1 else document.get("free", [])
    lists = {key: document.get(key, [] if key != "heads" else None) for key in ("heads", "buffers", "added")}
    is_sound = (
        bool(tensors) and isinstance(statistics, bool) and isinstance(base, str)
        and all(_are_names(names) for names in lists.values())
        and all(name in tensors for key in ("heads", "buffers") for name in lists[key] or ())
        and (_are_names(free) or free in _FREE)
        and isinstance(tied, dict) and _are_names(list(tied.values())) and all(n in tensors for n in tied.values())
    )  # fmt: skip
    if not is_sound:
        raise FormatError(f"an adapter needs heads, statistics and a base; {path.name} lacks them. Save it again.")
    assert isinstance(statistics, bool)
    assert isinstance(base, str)
    assert isinstance(tied, dict)
    names = {key: tuple(value or ()) for key, value in lists.items()}
    return Adapter(
        tensors, names["heads"], statistics, base, names["buffers"], names["added"], tied,
        free if isinstance(free, str) else tuple(free),
    )  # fmt: skip


def load_adapter(model: nn.Module, path: Path | str) -> Adapter:
    """Loads an adapter from a file into its base model and returns the adapter.

    Examples:
        >>> import onlynorm as on
        >>> from onlynorm.models import load_model
        >>> saved = on.save_adapter(load_model("digits_cnn"), "digits.safetensors")
        >>> loaded = on.load_adapter(load_model("digits_cnn"), "digits.safetensors")
        >>> loaded.n_entries == saved.n_entries
        True
    """
    need_module("load_adapter", model)
    adapter = read_adapter(path)
    apply_adapter(model, adapter)
    return adapter


def apply_adapter(model: nn.Module, adapter: Adapter) -> None:
    """Copies the tensors of an adapter into its base model; raises, without changes, if any does not fit.

    Examples:
        >>> import torch
        >>> from onlynorm.models import load_model
        >>> from onlynorm.tuning import apply_adapter, take_adapter
        >>> model = load_model("digits_cnn")
        >>> adapter = take_adapter(model)
        >>> model[2].reset_parameters()
        >>> apply_adapter(model, adapter)
        >>> torch.equal(model[2].weight, load_model("digits_cnn")[2].weight)
        True
    """
    model = need_module("apply_adapter", model)
    need_instance("apply_adapter", adapter, Adapter, cure="Pass what take_adapter or load returned.")
    need_fit(model, adapter)
    write_values(model, adapter.values)


def need_fit(model: nn.Module, adapter: Adapter) -> None:
    """Raises ConversionError unless all tensors of the adapter fit the model and its base model is the same."""
    if (gone := folded_places(model)) and any(name.rpartition(".")[0] in gone for name in adapter.tensors):
        raise ConversionError("the adapter needs the norms of the model; they are folded. Call unfold(model) first.")
    values, state, places = adapter.values, state_of(model), modules_of(model)
    hidden = hidden_buffers(model)
    missing, odd = [], []
    for name, value in sorted(values.items()):
        held = state.get(name, hidden.get(name))
        place = places.get(name.rpartition(".")[0])
        if held is None and place is not None and can_get_affine(place) and name.rpartition(".")[0] in adapter.added:
            if value.shape != affine_shape(place) or not value.is_floating_point():
                odd.append(f"{name} {tuple(value.shape)} {value.dtype} for {affine_shape(place)} floating-point values")
        elif held is None or not is_plain(held):
            missing.append(name)
        elif not _fits(value, held, place, is_head=name in adapter.heads, values=values, name=name):
            odd.append(f"{name} {tuple(value.shape)} {value.dtype} for {tuple(held.shape)} {held.dtype}")
    if missing or odd:
        listed = few(missing) if missing else few(odd)
        what = "its tensors in the model; there is no" if missing else "tensors of the same shape and dtype; got"
        raise ConversionError(f"the adapter needs {what} {listed}. Load it into its base model.")
    partners = [name for group in ties(state) if values.keys() & set(group) for name in group if name not in values]
    if partners:
        raise ConversionError(
            f"the adapter needs a model with the same tied tensors as in training; here {few(partners)} would change "
            "too. Load it into its base model."
        )
    free = free_tensors(model, adapter)
    need_same_base(
        digests({name: value for name, value in state.items() if name not in values and name not in free}), adapter.base
    )


@torch.no_grad()
def write_values(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Sets tensors of the model by name, all or none; heads may change their shape, norms get affine tensors."""
    places, like = modules_of(model), reference_tensor(model)
    undo: list[Callable[[], None]] = []
    name = ""
    try:
        for name, value in values.items():
            place, _, tensor = name.rpartition(".")
            module = places[place]
            if getattr(module, tensor, None) is None:
                undo.append(add_affine(module, like))
            held = getattr(module, tensor)
            undo.append(_restorer(module, held))
            if held.shape == value.shape:
                held.copy_(value)
            else:
                held.data = value.to(held.device, held.dtype, copy=True)
                _set_sizes(module)
    except Exception as error:
        while undo:
            undo.pop()()
        raise ConversionError(
            f"the adapter needs tensors that fit the model; {name!r} failed with: {error}. The model is unchanged."
        ) from error


def norm_tensors(model: nn.Module) -> set[str]:
    """Names of all scales, shifts and statistics in the state dict of the model."""
    return _all_norms(model, need=False) | statistics_of(model)


def free_tensors(model: nn.Module, adapter: Adapter) -> set[str]:
    """Names of the tensors that the adapter neither sets nor compares."""
    if isinstance(adapter.free, str):
        return norm_tensors(model) if adapter.free == "norms" else statistics_of(model)
    return set(adapter.free)


def statistics_of(model: nn.Module) -> set[str]:
    """Names of all running statistics of the model, of any module class."""
    return {
        plain_name(name) for name, _ in model.named_buffers(remove_duplicate=False) if is_statistic(name)
    }  # fmt: skip


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules by name, without the prefix that torch.compile adds."""
    return {plain_name(name): module for name, module in model.named_modules(remove_duplicate=False)}


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _untie(held: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(each tensor once, a mapping of other names of tied tensors to it)."""
    for name, value in held.items():
        if not is_plain(value):
            raise ConversionError(
                f"an adapter needs dense tensors; {name!r} is a {type(value).__name__} that is quantized, sparse or a "
                "wrapper subclass. Leave it out of also=."
            )
    tied = {name: group[0] for group in ties(held) for name in group[1:]}
    return {name: value.detach().clone() for name, value in held.items() if name not in tied}, tied


def _changed(
    model: nn.Module, state: Mapping[str, Any], found: Digests, before: Preparation, hidden: Mapping[str, Tensor]
) -> set[str]:
    """Names of buffers that changed since `only_norms`; raises if any other tensor changed."""
    buffers = {plain_name(name) for name, _ in model.named_buffers(remove_duplicate=False)}
    changed = {name for name, value in found.items() if before.digests.get(name) != value}
    # Non-persistent buffers that were added, removed or changed their shape are caches, computed again by forward.
    changed -= {name for name in changed & hidden.keys() if before.digests.get(name, (b"",))[0] != found[name][0]}
    lost = [name for name in before.digests if name not in state and name not in before.hidden]
    new = sorted(name for name in changed if name not in before.digests)
    if lost or new:
        raise ConversionError(
            f"an adapter needs the tensors that the model had when only_norms was called; got {len(lost)} missing and "
            f"{len(new)} new ones ({few([*lost, *new])}). Call undo() on the handle, then only_norms again."
        )
    cast = sorted(name for name in changed if before.digests[name][0] != found[name][0])
    if cast:
        raise ConversionError(
            f"an adapter needs an unchanged base model; since only_norms was called {len(cast)} tensors "
            f"changed their dtype or shape ({few(cast)}). Convert the model first, then call only_norms."
        )
    others = sorted(changed - buffers)
    if others:
        raise ConversionError(
            f"an adapter needs an unchanged base model; since only_norms was called {len(others)} frozen tensors "
            f"changed ({few(others)}). Name them in also=, or load weights before only_norms."
        )
    return changed


def _all_norms(model: nn.Module, *, need: bool = True) -> set[str]:
    """Names of the scales and shifts of all norms, at all their places."""
    norms = find_norms(model).norms
    if need and not norms:
        need_open("an adapter", model)
        raise ConversionError(
            f"an adapter needs a model with norms; got none in {type(model).__name__}. Insert norms first."
        )
    return {f"{place}.{t}".lstrip(".") for norm in norms for place in norm.names for t in norm.tensors}


def _fits(
    value: Tensor, held: Tensor, module: nn.Module | None, *, is_head: bool, values: Mapping[str, Tensor], name: str
) -> bool:
    """Whether the value fits a tensor of the model; a head may change its number of outputs."""
    if value.is_floating_point() != held.is_floating_point() or value.is_complex() != held.is_complex():
        return False
    if value.shape == held.shape:
        return True
    if not is_head or value.ndim != held.ndim:
        return False
    if not isinstance(module, nn.Linear | nn.modules.conv._ConvNd | nn.Embedding):
        return True  # unknown module: nothing else to compare
    place = name.rpartition(".")[0]
    weight, bias = (values.get(f"{place}.{own}".lstrip("."), getattr(module, own, None)) for own in ("weight", "bias"))
    assert isinstance(weight, Tensor)
    return weight.shape[1:] == module.weight.shape[1:] and (bias is None or len(bias) == len(weight))


def _restorer(module: nn.Module, held: Tensor) -> Callable[[], None]:
    """A function that restores the current value of the tensor."""
    before, storage = held.detach().clone(), held.data

    def restore() -> None:
        held.data = storage
        held.copy_(before)
        _set_sizes(module)

    return restore


def _set_sizes(module: nn.Module) -> None:
    """Sets the size attribute of a layer from its weight."""
    for kind, rows in _OUTPUTS:
        if isinstance(module, kind):
            setattr(module, rows, module.weight.shape[0])
