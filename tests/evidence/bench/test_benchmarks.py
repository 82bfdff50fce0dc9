"""One contract for all benchmarks: tables and JSON that fit together, pieces that are read again, goals that judge."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from tiny_benchmarks import TINY

from onlynorm.evidence.bench.table import BENCHMARKS
from onlynorm.evidence.cache import CACHED
from onlynorm.evidence.harness import goal_table
from onlynorm.evidence.sweep import Sweep

DOCUMENTED = Path(__file__).parents[3].joinpath("docs/json.md").read_text(encoding="utf-8").split("\n### bench\n")[1]
pytest.importorskip("peft", reason="peft is not installed; `pip install -e .[dev]` brings it")


def test_every_benchmark_has_a_tiny_version() -> None:
    assert set(TINY) == set(BENCHMARKS)


@pytest.mark.parametrize("name", BENCHMARKS)
class TestBenchmark:
    """What every benchmark owes."""

    def test_it_measures_tells_and_judges(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        said: list[str] = []
        told: list[str] = []
        sizes = TINY[name](monkeypatch)
        result = BENCHMARKS[name].run(sizes, out=tmp_path, progress=said.append, on_row=told.append)
        assert said
        tables = [*result.tables(), goal_table(result)]
        assert tables[0].rows
        assert tables[-1].rows
        assert all(isinstance(cell, str) for table in tables for row in table.rows for cell in row)
        assert "| met |" in tables[-1].markdown()
        facts = json.loads(json.dumps(result.as_dict()))
        assert [goal["aim"] for goal in facts["goals"]] == [goal.aim for goal in result.goals]
        assert len({goal.aim for goal in result.goals}) == len(result.goals) > 0
        assert bool(list(tmp_path.iterdir())) == BENCHMARKS[name].is_stored
        rows = [row for part in facts.values() if isinstance(part, list) for row in part if isinstance(row, dict)]
        keys = {*facts, *(key for row in rows for key in row)}
        assert [key for key in keys if not re.fullmatch("[a-z][a-z0-9_]*", key)] == [], "keys are snake_case"
        assert [key for key in keys if f"`{key}`" not in DOCUMENTED] == [], "docs/json.md has all keys"
        for path in facts.get("figures", ()):
            assert Path(path).read_bytes().startswith(b"\x89PNG")
            assert Path(path).with_suffix(".svg").exists()

    def test_nothing_is_computed_before_arguments_are_checked(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(BENCHMARKS[name], "work", lambda *_: pytest.fail("started"))
        for bad in ({"sizes": object()}, {"progress": 1}, {"on_row": "a"}, {"out": 1.5}, {"force": "a"}):
            with pytest.raises(Exception, match=r"needs|must"):
                BENCHMARKS[name].run(**{"out": tmp_path, **bad})
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [name for name, one in BENCHMARKS.items() if isinstance(one, Sweep)])
def test_what_is_finished_is_read_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one: Any = BENCHMARKS[name]
    sizes = TINY[name](monkeypatch)
    first = one.run(sizes, out=tmp_path)

    def refuse(*_: Any) -> None:
        pytest.fail("trained again")

    monkeypatch.setattr(one, "train", refuse, raising=False)
    monkeypatch.setattr(one, "validate", refuse, raising=False)
    refuse.__module__ = first.sweep.goals.__module__
    again = one.run(sizes, out=tmp_path)
    assert {note.split(",")[0] for note in again.runs["note"]} == {CACHED}
    assert again.runs.drop(columns="note").equals(first.runs.drop(columns="note"))
    assert [goal.measured for goal in again.goals] == [goal.measured for goal in first.goals]
