"""Checks of the arguments that benchmarks share, made before hours of work are spent on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from onlynorm.validate import (
    need_callable,
    need_choice,
    need_flag,
    need_instance,
    need_integer,
    need_items,
    need_number,
)

_Sizes = TypeVar("_Sizes")


def need_names(kind: str, value: Any, known: Collection[str]) -> tuple[str, ...]:
    """The names of a list, or a single name, if all are known."""
    given = [value] if isinstance(value, str) else need_items(kind, value, cure=f"Pass some of {', '.join(known)}.")
    return tuple(need_choice(kind, name, known) for name in given)


def need_counts(sizes: Any, kind: type[_Sizes]) -> _Sizes:
    """Sizes of a benchmark: a dataclass of this kind with positive counts and rates that are not negative."""
    found = need_instance("sizes", sizes, kind, cure=f"Pass a {kind.__name__}, or leave it out.")
    cure = f"See the defaults of {kind.__name__}."
    for one in dataclasses.fields(sizes):
        name, value, wanted = f"sizes.{one.name}", getattr(sizes, one.name), str(one.type)
        if wanted == "int":
            need_integer(name, value, low=1, cure=cure)
        elif wanted == "float":
            need_number(name, value, low=0.0, cure=cure)
        elif wanted == "bool":
            need_flag(name, value, cure=cure)
        else:
            for rate in need_items(name, value, cure=cure):
                need_number(name, rate, low=0.0, cure=cure)
    return found


def listener(name: str, value: Any) -> Callable[..., Any]:
    """The function to call, or one that does nothing if there is none."""
    if value is None:
        return lambda *_: None
    return need_callable(name, value, cure="Leave it out to hear nothing.")
