"""Base classes of results: JSON data, figures and HTML pages.

A result defines its content (`view`, `plot`); this module renders it in files, browsers and notebooks.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from onlynorm.display.figure import Figure
from onlynorm.display.table import Table
from onlynorm.storage import write_atomically
from onlynorm.validate import need_instance, need_items, need_path, need_text

Tone = Literal["good", "warn", "bad", ""]
SIGNS: dict[Tone, str] = {"good": "✓", "warn": "~", "bad": "✕", "": "·"}
"""Symbols shown with the colour of a verdict, for colour-blind readers."""


class Result:
    """Base class of the dataclasses that public functions return.

    The repr is the text of `str` if the class defines one, else the constructor call with tensors as their shapes.
    """

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__repr__" not in vars(cls):  # else `dataclass` adds one, which prints all entries of tensors
            cls.__repr__ = cls.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        return brief(self) if type(self).__str__ is object.__str__ else str(self)

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON types: shape and dtype for tensors and arrays, the class name for modules."""
        return {name: plain(getattr(self, name)) for name in getattr(self, "__dataclass_fields__", ())}


SHOWN_ITEMS = 6
"""Maximum number of items of a list or dictionary in a repr."""


def brief(value: object) -> str:
    """A repr without the entries of tensors and long lists: shapes, constructor calls, the first items."""
    if isinstance(value, Tensor | np.ndarray):
        shape = ", ".join(map(str, value.shape))
        return f"{type(value).__name__}({shape}{', ' * bool(shape)}{str(value.dtype).removeprefix('torch.')})"
    if isinstance(value, nn.Module):
        return f"{type(value).__name__}(...)"
    if isinstance(value, list | tuple):
        items = [brief(item) for item in value[:SHOWN_ITEMS]]
        more = [f"... {len(value)} in total"] if len(value) > SHOWN_ITEMS else []
        text = ", ".join(items + more)
        return f"[{text}]" if isinstance(value, list) else f"({text}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        entries = [f"{key!r}: {brief(item)}" for key, item in itertools.islice(value.items(), SHOWN_ITEMS)]
        more = [f"... {len(value)} in total"] if len(value) > SHOWN_ITEMS else []
        return f"{{{', '.join(entries + more)}}}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = {one.name: getattr(value, one.name) for one in dataclasses.fields(value) if one.repr}
        return f"{type(value).__name__}({', '.join(f'{name}={brief(item)}' for name, item in named.items())})"
    return repr(value)


def plain(value: object) -> Any:
    """The value as numbers, strings, lists and dicts."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "as_dict"):
        return value.as_dict()
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, Tensor | np.ndarray):
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, nn.Module | Path):
        return [plain(item) for item in value]
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return getattr(value, "__qualname__", None) or str(value)


@dataclass(frozen=True)
class View:
    """The content of the page of a result, except its figure.

    `verdict` is shown in the colour of `tone`. `lines` are findings, `advice` is the recommended action, `facts` are
    named values, and `tables` are tables by heading. `details` are collapsed facts.
    """

    title: str
    verdict: str = ""
    tone: Tone = ""
    lines: Sequence[str] = ()
    advice: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)
    tables: Mapping[str, Table] = field(default_factory=dict)
    details: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


class ShownResult(Result):
    """A result with a figure and an HTML page, displayed in notebooks."""

    __slots__ = ()

    @abstractmethod
    def plot(self) -> Figure:
        """The figure."""

    @abstractmethod
    def view(self) -> View:
        """The content of the page except the figure."""

    def to_html(self, path: Path | str, *, title: str | None = None) -> Path:
        """Writes a self-contained HTML page without scripts and returns its path; it has a light and a dark mode."""
        path = need_path("to_html", path)
        title = None if title is None else need_text("title", title, cure="Leave it out for the default.")
        write_atomically(path, self._render("display/result.html", title=title).encode())
        return path

    def _render(self, template: str, *, title: str | None = None) -> str:
        from onlynorm.display.page import render

        view, figure = self._shown()
        return render(template, title=title or view.title, view=view, figure=figure, signs=SIGNS)

    def _shown(self) -> tuple[View, str]:
        """The content of the page and the figure as SVG; empty without curves."""
        figure = self.plot()
        return self.view(), figure.responsive_svg() if figure.curves else ""

    def _repr_html_(self) -> str:
        return self._render("display/notebook.html")

    def __repr__(self) -> str:
        return str(self)


def write_page(path: Path | str, results: Sequence[ShownResult], *, title: str, text: str = "") -> Path:
    """Writes one self-contained HTML page with a section for each result and returns its path.

    Examples:
        >>> import onlynorm as on
        >>> from onlynorm.data import digits
        >>> from onlynorm.display import write_page
        >>> from onlynorm.models import mlp
        >>> found = on.diagnose(mlp((64, 32, 10)), *digits().train)
        >>> write_page("page.html", [found], title="My network").name
        'page.html'
    """
    from onlynorm.display.page import render

    path, cure = need_path("write_page", path), "Pass results with a figure, such as a Diagnosis."
    given = [need_instance("results", one, ShownResult, cure=cure) for one in need_items("results", results, cure=cure)]
    title = need_text("title", title, cure="Pass a string.")
    text = text if isinstance(text, str) and not text else need_text("text", text, cure="Pass a string.")
    sections = [result._shown() for result in given]
    page = render("display/results.html", title=title, text=text, sections=sections, signs=SIGNS)
    write_atomically(path, page.encode())
    return path
