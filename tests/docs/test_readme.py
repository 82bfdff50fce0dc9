"""The README as a new user meets it: what comes first, and examples that print what is shown."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?")


def line_of(start: str) -> int:
    return next(i for i, line in enumerate(README.splitlines(), 1) if line.startswith(start))


def test_the_readme_has_a_picture_then_the_installation_then_code_and_is_short() -> None:
    assert line_of("<picture>") < 15
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', README)
    assert len(pictures) == 2
    assert [path for path in pictures if not (ROOT / path).is_file()] == []
    assert line_of("pip install") < 25
    assert line_of("```python") < 35
    assert len(README.splitlines()) <= 115
    assert len(EXAMPLES) == README.count("```python") == 3


@pytest.mark.parametrize(("code", "shown"), EXAMPLES, ids=["train", "tune", "rebuild"])
def test_an_example_prints_what_is_shown(
    code: str, shown: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every example alone, in an empty folder and without data; other processors may round otherwise."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONLYNORM_DATA", str(tmp_path / "data"))
    state = torch.get_rng_state()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec", dont_inherit=True), {"__name__": "__main__"})
    assert torch.equal(state, torch.get_rng_state()), "an example that depends on torch's global generator"
    assert NUMBER.sub("#", printed.getvalue()) == NUMBER.sub("#", shown)
    for got, said in zip(NUMBER.findall(printed.getvalue()), NUMBER.findall(shown), strict=True):
        is_close(float(got.replace(",", "")), float(said.replace(",", "")))


def is_close(got: float, said: float) -> None:
    """Equal counts; accuracies within three points; errors of the size of rounding within a factor of ten."""
    if said < 1e-3:
        assert said / 10 <= got <= 10 * said or got == said
    elif said == int(said):
        assert got == said or abs(got - said) <= 3
    else:
        assert got == pytest.approx(said, abs=3)
