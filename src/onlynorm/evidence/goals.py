"""What every benchmark hands on: tables of text for people, plain data for machines, and goals judged by code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

NARROW = 0.03
"""Half the width up to which an interval of accuracies shows that two methods are equal; a wider one holds any gap."""


@dataclass(frozen=True)
class Goal:
    """A stated aim, what was measured for it, and whether it was met."""

    aim: str
    measured: str
    is_met: bool


@dataclass(frozen=True)
class Table:
    """Heads and rows of text. `width` is how many columns of a terminal it needs to be readable at all."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    width: int = 0


class Measured(Protocol):
    """One run of a benchmark."""

    @property
    def goals(self) -> Sequence[Goal]:
        """What was promised, as far as this run measured it."""

    def tables(self) -> list[Table]:
        """Everything that was measured, without the goals."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""


def number(value: float, pattern: str) -> str:
    """The value as text, or a dash where nothing was measured."""
    return "-" if math.isnan(value) else format(value, pattern)


def is_met(result: Measured) -> bool:
    """Whether every goal that the run could measure was met."""
    return all(goal.is_met for goal in result.goals)
