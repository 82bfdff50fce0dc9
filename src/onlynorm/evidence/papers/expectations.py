"""The verdict of a reproduction, computed from its expectations alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from onlynorm.evidence.artifacts import Expectation, Scale
from onlynorm.evidence.records import Check, RecordVerdict


def check(expectation: Expectation, values: Mapping[str, float]) -> Check:
    """Compares our value with one expectation; a missing value or NaN does not meet it."""
    ours = values.get(expectation.name)
    low, high = accepted_range(expectation)
    return Check(
        name=expectation.name,
        ours=ours,
        is_met=ours is not None and low <= ours <= high,  # false for a NaN
        accepted=_describe(expectation),
        source=expectation.source,
        value=expectation.value,
        is_soft=expectation.is_soft,
        note=expectation.note,
    )


def accepted_range(expectation: Expectation) -> tuple[float, float]:
    """The closed interval of accepted values."""
    low = -math.inf if expectation.minimum is None else expectation.minimum
    high = math.inf if expectation.maximum is None else expectation.maximum
    if expectation.value is not None and expectation.tolerance is not None:
        radius = expectation.tolerance * (abs(expectation.value) if expectation.is_relative else 1.0)
        low, high = max(low, expectation.value - radius), min(high, expectation.value + radius)
    return low, high


def decide(
    checks: Sequence[Check], *, scale: Scale, caveats: Iterable[str] = (), failure: str = ""
) -> tuple[RecordVerdict, tuple[str, ...]]:
    """The verdict and the reasons for it.

    Not reproduced: a hard expectation is not met, or nothing was checked. With a caveat: all hard expectations are
    met, but a soft one is not, the scale is quick, or the setting differs from the paper's. Otherwise reproduced.
    """
    hard = [_say(item) for item in checks if not item.is_met and not item.is_soft]
    soft = [_say(item) + " (soft)" for item in checks if not item.is_met and item.is_soft]
    notes = [*soft, *caveats]
    if scale == "quick":
        notes.append("Quick scale: smaller than the paper's setting. Run with scale='paper' for the full claim.")
    if failure:
        hard.insert(0, failure)
    if not checks:
        hard.append("Nothing was checked.")
    if hard:
        return RecordVerdict.NOT_REPRODUCED, (*hard, *notes)
    if notes:
        return RecordVerdict.CAVEAT, tuple(notes)
    return RecordVerdict.REPRODUCED, (f"All {len(checks)} expectations are met.",)


def _say(item: Check) -> str:
    ours = "no value" if item.ours is None else f"{item.ours:.4g}"
    return f"{item.name}: {ours}, accepted {item.accepted}."


def _describe(expectation: Expectation) -> str:
    parts = []
    if expectation.value is not None and expectation.tolerance is not None:
        tolerance = f"{100 * expectation.tolerance:g} %" if expectation.is_relative else f"{expectation.tolerance:g}"
        parts.append(f"{expectation.value:.4g} ± {tolerance}")
    if expectation.minimum is not None:
        parts.append(f"at least {expectation.minimum:.4g}")
    if expectation.maximum is not None:
        parts.append(f"at most {expectation.maximum:.4g}")
    return " and ".join(parts)
