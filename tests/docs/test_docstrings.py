"""The example of every public function and class runs and prints what its docstring shows."""

from __future__ import annotations

import doctest
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from onlynorm.features import distributions  # noqa: E402
from onlynorm.intervals import rules  # noqa: E402
from tools.docs import reference  # noqa: E402

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder without data; what an example registers or sets is gone afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONLYNORM_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(distributions, "_REGISTRY", dict(distributions._REGISTRY))
    before, state = dict(rules.RULES), torch.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(state)
    rules.RULES.clear()
    rules.RULES.update(before)


@pytest.mark.parametrize("name", reference.callables())
def test_the_example_of_a_public_name_runs(name: str) -> None:
    text = inspect.getdoc(reference.named(name)) or ""
    assert "\nExamples:\n    >>> " in text, f"the docstring of {name} needs a section Examples"
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    printed: list[str] = []
    result = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=printed.append, clear_globs=False)
    assert result.attempted > 0
    assert result.failed == 0, "".join(printed)


def test_an_example_that_prints_something_else_fails() -> None:
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, None)
    assert doctest.DocTestRunner(optionflags=FLAGS).run(test, out=lambda _: None).failed == 1
