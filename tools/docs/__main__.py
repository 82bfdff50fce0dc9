"""Builds the site: `python -m tools.docs`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tools.docs.assemble import ROOT, assemble
from tools.docs.tutorials import TutorialError


def main() -> int:
    """Writes the pages and builds the site; any warning is an error."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs", description=__doc__)
    parser.add_argument("--pages", type=Path, default=ROOT / "build" / "docs", help="folder for the pages; replaced")
    parser.add_argument("--site", type=Path, default=ROOT / "site", help="folder for the site; replaced")
    parser.add_argument("--no-run", action="store_true", help="leave out the output of tutorials that have changed")
    options = parser.parse_args()
    try:
        assemble(options.pages, run=not options.no_run)
    except TutorialError as error:
        print(error, file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "properdocs", "build", "--strict", "--site-dir", str(options.site.resolve())]
    environment = {**os.environ, "ONLYNORM_DOCS": str(options.pages.resolve())}
    # With --quiet, properdocs neither shows warnings nor counts them: the build would never fail.
    built = subprocess.run(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    print("".join(line for line in built.stderr.splitlines(keepends=True) if not line.startswith("INFO")), end="")
    (options.site / "404.html").unlink(missing_ok=True)  # its links start at the root of a server
    return built.returncode


if __name__ == "__main__":
    sys.exit(main())
