"""Records become one self-contained HTML file; nothing is computed here."""

from __future__ import annotations

from onlynorm.report.page import render_page, write_report
from onlynorm.report.records import (
    Check,
    Curve,
    Panel,
    PieceNote,
    Record,
    Table,
    Verdict,
    read_record,
    read_records,
)

__all__ = [
    "Check",
    "Curve",
    "Panel",
    "PieceNote",
    "Record",
    "Table",
    "Verdict",
    "read_record",
    "read_records",
    "render_page",
    "write_report",
]
