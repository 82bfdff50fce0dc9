"""Memorizers in files: a sealed safetensors file with the numbers, the sizes and the facts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from torch import Tensor

from onlynorm.errors import FormatError
from onlynorm.identity.memorizer import Memorizer, MemorizerFacts
from onlynorm.modules.validate import need_instance, need_path
from onlynorm.storage import make_checked, read_tensors, write_tensors

KIND = "onlynorm-memorizer"
FORMAT = 1
_CURE = "Write it again with save_memorizer or `onlynorm memorize --out`."


def save_memorizer(network: Memorizer, path: Path | str) -> None:
    """Writes the network as one sealed file, whole or not at all."""
    path = need_path("save_memorizer", path)
    need_instance("save_memorizer", network, Memorizer, cure="Pass what memorize returned.")
    document = {
        "n_inputs": network.n_inputs,
        "n_outputs": network.n_outputs,
        "width": network.width,
        "n_blocks": len(network.blocks),
        "n_cues": network.n_cues,
        "facts": None if network.facts is None else dataclasses.asdict(network.facts),
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    write_tensors(path, tensors, kind=KIND, format=FORMAT, document=document)


def load_memorizer(path: Path | str) -> Memorizer:
    """The network of a file that `save_memorizer` wrote; a damaged, altered or foreign file is refused."""
    path = need_path("load_memorizer", path)
    document, tensors = read_tensors(path, kind=KIND, format=FORMAT, cure=_CURE)
    try:
        sizes = {name: document[name] for name in ("n_inputs", "n_outputs", "width", "n_blocks", "n_cues")}
        _need_sizes(sizes, tensors)
        facts = document["facts"]
        checked = None if facts is None else make_checked(MemorizerFacts, facts)
        network = Memorizer(sizes.pop("n_inputs"), sizes.pop("n_outputs"), **sizes)
        network.load_state_dict(tensors)
        if checked is not None and (checked.width, checked.n_blocks, checked.n_parameters) != (
            network.width, len(network.blocks), network.n_parameters,
        ):  # fmt: skip
            raise ValueError("facts about another network")
        network.facts = checked
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise FormatError(
            f"a memorizer needs sizes that fit its numbers; {path.name} has others ({type(error).__name__}: "
            f"{error!s:.200}). {_CURE}"
        ) from error
    return network


def _need_sizes(sizes: dict[str, int], tensors: dict[str, Tensor]) -> None:
    """ValueError unless the sizes are those of the tensors; nothing is made of them before."""
    if not all(type(size) is int and size >= (name != "n_blocks") for name, size in sizes.items()):
        raise ValueError(f"sizes {sizes!s:.100}")
    n_inputs, n_outputs, width, n_blocks, n_cues = sizes.values()
    if len(tensors) != 3 * n_blocks + 5:
        raise ValueError(f"{n_blocks} blocks for {len(tensors)} tensors")
    wanted = {"lift.weight": (width, n_inputs), "lift.bias": (width,), "cues.weight": (n_cues, width),
              "cues.bias": (n_cues,), "values.weight": (n_outputs, n_cues)}  # fmt: skip
    for place in range(n_blocks):
        wanted |= {f"blocks.{place}.inner.weight": (width, width), f"blocks.{place}.inner.bias": (width,),
                   f"blocks.{place}.outer.weight": (width, width)}  # fmt: skip
    for name, shape in wanted.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape or not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} of {tensor.dtype} and shape {tuple(tensor.shape)}, not finite numbers {shape}")
