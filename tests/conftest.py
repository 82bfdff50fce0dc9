"""Shapes written in signatures are checked while the tests run; hypothesis has no deadline and CI no dice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jaxtyping
import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from commands import RunCli

# Systems in tests are small: a second thread waits more than it works, and on a busy machine tenfold.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The rooms whose signatures carry shapes. The tower lets an int stand for a float, as type checkers do. Compiled files
# remember whether they are checked: delete __pycache__ after a change of this list.
_ROOMS = (
    "modules", "intervals", "features", "solvers", "alignment", "frozen", "optim", "reconstruction",
    "tuning", "rank", "identity",
)  # fmt: skip
_CHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
jaxtyping.install_import_hook([f"onlynorm.{room}" for room in _ROOMS], _CHECKER)

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Shape checks off for one test: misuse meets our own errors, as it does for a user."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> RunCli:
    """Runs `onlynorm` in this process, in a folder of its own."""
    from commands import runner  # it imports the package, which must come after the hook above

    return runner(monkeypatch, capsys, tmp_path)
