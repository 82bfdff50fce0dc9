"""Independent tasks on several processes: on this machine, on a Dask cluster or on a Ray cluster.

A task is a function of a module with small arguments, such as paths, seeds and names. `run_tasks` is the one loop that
all engines share: it submits a task when a worker is free and collects futures as they finish. A task runs with a fixed
number of threads on every engine, also in this process, so that results do not depend on the number of workers. A task
whose worker died is submitted again; an exception of the task itself is not, since it would be raised again.

    with open_engine(workers=2, threads=1) as engine:
        outcomes = run_tasks([Task("seed 0", train, (0,)), Task("seed 1", train, (1,))], engine)
    results = need_results(outcomes)
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_for_end
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from onlynorm.errors import (
    ClusterError,
    ConversionError,
    MissingDataError,
    OnlynormError,
    UnknownNameError,
    ValueRangeError,
    shown,
)
from onlynorm.validate import Progress, need_integer

RETRIES = 3
"""How often a task is submitted again after its worker died."""
PATIENCE = 5.0
"""Seconds to wait for an answer from the address of a cluster."""
MOST = 4096
"""Largest number of workers, and of threads of a task."""
SHOWN = 3
"""Tasks named in a message; the others are counted."""
_PR_SET_PDEATHSIG = 1
_CURE = "Use --workers N for this machine, dask:ADDRESS, dask:local:N, ray:ADDRESS or ray:local:N."
_GUARD = (
    "If this is a script, call onlynorm below `if __name__ == '__main__':`, since every worker imports the script once."
)


@dataclass(frozen=True)
class Task:
    """A function of a module and its arguments; `name` identifies the task in messages."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class TaskOutcome:
    """The result of a task and its seconds in the worker, or the exception that ended it.

    `number` is the position of the task in the list; `attempts` counts how often it was started.
    """

    number: int
    name: str
    result: Any = None
    error: Exception | None = None
    seconds: float = 0.0
    attempts: int = 1


@dataclass(frozen=True)
class _Answer:
    """What a worker returns: the pickled result or exception."""

    data: bytes
    is_error: bool
    seconds: float


# ------------------------------------------------------------------------------- the loop


def run_tasks(
    tasks: Sequence[Task],
    engine: Engine,
    *,
    on_start: Callable[[int], None] = lambda _: None,
    on_done: Callable[[TaskOutcome], None] = lambda _: None,
    progress: Progress | None = None,
    retries: int = RETRIES,
) -> list[TaskOutcome]:
    """The outcomes of all tasks, in their order; a failed task does not stop the others.

    `on_start` is called with the number of a task before it starts, `on_done` with each outcome as it arrives,
    `progress` with (done, total, names of running tasks). An exception of these, or Ctrl-C, stops all workers.
    """
    found: dict[int, TaskOutcome] = {}
    waiting = deque((number, 1) for number in range(len(tasks)))
    payloads = [_pickled(task) for task in tasks]
    running: dict[Future[_Answer], tuple[int, int]] = {}

    def report() -> None:
        if progress is not None:
            names = [tasks[number].name for number, _ in running.values()]
            progress(len(found), len(tasks), shortened(names))

    try:
        while waiting or running:
            while waiting and len(running) < engine.n_workers:
                number, attempt = waiting.popleft()
                if attempt == 1:
                    on_start(number)
                running[engine.submit(_perform, payloads[number], engine.threads)] = number, attempt
                report()
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                number, attempt = running.pop(future)
                outcome = _outcome(number, tasks[number].name, future, attempt)
                if isinstance(outcome.error, WorkerDiedError) and attempt <= retries and not engine.retries_itself:
                    waiting.append((number, attempt + 1))
                    continue
                found[number] = outcome
                on_done(outcome)
            report()
    except BaseException:
        engine.stop()
        raise
    return [found[number] for number in range(len(tasks))]


def need_results(outcomes: Sequence[TaskOutcome]) -> list[Any]:
    """The results of all tasks; raises if some failed, after all others are done.

    The exception is that of the first failed task, with the names of the others, or a `ClusterError` if a worker died.
    """
    failed = [one for one in outcomes if one.error is not None]
    if not failed:
        return [one.result for one in outcomes]
    first = failed[0].error
    assert first is not None
    if not isinstance(first, WorkerDiedError) and len(failed) == 1:
        raise first
    if isinstance(first, OnlynormError) and not isinstance(first, ClusterError | UnknownNameError):
        others = shortened([repr(one.name) for one in failed[1:]])
        raise type(first)(f"{first} Other failed tasks: {others}.") from first
    listed = "; ".join(f"{one.name!r}: {one.error}" for one in failed[:SHOWN])
    more = f" and {len(failed) - SHOWN} more" if len(failed) > SHOWN else ""
    raise ClusterError(
        f"{len(outcomes)} tasks need to finish; {len(failed)} failed: {listed}{more}. The other "
        f"{len(outcomes) - len(failed)} are done. Run the same call again to repeat the failed ones only."
    ) from first


def shortened(names: Sequence[str]) -> str:
    """The first names of a list and the number of the others."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


class WorkerDiedError(ClusterError):
    """A worker process that died during a task, for example because its memory did not suffice."""


def _pickled(task: Task) -> bytes:
    try:
        return pickle.dumps((task.function, task.args))
    except Exception as error:
        raise ConversionError(
            f"task {task.name!r} needs a function and arguments that another process can import; got {error}. Define "
            "functions and classes at the top of a module."
        ) from error


def _perform(payload: bytes, threads: int) -> _Answer:
    """Runs a task in a worker. The limit stays, since other tasks of the process need the same."""
    start = time.perf_counter()
    _set_threads(threads)
    try:
        function, args = pickle.loads(payload)
        return _Answer(pickle.dumps(function(*args)), False, time.perf_counter() - start)
    except SystemExit as end:
        error: Exception = ClusterError(f"the task called sys.exit({end.code!r})")
        return _Answer(_pickled_error(error), True, time.perf_counter() - start)
    except Exception as error:
        return _Answer(_pickled_error(error), True, time.perf_counter() - start)


def _pickled_error(error: Exception) -> bytes:
    """The pickled exception; one that cannot be restored becomes a `ClusterError` with its text."""
    where = "".join(traceback.format_exception(error))
    with contextlib.suppress(Exception):
        data = pickle.dumps(error)
        if str(pickle.loads(data)) == str(error):
            if not isinstance(error, OnlynormError) and hasattr(error, "add_note"):
                error.add_note(f"In a worker process:\n{where}")
                data = pickle.dumps(error)
            return data
    return pickle.dumps(ClusterError(f"the task raised {type(error).__name__}: {error}"))


def _outcome(number: int, name: str, future: Future[_Answer], attempt: int) -> TaskOutcome:
    try:
        answer = future.result()
    except Exception as error:
        why = str(error) or type(error).__name__
        lost = WorkerDiedError(f"its worker process died: {why.splitlines()[0]}")
        lost.__cause__ = error
        return TaskOutcome(number, name, error=lost, attempts=attempt)
    value = pickle.loads(answer.data)
    if answer.is_error:
        return TaskOutcome(number, name, error=value, seconds=answer.seconds, attempts=attempt)
    return TaskOutcome(number, name, value, seconds=answer.seconds, attempts=attempt)


# ------------------------------------------------------------------------------- threads


@contextlib.contextmanager
def fixed_threads(n_threads: int) -> Iterator[None]:
    """Limits torch, NumPy and SciPy to this number of threads inside the block.

    Sums, products and factorizations round differently with another number of threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        with threadpool_limits(n_threads):
            yield
    finally:
        torch.set_num_threads(before)


def _set_threads(n_threads: int) -> None:
    torch.set_num_threads(n_threads)
    threadpool_limits(n_threads)


# ------------------------------------------------------------------------------- engines


def crowding(n_workers: int, threads: int) -> str:
    """A message if workers of this machine need more cores than there are, else empty."""
    n_cores = os.cpu_count() or 1
    if n_workers * threads <= n_cores:
        return ""
    return (
        f"{n_workers} worker{'s' * (n_workers > 1)} with {threads} thread{'s' * (threads > 1)} each share {n_cores} "
        f"core{'s' * (n_cores > 1)}."
    )


class Engine(ABC):
    """Where tasks run: `n_workers` at a time, each with `threads` threads.

    `retries_itself` if the engine submits a task again whose worker died.
    """

    retries_itself = False

    def __init__(self, n_workers: int, threads: int) -> None:
        self.n_workers, self.threads = n_workers, threads

    @abstractmethod
    def submit(self, function: Callable[..., _Answer], *args: Any) -> Future[_Answer]:
        """The future of one call, which starts soon."""

    @abstractmethod
    def stop(self) -> None:
        """Ends all workers without waiting for their tasks."""

    @property
    def is_parallel(self) -> bool:
        """Whether tasks run in other processes."""
        return not isinstance(self, SerialEngine)

    @property
    def remark(self) -> str:
        """A message if there are more workers than cores, else empty."""
        return ""


class SerialEngine(Engine):
    """This process: tasks run one after the other."""

    def __init__(self, threads: int) -> None:
        super().__init__(1, threads)

    def submit(self, function: Callable[..., _Answer], *args: Any) -> Future[_Answer]:
        """The finished future of a call."""
        future: Future[_Answer] = Future()
        with fixed_threads(self.threads):
            future.set_result(function(*args))
        return future

    def stop(self) -> None:
        """Nothing: no other process runs."""


@dataclass
class _Worker:
    """A pool of one process, so that a process that dies ends no other task."""

    pool: ProcessPoolExecutor
    started: Future[None]
    processes: list[BaseProcess] = field(default_factory=list)


class LocalEngine(Engine):
    """Worker processes on this machine. They are started when needed, and end with this process, however it ends."""

    def __init__(self, n_workers: int, threads: int) -> None:
        super().__init__(n_workers, threads)
        self._free: list[_Worker] = []
        self._busy: dict[Future[_Answer], _Worker] = {}
        self._n_started = self._n_failed_starts = 0

    def submit(self, function: Callable[..., _Answer], *args: Any) -> Future[_Answer]:
        """The future of a call in a free worker, or in a new one."""
        self._collect()
        while True:
            worker = self._free.pop() if self._free else self._start()
            try:
                future = worker.pool.submit(function, *args)
            except BrokenProcessPool:  # the process died while it was free
                _end(worker)
                continue
            self._busy[future] = worker
            return future

    def stop(self) -> None:
        """Kills all workers."""
        for worker in (*self._free, *self._busy.values()):
            _end(worker)
        self._free.clear()
        self._busy.clear()

    @property
    def remark(self) -> str:
        """A message if there are more workers than cores, else empty."""
        return crowding(self.n_workers, self.threads)

    def _collect(self) -> None:
        """Makes the workers of finished calls free; ends those whose process died."""
        for future in [one for one in self._busy if one.done()]:
            worker = self._busy.pop(future)
            has_started = worker.started.done() and worker.started.exception() is None
            self._n_started += has_started
            self._n_failed_starts += not has_started
            if isinstance(future.exception(), BrokenProcessPool):
                _end(worker)
            else:
                self._free.append(worker)
        if self._n_failed_starts > 1 and not self._n_started:
            raise ClusterError(
                f"worker processes need to start; {self._n_failed_starts} ended before their first task. {_GUARD}"
            )

    def _start(self) -> _Worker:
        with _uninterrupted():  # the new process inherits the mask, so that Ctrl-C reaches this process only
            pool = ProcessPoolExecutor(
                1, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(os.getpid(),)
            )
            started = pool.submit(_say_nothing)
        return _Worker(pool, started, list(pool._processes.values()))


def _end(worker: _Worker) -> None:
    for process in worker.processes:
        process.kill()
    worker.pool.shutdown(wait=True, cancel_futures=True)


def _say_nothing() -> None:
    """The first call of a worker: its result says that the process has started."""


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(parent: int) -> None:
    """Prepares a worker: it ignores Ctrl-C, which its parent handles, and ends when its parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before
            os._exit(1)
    else:
        threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait_for_end([parent.sentinel])
        os._exit(1)


# ------------------------------------------------------------------------------- engines of other packages


class DaskEngine(Engine):
    """Workers of a Dask cluster. Dask itself starts a task again whose worker died."""

    retries_itself = True

    def __init__(self, address: str, n_workers: int | None, threads: int) -> None:
        distributed, config = _need_package("distributed", "dask"), _need_package("dask", "dask").config
        self._cluster: Any = None
        n_local = _local_workers("dask", address)
        if n_local:
            # One task per worker, so that a task that kills its worker harms no other.
            with config.set({"distributed.scheduler.worker-saturation": 1.0}):
                self._cluster = distributed.LocalCluster(
                    n_workers=n_local, threads_per_worker=1, dashboard_address=None, silence_logs=logging.CRITICAL
                )
        else:
            _need_answer(address, cure="Check the address, and start the scheduler with `dask scheduler`.")
        try:
            where = self._cluster or address
            self._client = _in_time(lambda: distributed.Client(where, timeout=PATIENCE, set_as_default=False))
        except Exception as error:
            raise ClusterError(
                f"dask:{address} needs a Dask scheduler; got {type(error).__name__}: {error}. Check the address."
            ) from error
        found = n_local or sum(self._client.nthreads().values())
        if not found:
            self._client.close()
            raise ClusterError(f"dask:{address} needs workers; got none. Start some with `dask worker {address}`.")
        super().__init__(min(found, n_workers or found), threads)
        self._executor = self._client.get_executor(pure=False)

    def submit(self, function: Callable[..., _Answer], *args: Any) -> Future[_Answer]:
        """The future of a call on any worker."""
        future: Future[_Answer] = self._executor.submit(function, *args)
        return future

    def stop(self) -> None:
        """Drops tasks that have not started and ends workers that were started here."""
        self._executor.shutdown(wait=False)
        self._client.close(timeout=PATIENCE)
        if self._cluster is not None:
            self._cluster.close(timeout=PATIENCE)
            self._cluster = None


class RayEngine(Engine):
    """Workers of a Ray cluster. Ray itself starts a task again whose worker died."""

    retries_itself = True

    def __init__(self, address: str, n_workers: int | None, threads: int) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # the default of later versions
        self._ray = _need_package("ray", "ray")
        n_local = _local_workers("ray", address)
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if not n_local:
            _need_answer(address, cure=f"Check the address, and start the cluster with `ray start --head`. {_TOKEN}")
        self._is_ours = not self._ray.is_initialized()
        if n_local and self._is_ours:
            paths = os.pathsep.join(path for path in sys.path if path)  # so that tasks are found as in this process
            self._ray.init(
                address="local", num_cpus=n_local, include_dashboard=False,
                runtime_env={"env_vars": {"PYTHONPATH": paths}}, **quiet,
            )  # fmt: skip
        elif self._is_ours:
            try:
                self._ray.init(address=address, **quiet)
            except Exception as error:
                why = str(error).partition("\n")[0]
                raise ClusterError(
                    f"ray:{address} needs a Ray cluster; got {type(error).__name__}: {why} {_TOKEN}"
                ) from error
        found = n_local or int(self._ray.cluster_resources().get("CPU", 0))
        super().__init__(max(1, min(found, n_workers or found)), threads)

    def submit(self, function: Callable[..., _Answer], *args: Any) -> Future[_Answer]:
        """The future of a call on any worker."""
        remote = self._ray.remote(function).options(max_retries=RETRIES, num_cpus=1)
        future: Future[_Answer] = remote.remote(*args).future()
        return future

    def stop(self) -> None:
        """Disconnects, and ends workers that were started here."""
        if self._is_ours:
            self._ray.shutdown()


_TOKEN = (
    "Ray 2.59 and later need the token of the cluster for a remote address: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN "
    "to what `ray get-auth-token` prints there."
)


def _need_package(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDataError(
            f"{extra}:ADDRESS needs the package {name}; not installed. Run `pip install onlynorm[{extra}]`."
        ) from error


def _in_time(connect: Callable[[], Any]) -> Any:
    """The result of the function; raises `TimeoutError` after `PATIENCE` seconds, for a service that never answers."""
    made: Future[Any] = Future()

    def call() -> None:
        try:
            made.set_result(connect())
        except Exception as error:
            made.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return made.result(PATIENCE + 2.0)


def _local_workers(engine: str, address: str) -> int:
    """N of "local:N"; 0 for another address."""
    name, _, number = address.partition(":")
    if name != "local":
        return 0
    if not number.isdecimal() or int(number) < 1:
        raise ValueRangeError(f"{engine}:local:N needs a number of workers; got {address!r}. Try {engine}:local:2.")
    return int(number)


def _need_answer(address: str, *, cure: str) -> None:
    """Raises unless something accepts connections at "host:port" or "scheme://host:port"."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        raise ValueRangeError(f"an address needs the form HOST:PORT; got {address!r}. {_CURE}")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE):
            pass
    except (OSError, OverflowError) as error:
        raise ClusterError(f"nobody answers at {address} ({error}). {cure}") from error


# ------------------------------------------------------------------------------- choosing one


_ENGINES: dict[str, type[DaskEngine | RayEngine]] = {"dask": DaskEngine, "ray": RayEngine}


@contextlib.contextmanager
def open_engine(*, workers: int | None = None, cluster: str | None = None, threads: int = 1) -> Iterator[Engine]:
    """The engine for these options; its workers end with the block.

    - `workers`: number of processes on this machine; None or 1 is this process. With `cluster`, the largest number of
      tasks that run at a time.
    - `cluster`: "dask:ADDRESS", "dask:local:N", "ray:ADDRESS" or "ray:local:N".
    - `threads`: threads of each task.
    """
    engine = make_engine(workers=workers, cluster=cluster, threads=threads)
    try:
        yield engine
    finally:
        engine.stop()


def make_engine(*, workers: int | None = None, cluster: str | None = None, threads: int = 1) -> Engine:
    """The engine for the options of `open_engine`; the caller stops it."""
    threads = need_integer("threads", threads, low=1, high=MOST, cure="Pass the threads of one task, as in threads=1.")
    if workers is not None:
        workers = need_integer(
            "workers", workers, low=1, high=MOST, cure="Pass the number of processes, as in workers=2."
        )
    if cluster is not None:
        kind, _, address = cluster.partition(":") if isinstance(cluster, str) else ("", "", "")
        if kind not in _ENGINES or not address:
            raise ValueRangeError(f"cluster needs a known engine; got {shown(cluster)}. {_CURE}")
        return _ENGINES[kind](address, workers, threads)
    return SerialEngine(threads) if workers in (None, 1) else LocalEngine(int(workers or 1), threads)


def need_own_folder(cluster: str | None) -> None:
    """Raises if workers on other machines would need a folder that only this machine has."""
    if cluster is not None and ":local:" not in cluster:
        raise ValueRangeError(
            f"workers of {cluster} need a folder on a disk that all machines share; got none. Pass partial=FOLDER."
        )
