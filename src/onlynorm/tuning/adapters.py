"""Several adapters for one base model: add, switch, average, disable, merge and unmerge, all exact.

    adapters = Adapters(model)                       # remembers the base model's values
    ...train...; adapters.capture("new")
    adapters.add("a", "task_a.safetensors"); adapters.add("b", "task_b.safetensors")
    adapters.switch("a"); adapters.disable(); adapters.average({"a": 0.7, "b": 0.3})

The values that the base model has under any adapter are kept, so that every way back is exact to the last bit. Adapters
may cover different layers: what the active one does not hold has the base model's values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, ShapeError, UnknownNameError, ValueRangeError
from onlynorm.tuning.adapter import Adapter, assign, need_fit, norm_tensors, read_adapter, take_adapter


class Adapters:
    """The adapters of one model by name; `active` is the one whose values the model has now, None for the base."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.active: str | None = None
        self._adapters: dict[str, Adapter] = {}
        trained = model.__dict__.get("onlynorm_tuning", {}).get("trained", ())
        self._base: dict[str, Tensor] = self._present(norm_tensors(model) | set(trained))
        self._merged: list[dict[str, Tensor]] = []

    def __iter__(self) -> Iterator[str]:
        return iter(self._adapters)

    def __len__(self) -> int:
        return len(self._adapters)

    def add(self, name: str, adapter: Adapter | Path | str) -> Adapter:
        """Adds an adapter, or the one in a file, under a name; the model stays as it is until `switch`."""
        made = adapter if isinstance(adapter, Adapter) else read_adapter(adapter)
        if name in self._adapters:
            raise ConversionError(f"an adapter needs a name of its own; {name!r} is taken. Remove that one first.")
        present = self._present(self._base)
        self._set({})  # the adapter is held against the base model itself
        try:
            need_fit(self.model, made)
            self._base |= self._present(made.tensors.keys() - self._base.keys())
        finally:
            self._set(present)
        self._adapters[name] = made
        return made

    def capture(self, name: str, *, statistics: bool | None = None) -> Adapter:
        """Adds the model's present values, just trained, under a name and makes that adapter the active one."""
        made = self.add(name, take_adapter(self.model, statistics=statistics))
        self.switch(name)
        return made

    def remove(self, name: str) -> None:
        """Forgets an adapter; the base model's values come back if it was active."""
        self._need(name)
        if self.active == name:
            self.disable()
        del self._adapters[name]

    def switch(self, name: str) -> None:
        """Gives the model the values of this adapter, and the base model's wherever it holds none."""
        self._set(self._need(name).tensors)
        self.active = name

    def disable(self) -> None:
        """Gives the model the base model's values."""
        self._set({})
        self.active = None

    def average(self, weights: Mapping[str, float], *, name: str = "average") -> Adapter:
        """Adds, and switches to, the weighted mean of adapters; what one of them does not hold counts as the base."""
        total = sum(weights.values())
        if not weights or not abs(total) > 1e-12 or not all(abs(w) < float("inf") for w in weights.values()):
            raise ValueRangeError(
                f"an average needs finite weights with a sum other than zero; got {dict(weights)}. Try equal ones."
            )
        parts = [(self._need(key), weight / total) for key, weight in weights.items()]
        keys = dict.fromkeys(key for adapter, _ in parts for key in adapter.tensors)
        tensors = {key: self._mean(key, parts) for key in keys}
        heads = tuple(dict.fromkeys(h for adapter, _ in parts for h in adapter.heads))
        has_statistics = any(adapter.has_statistics for adapter, _ in parts)
        made = Adapter(tensors, heads, has_statistics, parts[0][0].base)
        if len({adapter.heads for adapter, _ in parts}) > 1:
            raise ConversionError(
                "an average needs adapters with the same heads; got different ones. Average adapters without heads, or "
                "of one task."
            )
        self.add(name, made)
        self.switch(name)
        return made

    def merge(self) -> None:
        """Makes the active adapter's values those of the base model; `unmerge` takes it back exactly."""
        if self.active is None:
            raise ConversionError("merge needs an active adapter; got none. Call switch(name) first.")
        self._merged.append(self._base)
        self._base = self._base | self._adapters[self.active].tensors
        self.active = None

    def unmerge(self) -> None:
        """Takes the last merge back: the base model has its former values, to the last bit."""
        if not self._merged:
            raise ConversionError("unmerge needs a merged adapter; got none. Call merge() first.")
        former = self._merged.pop()
        # Adapters that were added since know base values which that merge did not touch.
        self._base = self._base | former
        self.disable()

    def _set(self, tensors: Mapping[str, Tensor]) -> None:
        for key, value in (self._base | dict(tensors)).items():
            assign(self.model, key, value)

    def _present(self, keys: Iterable[str]) -> dict[str, Tensor]:
        state = self.model.state_dict()
        return {key: state[key].detach().clone() for key in keys if key in state}

    def _need(self, name: str) -> Adapter:
        if name not in self._adapters:
            raise UnknownNameError("adapter", name, self._adapters)
        return self._adapters[name]

    def _mean(self, key: str, parts: list[tuple[Adapter, float]]) -> Tensor:
        values = [(adapter.tensors.get(key, self._base[key]), weight) for adapter, weight in parts]
        if len({value.shape for value, _ in values}) > 1:
            raise ShapeError(
                f"an average needs tensors of one shape; got {', '.join(str(tuple(v.shape)) for v, _ in values)} for "
                f"{key}. Heads of different tasks have no mean: average adapters without them."
            )
        first = values[0][0]
        if not first.is_floating_point():
            return max(value for value, _ in values) if first.ndim == 0 else first
        mean = torch.stack([weight * value.double() for value, weight in values]).sum(0)
        return mean.to(first.dtype)
