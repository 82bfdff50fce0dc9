"""Any `nn.Module`: what it returns, what it is wrapped in, default losses, and checks of arguments.

Read `walk` for outputs and wrappers, `losses` for the rule that all of onlynorm uses for targets, and `validate` for
the checks that public functions share.
"""

from onlynorm.modules.losses import Loss, default_loss, is_class_labels
from onlynorm.modules.validate import (
    as_real,
    as_tensor,
    is_real_number,
    is_whole_number,
    need_callable,
    need_choice,
    need_device,
    need_flag,
    need_float_dtype,
    need_free_memory,
    need_instance,
    need_integer,
    need_items,
    need_model,
    need_number,
    need_path,
    need_seed,
    need_sizes,
    need_text,
)
from onlynorm.modules.walk import (
    GLOBAL_GENERATORS,
    Output,
    find_output,
    is_autocast,
    tensors_in,
    unwrap,
    without_autocast,
    without_compiling,
)

__all__ = [
    "GLOBAL_GENERATORS",
    "Loss",
    "Output",
    "as_real",
    "as_tensor",
    "default_loss",
    "find_output",
    "is_autocast",
    "is_class_labels",
    "is_real_number",
    "is_whole_number",
    "need_callable",
    "need_choice",
    "need_device",
    "need_flag",
    "need_float_dtype",
    "need_free_memory",
    "need_instance",
    "need_integer",
    "need_items",
    "need_model",
    "need_number",
    "need_path",
    "need_seed",
    "need_sizes",
    "need_text",
    "tensors_in",
    "unwrap",
    "without_autocast",
    "without_compiling",
]
