"""Records of nothing in particular, for the tests of reports."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from onlynorm.display import Curve, Panel, Table
from onlynorm.evidence.records import Check, PieceNote, Record, RecordVerdict

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">&'"


def make_record(**changes: Any) -> Record:
    """A record with everything in it: two panels, every kind of curve, a table, one check of each sort."""
    record = Record(
        artifact="toy:fig-1",
        title="Squares",
        claim="Squares grow.",
        kind="figure",
        scale="quick",
        verdict=RecordVerdict.CAVEAT,
        reasons=("Quick scale.",),
        checks=(
            Check("slope", 2.01, True, "2 ± 0.1", "Fig. 1", value=2.0, note="read off the figure"),
            Check("edge", None, False, "at most 1", "law"),
            Check("tail", math.nan, False, "at least 0", "law", is_soft=True),
        ),
        values={"slope": 2.01, "mass": 0.5},
        sizes={"n": 4, "names": ["a", "b"]},
        seeds=(0, 1),
        curves=(
            Curve("data", [0, 1, 2, 3], [1, 4, 9], kind="histogram", panel="left"),
            Curve("law", [0.5, 1.5, 2.5], [1, 4, math.nan], panel="left", style="law"),
            Curve("data", [1, 10, 100], [1, 2, 3], kind="line+points", panel="right"),
            Curve("seeds", [1, 10, 100], [1.1, 2.1, 2.9], kind="points", panel="right"),
        ),
        panels=(Panel("left", "Left", "x", "density"), Panel("right", "Right", "n", "error", x_log=True)),
        table=Table(["name", "value"], [["a", 1.5], ["b", math.inf]]),
        pieces=(PieceNote("k=1", "ab" * 32, {"k": 1}, 0.25, is_reloaded=True, is_stale=True),),
        versions={"torch": "2.0"},
        platform={"system": "Linux"},
        code="cd" * 32,
        created="2024-01-02T03:04:05+00:00",
        seconds=1.5,
    )
    return dataclasses.replace(record, **changes)
