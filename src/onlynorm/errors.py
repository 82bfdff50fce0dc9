"""Every exception onlynorm raises on purpose, and its one warning.

A message has three parts: what was needed, what came, and the cure. `OnlynormError` catches them all; each
also derives from the built-in exception a caller would expect, so `except ValueError` keeps working.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

SHOWN = 60
"""Characters of a value that a message shows at most."""
_SHOWN_BITS, _LISTED = 200, 24
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and newline, those that turn the direction of text, and bytes that are no Unicode."""


def shown(value: Any) -> str:
    """A value in a message: its repr if that is short, shape and type of an array, else its class."""
    try:
        return _shown(value)
    except Exception:  # attributes and the repr of a foreign object may raise anything, and must not hide the message
        return f"a {type(value).__name__}"


def _shown(value: Any) -> str:
    kind = type(value).__name__
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None and not isinstance(value, type) and len(shape) > 0:
        return f"a {kind} of shape {tuple(shape)} and {str(dtype).removeprefix('torch.')}"
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:  # beyond 4300 digits Python refuses to print it
        return f"an integer of {value.bit_length()} bits"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{'the class' if isinstance(value, type) else 'the function'} {value.__qualname__}"[:SHOWN]
    if callable(getattr(value, "named_parameters", None)):
        return f"a {kind} module"
    written = repr(value)
    return written if len(written) <= SHOWN and written.isprintable() else f"a {kind}"


def visible(text: str) -> str:
    """The text with characters that could command a terminal written out, as in \\x1b."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


class OnlynormError(Exception):
    """Base class: everything the library raises on purpose."""

    def __str__(self) -> str:  # names of files and tensors stand in messages, and a traceback goes to the terminal
        return visible(super().__str__())


class ShapeError(OnlynormError, ValueError):
    """Shapes that do not fit together."""


class ValueRangeError(OnlynormError, ValueError):
    """A number outside its admissible range: a tolerance of zero, a density above one, a NaN in a weight."""


class UnknownNameError(OnlynormError, KeyError):
    """A name that no registry holds; the message suggests the nearest one."""

    def __init__(self, kind: str, name: Any, known: Iterable[str]) -> None:
        known = sorted(known)
        got = shown(name)
        self._asked = (kind, name if isinstance(name, str | int | float | None) else got, known)
        near = difflib.get_close_matches(name[:SHOWN] if isinstance(name, str) else "", known, n=3, cutoff=0.4)
        listed = ", ".join(known[:_LISTED]) + (f" and {len(known) - _LISTED} more" if len(known) > _LISTED else "")
        cure = f"Did you mean {' or '.join(repr(n) for n in near)}?" if near else f"Known: {listed}."
        super().__init__(f"{kind} needs a known name; got {got}. {cure}")

    def __str__(self) -> str:  # KeyError shows the repr of its argument, quotes included
        return visible(str(self.args[0]))

    def __reduce__(self) -> tuple[type[UnknownNameError], tuple[str, Any, list[str]]]:
        return type(self), self._asked  # a worker sends its error home by pickle, which would call __init__ with args


class InsufficientFeaturesError(OnlynormError, ValueError):
    """Exactness was asked for with fewer features than equations, or with features that cannot reach it."""


class MemoryLimitError(OnlynormError, MemoryError):
    """No method fits into the memory the caller allowed."""


class ToleranceError(OnlynormError, ArithmeticError):
    """The caller asked for a tolerance and it was not reached; the message holds the size and the cure."""


class AccuracyWarning(UserWarning):
    """A layer less exact than its features should make it; the message holds its name, the size and the cure."""


class ConversionError(OnlynormError, TypeError):
    """A network, or a part of it, that cannot be turned into norm-only blocks."""


class FormatError(OnlynormError, ValueError):
    """A file or record that is damaged, altered, of a newer format, or not ours."""


class MissingDataError(OnlynormError, FileNotFoundError):
    """A data set that is not on this machine; the message says where it was looked for and how to get it."""


class StorageError(OnlynormError, OSError):
    """A folder that cannot be written: full, read-only, or in the way of a file."""


class TrainingError(OnlynormError, ArithmeticError):
    """Training that cannot continue, as with a loss that is NaN or infinite; the message says what was saved."""
