"""Tutorials: every script of docs/tutorials is run and becomes a page with its output and figures, and a notebook."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat

import onlynorm
from tools.docs import run_cells

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "docs" / "tutorials"
WIDTH = 90
"""Characters per line of output."""
CACHE = ROOT / "build" / "tutorials"


class TutorialError(Exception):
    """A script raised an error or a warning."""


def write_tutorials(folder: Path, *, run: bool = True) -> None:
    """Writes page and notebook of every script into `folder`; without `run` those that were not run have no output."""
    folder.mkdir(exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        for script, notebook in zip(scripts(), pool.map(lambda path: _notebook(path, run=run), scripts()), strict=True):
            nbformat.write(notebook, folder / f"{script.stem}.ipynb")
            (folder / f"{script.stem}.md").write_text(page(notebook, script.stem), encoding="utf-8")


def scripts() -> list[Path]:
    """All scripts, sorted by name."""
    return sorted(SCRIPTS.glob("*.py"))


def execute(script: Path, written: Path) -> None:
    """Runs a script on one thread, in an empty folder and a process of its own, and writes the notebook."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "tools.docs.run_cells", str(script.resolve()), str(written.resolve())]
    with TemporaryDirectory() as folder:
        ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if ran.returncode != 0:
        raise TutorialError(f"{script.name} failed:\n{ran.stderr}")


def page(notebook: Any, name: str) -> str:
    """A notebook as Markdown."""
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        else:
            parts.append(f"```python\n{cell.source}\n```")
            parts += [_shown(output) for output in cell.outputs]
    parts.append(f"This page was made by running [a script]({name}.py), which is also [a notebook]({name}.ipynb).")
    return "\n\n".join(parts) + "\n"


def _notebook(script: Path, *, run: bool) -> Any:
    """The notebook of a script with its output: from the cache if neither the script nor the library has changed."""
    kept = CACHE / f"{script.stem}-{_key(script)}.ipynb"
    if not kept.exists():
        if not run:
            return run_cells.read(script)
        CACHE.mkdir(parents=True, exist_ok=True)
        for old in CACHE.glob(f"{script.stem}-*"):
            old.unlink()
        unfinished = kept.with_suffix(".part")
        execute(script, unfinished)
        unfinished.replace(kept)
    return nbformat.read(kept, as_version=4)


def _key(script: Path) -> str:
    """A digest of the script, of what runs it, and of the sources of the library."""
    package = Path(onlynorm.__file__).parent
    digest = hashlib.sha256(script.read_bytes())
    for path in (Path(run_cells.__file__), *sorted(package.rglob("*.py"))):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _shown(output: Any) -> str:
    """An output as Markdown: text in a block, figures as they are."""
    if output.output_type == "stream":
        return f"```text\n{_folded(output.text.rstrip())}\n```"
    html = output.data.get("text/html")
    if html:
        return f'<div class="onlynorm-result"><div class="figure">\n{_one_block(html)}\n</div></div>'
    return f"```text\n{_folded(output.data['text/plain'])}\n```"


def _folded(text: str) -> str:
    """Text with long sentences folded; tables stay as they are."""
    lines = text.splitlines()
    return "\n".join(
        line if "  " in line.strip() else textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in lines
    )


def _one_block(html: str) -> str:
    """HTML without empty lines, which would end the block."""
    return "\n".join(line for line in html.splitlines() if line.strip())
