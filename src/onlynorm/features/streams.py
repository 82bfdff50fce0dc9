"""Counter-based random streams, determined by (format version, seed, layer name, part name).

A stream is an infinite sequence of 64-bit words of Philox4x64-10; the key is a prefix of a SHA-256 of the names. Entry
i is computed from word i, so that any range can be generated independently at the same cost. `docs/features.md`
specifies the format; golden values in the tests check it. A change of any bit requires a new `FORMAT_VERSION`, and the
old one must stay readable.
"""

from __future__ import annotations

import functools
import hashlib
import math
import operator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from onlynorm.errors import ValueRangeError, shown
from onlynorm.features.normals import CHUNK, NormalTransform
from onlynorm.validate import is_real_number, need_number, need_seed

FORMAT_VERSION = 1
_PREFIX = b"onlynorm stream v1"
_WORDS_PER_BLOCK = 4
_WORD_VALUES = 2**64


@dataclass(frozen=True)
class Stream:
    """An infinite sequence of random numbers, determined by (seed, layer, part).

    `part` distinguishes the streams of one layer: "left", "right", "left/mask" and so on.
    """

    seed: int
    layer: str
    part: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", check_seed(self.seed))
        _encode("layer", self.layer)
        _encode("part", self.part)

    @functools.cached_property
    def key(self) -> int:
        """The 128-bit Philox key: first 16 bytes, little endian, of the SHA-256 of prefix, seed and names."""
        layer, part = _encode("layer", self.layer), _encode("part", self.part)
        fields = (_PREFIX, _as_bytes(self.seed), _as_bytes(len(layer)), layer, _as_bytes(len(part)), part)
        return int.from_bytes(hashlib.sha256(b"".join(fields)).digest()[:16], "little")

    def words(self, start: int, stop: int) -> npt.NDArray[np.uint64]:
        """Raw words [start, stop): word i is word i mod 4 of the Philox block with counter 1 + i // 4."""
        start, stop = check_range(start, stop)
        block, skipped = divmod(start, _WORDS_PER_BLOCK)
        words: npt.NDArray[np.uint64] = self._generator(block).random_raw(skipped + stop - start)
        return words[skipped:]

    def uniforms(self, start: int, stop: int) -> npt.NDArray[np.float64]:
        """Uniform numbers in the open interval (0, 1): ((word >> 12) + 1/2) / 2^52, exact in float64.

        52 bits, since adding one half to a 53-bit integer would round, the largest one to 1.0.
        """
        words = self.words(start, stop)
        return _uniforms_from_words(words, np.empty(words.size))

    def normals(self, start: int, stop: int) -> npt.NDArray[np.float64]:
        """Standard normal numbers: the inverse normal distribution function of the uniforms. Never zero."""
        start, stop = check_range(start, stop)
        block, skipped = divmod(start, _WORDS_PER_BLOCK)
        generator = self._generator(block)
        generator.random_raw(skipped)
        numbers = np.empty(stop - start)
        uniforms = np.empty(min(CHUNK, numbers.size))
        transform = NormalTransform(uniforms.size)
        for first in range(0, numbers.size, CHUNK):
            part = numbers[first : first + CHUNK]
            transform(_uniforms_from_words(generator.random_raw(part.size), uniforms[: part.size]), out=part)
        return numbers

    def signs(self, start: int, stop: int) -> npt.NDArray[np.float64]:
        """+1.0 where the word's highest bit is 0 and -1.0 where it is 1."""
        return np.where(self.words(start, stop) >> np.uint64(63), -1.0, 1.0)

    def mask(self, density: float, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """True with probability `density`: where word < density * 2^64, compared as exact integers."""
        threshold = math.ceil(Fraction(check_density(density)) * _WORD_VALUES)
        if threshold == _WORD_VALUES:
            start, stop = check_range(start, stop)
            return np.ones(stop - start, dtype=np.bool_)
        return self.words(start, stop) < np.uint64(threshold)

    def permutation(self, n: int) -> npt.NDArray[np.int64]:
        """A uniformly random order of 0, ..., n - 1: indices sorted by their word, equal words by index."""
        return np.argsort(self.words(0, n), kind="stable").astype(np.int64)

    def _generator(self, block: int) -> np.random.Philox:
        # numpy adds one to the counter before it produces a block, so the first block has counter block + 1.
        return np.random.Philox(key=self.key, counter=block)


def _uniforms_from_words(words: npt.NDArray[np.uint64], out: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    words >>= np.uint64(12)
    np.copyto(out, words, casting="unsafe")  # exact: 52 bits fit a float64
    out += 0.5
    out *= 2.0**-52
    return out


def check_seed(seed: object) -> int:
    """The seed as an int; raises unless it is an integer in [0, 2^64)."""
    return need_seed(seed)


def check_density(density: Any) -> float:
    """The density as a float; raises unless it is in (0, 1]."""
    if is_real_number(density) and 0.0 < density <= 1.0:
        return need_number("density", density, cure="Pass density=0.5.")
    raise ValueRangeError(
        f"density needs a number in (0, 1], the probability of a nonzero entry; got {shown(density)}. Pass density=0.5."
    )


def check_range(start: object, stop: object, limit: int | None = None) -> tuple[int, int]:
    """(start, stop) as ints; raises unless 0 <= start <= stop, and stop <= limit if given."""
    first, last = as_integer(start), as_integer(stop)
    if first is None or last is None or not 0 <= first <= last or (limit is not None and last > limit):
        bound = "" if limit is None else f" <= {limit}"
        raise ValueRangeError(
            f"a block needs integers 0 <= start <= stop{bound}; got start={shown(start)}, stop={shown(stop)}. "
            "Negative indices are not supported."
        )
    return first, last


def as_integer(value: object) -> int | None:
    """The value as an int if it is of an integer type other than bool, else None."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError, OverflowError):  # torch raises for tensors with several or too large entries
        return None


def _encode(kind: str, name: object) -> bytes:
    try:
        return str.encode(name, "utf-8")  # type: ignore[arg-type]
    except (TypeError, UnicodeEncodeError):
        raise ValueRangeError(
            f"{kind} needs a str that can be encoded in UTF-8; got {shown(name)}. Pass the dotted name of the module."
        ) from None


def _as_bytes(value: int) -> bytes:
    return value.to_bytes(8, "little")
