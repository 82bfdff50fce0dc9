"""Dask and Ray: the same driver on real clusters of several processes on this machine."""

from __future__ import annotations

import importlib.util
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import cluster_tasks as tasks
import pytest

from onlynorm.cluster import Engine, Task, WorkerDiedError, need_results, open_engine, run_tasks
from onlynorm.errors import ClusterError, MissingDataError, ValueRangeError

PACKAGES = {"dask": "distributed", "ray": "ray"}


def need(kind: str) -> None:
    if importlib.util.find_spec(PACKAGES[kind]) is None:
        pytest.skip(f"needs the package {PACKAGES[kind]}: pip install onlynorm[{kind}]")


@pytest.fixture(scope="module", params=["dask", "ray"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Two workers of a cluster of this machine."""
    need(request.param)
    with open_engine(cluster=f"{request.param}:local:2") as made:
        yield made


pytestmark = pytest.mark.filterwarnings("ignore")  # those of Dask and Ray


@pytest.mark.slow
def test_results_are_those_of_this_process_to_the_last_bit(engine: Engine) -> None:
    assert engine.n_workers == 2
    work = [Task(str(seed), tasks.numbers, (seed,)) for seed in range(5)]
    with open_engine() as here:
        serial = need_results(run_tasks(work, here))
    assert need_results(run_tasks(work, engine)) == serial
    assert need_results(run_tasks([Task("threads", tasks.n_threads)], engine)) == [{1}]
    assert os.getpid() not in need_results(run_tasks([Task("process", tasks.process)], engine))


@pytest.mark.slow
def test_a_killed_worker_costs_its_task_which_is_retried(engine: Engine, tmp_path: Path) -> None:
    work = [Task(str(n), tasks.square, (n,)) for n in range(6)]
    work.insert(2, Task("dies", tasks.die_until, (str(tmp_path / "calls"), 1)))
    assert need_results(run_tasks(work, engine)) == [0, 1, 2, 4, 9, 16, 25]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_task_that_always_kills_its_worker_is_named_and_the_others_are_done(engine: Engine) -> None:
    work = [Task(str(n), tasks.square, (n,)) for n in range(7)]
    work.insert(1, Task("deadly", tasks.die))
    outcomes = run_tasks(work, engine)
    assert [one.result for one in outcomes] == [0, None, 1, 4, 9, 16, 25, 36]
    assert isinstance(outcomes[1].error, WorkerDiedError)
    with pytest.raises(ClusterError, match=r"8 tasks need to finish; 1 failed: 'deadly'.* other 7 are done"):
        need_results(outcomes)


@pytest.mark.slow
def test_exceptions_are_those_of_the_task(engine: Engine) -> None:
    outcomes = run_tasks([Task("bad", tasks.refuse, ("no",)), Task("good", tasks.square, (3,))], engine)
    assert outcomes[1].result == 9
    with pytest.raises(ValueError, match="no"):
        need_results(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PACKAGES)
def test_an_address_nobody_answers_at_is_an_error_within_ten_seconds(kind: str) -> None:
    need(kind)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(ClusterError, match=f"nobody answers at 127.0.0.1:{port}") as error:
        open_engine(cluster=f"{kind}:127.0.0.1:{port}").__enter__()
    assert time.monotonic() - start < 10
    assert ("RAY_AUTH_TOKEN" in str(error.value)) == (kind == "ray")


@pytest.mark.slow
def test_a_service_that_is_no_scheduler_is_an_error_within_ten_seconds() -> None:
    need("dask")
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=server.accept, daemon=True).start()
        start = time.monotonic()
        with pytest.raises(ClusterError, match="needs a Dask scheduler"):
            open_engine(cluster=f"dask:127.0.0.1:{server.getsockname()[1]}").__enter__()
        assert time.monotonic() - start < 10


@pytest.mark.parametrize("kind", PACKAGES)
def test_a_missing_package_names_the_extra(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, PACKAGES[kind], None)
    with pytest.raises(MissingDataError, match=rf"package {PACKAGES[kind]}; not installed.*onlynorm\[{kind}\]"):
        open_engine(cluster=f"{kind}:local:2").__enter__()


@pytest.mark.parametrize("kind", PACKAGES)
@pytest.mark.parametrize(
    ("address", "needle"),
    [("local:no", "needs a number of workers; got 'local:no'"), ("somewhere", "HOST:PORT; got 'somewhere'")],
)
def test_addresses_that_cannot_be_are_refused(kind: str, address: str, needle: str) -> None:
    need(kind)
    with pytest.raises(ValueRangeError, match=needle):
        open_engine(cluster=f"{kind}:{address}").__enter__()
