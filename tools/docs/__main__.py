"""Builds the site: `python -m tools.docs`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tools.docs.assemble import ROOT, assemble


def main() -> int:
    """Writes the pages and builds the site; any warning is an error."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs", description=__doc__)
    parser.add_argument("--pages", type=Path, default=ROOT / "build" / "docs", help="folder for the pages; replaced")
    parser.add_argument("--site", type=Path, default=ROOT / "site", help="folder for the site; replaced")
    options = parser.parse_args()
    assemble(options.pages)
    command = [sys.executable, "-m", "properdocs", "build", "--strict", "--quiet", "--site-dir", options.site.resolve()]
    environment = {**os.environ, "ONLYNORM_DOCS": str(options.pages.resolve())}
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
