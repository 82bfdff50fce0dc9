"""The methods of tuning that are compared: how each prepares a network, saves what it learned, and loads it again.

Ours, all parameters, the head alone, statistics alone, and PEFT's LN tuning and LoRA. Each saves what it would save for
a user: we an adapter, full fine-tuning the whole state, head only the head, PEFT what `save_pretrained` writes. Of
PEFT's folder only the file of the tensors is counted, neither the configuration nor the README. For a classifier whose
head is new each trains and saves the head beside its own parameters.
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
    """One method of tuning one network: `network` is trained, by the parameters that want gradients.

    `file` is the name of the file that is saved, which has all tensors that were learned.
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
        """The network to train, made of a copy of the base that may be changed."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes `file`, what was learned, into an empty folder."""

    @abstractmethod
    def reload(self, base: nn.Module, folder: Path) -> nn.Module:
        """The tuned network again, from a fresh copy of the base and what was saved."""


class Ours(Tuner):
    """Only the norms; the adapter holds their statistics too."""

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
    """The same training, saved as float16 scales and shifts alone."""

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
    """The last layer alone, saved as an adapter; statistics stay."""

    name = HEAD

    def prepare(self, base: nn.Module) -> nn.Module:
        only_norms(base, also=self.subject.head, which=lambda _: False, statistics="freeze")
        return base


class Statistics(Ours):
    """Only the running statistics: those of the inputs, without their labels."""

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
    """The last layer alone."""

    name = HEAD

    def prepare(self, base: nn.Module) -> nn.Module:
        base.requires_grad_(False)
        base.get_submodule(self.subject.head).requires_grad_(True)
        return base

    def saved(self) -> dict[str, Any]:
        return {k: v for k, v in self.network.state_dict().items() if k.startswith(f"{self.subject.head}.")}


class PeftLN(Tuner):
    """PEFT's LN tuning, with the names of the norms written by hand; with the head beside them if it is new."""

    name, file = PEFT_LN, "adapter_model.safetensors"

    def prepare(self, base: nn.Module) -> nn.Module:
        peft = importlib.import_module("peft")
        with _quiet():
            return peft.get_peft_model(base.requires_grad_(True), self.config(peft))

    def config(self, peft: Any) -> Any:
        """The configuration with PEFT's own defaults, but for the names."""
        return peft.LNTuningConfig(target_modules=list(self.subject.norms), modules_to_save=self.saved_modules())

    def saved_modules(self) -> list[str] | None:
        """Modules to train and save beside them."""
        return None

    def save(self, folder: Path) -> None:
        network: Any = self.network
        with _quiet():
            network.save_pretrained(folder, save_embedding_layers=False)

    def reload(self, base: nn.Module, folder: Path) -> nn.Module:
        with _quiet():
            return importlib.import_module("peft").PeftModel.from_pretrained(base, folder)


class PeftLora(PeftLN):
    """PEFT's LoRA, with the names of the layers written by hand."""

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
    """PEFT warns of norms it does not know and copies, and of models without a configuration."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


METHODS: tuple[type[Tuner], ...] = (Head, NormsAndHead, Full, PeftLNAndHead, PeftLoraAndHead)
"""For a network whose head is new."""
TUNERS: tuple[type[Tuner], ...] = (Ours, Full, Head, PeftLN, PeftLora)
"""For a network whose head is trained."""


def installed(kinds: Sequence[type[Tuner]]) -> list[type[Tuner]]:
    """Those that can be run: without the package peft, ours alone."""
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
    """What was trained, saved, and loaded again onto a fresh copy of the base; outputs are those for the probe."""
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
