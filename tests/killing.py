"""Kills a command at random moments and lets it resume: `python killing.py FOLDER N_KILLS SEED COMMAND...`.

The command is a resumable one of `onlynorm` with `--json`; `--out` is added to it. Everything is imported once, and
each run is a fork, so that a moment is one of the work and not of the imports. The report on standard output has, for
each kill, whether the resumed run printed and stored what the uninterrupted one did, to the last bit; times, and notes
of what was reused, aside.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

MEASURED = ("seconds", "created", "note", "is_reloaded", "figures", "checksum")
"""Fields that may differ between two runs that found the same: times, what was reused, and what holds one of these."""
MOST_TRIES = 5
"""Runs per kill: on a busy machine a moment may come after the end."""


def main() -> None:
    """Runs the command once, and kills and resumes it as often as was asked for."""
    folder, n_kills, generator = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    command = sys.argv[4:]
    run(command, folder / "warm")  # in this process: what is imported or read once is nobody's work later
    start = time.monotonic()
    wait_for(fork(command, folder / "whole"))
    duration = time.monotonic() - start
    whole = found(folder / "whole")
    kills: list[dict[str, Any]] = []
    for number in range(MOST_TRIES * n_kills):
        if len(kills) == n_kills:
            break
        out = folder / f"killed-{number}"
        moment = generator.uniform(0.0, duration)
        child = fork(command, out)
        time.sleep(moment)
        os.kill(child, signal.SIGKILL)
        if os.WIFSIGNALED(os.waitpid(child, 0)[1]):
            n_stored = len(list(out.rglob("*.json")))
            wait_for(fork(command, out))
            kills.append({"moment": moment, "n_stored": n_stored, "is_equal": found(out) == whole})
    print(json.dumps({"n_files": len(whole) - 1, "kills": kills}))


def run(command: list[str], out: Path) -> None:
    """Runs the command in this process; what it prints goes to a file beside the folder of its results."""
    from onlynorm import cli

    out.parent.mkdir(parents=True, exist_ok=True)
    sys.argv = ["onlynorm", *command, "--json", "--out", str(out)]
    with out.with_suffix(".stdout").open("w") as printed, out.with_suffix(".stderr").open("w") as said:
        kept, (sys.stdout, sys.stderr) = (sys.stdout, sys.stderr), (printed, said)
        try:
            cli.main()
        except SystemExit:
            pass  # a benchmark that misses a goal exits with 1
        finally:
            sys.stdout, sys.stderr = kept


def fork(command: list[str], out: Path) -> int:
    """The process that runs the command."""
    child = os.fork()
    if child == 0:
        run(command, out)
        os._exit(0)
    return child


def wait_for(child: int) -> None:
    """Waits for a run that has to end by itself."""
    status = os.waitpid(child, 0)[1]
    assert os.WIFEXITED(status), f"ended with {status}"
    assert os.WEXITSTATUS(status) == 0, f"ended with {status}"


def found(out: Path) -> dict[str, Any]:
    """What the command printed and every file of numbers that it left, without what may differ between two runs."""
    files = {str(path.relative_to(out)): path for path in out.rglob("*.json")}
    files["printed"] = out.with_suffix(".stdout")
    return {name: without_measured(json.loads(path.read_text())) for name, path in files.items()}


def without_measured(value: Any) -> Any:
    """JSON without the measured fields, on every level."""
    if isinstance(value, dict):
        return {name: without_measured(one) for name, one in value.items() if name not in MEASURED}
    return [without_measured(one) for one in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
