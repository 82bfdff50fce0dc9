"""Progress of long calls: `progress=True` shows a bar, a function is called with (done, total, message)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import numpy as np

from onlynorm.errors import visible

DELAY = 2.0
"""Seconds before a bar is shown, so that short calls have none."""
INTERVAL = 0.1
"""Seconds between two updates of a bar."""
_P = ParamSpec("_P")
_T = TypeVar("_T")


def with_progress(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """The function with `progress=True` as a bar that is closed at the end, and `progress=False` as None."""

    @functools.wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        given = kwargs.get("progress")
        if not isinstance(given, bool | np.bool_):
            return function(*args, **kwargs)
        kwargs["progress"] = None
        if not given:
            return function(*args, **kwargs)
        with ProgressBar(function.__name__) as bar:
            kwargs["progress"] = bar
            return function(*args, **kwargs)

    return called


class ProgressBar:
    """A progress bar on standard error of a terminal, or in a notebook; nothing is shown elsewhere."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._shown: Any = None
        self._next = time.monotonic() + DELAY

    def __enter__(self) -> ProgressBar:
        return self

    def __call__(self, done: int, total: int, message: str = "") -> None:
        """Updates the bar, at most every tenth of a second."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + INTERVAL
        if self._shown is None:
            self._shown = _bar()
            self._shown.start()
            self._shown.add_task("", total=None)
        from rich.markup import escape

        description = escape(visible(f"{self.name}: {message}" if message else self.name))
        self._shown.update(self._shown.task_ids[0], completed=done, total=total, description=description)
        self._shown.refresh()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown is not None:
            self._shown.stop()
            self._shown = None


def _bar() -> Any:
    """A bar of rich without a thread: it is drawn when it is updated."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console,
        transient=True, auto_refresh=False, disable=not (console.is_terminal or console.is_jupyter),
    )  # fmt: skip
