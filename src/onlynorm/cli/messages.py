"""Messages of the library in the words of the command line.

The library names arguments of Python functions: "excess must be positive", "Pass excess=1.25". A user of a command has
options instead: "--excess must be positive", "Pass --excess 1.25". Messages are rewritten only here, from
the options of the command that runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType

from onlynorm.errors import OnlynormError

FIELDS: set[str] = set()
"""Fields of constructions and ranges, which commands with --set accept as NAME=VALUE."""
OTHER_NAMES = {
    "a size of noise": ("noise",), "dim of a random matrix": ("random",), "module or parameter": ("also",),
    "n_points": ("points",), "n_samples": ("calibration", "batch"), "n_steps": ("steps",),
}  # fmt: skip
"""Names in messages, and names of the parameters of commands that set them."""
PHRASES = {
    "Reduce it: seed=hash_value % 2**64.": "Try --seed 0.",
    ", or ranges=Ranges(box=Box(low, high)).": ".",
    ", pass add_affine=True": "",
    ", pass thaw=True": "",
}
"""Advice for Python only, and what to say instead."""
_VALUE = r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\([^)]*\)|[\w+\-]+(?:\.\w+)*(?:\([^)]*\))?"
_PYTHON = re.compile(rf"(?<![\w.'\"\-])(?<!--set )([a-z]\w*)=(?:({_VALUE})|(?=[.,; ]|$))")
_options: ContextVar[Mapping[str, str]] = ContextVar("_options", default=MappingProxyType({}))


@contextmanager
def naming_options(options: Mapping[str, str]) -> Iterator[None]:
    """Errors raised here name these options, given by the names of their parameters; so does `in_options`."""
    token = _options.set(options)
    try:
        yield
    except OnlynormError as error:
        error.args = (in_options(str(error)),)
        raise
    finally:
        _options.reset(token)


def in_options(message: str) -> str:
    """The message of the library with the options of the running command instead of names of arguments."""
    if not (options := _with_other_names(_options.get())):
        return message
    for phrase, instead in PHRASES.items():
        message = message.replace(phrase, instead)
    name = "|".join(sorted(map(re.escape, options), key=len, reverse=True))
    subject = re.compile(rf"(^|: |; got |\. )({name})(?: of \w+)?(?= (?:must|needs?)\b)")
    message = subject.sub(lambda found: found[1] + options[found[2]], message)
    message = re.sub(rf"\b([Oo]mit) ({name})\b", lambda found: f"{found[1]} {options[found[2]]}", message)
    return _PYTHON.sub(lambda found: _written(found, options), message)


def _with_other_names(options: Mapping[str, str]) -> dict[str, str]:
    named = dict(options)
    if "--set" in options.values():
        named = {field: f"--set {field}" for field in FIELDS} | named
    return named | {other: options[name] for other, names in OTHER_NAMES.items() for name in names if name in options}


def _written(found: re.Match[str], options: Mapping[str, str]) -> str:
    """`name=value` as it is typed after the command."""
    name, value = found[1], found[2]
    if (option := options.get(name)) is None:
        return found[0]
    if value is None or value == "True":
        return option
    return f"{option}{'=' if option.startswith('--set ') else ' '}{value.strip(chr(39) + chr(34))}"
