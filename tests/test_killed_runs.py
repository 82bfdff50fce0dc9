"""Runs that are killed at random moments and resumed find what an uninterrupted run finds, to the last bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onlynorm.data import find_data
from onlynorm.errors import MissingDataError

N_KILLS = 20
REPRODUCE = ("reproduce", "random_features:fig-3")
BENCH = (
    "bench", "scaled", "--quick", "--data", "fashion_mnist", "--law", "geometric", "--seeds", "1", "--epochs", "1",
    "--images", "128",
)  # fmt: skip


def kill_and_resume(command: tuple[str, ...], folder: Path) -> dict[str, Any]:
    script = Path(__file__).with_name("killing.py")
    ran = subprocess.run(
        [sys.executable, str(script), str(folder), str(N_KILLS), "0", *command],
        stdout=subprocess.PIPE, text=True, timeout=1700, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a minute if nothing else runs; moments scale with the machine
@pytest.mark.skipif(not hasattr(os, "fork"), reason="killing needs processes that fork")
@pytest.mark.parametrize("command", [REPRODUCE, BENCH], ids=["reproduce", "bench"])
def test_a_run_that_is_killed_at_any_moment_resumes_to_the_same_numbers(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    if command == BENCH:
        try:
            find_data("fashion-mnist")
        except MissingDataError as error:
            pytest.skip(str(error))
    report = kill_and_resume(command, tmp_path)
    assert len(report["kills"]) == N_KILLS
    assert [kill for kill in report["kills"] if not kill["is_equal"]] == []
    assert any(0 < kill["n_stored"] < report["n_files"] for kill in report["kills"]), "no kill came in the middle"
