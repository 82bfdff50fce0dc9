"""Train only the norms of any model, and keep what was learned as a tiny exact adapter.

The files read in the order of the work: norms, only_norms, fingerprint, adapter, adapters, peft_files, folding,
batches, training_state, train.
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
from onlynorm.tuning.folding import FoldedModel, KeptNorm, fold, unfold
from onlynorm.tuning.norms import NormLayer, Norms, SkippedNorm, find_norms
from onlynorm.tuning.only_norms import NormHandle, init_gamma, only_norms
from onlynorm.tuning.peft_files import read_peft, write_peft
from onlynorm.tuning.train import Fit, Schedule, accuracy, fit

__all__ = [
    "Adapter",
    "Adapters",
    "Fit",
    "FoldedModel",
    "KeptNorm",
    "NormHandle",
    "NormLayer",
    "Norms",
    "Schedule",
    "SkippedNorm",
    "accuracy",
    "apply_adapter",
    "find_norms",
    "fit",
    "fold",
    "init_gamma",
    "load_adapter",
    "only_norms",
    "read_adapter",
    "read_peft",
    "save_adapter",
    "take_adapter",
    "unfold",
    "write_adapter",
    "write_peft",
]
