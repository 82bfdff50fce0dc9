"""Several adapters for one base model: add, switch, average, disable, merge and unmerge, all exact.

    adapters = Adapters(model)                       # copies the base model's values
    ...train...; adapters.capture("new")
    adapters.add("a", "task_a.safetensors"); adapters.add("b", "task_b.safetensors")
    adapters.switch("a"); adapters.disable(); adapters.average({"a": 0.7, "b": 0.3})

Base model values of all tensors in adapters are copied, so they are restored bit for bit. Other tensors are hashed, and
a change of one of them raises. Adapters may cover different layers: tensors that the active adapter does not hold have
the base model's values.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, ShapeError, ValueRangeError, shown
from onlynorm.modules.norms import add_affine, can_get_affine, need_module, plain_name, reference_tensor, remove_affine
from onlynorm.modules.walk import need_open
from onlynorm.tuning.adapter import (
    Adapter,
    free_tensors,
    modules_of,
    need_fit,
    norm_tensors,
    read_adapter,
    take_adapter,
    write_values,
)
from onlynorm.tuning.fingerprint import digests, few, fingerprint, hidden_buffers, is_plain, state_of
from onlynorm.tuning.only_norms import preparation_of
from onlynorm.validate import need_choice, need_text


class Adapters:
    """The adapters of one model by name; `active` is the name of the loaded adapter, None for the base model.

    Examples:
        >>> import onlynorm as on
        >>> from onlynorm.models import load_model
        >>> model = load_model("digits_cnn")
        >>> adapters = on.Adapters(model)
        >>> handle = on.only_norms(model)
        >>> adapter = adapters.capture("as trained")
        >>> adapters.switch("as trained")
        >>> adapters.active, list(adapters)
        ('as trained', ['as trained'])
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = need_module("Adapters", model)
        need_open("Adapters", self.model)
        self.active: str | None = None
        self._adapters: dict[str, Adapter] = {}
        state = self._state()
        self._digests = digests(state)
        buffers = {plain_name(name) for name, _ in self.model.named_buffers(remove_duplicate=False)}
        prepared = preparation_of(self.model)
        keys = norm_tensors(self.model) | buffers | set(() if prepared is None else prepared.trained)
        self._base = {key: state[key].detach().clone() for key in state if key in keys and is_plain(state[key])}
        self._bare: set[str] = set()  # scales and shifts that do not exist in the base model
        self._merged: list[dict[str, Tensor]] = []

    def __repr__(self) -> str:
        names = ", ".join(f"{name} (active)" if name == self.active else name for name in self._adapters)
        return f"Adapters of {type(self.model).__name__}: {names or 'none'}"

    def __iter__(self) -> Iterator[str]:
        return iter(self._adapters)

    def __len__(self) -> int:
        return len(self._adapters)

    def add(self, name: str, adapter: Adapter | Path | str) -> Adapter:
        """Adds an adapter, or loads one from a file, under a name; does not change the model until `switch`."""
        made = adapter if isinstance(adapter, Adapter) else read_adapter(adapter)
        need_text("the name of an adapter", name, cure="Pass a string.")
        if name in self._adapters:
            raise ConversionError(f"an adapter needs a new name; {shown(name)} is taken. Remove that adapter first.")
        self._remember(made)
        current = self._current()
        self._set_base()  # adapters are compared with the base model before merges
        try:
            self._need_same_elsewhere()
            need_fit(self.model, made)
        finally:
            self._write(current)
        self._adapters[name] = made
        return made

    def capture(self, name: str, *, statistics: bool | None = None) -> Adapter:
        """Adds the current, trained values of the model under a name and makes that adapter active."""
        made = self.add(name, take_adapter(self.model, statistics=statistics))
        self.switch(name)
        return made

    def remove(self, name: str) -> None:
        """Removes an adapter; restores the base model if it was active."""
        self._need(name)
        if self.active == name:
            self.disable()
        del self._adapters[name]

    def switch(self, name: str) -> None:
        """Loads the values of this adapter, and base model values for all other tensors."""
        adapter = self._need(name)
        self._remember()
        self._write({**self._visible_base(), **adapter.values})
        self.active = name

    def disable(self) -> None:
        """Restores the base model."""
        self._remember()
        self._write(self._visible_base())
        self.active = None

    def average(self, weights: Mapping[str, float], *, name: str = "average") -> Adapter:
        """Adds and loads the weighted mean of adapters; a tensor missing in an adapter has its base value."""
        given: Any = weights
        is_map = isinstance(given, Mapping)
        is_real = is_map and all(isinstance(w, numbers.Real) and math.isfinite(w) for w in given.values())
        if not is_real or not abs(total := sum(weights.values())) > 1e-12:
            raise ValueRangeError(
                f"an average needs finite weights with a nonzero sum; got {shown(given)}. Try equal weights."
            )
        parts = [(self._need(key), weight / total) for key, weight in weights.items()]
        if len({adapter.heads for adapter, _ in parts}) > 1:
            raise ConversionError(
                "an average needs adapters with the same heads; got different ones. Average adapters without heads, or "
                "of the same task."
            )
        keys = dict.fromkeys(key for adapter, _ in parts for key in adapter.values)
        values = {key: self._mean(key, parts) for key in keys}
        tied = {key: first for adapter, _ in parts for key, first in adapter.tied.items()}
        free = {key for adapter, _ in parts for key in free_tensors(self.model, adapter)} - set(keys)
        made = Adapter(
            {key: value for key, value in values.items() if key not in tied},
            heads=parts[0][0].heads,
            has_statistics=any(adapter.has_statistics for adapter, _ in parts),
            base="",
            buffers=tuple(dict.fromkeys(key for adapter, _ in parts for key in adapter.buffers)),
            added=tuple(dict.fromkeys(key for adapter, _ in parts for key in adapter.added)),
            tied=tied,
            free=tuple(sorted(free)),
        )
        current = self._current()
        self._set_base()
        try:
            base = fingerprint(self.model, values.keys() | free)
        finally:
            self._write(current)
        self.add(name, made := replace(made, base=base))
        self.switch(name)
        return made

    def merge(self) -> None:
        """Merges the active adapter into the base model; `unmerge` reverts it exactly."""
        if self.active is None:
            raise ConversionError("merge needs an active adapter; got none. Call switch(name) first.")
        self._merged.append(self._visible_base())
        values = self._adapters[self.active].values
        self._base = self._base | values
        self._bare -= values.keys()
        self.active = None

    def unmerge(self) -> None:
        """Reverts the last merge and restores the base model bit for bit."""
        if not self._merged:
            raise ConversionError("unmerge needs a merged adapter; got none. Call merge() first.")
        former = self._merged.pop()
        # Adapters added since then have base values that the merge did not change.
        self._bare |= {key for key in self._base if key not in former and key not in self._digests}
        self._base = self._base | former
        self.disable()

    def _remember(self, adapter: Adapter | None = None) -> None:
        """Copies base values of the tensors in the adapter, and of those newly selected by `only_norms`."""
        prepared = preparation_of(self.model)
        trained = {} if prepared is None else prepared.initial
        state, places = self._state(), modules_of(self.model)
        needed = dict.fromkeys([*trained, *(() if adapter is None else adapter.values)])
        for key in [key for key in needed if key not in self._base]:
            place = key.rpartition(".")[0]
            values = [value for value in (state.get(key), trained.get(key)) if value is not None and is_plain(value)]
            is_known = key in self._digests
            found = [v for v in values if not is_known or digests({key: v})[key] == self._digests[key]]
            if found:  # the value stored by `only_norms` is last, and is used for tensors new since then
                self._base[key] = found[0 if is_known else -1].detach().clone()
            elif values:
                raise ConversionError(
                    f"Adapters needs the base model's value of {key!r}; it changed since Adapters(model) was called. "
                    f"Call only_norms first, or create Adapters from the base model again.{self._unmerge_cure()}"
                )
            elif place in places and can_get_affine(places[place]):
                self._add_bare(place, places[place])

    def _unmerge_cure(self) -> str:
        return " Call unmerge() before training." if self._merged else ""

    def _add_bare(self, place: str, norm: nn.Module) -> None:
        """Adds base values for a norm without affine tensors: a scale of one and a shift of zero."""
        remove = add_affine(norm, reference_tensor(self.model))
        for own, value in norm.named_parameters(recurse=False):
            key = f"{place}.{own}".lstrip(".")
            self._base[key] = value.detach().clone()
            self._bare.add(key)
        remove()

    def _need_same_elsewhere(self) -> None:
        """Raises if a tensor without a stored base value changed since `Adapters(model)`."""
        outside = {key: value for key, value in state_of(self.model).items() if key not in self._base}
        changed = [key for key, found in digests(outside).items() if self._digests.get(key, found) != found]
        if changed:
            raise ConversionError(
                f"Adapters needs an unchanged base model; {few(changed)} changed since Adapters(model) was called. "
                "Name trained tensors in also= of only_norms, or create Adapters from the new base model."
                f"{self._unmerge_cure()}"
            )

    def _visible_base(self) -> dict[str, Tensor]:
        """The base values, without scales and shifts that do not exist in the base model."""
        return {key: value for key, value in self._base.items() if key not in self._bare}

    def _set_base(self) -> None:
        """Restores the base model as it was before any merge."""
        self._write({**self._visible_base(), **(self._merged[0] if self._merged else {})})

    def _write(self, values: Mapping[str, Tensor]) -> None:
        """Writes these values; removes affine tensors that neither they nor the base model have."""
        hidden = hidden_buffers(self.model)
        names = self._digests.keys() - state_of(self.model).keys()
        # Non-persistent buffers that were added, removed or changed their shape are caches, computed again by forward.
        caches = {k for k in names & values.keys() if k not in hidden or hidden[k].shape != values[k].shape}
        write_values(self.model, {key: value for key, value in values.items() if key not in caches})
        places = modules_of(self.model)
        for place in {key.rpartition(".")[0] for key in self._bare - values.keys()}:
            if not can_get_affine(places[place]):
                remove_affine(places[place])

    def _state(self) -> dict[str, Any]:
        """The tensors of the model by name, including non-persistent buffers."""
        return state_of(self.model) | hidden_buffers(self.model)

    def _current(self) -> dict[str, Tensor]:
        state = self._state()
        return {key: state[key].detach().clone() for key in self._base if key in state}

    def _need(self, name: str) -> Adapter:
        return self._adapters[need_choice("adapter", name, self._adapters)]

    def _mean(self, key: str, parts: list[tuple[Adapter, float]]) -> Tensor:
        values = [(adapter.values.get(key, self._base[key]), weight) for adapter, weight in parts]
        if len({value.shape for value, _ in values}) > 1:
            raise ShapeError(
                f"an average needs tensors of one shape; got {', '.join(str(tuple(v.shape)) for v, _ in values)} for "
                f"{key}. Heads of different tasks cannot be averaged: use adapters without heads."
            )
        first = values[0][0]
        if not first.is_floating_point():
            return max(value for value, _ in values) if first.ndim == 0 else first
        mean = torch.stack([weight * value.double() for value, weight in values]).sum(0)
        return mean.to(first.dtype)
