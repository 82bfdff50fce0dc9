"""The random weights of a chain: those of step t are a fixed slice of a random stream.

The weights of a step do not depend on how a run is split, since the generator, PCG64 DXSM, can jump to any position.
Random bits take a third of the time of a fast chain. This generator is twice as fast as the one for frozen features,
and uniform weights use 16 bits each: odd integers between -32767 and 32767, a symmetric grid of 2^15 points with mean
zero and, after scaling, variance one.

Small chains draw many steps at a time to reduce overhead. A step always uses the same slot of the buffer, because the
rounding of a matrix product may depend on the alignment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onlynorm.errors import UnknownNameError
from onlynorm.features.streams import Stream

LAWS = ("uniform", "normal", "asymmetric")
_LAYER = "rank/chain"
_ODD = np.uint64(0x0001_0001_0001_0001)
_LEVELS = 2**15
_AT_ONCE = 2**16
"""Maximum number of weights drawn together; more would not fit into the cache."""


class ChainWeights:
    """W = scale * entries, entries (chains, width, width) for every step. All distributions have variance one.

    "uniform" is U(-sqrt 3, sqrt 3), as in the paper; "normal" is N(0, 1); "asymmetric" is U(0, 2 sqrt 3), the uniform
    distribution shifted to positive values: mean sqrt 3.
    """

    def __init__(self, law: str, *, seed: int, n_chains: int, width: int, dtype: torch.dtype, device: str) -> None:
        if law not in LAWS:
            raise UnknownNameError("weights", law, LAWS)
        self.law, self.dtype, self.device = law, dtype, device
        self.shape = (n_chains, width, width)
        self.scale = math.sqrt(2.0) if law == "normal" else math.sqrt(3.0 / (_LEVELS**2 - 1))
        self._key = Stream(seed, _LAYER, f"weights/{law}").key
        self._n_words = -(-math.prod(self.shape) // (2 if law == "normal" else 4))

    def steps(self, start: int, stop: int) -> Iterator[Tensor]:
        """Yields the entries of steps start, ..., stop - 1, in a buffer that the next step overwrites."""
        n_entries = math.prod(self.shape)
        n_slots = max(1, _AT_ONCE // n_entries)
        buffer = torch.empty((n_slots, *self.shape), dtype=self.dtype, device=self.device)
        flat, slots = buffer.view(n_slots, -1), buffer.unbind()
        generator = np.random.PCG64DXSM(self._key).advance(start * self._n_words)
        while start < stop:
            first = start % n_slots
            last = min(n_slots, first + stop - start)
            words = generator.random_raw((last - first) * self._n_words)
            flat[first:last] = self._from_words(words).view(last - first, -1)[:, :n_entries]
            if self.law == "asymmetric":
                flat[first:last] += _LEVELS
            yield from slots[first:last]
            start += last - first

    def _from_words(self, words: npt.NDArray[np.uint64]) -> Tensor:
        """Odd integers, or the inverse error function of a uniform grid of 2^32 points."""
        if self.law != "normal":
            words |= _ODD
            return torch.from_numpy(words.astype("<u8", copy=False).view("<i2"))
        grid = torch.from_numpy(words.astype("<u8", copy=False).view("<i4")).to(torch.float64)
        return grid.add_(0.5).mul_(2.0**-31).erfinv_()

    def step(self, t: int) -> Tensor:
        """W of step t, scaled."""
        return next(self.steps(t, t + 1)) * self.scale
