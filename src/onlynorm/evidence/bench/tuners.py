"""Methods of tuning for comparison: how each prepares a network, saves the trained parameters, and loads them.

The methods are norms, all parameters, head only, statistics only, and PEFT's LN tuning and LoRA. Each saves what a user
would save: an adapter, the whole state, the head, or what PEFT's `save_pretrained` writes. Of PEFT's folder only the
file of the tensors counts, without configuration and README. For a classifier with a new head, each method also trains
and saves the head.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from onlynorm.evidence.bench.tasks import TuningTask
from onlynorm.files import save
from onlynorm.tuning import Schedule, fit, load_adapter, only_norms, save_adapter, take_adapter

OURS, FULL, HEAD, PEFT_LN, PEFT_LORA = "onlynorm", "full fine-tuning", "head only", "PEFT LN tuning", "PEFT LoRA"
HALF, STATISTICS, NORMS = "onlynorm, float16, no statistics", "statistics only", "norms and head"
NOT_INSTALLED = "peft is not installed (`pip install onlynorm[bench]`)"


class Tuner(ABC):
    """One method of tuning one network: the parameters of `network` that require gradients are trained.

    `file` is the name of the saved file, which has all trained tensors.
    """

    name: str
    file = "adapter.safetensors"

    def __init__(self, subject: TuningTask) -> None:
        self.subject = subject
        self.network = self.prepare(copy.deepcopy(subject.base))

    def parameters(self) -> list[nn.Parameter]:
        """What is trained."""
        return [p for p in self.network.parameters() if p.requires_grad]

    def tune(self, schedule: Schedule) -> None:
        """Trains the network on the batch of the subject."""
        fit(self.network, (self.subject.inputs, self.subject.labels), schedule=schedule)

    @abstractmethod
    def prepare(self, base: nn.Module) -> nn.Module:
        """The network to train, from a copy of the base, which may be changed."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes the trained tensors to `file` in an empty folder."""

    @abstractmethod
    def reload(self, base: nn.Module, folder: Path) -> nn.Module:
        """The tuned network, from a new copy of the base and the saved file."""


class Ours(Tuner):
    """Only the norms; the adapter includes their statistics."""

    name = OURS

    def prepare(self, base: nn.Module) -> nn.Module:
        only_norms(base)
        return base

    def save(self, folder: Path) -> None:
        save_adapter(self.network, folder / self.file)

    def reload(self, base: nn.Module, folder: Path) -> nn.Module:
        load_adapter(base, folder / self.file)
        return base


class OursInHalf(Ours):
    """The same training, saved as scales and shifts in float16, without statistics."""

    name = HALF

    def __init__(self, ours: Tuner) -> None:
        self.subject, self.network = ours.subject, ours.network

    def save(self, folder: Path) -> None:
        save_adapter(self.network, folder / self.file, statistics=False, dtype=torch.float16)


class NormsAndHead(Ours):
    """The norms and the head, saved as one adapter."""

    name = NORMS

    def prepare(self, base: nn.Module) -> nn.Module:
        only_norms(base, also=self.subject.head)
        return base


class HeadAdapter(Ours):
    """The last layer, saved as an adapter; statistics are fixed."""

    name = HEAD

    def prepare(self, base: nn.Module) -> nn.Module:
        only_norms(base, also=self.subject.head, which=lambda _: False, statistics="freeze")
        return base


class Statistics(Ours):
    """Only the running statistics, from the inputs without labels."""

    name = STATISTICS

    def prepare(self, base: nn.Module) -> nn.Module:
        self.handle = only_norms(base, statistics="recalibrate")
        return base

    def tune(self, schedule: Schedule) -> None:
        self.handle.recalibrate(self.subject.inputs.split(schedule.batch_size))

    def save(self, folder: Path) -> None:
        adapter, moved = take_adapter(self.network), ("running_mean", "running_var", "num_batches_tracked")
        saved = {name: value for name, value in adapter.tensors.items() if name.rpartition(".")[2] in moved}
        others = tuple(sorted(adapter.tensors.keys() - saved.keys()))
        save(replace(adapter, tensors=saved, free=others), folder / self.file)


class Untuned(Tuner):
    """Nothing is changed or saved."""

    name = "nothing"

    def prepare(self, base: nn.Module) -> nn.Module:
        return base

    def tune(self, schedule: Schedule) -> None:
        pass

    def save(self, folder: Path) -> None:
        pass

    def reload(self, base: nn.Module, folder: Path) -> nn.Module:
        return base


class Full(Tuner):
    """All parameters."""

    name, file = FULL, "tuned.safetensors"

    def prepare(self, base: nn.Module) -> nn.Module:
        return base.requires_grad_(True)

    def save(self, folder: Path) -> None:
        save_file(self.saved(), folder / self.file)

    def reload(self, base: nn.Module, folder: Path) -> nn.Module:
        base.load_state_dict(load_file(folder / self.file), strict=False)
        return base

    def saved(self) -> dict[str, Any]:
        """The tensors that are saved."""
        return self.network.state_dict()


class Head(Full):
    """The last layer."""

    name = HEAD

    def prepare(self, base: nn.Module) -> nn.Module:
        base.requires_grad_(False)
        base.get_submodule(self.subject.head).requires_grad_(True)
        return base

    def saved(self) -> dict[str, Any]:
        return {k: v for k, v in self.network.state_dict().items() if k.startswith(f"{self.subject.head}.")}


class PeftLN(Tuner):
    """PEFT's LN tuning with given names of the norms, and with the head if it is new."""

    name, file = PEFT_LN, "adapter_model.safetensors"

    def prepare(self, base: nn.Module) -> nn.Module:
        peft = importlib.import_module("peft")
        with _quiet():
            return peft.get_peft_model(base.requires_grad_(True), self.config(peft))

    def config(self, peft: Any) -> Any:
        """The configuration with PEFT's defaults except for the names."""
        return peft.LNTuningConfig(target_modules=list(self.subject.norms), modules_to_save=self.saved_modules())

    def saved_modules(self) -> list[str] | None:
        """Additional modules to train and save."""
        return None

    def save(self, folder: Path) -> None:
        network: Any = self.network
        with _quiet():
            network.save_pretrained(folder, save_embedding_layers=False)

    def reload(self, base: nn.Module, folder: Path) -> nn.Module:
        with _quiet():
            return importlib.import_module("peft").PeftModel.from_pretrained(base, folder)


class PeftLora(PeftLN):
    """PEFT's LoRA with given names of the layers."""

    name = PEFT_LORA

    def config(self, peft: Any) -> Any:
        return peft.LoraConfig(target_modules=list(self.subject.adapted), modules_to_save=self.saved_modules())


class PeftLNAndHead(PeftLN):
    """PEFT's LN tuning with the head among its modules to save."""

    def saved_modules(self) -> list[str]:
        return [self.subject.head]


class PeftLoraAndHead(PeftLora, PeftLNAndHead):
    """PEFT's LoRA with the head among its modules to save."""


@contextmanager
def _quiet() -> Iterator[None]:
    """PEFT warns about unknown norms, which it copies, and about models without a configuration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


METHODS: tuple[type[Tuner], ...] = (Head, NormsAndHead, Full, PeftLNAndHead, PeftLoraAndHead)
"""Methods for a network with a new head."""
TUNERS: tuple[type[Tuner], ...] = (Ours, Full, Head, PeftLN, PeftLora)
"""Methods for a network with a trained head."""


def installed(kinds: Sequence[type[Tuner]]) -> list[type[Tuner]]:
    """The available methods: without the package peft, only ours."""
    has_peft = importlib.util.find_spec("peft") is not None
    return [kind for kind in kinds if has_peft or not issubclass(kind, PeftLN)]


class Reloaded(NamedTuple):
    """A network that was saved and loaded again, and the bytes of its file.

    `drift` is the largest difference of its outputs, as a fraction of the largest output.
    """

    file_size: int
    drift: float
    network: nn.Module


def save_and_reload(tuner: Tuner, probe: Tensor | None = None) -> Reloaded:
    """Trains, saves, and loads the parameters into a new copy of the base; the outputs are those for the probe."""
    probe = tuner.subject.probe if probe is None else probe
    wanted = _outputs(tuner.network, probe)
    with tempfile.TemporaryDirectory() as folder:
        tuner.save(Path(folder))
        size = sum(path.stat().st_size for path in Path(folder).glob(tuner.file))
        again = tuner.reload(copy.deepcopy(tuner.subject.base), Path(folder))
    return Reloaded(size, float((_outputs(again, probe) - wanted).abs().max() / wanted.abs().max()), again)


@torch.no_grad()
def _outputs(network: nn.Module, probe: Tensor) -> Tensor:
    outputs: Tensor = network.eval()(probe.to(next(network.parameters()).device))
    return outputs.cpu()
