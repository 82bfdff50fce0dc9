"""Memorizers in files: a sealed safetensors file with the numbers, the sizes and the facts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from onlynorm.errors import FormatError
from onlynorm.identity.memorizer import Memorizer, MemorizerFacts
from onlynorm.storage import read_tensors, write_tensors

KIND = "onlynorm-memorizer"
FORMAT = 1
_CURE = "Write it again with save_memorizer or `onlynorm memorize --out`."


def save_memorizer(network: Memorizer, path: Path | str) -> None:
    """Writes the network as one sealed file, whole or not at all."""
    document = {
        "n_inputs": network.n_inputs,
        "n_outputs": network.n_outputs,
        "width": network.width,
        "n_blocks": len(network.blocks),
        "n_cues": network.n_cues,
        "facts": None if network.facts is None else dataclasses.asdict(network.facts),
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    write_tensors(Path(path), tensors, kind=KIND, format=FORMAT, document=document)


def load_memorizer(path: Path | str) -> Memorizer:
    """The network of a file that `save_memorizer` wrote; a damaged, altered or foreign file is refused."""
    path = Path(path)
    document, tensors = read_tensors(path, kind=KIND, format=FORMAT, cure=_CURE)
    try:
        network = Memorizer(
            document["n_inputs"], document["n_outputs"], width=document["width"], n_blocks=document["n_blocks"],
            n_cues=document["n_cues"],
        )  # fmt: skip
        network.load_state_dict(tensors)
        facts = document["facts"]
        network.facts = None if facts is None else MemorizerFacts(**facts)
    except (KeyError, TypeError, RuntimeError) as error:
        raise FormatError(
            f"a memorizer needs sizes that fit its numbers; {path.name} has others ({type(error).__name__}). {_CURE}"
        ) from error
    return network
