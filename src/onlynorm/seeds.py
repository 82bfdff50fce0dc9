"""Seeded random generators that leave the global generator of torch unchanged."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from onlynorm.validate import need_seed


def seeded(seed: int) -> torch.Generator:
    """A new generator with this seed."""
    return torch.Generator().manual_seed(need_seed(seed))


@contextlib.contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Context in which torch's global generator has this seed; its state is restored afterwards."""
    with GLOBAL_GENERATORS, torch.random.fork_rng(devices=[]):
        torch.set_rng_state(seeded(seed).get_state())  # torch.manual_seed would also seed the GPUs
        yield


GLOBAL_GENERATORS = threading.RLock()
"""Lock held while onlynorm has replaced the state of torch's global generators, one thread at a time."""
