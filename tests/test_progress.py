"""`progress=True` of every long call: a bar after two seconds in a terminal, nothing elsewhere, always closed."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tensors import normal
from torch import nn

import onlynorm as on
from onlynorm import identity, models, progress, reconstruction
from onlynorm.errors import ConversionError
from onlynorm.progress import ProgressBar, with_progress
from onlynorm.solvers import spectrum

X, LABELS = normal(16, 4), torch.arange(16) % 2


def net() -> nn.Sequential:
    return models.mlp((4, 6, 2)).double().eval()


def deep() -> nn.Sequential:
    return models.mlp((4, *[6] * 12, 2)).double()


VERBS: dict[str, Callable[[Any, Path], object]] = {
    "reconstruct": lambda given, _: on.reconstruct(net(), X, progress=given),
    "verify": lambda given, _: on.verify(net(), on.reconstruct(net(), X).network, X, progress=given),
    "compare": lambda given, _: reconstruction.compare(net(), net(), X, progress=given),
    "save": lambda given, folder: on.save(on.to_norm_only(net()), folder / "a.safetensors", progress=given),
    "load": lambda given, folder: on.load(saved(folder), net(), progress=given),
    "fit": lambda given, _: on.fit(
        net().float(), (X.float(), LABELS), schedule=on.Schedule(epochs=2, batch_size=8), progress=given
    ),
    "repair": lambda given, _: on.repair(deep(), X, LABELS, n_steps=1, progress=given),
    "repair by one method": lambda given, _: on.repair(net(), X, LABELS, method="lsuv", progress=given),
    "memorize": lambda given, _: on.memorize(X, LABELS, progress=given),
    "measure_off_sample": lambda given, _: identity.measure_off_sample(
        on.memorize(X, LABELS), X, LABELS, sizes=(0.1,), progress=given
    ),
    "simulate": lambda given, _: on.simulate(on.Chain(width=4, n_chains=1), 50, progress=given),
    "sweep_excess": lambda given, _: spectrum.sweep_excess("he_normal", (2, 3), excesses=(1.5, 2.0), progress=given),
}


def saved(folder: Path) -> Path:
    on.save(on.to_norm_only(net()), folder / "b.safetensors")
    return folder / "b.safetensors"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is written to a terminal, with bars from the first call on."""
    text = io.StringIO()
    monkeypatch.setattr("rich.console.Console", lambda **_: Console(file=text, force_terminal=True, width=80))
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    return text


def test_every_public_function_with_progress_takes_a_bar() -> None:
    found = {
        name for room in (on, reconstruction, identity, spectrum, on.tuning, on.rank, on.solvers, on.alignment)
        for name, one in vars(room).items()
        if inspect.isfunction(one) and "progress" in inspect.signature(one).parameters and not name.startswith("_")
    }  # fmt: skip
    assert found == {name for name in VERBS if " " not in name}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", VERBS)
def test_a_function_is_called_up_to_the_total_and_true_shows_the_same(
    name: str, terminal: io.StringIO, tmp_path: Path
) -> None:
    calls: list[tuple[int, int, str]] = []
    VERBS[name](lambda *given: calls.append(given), tmp_path)
    assert calls
    done = [one[0] for one in calls]
    assert done == sorted(done)
    assert all(0 <= one <= total and isinstance(message, str) for one, total, message in calls)
    assert calls[-1][0] == calls[-1][1] or name in ("memorize", "sweep_excess")  # these report the start of a piece
    assert terminal.getvalue() == ""
    VERBS[name](True, tmp_path)
    shown = terminal.getvalue()
    assert name.partition(" ")[0] in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") > 0  # the cursor is hidden and shown again
    terminal.truncate(0)
    VERBS[name](False, tmp_path)
    assert "\x1b" not in terminal.getvalue()


@with_progress
def work(n: int, *, progress: Any = None) -> str:
    """Reports n pieces."""
    for done in range(n):
        progress(done + 1, n, f"[red]\x1b[2J{done}")
        if done == 5:
            raise RuntimeError("half-way")
    return "done"


def test_the_bar_is_closed_after_an_error_and_shows_texts_as_they_are(terminal: io.StringIO) -> None:
    with pytest.raises(RuntimeError, match="half-way"):
        work(10, progress=True)
    shown = terminal.getvalue()
    assert shown.endswith("\x1b[?25h") or shown.count("\x1b[?25h") == 1
    assert "[red]" in shown
    assert "\x1b[2J" not in shown
    assert work.__doc__ == "Reports n pieces."


def test_short_calls_show_no_bar(terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY", 60.0)
    assert work(3, progress=True) == "done"
    assert terminal.getvalue() == ""


def test_a_bar_appears_after_the_delay(terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY", 2.0)
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with ProgressBar("work") as bar:
        bar(1, 3, "first")
        assert terminal.getvalue() == ""
        now[0] = 102.5
        bar(2, 3, "second")
        assert "work: second" in terminal.getvalue()
        assert "2/3" in terminal.getvalue()


def test_nothing_is_written_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "DELAY", 0.0)
    assert work(3, progress=True) == "done"
    assert capsys.readouterr().err.strip() == ""


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("given", [1, "yes", [True]])
def test_other_values_are_refused(given: object) -> None:
    with pytest.raises(ConversionError, match="progress must be callable"):
        on.simulate(on.Chain(width=4, n_chains=1), 3, progress=given)  # type: ignore[arg-type]
