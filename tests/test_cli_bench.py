"""`onlynorm bench solve` and `bench reconstruct`: exit codes, tables, and options handed on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import RunCli

from onlynorm.cli.evidence import bench as measuring
from onlynorm.evidence.bench.races.reconstruct import RECIPES, RebuiltRow, ReconstructBench, Sizes
from onlynorm.evidence.bench.races.solve import Bench, Duel, Row
from onlynorm.evidence.goals import Goal

# ------------------------------------------------------------------------------- stand-ins for what takes long


def a_bench(*, is_met: bool) -> Bench:
    return Bench(
        [
            Row("linear 4x4", 16, 1.25, "onlynorm", 0.5, 1.0, 1000, 1e-12, 7, "krylov", "tiny", 1e-12),
            Row("linear 4x4", 16, 1.25, "LU", math.nan, math.nan, 2000, math.nan, 0, "90 s", "tiny"),
        ],
        [Goal("an aim", "a measurement", is_met)],
    )


# ------------------------------------------------------------------------------- bench


@pytest.mark.parametrize("is_met", [True, False])
@pytest.mark.parametrize("args", [(), ("--markdown",), ("--json",)], ids=["table", "markdown", "json"])
def test_bench_exits_with_1_when_a_goal_is_missed(
    run: RunCli, monkeypatch: pytest.MonkeyPatch, is_met: bool, args: tuple[str, ...]
) -> None:
    asked: dict[str, Any] = {}

    def measure(*, progress: Callable[[str], None], on_duel: Callable[[Duel], None], **options: Any) -> Bench:
        asked.update(options)
        progress("a system")
        on_duel(*a_bench(is_met=is_met).duels("tiny"))
        return a_bench(is_met=is_met)

    monkeypatch.setattr(measuring, "bench_solve", measure)
    ran = run("bench", "solve", "--quick", "--repeats", 2, "--families", "tiny", "--families", "flat", *args)
    assert ran.code == (0 if is_met else 1)
    assert asked == {"quick": True, "repeats": 2, "families": ["tiny", "flat"]}
    assert "a system" not in ran.out
    assert "linear 4x4 at 1.25: no rival meets the tolerance" in ran.err
    if "--json" in args:
        assert [row["seconds"] for row in ran.json()["rows"]] == [0.5, None]
        assert ran.json()["goals"] == [{"aim": "an aim", "measured": "a measurement", "is_met": is_met}]
    if "--markdown" in args:
        assert ran.stdout.startswith("| tiny | excess | ours by |")
        assert "| linear 4x4 | 1.25 | LU (90 s) |" in ran.stdout
        assert "| an aim | a measurement |" in ran.stdout


@pytest.mark.parametrize("is_met", [True, False])
@pytest.mark.parametrize("args", [(), ("--markdown",), ("--json",)], ids=["table", "markdown", "json"])
def test_bench_reconstruct_hands_its_options_on_and_shows_both_tables(
    run: RunCli, monkeypatch: pytest.MonkeyPatch, is_met: bool, args: tuple[str, ...]
) -> None:
    asked: dict[str, Any] = {}
    row = RebuiltRow("id_cond", 1.0, 0.0, 1e-12 if is_met else 1.0, 0.0, 1.0, 1.0, 0.9, 0.9, 2000, 3.0, 8, 7, 6)

    def rebuild(*, on_row: Callable[[RebuiltRow], None], progress: Callable[[str], None], **options: Any) -> Any:
        asked.update(options)
        progress("a layer")
        on_row(row)
        return ReconstructBench([row], a_bench(is_met=True).rows)

    monkeypatch.setattr(measuring, "bench_reconstruct", rebuild)
    words = "--quick --features id_cond --features he_normal --images 7 --calibration 5 --out records --force"
    ran = run("bench", "reconstruct", *words.split(), *args)
    assert ran.code == (0 if is_met else 1)
    assert asked == {
        "features": ["id_cond", "he_normal"], "quick": True, "force": True, "out": Path("records"),
        "sizes": dataclasses.replace(Sizes.quick(), images=7, calibration=5),
    }  # fmt: skip
    assert "id_cond: error 1.0e" in ran.err
    assert "a layer" not in ran.out
    if "--json" in args:
        assert ran.json()["rows"][0]["features"] == "id_cond"
        assert [paper["method"] for paper in ran.json()["papers"]] == ["onlynorm", "LU"]
    else:
        assert ("| id_cond | 1 | 0.0e+00 |" if args else "id_cond 1 0.0e+00") in ran.out
        assert ("| linear 4x4 |" if args else "linear 4x4") in ran.out


def test_bench_reconstruct_asks_for_everything_by_default(run: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(measuring, "bench_reconstruct", lambda **options: asked.update(options) or ReconstructBench())
    assert run("bench", "reconstruct").code == 0
    assert asked["features"] == tuple(RECIPES)
    assert asked["sizes"] == Sizes()
