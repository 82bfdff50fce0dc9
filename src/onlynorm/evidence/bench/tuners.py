"""The methods of tuning that are compared: how each prepares a network, saves what it learned, and loads it again.

Ours, all parameters, the head alone, and PEFT's LN tuning and LoRA. Each saves what it would save for a user: we an
adapter, full fine-tuning the whole state, head only the head, PEFT what `save_pretrained` writes. Of PEFT's folder only
the file of the tensors is counted, neither the configuration nor the README. For a classifier whose head is new each
trains and saves the head beside its own parameters.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from onlynorm.tuning import load_adapter, only_norms, save_adapter


@dataclass(frozen=True)
class TuningTask:
    """A network to tune. `norms` and `adapted` are the names that PEFT needs for LN tuning and for LoRA."""

    name: str
    base: nn.Module
    inputs: Tensor
    labels: Tensor
    probe: Tensor
    head: str
    norms: tuple[str, ...]
    adapted: tuple[str, ...]


OURS, FULL, HEAD, PEFT_LN, PEFT_LORA = "onlynorm", "full fine-tuning", "head only", "PEFT LN tuning", "PEFT LoRA"
HALF = "onlynorm, float16, no statistics"


class Tuner(ABC):
    """One method of tuning one network: `network` is trained, by the parameters that want gradients."""

    name: str

    def __init__(self, subject: TuningTask) -> None:
        self.subject = subject
        self.network = self.prepare(copy.deepcopy(subject.base))

    def parameters(self) -> list[nn.Parameter]:
        """What is trained."""
        return [p for p in self.network.parameters() if p.requires_grad]

    @abstractmethod
    def prepare(self, base: nn.Module) -> nn.Module:
        """The network to train, made of a copy of the base that may be changed."""

    @abstractmethod
    def save(self, folder: Path) -> int:
        """Bytes of the file that holds what was learned, written into an empty folder."""

    @abstractmethod
    def reload(self, base: nn.Module, folder: Path) -> nn.Module:
        """The tuned network again, from a fresh copy of the base and what was saved."""


class Ours(Tuner):
    """Only the norms; the adapter holds their statistics too."""

    name = OURS

    def prepare(self, base: nn.Module) -> nn.Module:
        only_norms(base)
        return base

    def save(self, folder: Path) -> int:
        save_adapter(self.network, folder / "adapter.safetensors")
        return (folder / "adapter.safetensors").stat().st_size

    def reload(self, base: nn.Module, folder: Path) -> nn.Module:
        load_adapter(base, folder / "adapter.safetensors")
        return base


class OursInHalf(Ours):
    """The same training, saved as float16 scales and shifts alone."""

    name = HALF

    def __init__(self, ours: Ours) -> None:
        self.subject, self.network = ours.subject, ours.network

    def save(self, folder: Path) -> int:
        save_adapter(self.network, folder / "adapter.safetensors", statistics=False, dtype=torch.float16)
        return (folder / "adapter.safetensors").stat().st_size


class Full(Tuner):
    """All parameters."""

    name = FULL

    def prepare(self, base: nn.Module) -> nn.Module:
        return base.requires_grad_(True)

    def save(self, folder: Path) -> int:
        save_file(self.saved(), folder / "tuned.safetensors")
        return (folder / "tuned.safetensors").stat().st_size

    def reload(self, base: nn.Module, folder: Path) -> nn.Module:
        base.load_state_dict(load_file(folder / "tuned.safetensors"), strict=False)
        return base

    def saved(self) -> dict[str, Any]:
        """The tensors that are saved."""
        return self.network.state_dict()


class Head(Full):
    """The last layer alone."""

    name = HEAD

    def prepare(self, base: nn.Module) -> nn.Module:
        base.requires_grad_(False)
        base.get_submodule(self.subject.head).requires_grad_(True)
        return base

    def saved(self) -> dict[str, Any]:
        return {k: v for k, v in self.network.state_dict().items() if k.startswith(f"{self.subject.head}.")}


class PeftLN(Tuner):
    """PEFT's LN tuning, with the names of the norms written by hand."""

    name = PEFT_LN

    def prepare(self, base: nn.Module) -> nn.Module:
        peft = importlib.import_module("peft")
        with _quiet():
            return peft.get_peft_model(base.requires_grad_(True), self.config(peft))

    def config(self, peft: Any) -> Any:
        """The configuration with PEFT's own defaults, but for the names."""
        return peft.LNTuningConfig(target_modules=list(self.subject.norms))

    def save(self, folder: Path) -> int:
        network: Any = self.network
        with _quiet():
            network.save_pretrained(folder, save_embedding_layers=False)
        return (folder / "adapter_model.safetensors").stat().st_size

    def reload(self, base: nn.Module, folder: Path) -> nn.Module:
        with _quiet():
            return importlib.import_module("peft").PeftModel.from_pretrained(base, folder)


class PeftLora(PeftLN):
    """PEFT's LoRA, with the names of the layers written by hand."""

    name = PEFT_LORA

    def config(self, peft: Any) -> Any:
        return peft.LoraConfig(target_modules=list(self.subject.adapted))


@contextmanager
def _quiet() -> Iterator[None]:
    """PEFT warns of norms it does not know and copies, and of models without a configuration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


NORMS = "norms and head"


class NormsAndHead(Ours):
    """The norms and the head, saved as one adapter."""

    name = NORMS

    def prepare(self, base: nn.Module) -> nn.Module:
        only_norms(base, also=self.subject.head)
        return base


class PeftLNAndHead(PeftLN):
    """PEFT's LN tuning with the head among its modules to save."""

    def config(self, peft: Any) -> Any:
        return peft.LNTuningConfig(target_modules=list(self.subject.norms), modules_to_save=[self.subject.head])


class PeftLoraAndHead(PeftLora):
    """PEFT's LoRA with the head among its modules to save."""

    def config(self, peft: Any) -> Any:
        return peft.LoraConfig(target_modules=list(self.subject.adapted), modules_to_save=[self.subject.head])


METHODS: tuple[type[Tuner], ...] = (Head, NormsAndHead, Full, PeftLNAndHead, PeftLoraAndHead)
