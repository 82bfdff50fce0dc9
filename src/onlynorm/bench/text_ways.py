"""The ways of tuning a classifier whose head is new: each trains and keeps the head beside its own parameters."""

from __future__ import annotations

from typing import Any

from torch import nn

from onlynorm.bench.tuners import Full, Head, Ours, PeftLN, PeftLora, Tuner
from onlynorm.tuning import only_norms

NORMS = "norms and head"


class NormsAndHead(Ours):
    """The norms and the head, kept as one adapter."""

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


WAYS: tuple[type[Tuner], ...] = (Head, NormsAndHead, Full, PeftLNAndHead, PeftLoraAndHead)
