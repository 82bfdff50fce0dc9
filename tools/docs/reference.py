"""Pages of the reference: one for every room of the package, with all that the room exports."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import onlynorm

ROOMS = {
    "reconstruction": "Rebuild a trained network",
    "tuning": "Tune norms",
    "rank": "Diagnose and repair",
    "identity": "Near the identity",
    "frozen": "Frozen layers",
    "optim": "Optimizers",
    "features": "Frozen weights",
    "solvers": "Solve for gamma",
    "alignment": "Align a target",
    "intervals": "Certified ranges",
    "modules": "Tools for modules",
    "models": "Models",
    "data": "Data",
    "files": "Save and load",
    "display": "Results and figures",
    "errors": "Errors",
}
"""Titles of the pages, in the order of the navigation."""

EVIDENCE = (
    "onlynorm.evidence.registry",
    "onlynorm.evidence.papers.reproduce.reproduce",
    "onlynorm.evidence.report.page.write_report",
    "onlynorm.evidence.papers.giannou2023.depth.deep_table",
    "onlynorm.evidence.papers.giannou2023.equal_size.pad_equal",
    "onlynorm.evidence.papers.giannou2023.sparse.predicted_density",
    "onlynorm.evidence.papers.burkholz2024.depth",
    "onlynorm.evidence.papers.random_features.match_bounds",
    "onlynorm.evidence.papers.daneshmand2020.eigenvalues.frobenius_drift",
)


def write_reference(folder: Path) -> None:
    """Writes a page for every room, and one for the evidence."""
    (folder / "reference").mkdir(exist_ok=True)
    for room, title in ROOMS.items():
        (folder / "reference" / f"{room}.md").write_text(_page(room, title), encoding="utf-8")
    text = "# Theorems and papers\n\nNot loaded by `import onlynorm`: it needs `onlynorm[evidence]`.\n\n"
    directives = "".join(f"::: {name}\n" for name in EVIDENCE)
    (folder / "reference" / "evidence.md").write_text(text + directives, encoding="utf-8")


def rooms_table() -> str:
    """A table of all rooms with a link to the page of each."""
    rows = [f"| [{title}](reference/{room}.md) | {_summary(room)} |" for room, title in ROOMS.items()]
    rows.append(
        "| [Theorems and papers](reference/evidence.md) | The registry of statements, and how figures are redrawn. |"
    )
    return "\n".join(["| page | contents |", "| --- | --- |", *rows])


def identifiers(room: str) -> list[str]:
    """Names of what a room exports, as a user imports them: `onlynorm.solve`, `onlynorm.solvers.choose`."""
    module = importlib.import_module(f"onlynorm.{room}")
    if not hasattr(module, "__path__") and room != "optim":
        return [f"onlynorm.{room}"]
    paths = []
    for name in sorted(set(module.__all__) - set(constants(room)), key=lambda name: _rank(getattr(module, name), name)):
        is_top = name in onlynorm.__all__ and getattr(onlynorm, name) is getattr(module, name)
        is_module = inspect.ismodule(getattr(module, name))
        paths.append(f"onlynorm.{name}" if is_top and not is_module else f"onlynorm.{room}.{name}")
    return paths


def callables() -> dict[str, Any]:
    """What users call: the functions of all rooms and of public modules, and the classes of `onlynorm` itself."""
    names = [f"onlynorm.{name}" for name in onlynorm.__all__]
    names += [name for room in ROOMS for name in identifiers(room)]
    modules = [thing for name in onlynorm.__all__ if inspect.ismodule(thing := getattr(onlynorm, name))]
    names += [f"{module.__name__}.{name}" for module in modules for name in _functions_of(module)]
    things = {name: named(name) for name in names}
    return {
        name: thing
        for name, thing in sorted(things.items())
        if inspect.isfunction(thing) or (inspect.isclass(thing) and name.count(".") == 1)
    }


def named(name: str) -> Any:
    """The object of this name; `onlynorm.solvers.choose` is the function and not its module."""
    parent, _, last = name.rpartition(".")
    return getattr(importlib.import_module(parent), last)


def _functions_of(module: ModuleType) -> list[str]:
    found = vars(module).items()
    return [k for k, v in found if inspect.isfunction(v) and v.__module__ == module.__name__ and not k.startswith("_")]


def constants(room: str) -> list[str]:
    """Names of the plain values that a room exports."""
    module = importlib.import_module(f"onlynorm.{room}")
    return [name for name in getattr(module, "__all__", ()) if name.isupper()]


def _rank(thing: object, name: str) -> tuple[bool, int, str]:
    """Names of `import onlynorm` first, then functions, classes and the rest."""
    is_top = name in onlynorm.__all__
    kind = 0 if inspect.isfunction(thing) else 1 if inspect.isclass(thing) else 2
    return not is_top, kind, name


def _page(room: str, title: str) -> str:
    module = importlib.import_module(f"onlynorm.{room}")
    if room == "files":
        return f"# {title}\n\n" + _directive("onlynorm.save") + _directive("onlynorm.load")
    start = f"# {title}\n\n`onlynorm.{room}`: {_escaped(inspect.getdoc(module) or '')}\n\n"
    if room == "files":
        return f"# {title}\n\n::: onlynorm.save\n::: onlynorm.load\n"
    named = ", ".join(f"`{name}`" for name in constants(room))
    start += f"Constants: {named}.\n\n" if named else ""
    return start + "".join(_directive(name) for name in identifiers(room))


def defined_at(name: str) -> str:
    """Where a public name is defined; `onlynorm.tuning.only_norms` alone may be the function or its module."""
    parent, _, last = name.rpartition(".")
    thing = getattr(importlib.import_module(parent), last, None)
    is_defined = inspect.isfunction(thing) or inspect.isclass(thing)
    return f"{thing.__module__}.{thing.__qualname__}" if is_defined else name


def _directive(name: str) -> str:
    label = name.rpartition(".")[2]
    return f"::: {defined_at(name)}\n    options:\n      heading: {name}\n      toc_label: {label}\n\n"


def _summary(room: str) -> str:
    return (inspect.getdoc(importlib.import_module(f"onlynorm.{room}")) or "").split("\n\n")[0].replace("\n", " ")


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*")
