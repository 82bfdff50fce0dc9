"""Writes all pages into one folder, from which any site generator for Markdown can build the site."""

from __future__ import annotations

import lzma
import shutil
from collections.abc import Callable
from pathlib import Path

from onlynorm.evidence.registry import PAPERS
from tools.docs.commands import write_commands
from tools.docs.reference import rooms_table, write_reference
from tools.docs.statements import statements_of, verdicts_table
from tools.docs.tutorials import write_tutorials

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "docs"
COMPRESSED = "assets/mathjax/tex-svg.js.xz"
GENERATED: dict[str, Callable[[], str]] = {
    "rooms": rooms_table,
    "verdicts": verdicts_table,
    **{f"statements {paper}": (lambda paper=paper: statements_of(paper)) for paper in PAPERS},  # type: ignore[misc]
}
"""What takes the place of `<!-- generated: NAME -->` in a page."""


def assemble(folder: Path, *, run: bool = True) -> None:
    """Replaces `folder` by the pages of the documentation; with `run`, tutorials that have changed are run."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("ruff.toml"))
    (folder / "verdicts.json").unlink()
    packed = folder / COMPRESSED
    packed.with_suffix("").write_bytes(lzma.decompress(packed.read_bytes()))
    packed.unlink()
    shutil.copy(ROOT / "CHANGELOG.md", folder / "changelog.md")
    write_reference(folder)
    write_commands(folder)
    write_tutorials(folder / "tutorials", run=run)
    for page in folder.rglob("*.md"):
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


def filled(text: str) -> str:
    """The text of a page with its generated parts."""
    for name, make in GENERATED.items():
        mark = f"<!-- generated: {name} -->"
        if mark in text:
            text = text.replace(mark, make())
    return text
