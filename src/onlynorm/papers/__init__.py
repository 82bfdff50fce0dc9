"""Every figure, table and stated number of the papers: `reproduce` measures them and says what came out."""

from __future__ import annotations

from onlynorm.papers.artifact import Artifact, Expectation, artifact, artifacts, load_artifacts
from onlynorm.papers.run import Outcome, Progress, Run, reproduce
from onlynorm.report.records import Curve, Panel, Record, Table, Verdict

__all__ = [
    "Artifact",
    "Curve",
    "Expectation",
    "Outcome",
    "Panel",
    "Progress",
    "Record",
    "Run",
    "Table",
    "Verdict",
    "artifact",
    "artifacts",
    "load_artifacts",
    "reproduce",
]
