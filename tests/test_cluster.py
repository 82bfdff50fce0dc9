"""Tasks on several processes: results, failures, killed workers, and what is left when the parent ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import cluster_tasks as tasks
import psutil
import pytest
import torch

from onlynorm import cluster
from onlynorm.cluster import Engine, Task, WorkerDiedError, need_results, open_engine, run_tasks
from onlynorm.errors import ClusterError, ConversionError, ValueRangeError


@pytest.fixture(scope="module")
def two() -> Iterator[Engine]:
    """Two workers of this machine."""
    with open_engine(workers=2) as engine:
        yield engine


def wait_until(condition: object, seconds: float = 60.0) -> bool:
    assert callable(condition)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_results_come_in_the_order_of_the_tasks(two: Engine) -> None:
    work = [Task(f"square of {n}", tasks.square, (n,)) for n in range(7)]
    assert need_results(run_tasks(work, two)) == [n * n for n in range(7)]


def test_one_worker_is_this_process_and_two_are_others(two: Engine) -> None:
    with open_engine(workers=1) as engine:
        assert need_results(run_tasks([Task("here", tasks.process)], engine)) == [os.getpid()]
    found = need_results(run_tasks([Task(str(n), tasks.process) for n in range(6)], two))
    assert os.getpid() not in found


def test_every_task_has_its_number_of_threads_on_every_engine(two: Engine) -> None:
    before = tasks.n_threads()
    with open_engine(threads=1) as engine:
        assert need_results(run_tasks([Task("threads", tasks.n_threads)], engine)) == [{1}]
    assert tasks.n_threads() == before
    assert need_results(run_tasks([Task("threads", tasks.n_threads)], two)) == [{1}]


def test_bits_are_those_of_the_serial_run(two: Engine) -> None:
    work = [Task(str(seed), tasks.numbers, (seed,)) for seed in range(4)]
    with open_engine() as engine:
        serial = need_results(run_tasks(work, engine))
    assert need_results(run_tasks(work, two)) == serial


def test_the_fixed_number_of_threads_is_restored() -> None:
    before = torch.get_num_threads()
    with cluster.fixed_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_an_exception_is_not_retried_and_leaves_the_other_tasks_done(two: Engine) -> None:
    work = [Task("good", tasks.square, (3,)), Task("bad", tasks.refuse, ("no",)), Task("late", tasks.square, (4,))]
    outcomes = run_tasks(work, two)
    assert [one.result for one in outcomes] == [9, None, 16]
    assert [one.attempts for one in outcomes] == [1, 1, 1]
    with pytest.raises(ValueError, match="no"):
        need_results(outcomes)
    outcomes = run_tasks([*work, Task("worse", tasks.refuse, ("never",))], two)
    with pytest.raises(
        ClusterError, match=r"4 tasks need to finish; 2 failed: 'bad': no; 'worse': never\. The other 2"
    ):
        need_results(outcomes)


def test_exceptions_that_pickle_cannot_restore_keep_their_text(two: Engine) -> None:
    outcome, end = run_tasks([Task("odd", tasks.refuse_unpicklable), Task("end", tasks.leave)], two)
    assert isinstance(outcome.error, ClusterError)
    assert "TwoArgumentsError: one and two" in str(outcome.error)
    assert isinstance(end.error, ClusterError)
    assert "sys.exit(3)" in str(end.error)


def test_a_function_that_no_worker_can_import_is_refused_before_anything_runs(two: Engine) -> None:
    with pytest.raises(ConversionError, match=r"task 'local' .* at the top of a module"):
        run_tasks([Task("local", lambda: None)], two)


@pytest.mark.parametrize("n_deaths", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_killed_worker_costs_its_task_which_is_retried(two: Engine, tmp_path: Path, n_deaths: int) -> None:
    work = [Task(str(n), tasks.square, (n,)) for n in range(4)]
    work.insert(1, Task("dies", tasks.die_until, (str(tmp_path / "calls"), n_deaths)))
    outcomes = run_tasks(work, two)
    assert [one.result for one in outcomes] == [0, n_deaths + 1, 1, 4, 9]
    assert [one.attempts for one in outcomes] == [1, n_deaths + 1, 1, 1, 1]


def test_a_task_that_always_kills_its_worker_is_named_and_the_others_are_done(two: Engine) -> None:
    work = [Task(str(n), tasks.square, (n,)) for n in range(4)]
    outcomes = run_tasks([*work, Task("deadly", tasks.die)], two, retries=1)
    assert [one.result for one in outcomes] == [0, 1, 4, 9, None]
    assert isinstance(outcomes[-1].error, WorkerDiedError)
    assert outcomes[-1].attempts == 2
    with pytest.raises(ClusterError, match=r"1 failed: 'deadly': its worker process died: .* other 4 are done"):
        need_results(outcomes)


def test_progress_counts_tasks_and_names_those_that_run(two: Engine) -> None:
    seen: list[tuple[int, int, str]] = []
    run_tasks([Task(f"t{n}", tasks.square, (n,)) for n in range(5)], two, progress=lambda *one: seen.append(one))
    assert seen[-1] == (5, 5, "")
    assert {total for _, total, _ in seen} == {5}
    assert "t0, t1" in {message for _, _, message in seen}
    assert sorted(seen, key=lambda one: one[0]) == seen


def test_an_exception_of_a_callback_ends_the_workers(tmp_path: Path) -> None:
    def interrupt(done: int, total: int, message: str) -> None:
        if message == "a, b" and wait_until(lambda: {"a", "b"} <= set(os.listdir(tmp_path))):
            raise KeyboardInterrupt

    work = [Task(name, tasks.announce_and_sleep, (str(tmp_path), name)) for name in ("a", "b")]
    with open_engine(workers=2) as engine, pytest.raises(KeyboardInterrupt):
        run_tasks(work, engine, progress=interrupt)
    pids = [int((tmp_path / name).read_text()) for name in ("a", "b")]
    assert wait_until(lambda: not any(map(is_running, pids)), 10)


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("number", ["SIGINT", pytest.param("SIGTERM", marks=pytest.mark.slow), "SIGKILL"])
def test_no_worker_survives_its_parent(tmp_path: Path, number: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, tasks.__file__, str(tmp_path)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert wait_until(lambda: {"a", "b"} <= set(os.listdir(tmp_path)))
    pids = [int((tmp_path / name).read_text()) for name in ("a", "b")]
    assert all(map(is_running, pids))
    if number == "SIGINT":
        os.killpg(parent.pid, signal.SIGINT)  # as the terminal does
    else:
        parent.send_signal(signal.Signals[number])
    _, said = parent.communicate(timeout=30)
    assert wait_until(lambda: not any(map(is_running, pids)), 10)
    if number == "SIGINT":
        assert said.count("KeyboardInterrupt") == 1, "workers print nothing"


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from operator import neg\nfrom onlynorm.cluster import *\nfrom onlynorm.cluster import Task, open_engine\n"
        "with open_engine(workers=2) as engine:\n    run_tasks([Task(str(n), neg, (n,)) for n in range(3)], engine)\n"
    )
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 1
    assert "ClusterError: worker processes need to start; 2 ended" in ran.stderr
    assert "if __name__ == '__main__':" in ran.stderr.splitlines()[-1]


def test_more_workers_than_cores_are_allowed_and_said() -> None:
    n_cores = os.cpu_count() or 1
    with open_engine(workers=n_cores + 1) as engine:
        assert engine.n_workers == n_cores + 1
        assert engine.remark.startswith(f"{n_cores + 1} workers with 1 thread each share {n_cores} core")
    with open_engine(workers=1) as engine:
        assert engine.remark == ""


@pytest.mark.parametrize(
    ("options", "needle"),
    [
        ({"workers": 0}, "workers must be an integer .*; got 0"),
        ({"threads": 0}, "threads must be an integer .*; got 0"),
        ({"cluster": "slurm:x"}, "cluster needs a known engine; got 'slurm:x'"),
    ],
)  # fmt: skip
def test_invalid_options_are_refused(options: dict[str, object], needle: str) -> None:
    with pytest.raises(ValueRangeError, match=needle), open_engine(**options):  # type: ignore[arg-type]
        pass
