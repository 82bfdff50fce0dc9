"""Generators for a seed, so that torch's global generator stays as it is."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from onlynorm.validate import need_seed


def seeded(seed: int) -> torch.Generator:
    """A generator of its own for this seed, so that the global one stays as it is."""
    return torch.Generator().manual_seed(need_seed(seed))


@contextlib.contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Inside, torch draws from this seed; outside, the global generator has not moved."""
    with GLOBAL_GENERATORS, torch.random.fork_rng(devices=[]):
        torch.set_rng_state(seeded(seed).get_state())  # torch.manual_seed would reach the generators of GPUs too
        yield


GLOBAL_GENERATORS = threading.RLock()
"""Held while a function of onlynorm has lent torch's global generators another state: threads take turns."""
