"""One layer in more and more blocks: as exact, with fewer frozen numbers."""

from __future__ import annotations

from onlynorm.evidence.bench.blocks import TOLERANCE, measure_blocks


def test_blocks_keep_exactness_and_drop_what_is_frozen() -> None:
    rows = measure_blocks(8, repeats=1)
    assert [row.n_blocks for row in rows] == [1, 2, 4, 8]
    assert all(row.residual <= TOLERANCE for row in rows)
    assert all(rows[0].n_frozen >= row.n_blocks * row.n_frozen for row in rows)
