"""Every exception onlynorm raises on purpose.

A message has three parts: what was needed, what came, and the cure. `OnlynormError` catches them all; each
also derives from the built-in exception a caller would expect, so `except ValueError` keeps working.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OnlynormError(Exception):
    """Base class: everything the library raises on purpose."""


class ShapeError(OnlynormError, ValueError):
    """Shapes that do not fit together."""


class ValueRangeError(OnlynormError, ValueError):
    """A number outside its admissible range: a tolerance of zero, a density above one, a NaN in a weight."""


class UnknownNameError(OnlynormError, KeyError):
    """A name that no registry holds; the message suggests the nearest one."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        self._asked = (kind, name, known)
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        cure = f"Did you mean {' or '.join(repr(n) for n in near)}?" if near else f"Known: {', '.join(known)}."
        super().__init__(f"{kind} needs a known name; got {name!r}. {cure}")

    def __str__(self) -> str:  # KeyError shows the repr of its argument, quotes included
        return str(self.args[0])

    def __reduce__(self) -> tuple[type[UnknownNameError], tuple[str, str, list[str]]]:
        return type(self), self._asked  # a worker sends its error home by pickle, which would call __init__ with args


class InsufficientFeaturesError(OnlynormError, ValueError):
    """Exactness was asked for with fewer features than equations, or with features that cannot reach it."""


class MemoryLimitError(OnlynormError, MemoryError):
    """No method fits into the memory the caller allowed."""


class ToleranceError(OnlynormError, ArithmeticError):
    """The caller asked for a tolerance and it was not reached; the message holds the size and the cure."""


class ConversionError(OnlynormError, TypeError):
    """A network, or a part of it, that cannot be turned into norm-only blocks."""


class FormatError(OnlynormError, ValueError):
    """A file or record that is damaged, altered, of a newer format, or not ours."""


class MissingDataError(OnlynormError, FileNotFoundError):
    """A data set that is not on this machine; the message says where it was looked for and how to get it."""


class StorageError(OnlynormError, OSError):
    """A folder that cannot be written: full, read-only, or in the way of a file."""


class TrainingError(OnlynormError, ArithmeticError):
    """Training that cannot go on, as with a loss that is no number; the message says what was kept."""
