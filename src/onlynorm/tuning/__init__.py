"""Train only the norms of a model, and save them as a small adapter file.

Reading order: only_norms, fingerprint, adapter, adapters, peft, batches, training_state,
train.
"""

from onlynorm.tuning import batches, fingerprint
from onlynorm.tuning.adapter import (
    Adapter,
    apply_adapter,
    load_adapter,
    save_adapter,
    take_adapter,
)
from onlynorm.tuning.adapters import Adapters
from onlynorm.tuning.only_norms import STATISTICS, NormHandle, init_gamma, only_norms
from onlynorm.tuning.peft import read_peft, write_peft
from onlynorm.tuning.train import OPTIMIZERS, Fit, Schedule, accuracy, fit, make_fabric

__all__ = [
    "OPTIMIZERS",
    "STATISTICS",
    "Adapter",
    "Adapters",
    "Fit",
    "NormHandle",
    "Schedule",
    "accuracy",
    "apply_adapter",
    "batches",
    "fingerprint",
    "fit",
    "init_gamma",
    "load_adapter",
    "make_fabric",
    "only_norms",
    "read_peft",
    "save_adapter",
    "take_adapter",
    "write_peft",
]
