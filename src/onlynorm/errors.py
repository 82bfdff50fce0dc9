"""The exceptions of onlynorm, and its one warning.

A message has three parts: what is needed, what was passed, and the cure. All exceptions derive from `OnlynormError` and
from the matching built-in class, so `except ValueError` works too.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

SHOWN = 60
"""Maximum number of characters of a value in a message."""
_SHOWN_BITS, _LISTED, _LINE = 200, 24, 300
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and newline, characters that change the text direction, and lone surrogates."""


def shown(value: Any) -> str:
    """A value formatted for a message: shape and dtype of an array, the repr if it is short, else the class name."""
    try:
        return _shown(value)
    except Exception:  # attributes and repr of an unknown object may raise anything
        return f"a {type(value).__name__}"


def _shown(value: Any) -> str:
    kind = type(value).__name__
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None and not isinstance(value, type) and len(shape) > 0:
        return f"a {kind} of shape {tuple(shape)} and {str(dtype).removeprefix('torch.')}"
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:  # Python does not print more than 4300 digits
        return f"an integer of {value.bit_length()} bits"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{'the class' if isinstance(value, type) else 'the function'} {value.__qualname__}"[:SHOWN]
    if callable(getattr(value, "named_parameters", None)):
        return f"a {kind} module"
    text = repr(value)
    return text if len(text) <= SHOWN and text.isprintable() else f"a {kind}"


def visible(text: str) -> str:
    """The text with control characters escaped, as in \\x1b."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


def first_line(error: BaseException) -> str:
    """The first line of an error of other code, of at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return visible(lines[0][:_LINE] if lines else type(error).__name__)


class OnlynormError(Exception):
    """Base class of all exceptions of onlynorm."""

    def __str__(self) -> str:  # messages contain file and tensor names, which may hold control characters
        return visible(super().__str__())


class ShapeError(OnlynormError, ValueError):
    """Incompatible shapes."""


class ValueRangeError(OnlynormError, ValueError):
    """A value outside its valid range: a tolerance of zero, a density above one, a NaN in a weight."""


class UnknownNameError(OnlynormError, KeyError):
    """An unknown name; the message suggests similar ones."""

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
        return type(self), self._asked  # pickle would call __init__ with args, the message alone


class InsufficientFeaturesError(OnlynormError, ValueError):
    """An exact solution was requested with fewer features than equations, or with dependent features."""


class MemoryLimitError(OnlynormError, MemoryError):
    """No method fits into the allowed memory."""


class ToleranceError(OnlynormError, ArithmeticError):
    """The requested tolerance was not reached; the message gives the error and the cure."""


class AccuracyWarning(UserWarning):
    """A layer is less accurate than its features allow; the message gives its name, the error and the cure."""


class ConversionError(OnlynormError, TypeError):
    """A model or an argument that cannot be converted, such as a layer without a norm-only equivalent."""


class FormatError(OnlynormError, ValueError):
    """A file or record that is damaged, modified, of a newer format, or not written by onlynorm."""


class MissingDataError(OnlynormError, FileNotFoundError):
    """A data set or file that does not exist; the message gives the path and how to get it."""


class StorageError(OnlynormError, OSError):
    """A path that cannot be read or written: the disk is full, read-only, or the path is a folder."""


class TrainingError(OnlynormError, ArithmeticError):
    """Training cannot continue, for example because the loss is NaN or infinite; the message says what was saved."""


class ClusterError(OnlynormError, RuntimeError):
    """Workers that cannot be reached or started, or tasks that failed on them; the message names the tasks."""
