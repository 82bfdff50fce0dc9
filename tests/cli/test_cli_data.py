"""`onlynorm data`: what it gets, copies and lists, and errors in one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import RunCli, runner
from serving import CONTENT, Server, ranged, reply, serving

from onlynorm.cli.commands import data as command
from onlynorm.cli.terminal import byte_bars, errors
from onlynorm.data import SOURCES, Source, get_data
from onlynorm.data.downloads import get as getting


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that has the only file of the data set toy."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(getting, "PAUSE", 0.0)
    with serving() as made:
        monkeypatch.setitem(SOURCES, "toy", Source("a toy", "toys", (made.file(ranged()),)))
        yield made


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, server: Server) -> RunCli:
    """Runs `onlynorm data` in this process, with an empty data folder."""
    monkeypatch.setenv("ONLYNORM_DATA", str(tmp_path / "data"))
    return runner(monkeypatch, capsys, tmp_path, "data")


def test_what_is_missing_is_listed_with_its_size(run: RunCli, tmp_path: Path) -> None:
    listed = run("list").out
    for words in ("cifar10 missing 170 MB cifar-10-batches-bin", "fashion_mnist missing 30.9 MB", "toy missing 200 kB"):
        assert words in listed
    assert f"The data folder is {tmp_path / 'data'}" in listed
    document = run("list", "--json").json()
    assert document["folder"] == str(tmp_path / "data")
    assert [one["name"] for one in document["data"]] == list(SOURCES)
    assert {one["state"] for one in document["data"]} == {"missing"}
    assert not (tmp_path / "data").exists()


def test_data_are_downloaded_and_then_listed(run: RunCli, tmp_path: Path, server: Server) -> None:
    assert "toy present 200 kB toys/file.bin" in run("get", "toy").out
    assert (tmp_path / "data/toys/file.bin").read_bytes() == CONTENT
    assert "toy present 200 kB toys/file.bin" in run("list").out
    document = run("get", "toy", "--json").json()
    assert document["folder"] == str(tmp_path / "data")
    (facts,) = document["data"]
    assert facts == {
        "name": "toy", "title": "a toy", "state": "present", "path": str(tmp_path / "data/toys/file.bin"),
        "n_bytes": len(CONTENT), "n_download": len(CONTENT),
    }  # fmt: skip
    assert len(server.requests) == 1


def test_data_are_copied_from_a_folder(run: RunCli, tmp_path: Path, server: Server) -> None:
    (tmp_path / "stick").mkdir()
    ran = run("get", "toy", "--from", "stick")
    assert ran.code == 2
    assert "error: copying needs file.bin in stick, or in toys below it; got none" in ran.err
    (tmp_path / "stick/file.bin").write_bytes(CONTENT)
    assert run("get", "toy", "--from", "stick").code == 0
    assert server.requests == []


def test_failures_are_one_line_and_the_next_run_resumes(run: RunCli, server: Server) -> None:
    server.answers[:] = [ranged(n_sent=1000), reply(404)]
    ran = run("get", "toy")
    assert ran.code == 2
    assert "404 Not Found" in ran.err
    assert "1,000 bytes are in" in ran.err
    server.answers[:] = [ranged()]
    server.requests.clear()
    assert run("get", "toy").code == 0
    assert server.ranges == ["bytes=1000-"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("get", "cifar"), "data to get needs a known name; got 'cifar'. Did you mean"),
        (("get", "toy", "--from", "nowhere"), "copying data needs a folder; got none at nowhere"),
        (("get", "toy", "--timeout", "0"), "timeout"),
        (("get",), "Missing argument 'NAME'"),
    ],
    ids=lambda one: one if isinstance(one, str) else " ".join(one),
)
def test_wrong_use_is_refused(run: RunCli, args: tuple[str, ...], message: str) -> None:
    ran = run(*args)
    assert ran.code == 2
    assert message in ran.err


def test_an_interruption_says_how_to_resume(run: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "get_data", interrupt)
    ran = run("get", "toy")
    assert ran.code == 130
    assert "run the same command again to resume" in ran.err


def test_the_progress_bar_shows_bytes_speed_and_time(
    run: RunCli, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(errors, "_force_terminal", True)
    monkeypatch.setattr(errors, "is_interactive", True)
    monkeypatch.setattr(errors, "width", 120)
    with byte_bars(hidden=False) as progress:
        get_data("toy", progress=progress)
    shown = capsys.readouterr().err
    assert "file.bin" in shown
    assert "200.0/200.0 kB" in shown
    assert "/s" in shown
