"""Tasks for workers, which import them from here: some end their own process, as the out-of-memory killer would."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from threadpoolctl import threadpool_info

from onlynorm.cluster import Task, open_engine, run_tasks


def square(number: int) -> int:
    """The square."""
    return number * number


def process() -> int:
    """The id of the process."""
    return os.getpid()


def refuse(text: str) -> None:
    """Raises an error."""
    raise ValueError(text)


class TwoArgumentsError(Exception):
    """An exception that pickle cannot restore from its message."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def refuse_unpicklable() -> None:
    """Raises an error that pickle cannot restore."""
    raise TwoArgumentsError("one", "two")


def leave() -> None:
    """Ends the interpreter."""
    sys.exit(3)


def die() -> None:
    """Kills its own process."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_until(path: str, n_deaths: int) -> int:
    """Kills its own process at the first calls; the number of calls is the size of the file."""
    with open(path, "ab") as file:
        file.write(b"x")
    n_calls = Path(path).stat().st_size
    if n_calls <= n_deaths:
        die()
    return n_calls


def n_threads() -> set[int]:
    """The numbers of threads of torch and of all libraries of linear algebra."""
    return {torch.get_num_threads(), *(one["num_threads"] for one in threadpool_info())}


def numbers(seed: int) -> bytes:
    """The bits of sums and factorizations that depend on the number of threads."""
    A = torch.randn(300, 300, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    parts = [A.sum().reshape(1), torch.linalg.solve(A, A[:, 0]), torch.linalg.eigvalsh(A @ A.T), (A @ A).sum(1)]
    return torch.cat(parts).numpy().tobytes()


def announce_and_sleep(folder: str, name: str) -> None:
    """Writes a file with its process id, then sleeps."""
    temporary = Path(folder, f".{name}")
    temporary.write_text(str(os.getpid()))
    temporary.rename(Path(folder, name))
    time.sleep(600)


def main() -> None:
    """Runs two sleeping tasks on two workers: `python cluster_tasks.py FOLDER`."""
    with open_engine(workers=2) as engine:
        run_tasks([Task(name, announce_and_sleep, (sys.argv[1], name)) for name in ("a", "b")], engine)


if __name__ == "__main__":
    main()
