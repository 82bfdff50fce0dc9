"""The statements of a paper as a page: what each says, the code that rests on it, its check, and the verdict."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import onlynorm
from onlynorm.evidence import registry
from onlynorm.evidence.papers.table import CHECKS
from onlynorm.evidence.registry import Statement
from tools.docs.reference import ROOMS, defined_at, identifiers

ROOT = Path(__file__).parents[2]
VERDICTS = ROOT / "docs" / "verdicts.json"
"""What `onlynorm theorems --check` found: a dictionary from keys to verdicts and evidence. A test keeps it current."""
MARKS = {"holds": "success", "holds with a corrected constant": "info", "fails": "failure"}


def statements_of(paper: str) -> str:
    """All statements of a paper, as Markdown."""
    return "\n".join(_section(one) for one in registry.statements(paper))


def verdicts_table() -> str:
    """How many statements of each paper hold, with links to the pages."""
    verdicts = list(MARKS)
    rows = [f"| paper | statements | {' | '.join(verdicts)} |", "| --- |" + " --- |" * (1 + len(verdicts))]
    for paper in registry.papers():
        found = [recorded()[one.key]["verdict"] for one in registry.statements(paper.key)]
        counts = " | ".join(str(found.count(verdict)) for verdict in verdicts)
        rows.append(f"| [{paper.title}](papers/{paper.key}.md) | {len(found)} | {counts} |")
    return "\n".join(rows)


@cache
def recorded() -> dict[str, dict[str, Any]]:
    """The recorded verdicts."""
    return dict(json.loads(VERDICTS.read_text(encoding="utf-8")))


def _section(one: Statement) -> str:
    verdict = recorded()[one.key]
    number = f" {one.number}" if registry.KINDS[one.kind] else ""
    kind = one.kind.capitalize() + number if one.kind != "named" else "Remark"
    anchor = one.key.partition(":")[2]
    lines = [
        f"### {kind}: {_plain(one.title)} {{#{anchor}}}",
        "",
        f"`{one.key}`{_origin(one)}",
        "",
        _plain(one.says),
        "",
    ]
    if one.assumes:
        lines += ["*Assumes* " + "; ".join(map(_plain, one.assumes)) + ".", ""]
    if one.slips:
        lines += ['??? note "Corrections of the printed text"', textwrap.indent(_plain(one.slips), "    "), ""]
    lines += [
        f'!!! {MARKS[verdict["verdict"]]} "{verdict["verdict"].capitalize()}"',
        f"    {_plain(verdict['evidence'])}",
        "",
    ]
    places = code_of(one.key)
    if places:
        lines += ["*Code* " + ", ".join(places), ""]
    lines += _check(one)
    return "\n".join(lines)


def _origin(one: Statement) -> str:
    notes = ["quoted by the paper from another work"] * one.from_elsewhere
    if one.restates:
        paper, _, anchor = one.restates.partition(":")
        page = f"{paper}.md" if paper != one.paper else ""
        notes.append(f"restates [`{one.restates}`]({page}#{anchor})")
    return ", " + ", ".join(notes) if notes else ""


def _check(one: Statement) -> list[str]:
    """The source of the check, folded."""
    if one.restates:
        return []
    function = inspect.unwrap(CHECKS[one.key])
    place = registry.where(one.key).partition(":")[0].removeprefix("onlynorm.").replace(".", "/") + ".py"
    source = textwrap.dedent(inspect.getsource(function)).rstrip()
    block = f"```python\n{source}\n```"
    command = f"`onlynorm theorems {one.key} --check` runs it."
    return [f'??? example "The check: {place}"', f"    {command}", "", textwrap.indent(block, "    "), ""]


def code_of(key: str) -> list[str]:
    """Functions, classes and modules whose docstring rests on a statement, with links to the reference."""
    return [f"[`{name}`][{target}]" if target else f"`{name}`" for name, target in _mentions().get(key, [])]


@cache
def _mentions() -> dict[str, list[tuple[str, str]]]:
    """Statement keys to (name, its place in the reference or ""), for every `Theory:` in a docstring of the library."""
    source = Path(onlynorm.__file__).parent
    public = _public_names()
    found: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(source.rglob("*.py")):
        module = ".".join(("onlynorm", *path.relative_to(source).with_suffix("").parts)).removesuffix(".__init__")
        if module.startswith("onlynorm.evidence"):
            continue
        for name, docstring in _docstrings(ast.parse(path.read_text(encoding="utf-8")), module):
            for mention in re.findall(r"Theory:\s*((?:[a-z]+\w*:[\w.-]*\w(?:,\s*)?)+)", docstring):
                for key in re.findall(r"[a-z]\w*:[\w.-]*\w", mention):
                    entry = (public.get(name, name), name if name in public else "")
                    if entry not in found.setdefault(key, []):
                        found[key].append(entry)
    return found


def _docstrings(tree: ast.AST, prefix: str) -> list[tuple[str, str]]:
    """(qualified name, docstring) of a module and of every public function and class in it."""
    found = [(prefix, ast.get_docstring(tree) or "")] if isinstance(tree, ast.Module) else []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            name = f"{prefix}.{node.name}"
            found.append((name, ast.get_docstring(node) or ""))
            if isinstance(node, ast.ClassDef):
                found += _docstrings(node, name)
    return found


def _public_names() -> dict[str, str]:
    """Where something is defined, to the name under which a user imports it, for all that the reference has."""
    return {defined_at(name): name for room in ROOMS for name in identifiers(room)}


def _plain(text: str) -> str:
    """Text in which no character is taken for Markdown."""
    return re.sub(r"([*_|<>\[\]`$\\])", r"\\\1", text)
