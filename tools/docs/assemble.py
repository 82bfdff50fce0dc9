"""Writes all pages into one folder, from which any site generator for Markdown can build the site."""

from __future__ import annotations

import lzma
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "docs"
COMPRESSED = "assets/mathjax/tex-svg.js.xz"


def assemble(folder: Path) -> None:
    """Replaces `folder` by the pages of the documentation and what they show."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(SOURCE, folder)
    packed = folder / COMPRESSED
    packed.with_suffix("").write_bytes(lzma.decompress(packed.read_bytes()))
    packed.unlink()
