"""Train only the norms of any model, and keep what was learned as a tiny exact adapter.

The files read in the order of the work: only_norms, fingerprint, adapter, adapters, peft, batches, training_state,
train.
"""

from onlynorm.tuning.adapter import (
    Adapter,
    apply_adapter,
    load_adapter,
    read_adapter,
    save_adapter,
    take_adapter,
    write_adapter,
)
from onlynorm.tuning.adapters import Adapters
from onlynorm.tuning.only_norms import NormHandle, init_gamma, only_norms
from onlynorm.tuning.peft import read_peft, write_peft
from onlynorm.tuning.train import Fit, Schedule, accuracy, fit

__all__ = [
    "Adapter",
    "Adapters",
    "Fit",
    "NormHandle",
    "Schedule",
    "accuracy",
    "apply_adapter",
    "fit",
    "init_gamma",
    "load_adapter",
    "only_norms",
    "read_adapter",
    "read_peft",
    "save_adapter",
    "take_adapter",
    "write_adapter",
    "write_peft",
]
