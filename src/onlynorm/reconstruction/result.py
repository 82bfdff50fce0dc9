"""What a reconstruction returns: the network, the evidence for every layer, and how far its ranges can be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from onlynorm.errors import FormatError
from onlynorm.features.distributions import STRUCTURED
from onlynorm.frozen.form import find_blocks
from onlynorm.memory import readable
from onlynorm.modules import need_model, unwrap
from onlynorm.modules.layers import Left
from onlynorm.reconstruction.constructions.base import Recipe
from onlynorm.storage import make_checked
from onlynorm.validate import need_instance, need_items

CONFIDENCE = 0.95
"""Of the upper limit of the rate at which inputs leave the ranges."""
FEW = 0.05
"""An upper limit above this deserves a warning even where no held-back sample left: below 59 samples."""
ENOUGH = 64
"""Calibration samples that are recommended: with none outside, at most 4.6 % of new inputs are."""


@dataclass(frozen=True)
class LayerResult:
    """The evidence for one rebuilt layer. `residual` is that of its weight, `error` that of its outputs, measured.

    `outside` numbers the calibration samples that leave the ranges of all the others (None where it was not measured),
    `needed_margin` is the margin that would have held them.
    """

    name: str
    shape: tuple[int, ...]
    n_features: int
    method: str
    residual: float
    window_error: float
    seconds: float
    shortfall: str = ""
    error: float = 0.0
    outside: tuple[int, ...] | None = None
    needed_margin: float = 0.0

    @classmethod
    def from_dict(cls, written: dict[str, Any]) -> LayerResult:
        """The evidence that a file holds."""
        try:
            return make_checked(cls, written)
        except ValueError as error:
            raise FormatError(
                f"a finished layer needs its evidence; the file has others: {error}. Start again."
            ) from error

    def __str__(self) -> str:
        return (
            f"{self.name} {self.shape}: {self.n_features} features by {self.method}, residual {self.residual:.1e}, "
            f"window {self.window_error:.1e}, output error {self.error:.1e}, {self.seconds:.2g} s"
            + (f"; {self.shortfall}" if self.shortfall else "")
        )


@dataclass(frozen=True)
class Calibration:
    """How often inputs leave the calibrated ranges, measured by leave-one-out on the calibration samples.

    Each of the `n_samples` distinct samples is held back once: `n_outside` of them leave, in at least one layer, the
    ranges that the other samples give (None where nothing could be held back). The final ranges are calibrated on all
    samples. New inputs of the same kind leave them at about this `rate`, and at most at the rate `upper` with 95 %
    confidence; an input that leaves is not reproduced: the error of its output has no bound.

    `by_layer` has the number of samples outside of each layer that was measured, `unmeasured` the names of the others.
    `margin` is what the ranges were widened by, `needed_margin` what would have held all samples.
    """

    n_samples: int
    n_outside: int | None
    margin: float
    needed_margin: float
    by_layer: dict[str, int]
    unmeasured: tuple[str, ...] = ()

    @classmethod
    def of(cls, layers: Sequence[LayerResult], *, n_samples: int, margin: float) -> Calibration:
        """The summary of what was measured layer by layer."""
        cure = "Pass the layers of a Reconstruction."
        given = need_items("layers", layers, cure=cure)
        layers = [need_instance("a layer", one, LayerResult, cure=cure) for one in given]
        measured = {layer.name: layer.outside for layer in layers if layer.outside is not None}
        unmeasured = tuple(layer.name for layer in layers if layer.outside is None)
        return cls(
            n_samples,
            len({sample for outside in measured.values() for sample in outside}) if measured else None,
            margin,
            max((layer.needed_margin for layer in layers), default=0.0),
            {name: len(outside) for name, outside in measured.items()},
            unmeasured,
        )

    @property
    def rate(self) -> float | None:
        """Fraction of the held-back samples that left a range."""
        return None if self.n_outside is None else self.n_outside / self.n_samples

    @property
    def upper(self) -> float:
        """Upper limit of the rate at 95 % confidence (Clopper and Pearson's, as for independent samples)."""
        from scipy.special import betaincinv

        if self.n_outside is None or self.n_outside == self.n_samples:
            return 1.0
        return float(betaincinv(self.n_outside + 1, self.n_samples - self.n_outside, CONFIDENCE))

    @property
    def warning(self) -> str:
        """What to expect of new inputs, and the cure; empty where the ranges can be trusted."""
        cure = f"Pass {ENOUGH} different samples or more"
        if self.n_outside is None and self.n_samples < 2:
            return (
                "calibrated on 1 distinct sample, so that none could be held back: how many inputs leave the ranges is "
                f"unknown, and those that do are not reproduced. {cure}, or box=Box(low, high)."
            )
        if self.n_outside is None:
            return (
                "no layer's input could be split into samples, so that none could be held back: how many inputs leave "
                "the ranges is unknown, and those that do are not reproduced. Pass a batch with samples first, or "
                "box=Box(low, high)."
            )
        counted = f"{self.n_outside} of {self.n_samples} calibration samples"
        if self.n_outside:
            wider = f", margin={math.ceil(1.1 * self.needed_margin)}" if math.isfinite(self.needed_margin) else ""
            more = cure if self.n_samples < ENOUGH else "Pass more samples"
            rate = _percent(self.n_outside / self.n_samples)
            return (
                f"{counted} ({rate}), held back one at a time, leave the ranges of the others. About {rate} of new "
                f"inputs (at most {_percent(self.upper)} with 95 % confidence) will leave the calibrated ranges, and "
                f"their outputs are not reproduced. {more}{wider}, or box=Box(low, high)."
            )
        if self.upper > FEW:
            return (
                f"{counted}, held back one at a time, leave the ranges of the others, but so few samples only show "
                f"that at most {_percent(self.upper)} of new inputs will (95 % confidence). {cure}."
            )
        if self.unmeasured:
            return (
                f"{counted}, held back one at a time, leave the ranges of the others in {len(self.by_layer)} layers; "
                f"{len(self.unmeasured)} layers could not be measured, because their input could not be split into "
                f"samples: {', '.join(self.unmeasured[:5])}. Verify on other inputs."
            )
        return ""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        needed = self.needed_margin if math.isfinite(self.needed_margin) else None
        return {
            "n_samples": self.n_samples, "n_outside": self.n_outside, "rate": self.rate, "upper": self.upper,
            "margin": self.margin, "needed_margin": needed, "by_layer": dict(self.by_layer),
            "unmeasured": list(self.unmeasured), "warning": self.warning,
        }  # fmt: skip

    def __str__(self) -> str:
        if self.n_outside is None:
            return f"calibrated on {self.n_samples} distinct samples, none held back"
        return (
            f"calibrated on {self.n_samples} samples, of which {self.n_outside} leave the ranges of the others (at "
            f"most {_percent(self.upper)} of new inputs at {_percent(CONFIDENCE)} confidence)"
        )


def _percent(rate: float) -> str:
    return f"{100 * rate:.2g} %" if rate < 0.995 else "100 %"


@dataclass(frozen=True)
class Reconstruction:
    """The rebuilt network, the evidence layer by layer, what was left as it is, and which norms were folded.

    `error` is the relative error of the network's output on a few calibration samples, in float64, where an error was
    asked for. `partial` is the folder of finished layers, which `save` removes. `calibration` says how often inputs
    leave the calibrated ranges; it is None where nothing depends on them (certified ranges, no activation).
    `mismatch` is empty unless the outputs of target and network differ on a calibration sample, in their own precision,
    though no layer's do.
    """

    network: nn.Module
    layers: tuple[LayerResult, ...]
    left: tuple[Left, ...]
    recipe: Recipe
    folded: tuple[str, ...] = ()
    error: float | None = None
    partial: Path | None = None
    calibration: Calibration | None = None
    mismatch: str = ""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What limits the result, each with its size and its cure: layers, the whole network, the calibration."""
        short = tuple(f"layer {layer.name!r} fell short: {layer.shortfall}" for layer in self.layers if layer.shortfall)
        others = (self.mismatch, "" if self.calibration is None else self.calibration.warning)
        return (*short, *(warning for warning in others if warning))

    @property
    def is_approximate(self) -> bool:
        """Whether the recipe asks for an approximation: too few features, a rank, or a mask of structured ones."""
        r = self.recipe
        is_masked = r.features in STRUCTURED and r.density is not None
        return (r.excess is not None and r.excess < 1.0) or r.rank is not None or is_masked

    @property
    def n_norm_parameters(self) -> int:
        """Parameters of the norms that were chosen: all that has to be kept beside the seed."""
        return sum(p.numel() for block in set(find_blocks(self.network).values()) for p in block.parameters())

    def __str__(self) -> str:
        kept = readable(4 * self.n_norm_parameters)
        head = (
            f"{len(self.layers)} layers from {self.recipe.features} features, seed {self.recipe.seed}: "
            f"{self.n_norm_parameters:,} norm parameters ({kept} in float32)"
            + (f", relative output error {self.error:.1e}" if self.error is not None else "")
        )
        folded = [f"  folded: {', '.join(self.folded)}"] if self.folded else []
        left = (f"  left: {item}" for item in self.left)
        checked = [] if self.calibration is None else [f"  {self.calibration}"]
        warned = (f"  warning: {warning}" for warning in self.warnings)
        return "\n".join([head, *(f"  {layer}" for layer in self.layers), *folded, *left, *checked, *warned])


def as_network(what: str, value: object) -> nn.Module:
    """The network of a reconstruction, or a network itself, out of DistributedDataParallel, torch.compile and so on."""
    return unwrap(need_model(what, value))
