"""Read and write adapters in the LN-tuning format of PEFT.

PEFT wraps each norm and names its trained copy `base_model.model.<place>.ln_tuning_layers.<tensor>`; heads are saved as
`base_model.model.<place>.<tensor>`. The folder holds `adapter_model.safetensors` and `adapter_config.json`. It has no
fingerprint of the base model, so `read_peft` computes one from the given model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor, nn

from onlynorm.data.tensor_files import read_safetensors
from onlynorm.errors import ConversionError, FormatError, MissingDataError
from onlynorm.modules.norms import need_module
from onlynorm.storage import parse_json, read_file, write_atomically
from onlynorm.tuning.adapter import Adapter, need_fit, norm_tensors
from onlynorm.tuning.fingerprint import fingerprint
from onlynorm.validate import need_instance, need_path, need_text

_PREFIX = "base_model.model."
_MIDDLE = ".ln_tuning_layers."
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_CONFIG_BYTES = 2**20


def read_peft(model: nn.Module, folder: Path | str) -> Adapter:
    """The LN-tuning adapter in a PEFT folder, checked against its base model.

    Examples:
        >>> from torch import nn
        >>> from onlynorm.tuning import read_peft, take_adapter, write_peft
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        >>> write_peft(take_adapter(model), "peft_adapter")
        >>> sorted(read_peft(model, "peft_adapter").tensors)
        ['1.bias', '1.weight']
    """
    model, folder = need_module("read_peft", model), need_path("folder", folder)
    config = _read_config(folder / _CONFIG)
    if config.get("peft_type") != "LN_TUNING":
        raise ConversionError(
            f"read_peft needs an LN-tuning folder (peft_type LN_TUNING); got {config.get('peft_type')!r}. Merge other "
            "adapters with PEFT first."
        )
    tensors: dict[str, Tensor] = {}
    for key, value in _read_weights(folder / _WEIGHTS).items():
        if not key.startswith(_PREFIX):
            raise FormatError(
                f"PEFT's tensors need names that begin with {_PREFIX}; got {key!r}. Save it with PEFT again."
            )
        name = key.removeprefix(_PREFIX).replace(_MIDDLE, ".")
        if name in tensors:
            raise FormatError(f"PEFT's tensors need unique names; got two for {name!r}. Save it with PEFT again.")
        tensors[name] = value
    norms = norm_tensors(model)
    heads = tuple(name for name in tensors if name not in norms)
    has_statistics = any(name.endswith("running_mean") for name in tensors)
    adapter = Adapter(tensors, heads, has_statistics, fingerprint(model, tensors))
    need_fit(model, adapter)
    return adapter


def write_peft(adapter: Adapter, folder: Path | str, *, task_type: str | None = None) -> None:
    """Writes an adapter, including its statistics, as a folder for `peft.PeftModel.from_pretrained`.

    Examples:
        >>> from pathlib import Path
        >>> from torch import nn
        >>> from onlynorm.tuning import take_adapter, write_peft
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        >>> write_peft(take_adapter(model), "peft_adapter")
        >>> sorted(path.name for path in Path("peft_adapter").iterdir())
        ['adapter_config.json', 'adapter_model.safetensors']
    """
    folder = need_path("folder", folder)
    if task_type is not None:
        need_text("task_type", task_type, cure="Write 'SEQ_CLS', or leave it out.")
    need_instance("write_peft", adapter, Adapter, cure="Pass the result of take_adapter.")
    if adapter.buffers or adapter.added:
        what = f"buffers ({', '.join(adapter.buffers[:3])})" if adapter.buffers else "norms with added scale and shift"
        raise ConversionError(f"PEFT needs an adapter of norms and heads; got {what}. Save it with save_adapter.")
    heads = set(adapter.heads)
    places = list(dict.fromkeys(name.rpartition(".")[0] for name in adapter.tensors if name not in heads))
    if "" in places:
        raise ConversionError(
            "PEFT needs norms inside a model; got a norm as the whole model. Wrap it: nn.Sequential(norm)."
        )
    config: dict[str, Any] = {
        "auto_mapping": None, "base_model_name_or_path": None, "exclude_modules": None, "inference_mode": True,
        "modules_to_save": sorted({name.rpartition(".")[0] for name in heads}) or None, "peft_type": "LN_TUNING",
        "revision": None, "target_modules": places, "task_type": task_type,
    }  # fmt: skip
    tensors = {_peft_name(name, name in heads): value.cpu().contiguous() for name, value in adapter.tensors.items()}
    write_atomically(folder / _WEIGHTS, save(tensors, metadata={"format": "pt"}))
    write_atomically(folder / _CONFIG, json.dumps(config, indent=2).encode())


def _peft_name(name: str, is_head: bool) -> str:
    place, _, tensor = name.rpartition(".")
    return f"{_PREFIX}{name}" if is_head else f"{_PREFIX}{place}{_MIDDLE}{tensor}"


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise MissingDataError(f"a PEFT folder needs {path.name}; got none. Pass the folder that contains it.")
    try:
        config = parse_json(read_file(path, what="a PEFT folder", limit=_CONFIG_BYTES))
    except FormatError:
        raise
    except ValueError as error:
        raise FormatError(f"{path.name} needs to be JSON; it is not. Save the adapter with PEFT again.") from error
    if not isinstance(config, dict):
        raise FormatError(f"{path.name} needs a JSON object; got another value. Save it with PEFT again.")
    return config


def _read_weights(path: Path) -> dict[str, Tensor]:
    if not path.exists():
        raise MissingDataError(
            f"a PEFT folder needs {path.name}; got none. .bin files can run code and are not read: save with "
            "safe_serialization=True."
        )
    return read_safetensors(path)
