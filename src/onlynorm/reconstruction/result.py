"""Results of a reconstruction: the network, the evidence for every layer, and the check of its ranges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from onlynorm.display import Curve, Figure, Panel, Result, ShownResult, Table, View
from onlynorm.errors import FormatError, visible
from onlynorm.features.distributions import STRUCTURED
from onlynorm.frozen.form import find_blocks
from onlynorm.memory import readable
from onlynorm.modules import need_model, unwrap
from onlynorm.modules.layers import Left
from onlynorm.reconstruction.constructions.options import Construction, LowRank, Settings
from onlynorm.storage import make_checked
from onlynorm.validate import need_instance, need_items

CONFIDENCE = 0.95
"""Confidence level of the upper limit of the rate at which inputs leave the ranges."""
FEW = 0.05
"""Upper limit above which a warning is issued even if no sample is outside: below 59 samples."""
ENOUGH = 64
"""Recommended number of calibration samples: with none outside, at most 4.6 % of new inputs are."""


@dataclass(frozen=True)
class LayerResult(Result):
    """The evidence for one rebuilt layer. `residual` is that of its weight, `error` that of its outputs, measured.

    `outside` lists the calibration samples outside the ranges of all others (None if not measured), `needed_margin` is
    the margin that would have included them.
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
        """The evidence from a dict of a file."""
        try:
            return make_checked(cls, written)
        except ValueError as error:
            raise FormatError(
                f"a finished layer needs its evidence; got invalid fields: {error}. Start again."
            ) from error

    def __str__(self) -> str:
        return (
            f"{self.name} {self.shape}: {self.n_features} features by {self.method}, residual {self.residual:.1e}, "
            f"window {self.window_error:.1e}, output error {self.error:.1e}, {self.seconds:.2g} s"
            + (f"; {self.shortfall}" if self.shortfall else "")
        )


@dataclass(frozen=True)
class Calibration(Result):
    """How often inputs leave the calibrated ranges, measured by leave-one-out on the calibration samples.

    `n_outside` of the `n_samples` distinct samples are outside the ranges of the other samples in at least one layer
    (None if not measured). The final ranges are calibrated on all samples. New inputs of the same distribution leave
    them at about this `rate`, and at most at the rate `upper` with 95 % confidence. The output error of such an input
    has no bound.

    `by_layer` is the number of samples outside for each measured layer, `unmeasured` the names of the other layers.
    `margin` is the margin of the ranges, `needed_margin` the one that would have included all samples.
    """

    n_samples: int
    n_outside: int | None
    margin: float
    needed_margin: float
    by_layer: dict[str, int]
    unmeasured: tuple[str, ...] = ()

    @classmethod
    def of(cls, layers: Sequence[LayerResult], *, n_samples: int, margin: float) -> Calibration:
        """The summary of the results of all layers."""
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
        """Fraction of samples outside the ranges of the others."""
        return None if self.n_outside is None else self.n_outside / self.n_samples

    @property
    def upper(self) -> float:
        """Upper limit of the rate at 95 % confidence (Clopper-Pearson, for independent samples)."""
        from scipy.special import betaincinv

        if self.n_outside is None or self.n_outside == self.n_samples:
            return 1.0
        return float(betaincinv(self.n_outside + 1, self.n_samples - self.n_outside, CONFIDENCE))

    @property
    def warning(self) -> str:
        """A warning about the ranges, with its cure; empty if there is none."""
        cure = f"Pass {ENOUGH} different samples or more"
        if self.n_outside is None and self.n_samples < 2:
            return (
                "calibrated on 1 distinct sample, so that none could be left out: how many inputs leave the ranges is "
                f"unknown, and their outputs may be wrong. {cure}, or ranges=Ranges(box=Box(low, high))."
            )
        if self.n_outside is None:
            return (
                "no layer's input could be split into samples, so that none could be left out: how many inputs leave "
                "the ranges is unknown, and their outputs may be wrong. Pass samples along the first axis, "
                "or ranges=Ranges(box=Box(low, high))."
            )
        counted = f"{self.n_outside} of {self.n_samples} calibration samples"
        if self.n_outside:
            wider = (
                f", ranges=Ranges(margin={math.ceil(1.1 * self.needed_margin)})"
                if math.isfinite(self.needed_margin)
                else ""
            )
            more = cure if self.n_samples < ENOUGH else "Pass more samples"
            rate = _percent(self.n_outside / self.n_samples)
            return (
                f"{counted} ({rate}) are outside the ranges of the others (leave-one-out). About {rate} of new inputs "
                f"(at most {_percent(self.upper)} with 95 % confidence) will be outside the calibrated ranges, and "
                f"their outputs may be wrong. {more}{wider}, or ranges=Ranges(box=Box(low, high))."
            )
        if self.upper > FEW:
            return (
                f"{counted} are outside the ranges of the others (leave-one-out), but the sample is small: at most "
                f"{_percent(self.upper)} of new inputs will be (95 % confidence). {cure}."
            )
        if self.unmeasured:
            return (
                f"{counted} are outside the ranges of the others (leave-one-out) in {len(self.by_layer)} layers; "
                f"{len(self.unmeasured)} layers could not be measured, because their input could not be split into "
                f"samples: {', '.join(self.unmeasured[:5])}. Verify on other inputs."
            )
        return ""

    def as_dict(self) -> dict[str, Any]:
        """All results as JSON types."""
        needed = self.needed_margin if math.isfinite(self.needed_margin) else None
        return {
            "n_samples": self.n_samples, "n_outside": self.n_outside, "rate": self.rate, "upper": self.upper,
            "margin": self.margin, "needed_margin": needed, "by_layer": dict(self.by_layer),
            "unmeasured": list(self.unmeasured), "warning": self.warning,
        }  # fmt: skip

    def __str__(self) -> str:
        if self.n_outside is None:
            return f"calibrated on {self.n_samples} distinct samples, not checked by leave-one-out"
        return (
            f"calibrated on {self.n_samples} samples, of which {self.n_outside} are outside the ranges of the others "
            f"(at most {_percent(self.upper)} of new inputs at {_percent(CONFIDENCE)} confidence)"
        )


def _percent(rate: float) -> str:
    return f"{100 * rate:.2g} %" if rate < 0.995 else "100 %"


@dataclass(frozen=True, repr=False)
class Reconstruction(ShownResult):
    """The rebuilt network, the evidence of each layer, modules that were not rebuilt, and folded norms.

    `construction` and `settings` are the options of the call, with the tolerance, window and precision that were used.
    `error` is the relative error of the network's output on a few calibration samples in float64, if a maximum was
    given. `partial` is the folder of finished layers, which `save` deletes. `calibration` measures how often inputs
    leave the calibrated ranges (None for certified ranges or without activation). `mismatch` is a message if the
    outputs of target and network differ on a calibration sample although those of the layers do not. `threads` is the
    number of threads of the run, on which the last bits depend.
    """

    network: nn.Module
    layers: tuple[LayerResult, ...]
    left: tuple[Left, ...]
    construction: Construction
    settings: Settings
    folded: tuple[str, ...] = ()
    error: float | None = None
    partial: Path | None = None
    calibration: Calibration | None = None
    mismatch: str = ""
    threads: int = 1

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about layers, the network and the calibration, each with its size and its cure."""
        short = tuple(f"layer {layer.name!r} fell short: {layer.shortfall}" for layer in self.layers if layer.shortfall)
        others = (self.mismatch, "" if self.calibration is None else self.calibration.warning)
        return (*short, *(warning for warning in others if warning))

    @property
    def is_approximate(self) -> bool:
        """Whether the options request an approximation: too few features, a rank, or a mask of structured features."""
        c = self.construction
        is_masked = c.features in STRUCTURED and c.density is not None
        has_rank = isinstance(c, LowRank) and c.rank is not None
        return (c.excess is not None and c.excess < 1.0) or has_rank or is_masked

    @property
    def n_norm_parameters(self) -> int:
        """Number of norm parameters; with the seed they determine the rebuilt layers."""
        return sum(p.numel() for block in set(find_blocks(self.network).values()) for p in block.parameters())

    def as_dict(self) -> dict[str, Any]:
        """All fields except the network as JSON types."""
        return {
            "layers": [layer.as_dict() for layer in self.layers], "left": [str(item) for item in self.left],
            "recipe": {**self.construction.as_dict(), **self.settings.as_dict()}, "folded": list(self.folded),
            "error": self.error,
            "n_norm_parameters": self.n_norm_parameters, "warnings": list(self.warnings),
            "calibration": None if self.calibration is None else self.calibration.as_dict(),
        }  # fmt: skip

    def plot(self) -> Figure:
        """The errors and seconds of every layer."""
        names = [layer.name for layer in self.layers]
        curves = []
        for label, values in (
            ("residual of the weight", [layer.residual for layer in self.layers]),
            ("activation off its line", [layer.window_error for layer in self.layers]),
            ("error of the output", [layer.error for layer in self.layers]),
        ):
            points = [(x, y) for x, y in enumerate(values, start=1) if y > 0 and math.isfinite(y)]
            if points:
                xs, ys = zip(*points, strict=True)
                curves.append(Curve(label, xs, ys, "line+points", "error"))
        seconds = [layer.seconds for layer in self.layers]
        if seconds:
            curves.append(Curve("", range(1, len(seconds) + 1), seconds, "bars", "seconds"))
        return Figure(curves, (
            Panel("error", "Relative errors", y_log=True, x_names=names),
            Panel("seconds", f"Seconds, {sum(seconds):.3g} in all", y_label="seconds", x_names=names),
        ))  # fmt: skip

    def view(self) -> View:
        """The accuracy of the layers, and the warnings."""
        columns = ("layer", "shape", "features", "method", "residual", "window error", "output error", "seconds")
        rows = [
            (one.name, "x".join(map(str, one.shape)), f"{one.n_features:,}", one.method, f"{one.residual:.1e}",
             f"{one.window_error:.1e}", f"{one.error:.1e}", f"{one.seconds:.2g}")
            for one in self.layers
        ]  # fmt: skip
        facts: dict[str, object] = {
            "features": self.construction.features, "seed": self.settings.seed,
            "norm parameters": self.n_norm_parameters,
            "largest residual": f"{max((one.residual for one in self.layers), default=0.0):.2e}",
        }  # fmt: skip
        if self.calibration is not None:
            facts["calibration"] = str(self.calibration)
        n = len(self.warnings)
        return View(
            f"Reconstruction of {len(self.layers)} layers", f"{n} warning{'s' * (n != 1)}" if n else "no warnings",
            "warn" if n else "good", self.warnings, facts=facts,
            tables={"Layers": Table(columns, rows)},
            details={"Left as they are": {item.name: item.reason for item in self.left}} if self.left else {},
        )  # fmt: skip

    def __str__(self) -> str:
        size = readable(4 * self.n_norm_parameters)
        head = (
            f"{len(self.layers)} layers from {self.construction.features} features, seed {self.settings.seed}: "
            f"{self.n_norm_parameters:,} norm parameters ({size} in float32)"
            + (f", relative output error {self.error:.1e}" if self.error is not None else "")
        )
        folded = [f"  folded: {', '.join(self.folded)}"] if self.folded else []
        left = (f"  left: {item}" for item in self.left)
        checked = [] if self.calibration is None else [f"  {self.calibration}"]
        warned = (f"  warning: {warning}" for warning in self.warnings)
        lines = [head, *(f"  {layer}" for layer in self.layers), *folded, *left, *checked, *warned]
        return visible("\n".join(lines))


def as_network(what: str, value: object) -> nn.Module:
    """The network of a reconstruction, or the network itself, without wrappers (DDP, DataParallel, torch.compile)."""
    return unwrap(need_model(what, value))
