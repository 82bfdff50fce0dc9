"""Adapters: the values of a model's norms, and perhaps of its statistics and heads, as one tiny exact file.

    handle = only_norms(model, also=("head",), statistics="track")
    ...train...
    save_adapter(model, "task_a.safetensors")
    load_adapter(model, "task_a.safetensors")

An adapter holds values, not differences: the base model with the adapter is the trained model to the last bit. It
carries a fingerprint of everything it does not hold, so that it cannot land on the wrong base model, and it is not
saved if anything else changed since `only_norms` was called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, FormatError, StorageError
from onlynorm.modules.norms import (
    add_affine,
    affine_shape,
    can_get_affine,
    find_norms,
    folded_places,
    is_statistic,
    need_module,
    number_like,
    plain_name,
)
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
from onlynorm.validate import need_choice, need_flag, need_instance, need_path

FORMAT = 2
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
_FREE = ("statistics", "norms")
"""Names for many tensors that an adapter does not compare."""
_OUTPUTS: tuple[tuple[Any, str], ...] = (
    (nn.Linear, "out_features"), (nn.modules.conv._ConvNd, "out_channels"), (nn.Embedding, "num_embeddings")
)  # fmt: skip
"""Where layers state the rows of their weight, which follow a head of another shape."""


@dataclass(frozen=True)
class Adapter:
    """Values for some tensors of a model: scales and shifts, heads, and running statistics if they are saved too.

    `buffers` names other buffers that training changed, such as the vectors of a spectral norm; `added` the norms that
    had neither scale nor shift in the base model. `tied` maps further names of a tensor to the one under which it is in
    `tensors`. `base` is the fingerprint of all tensors but these and the `free` ones, by name; "statistics" stands for
    all running statistics, and "norms", as in files of format 1, for everything of norms.
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
    def n_numbers(self) -> int:
        """Numbers that the adapter holds."""
        return sum(t.numel() for t in self.tensors.values())

    @property
    def values(self) -> dict[str, Tensor]:
        """The value of every tensor that the adapter sets, tied ones under each of their names."""
        return {**self.tensors, **{name: self.tensors[first] for name, first in self.tied.items()}}

    def __str__(self) -> str:
        statistics = "with" if self.has_statistics else "without"
        heads = f", heads: {', '.join(self.heads)}" if self.heads else ""
        return f"adapter of {len(self.tensors)} tensors, {self.n_numbers:,} numbers, {statistics} statistics{heads}"


def take_adapter(model: nn.Module, *, statistics: bool | None = None) -> Adapter:
    """The present values of the model's norms (those that `only_norms` chose, else all) and heads, as an adapter.

    `statistics` says whether running statistics are saved too; None saves them unless they were frozen and are still
    the same. Other buffers that changed since `only_norms` are saved in any case, those outside the state dict too
    unless their shape changed, as that of a cache does. A parameter that changed and was not to be trained raises
    `ConversionError`. Wrappers (DDP, DataParallel, torch.compile) are looked through.
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
    moved = {name for name in statistics_of(model) if name in state}
    buffers = changed - moved
    is_still = before is not None and before.statistics == "freeze" and not changed & moved
    if statistics is None:
        statistics = not is_still
    held = trained | buffers | (moved if statistics else set())
    is_free = not statistics and not is_still
    apart = held | hidden.keys() | (moved if is_free else set())
    outside = {name: value for name, value in found.items() if name not in apart}
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
    model: nn.Module, path: Path | str, *, statistics: bool | None = None, dtype: str | None = None
) -> Adapter:
    """Writes the model's norms as an adapter and returns it; `dtype` ("float16") rounds the numbers in the file.

    `statistics` is that of `take_adapter`.
    """
    if dtype is not None:
        need_choice("dtype", dtype, DTYPES)
    adapter = take_adapter(model, statistics=statistics)
    write_adapter(adapter, path, dtype=dtype)
    return adapter


def write_adapter(adapter: Adapter, path: Path | str, *, dtype: str | None = None) -> None:
    """Writes an adapter, whole or not at all."""
    need_instance("write_adapter", adapter, Adapter, cure="Pass what take_adapter returned.")
    if dtype is not None:
        need_choice("dtype", dtype, DTYPES)
    tensors = {
        name: t.to("cpu", DTYPES[dtype]) if dtype and t.is_floating_point() else t.cpu()
        for name, t in adapter.tensors.items()
    }
    document: dict[str, Any] = {
        "heads": list(adapter.heads), "statistics": adapter.has_statistics, "base": adapter.base
    }  # fmt: skip
    rare = {"buffers": list(adapter.buffers), "added": list(adapter.added), "tied": adapter.tied, "free": adapter.free}
    document |= {key: value for key, value in rare.items() if value}  # files have a few kilobytes: no empty fields
    path = need_path("path", path)
    if path.is_dir():
        raise StorageError(f"an adapter needs the name of a file; {path} is a folder. Add a name.")
    write_tensors(path, tensors, kind="adapter", format=FORMAT, document=document)


def read_adapter(path: Path | str) -> Adapter:
    """The adapter in a file, checked for damage."""
    path = need_path("path", path)
    document, tensors = read_tensors(path, kind="adapter", format=FORMAT, cure="Save the adapter again.")
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
    """Puts an adapter's values into the model, if it is the adapter's base model, and returns the adapter."""
    need_module("load_adapter", model)
    adapter = read_adapter(path)
    apply_adapter(model, adapter)
    return adapter


def apply_adapter(model: nn.Module, adapter: Adapter) -> None:
    """Puts the values into the model; nothing is changed unless all of them fit."""
    model = need_module("apply_adapter", model)
    need_instance("apply_adapter", adapter, Adapter, cure="Pass what read_adapter returned.")
    need_fit(model, adapter)
    write_values(model, adapter.values)


def need_fit(model: nn.Module, adapter: Adapter) -> None:
    """Raises ConversionError unless every tensor of the adapter has its place in the model and the base is the same."""
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
                odd.append(
                    f"{name} {tuple(value.shape)} {value.dtype} for {affine_shape(place)} floating-point numbers"
                )
        elif held is None or not is_plain(held):
            missing.append(name)
        elif not _fits(value, held, place, is_head=name in adapter.heads, values=values, name=name):
            odd.append(f"{name} {tuple(value.shape)} {value.dtype} for {tuple(held.shape)} {held.dtype}")
    if missing or odd:
        listed = few(missing) if missing else few(odd)
        what = "places for its tensors; the model has none for" if missing else "tensors of its own shapes; got"
        raise ConversionError(f"the adapter needs {what} {listed}. Load it onto the model it was trained on.")
    partners = [name for group in ties(state) if values.keys() & set(group) for name in group if name not in values]
    if partners:
        raise ConversionError(
            f"the adapter needs a model whose tensors are tied as they were in training; in this one {few(partners)} "
            "would change too. Load it onto the model it was trained on."
        )
    free = free_tensors(model, adapter)
    need_same_base(
        digests({name: value for name, value in state.items() if name not in values and name not in free}), adapter.base
    )


@torch.no_grad()
def write_values(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Sets tensors of the model by name, all of them or none; heads may change their shape, norms get an affine map."""
    places, like = modules_of(model), number_like(model)
    undo: list[Callable[[], None]] = []
    name = ""
    try:
        for name, value in values.items():
            place, _, tensor = name.rpartition(".")
            module = places[place]
            if getattr(module, tensor, None) is None:
                undo.append(add_affine(module, like))
            held = getattr(module, tensor)
            undo.append(_keeper(module, held))
            if held.shape == value.shape:
                held.copy_(value)
            else:
                held.data = value.to(held.device, held.dtype, copy=True)
                _set_sizes(module)
    except Exception as error:
        while undo:
            undo.pop()()
        raise ConversionError(
            f"the adapter needs tensors that the model can take; {name!r} failed with: {error}. The model is as it was."
        ) from error


def norm_tensors(model: nn.Module) -> set[str]:
    """The names of all scales, shifts and statistics in the state dict of the model."""
    return _all_norms(model, need=False) | statistics_of(model)


def free_tensors(model: nn.Module, adapter: Adapter) -> set[str]:
    """The names of the tensors that the adapter neither holds nor compares."""
    if isinstance(adapter.free, str):
        return norm_tensors(model) if adapter.free == "norms" else statistics_of(model)
    return set(adapter.free)


def statistics_of(model: nn.Module) -> set[str]:
    """The names of all running statistics of the model, of norms without scale and shift too, and of other classes."""
    return {
        plain_name(name) for name, _ in model.named_buffers(remove_duplicate=False) if is_statistic(name)
    }  # fmt: skip


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules by name, with names as they are without torch.compile."""
    return {plain_name(name): module for name, module in model.named_modules(remove_duplicate=False)}


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _untie(held: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(each tensor once, the other names of tied ones)."""
    for name, value in held.items():
        if not is_plain(value):
            raise ConversionError(
                f"an adapter needs ordinary tensors; {name!r} is a {type(value).__name__} that is quantized, sparse or "
                "a wrapper. Leave it out of also=."
            )
    tied = {name: group[0] for group in ties(held) for name in group[1:]}
    return {name: value.detach().clone() for name, value in held.items() if name not in tied}, tied


def _changed(
    model: nn.Module, state: Mapping[str, Any], found: Digests, before: Preparation, hidden: Mapping[str, Tensor]
) -> set[str]:
    """The buffers that changed since `only_norms`; raises if anything else did."""
    buffers = {plain_name(name) for name, _ in model.named_buffers(remove_duplicate=False)}
    changed = {name for name, value in found.items() if before.digests.get(name) != value}
    # Buffers outside the state dict that come, go or change their shape are caches, which forward makes again.
    changed -= {name for name in changed & hidden.keys() if before.digests.get(name, (b"",))[0] != found[name][0]}
    lost = [name for name in before.digests if name not in state and name not in before.hidden]
    new = sorted(name for name in changed if name not in before.digests)
    if lost or new:
        raise ConversionError(
            f"an adapter needs the tensors that the model had when only_norms was called; it lost {len(lost)} and got "
            f"{len(new)} new ones ({few([*lost, *new])}). Call undo() on the handle, then only_norms again."
        )
    cast = sorted(name for name in changed if before.digests[name][0] != found[name][0])
    if cast:
        raise ConversionError(
            f"an adapter needs a base model that stays as it was; since only_norms was called {len(cast)} tensors "
            f"changed their type or shape ({few(cast)}). Convert the model first, then call only_norms."
        )
    others = sorted(changed - buffers)
    if others:
        raise ConversionError(
            f"an adapter needs a base model that stays as it was; since only_norms was called {len(others)} tensors "
            f"changed that are not to be trained ({few(others)}). Name them in also=, or load weights before "
            "only_norms."
        )
    return changed


def _all_norms(model: nn.Module, *, need: bool = True) -> set[str]:
    """The names of the scales and shifts of all norms at all their places."""
    norms = find_norms(model).norms
    if need and not norms:
        raise ConversionError(
            f"an adapter needs a model with norms; got none in {type(model).__name__}. Insert norms first."
        )
    return {f"{place}.{t}".lstrip(".") for norm in norms for place in norm.names for t in norm.tensors}


def _fits(
    value: Tensor, held: Tensor, module: nn.Module | None, *, is_head: bool, values: Mapping[str, Tensor], name: str
) -> bool:
    """Whether a tensor of the model can have this value; a head may have another number of outputs."""
    if value.is_floating_point() != held.is_floating_point() or value.is_complex() != held.is_complex():
        return False
    if value.shape == held.shape:
        return True
    if not is_head or value.ndim != held.ndim:
        return False
    if not isinstance(module, nn.Linear | nn.modules.conv._ConvNd | nn.Embedding):
        return True  # nothing is known about what else has to change with it
    place = name.rpartition(".")[0]
    weight, bias = (values.get(f"{place}.{own}".lstrip("."), getattr(module, own, None)) for own in ("weight", "bias"))
    assert isinstance(weight, Tensor)
    return weight.shape[1:] == module.weight.shape[1:] and (bias is None or len(bias) == len(weight))


def _keeper(module: nn.Module, held: Tensor) -> Callable[[], None]:
    """A function that gives the tensor the value it has now."""
    before, is_same = held.detach().clone(), held.data

    def back() -> None:
        held.data = is_same
        held.copy_(before)
        _set_sizes(module)

    return back


def _set_sizes(module: nn.Module) -> None:
    """Lets a layer state the sizes that its weight has."""
    for kind, rows in _OUTPUTS:
        if isinstance(module, kind):
            setattr(module, rows, module.weight.shape[0])
