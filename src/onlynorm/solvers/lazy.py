"""Dataclass fields that are computed on first access.

Estimating the condition number of a small system takes longer than solving it, and it is rarely read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Class = TypeVar("_Class")
MAX_HELD = 16 * 2**20
"""Bytes that a result may hold for a field that is not computed yet."""


class _Field:
    """A descriptor that stores a value, or a function of the instance that computes it on first access."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        value = instance.__dict__[self._name]
        if callable(value):
            value = instance.__dict__[self._name] = value(instance)  # releases the function and its tensors
        return value

    def __set__(self, instance: Any, value: object) -> None:
        instance.__dict__[self._name] = value


def lazy(*names: str) -> Callable[[type[_Class]], type[_Class]]:
    """A dataclass decorator: the fields `names` may be set with `set_lazy`."""

    def decorate(cls: type[_Class]) -> type[_Class]:
        for name in names:
            setattr(cls, name, _Field(name))
        return cls

    return decorate


def set_lazy(instance: _Class, name: str, compute: Callable[[_Class], object], n_bytes: int = 0) -> None:
    """Sets a lazy field to be computed on first access, or computes it now if the function holds many bytes.

    The function takes the instance as an argument: a closure over it would be a reference cycle.
    """
    instance.__dict__[name] = compute if n_bytes <= MAX_HELD else compute(instance)


def copy_lazy(name: str, source: object, instance: object) -> None:
    """Copies a lazy field from `source` to `instance` without computing it."""
    compute = source.__dict__[name]
    instance.__dict__[name] = (lambda _: getattr(source, name)) if callable(compute) else compute
