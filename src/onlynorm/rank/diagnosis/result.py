"""The result of a diagnosis: all signals, measures of the gradients, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from onlynorm.display import Curve, Figure, Panel, ShownResult, Table, View
from onlynorm.display.result import Tone
from onlynorm.errors import visible
from onlynorm.modules import ModuleTree
from onlynorm.rank.diagnosis.signals import Layer, gradient_ratio
from onlynorm.rank.diagnosis.verdict import HealthVerdict

COLUMNS = ("depth", "signal", "kind", "units", "r", "soft rank", "spread", "scale", "dead", "gradient", "of signal")
MAX_ROWS_SHOWN = 40
"""Longer tables show evenly spaced rows; `layers` has all."""
_DEPTH = "layers with weights so far"
PANELS = (
    Panel("rank", "Directions of the signal", _DEPTH, "rank ratio, soft rank", y_log=True),
    Panel("gradient", "Gradients", _DEPTH, "norm", y_log=True),
    Panel("spread", "Part that differs between samples", _DEPTH, "fraction of the squares", y_log=True),
    Panel("scale", "Scale of the signal", _DEPTH, "root mean square", y_log=True),
    Panel("dead", "Dead units", _DEPTH, "fraction"),
)
TONES: dict[str, Tone] = {"healthy": "good", "suspect": "warn", "unhealthy": "bad"}
_Value = Callable[[Layer], "float | None"]
_LAYERS, _OTHERS = "layers with weights", "norms, activations, blocks"


@dataclass(frozen=True, repr=False)
class Diagnosis(ShownResult):
    """The result of `diagnose`. `layers` are all signals in the order in which they were computed.

    `alignment` is the mean absolute cosine between the gradients of two samples, for one neuron of the last linear
    layer, `sample_cosine` the mean cosine between their gradients of the whole layer, `input_cosine` the cosine between
    the layer's gradients on the inputs and on noise. `contrast` is the speed at which differences between samples are
    learned, relative to their mean. `directions` is the effective number of directions in which the inputs of the last
    layer vary, `explained_variance` the fraction of this variance that the targets explain. `initial_loss_ratio` is the
    loss relative to that of zero outputs. Measures that are not available are None; `skipped` gives the reasons. `tree`
    has all modules with their output shapes and parameters, and prints as a table. `unseen_fraction` is the fraction of
    the parameters outside the layers that were called, which were not measured.
    """

    columns: ClassVar[tuple[str, ...]] = COLUMNS
    layers: tuple[Layer, ...]
    verdict: HealthVerdict
    loss: float | None
    alignment: float | None
    sample_cosine: float | None
    input_cosine: float | None
    contrast: float | None
    directions: float | None
    explained_variance: float | None
    initial_loss_ratio: float | None
    last_layer: str | None
    skipped: tuple[str, ...]
    n_samples: int
    mode: str
    seconds: float = field(compare=False)
    unseen_fraction: float = 0.0
    tree: ModuleTree | None = field(default=None, repr=False, compare=False)

    @property
    def score(self) -> float:
        """The score of the verdict, from 0 to 1."""
        return self.verdict.score

    @property
    def is_trainable(self) -> bool:
        """Whether the score is at least one half, so that plain SGD may train the network."""
        return self.verdict.is_trainable

    @property
    def gradient_ratio(self) -> float:
        """The output gradient of the first hidden layer relative to that of the last; one is ideal."""
        return gradient_ratio(self.layers)

    @property
    def weighted_layers(self) -> tuple[Layer, ...]:
        """The outputs of layers with weights, one for each call."""
        return tuple(layer for layer in self.layers if layer.has_weights)

    @property
    def n_layers(self) -> int:
        """Number of calls of layers with weights."""
        return max((layer.depth for layer in self.layers), default=0)

    def rows(self) -> list[tuple[str, ...]]:
        """The table as text, with one row per signal."""
        return [_cells(layer) for layer in self.layers]

    def as_dict(self) -> dict[str, Any]:
        """All results as JSON types."""
        facts = {name: getattr(self, name) for name in (
            "n_samples", "mode", "unseen_fraction", "loss", "initial_loss_ratio", "gradient_ratio", "alignment",
            "sample_cosine", "input_cosine", "contrast", "directions", "explained_variance", "last_layer", "seconds",
        )}  # fmt: skip
        return {
            **self.verdict.as_dict(),
            **facts,
            "skipped": list(self.skipped),
            "layers": [asdict(layer) | {"shape": list(layer.shape)} for layer in self.layers],
        }

    def plot(self) -> Figure:
        """Rank, gradients, spread, scale and dead units over depth."""
        return Figure(tuple(self._curves()), PANELS)

    def view(self) -> View:
        """The verdict, the measures of the last layer, and every signal."""
        verdict = self.verdict
        return View(
            "Diagnosis of a network", f"{verdict.word}, score {verdict.score:.2f} of 1", TONES[verdict.word],
            [f"{text[:1].upper()}{text[1:]}." for text in verdict.findings], verdict.advice,
            tables={
                "Signals": Table(COLUMNS, self.rows()),
                "Gradients of the last layer": Table(("measure",), [(note,) for note in self.notes()]),
                **({} if self.tree is None else {"Modules": self.tree.table()}),
            },
            details={
                "Parts of the score": {name: f"{value:.3g}" for name, value in verdict.parts.items()},
                "Thresholds": vars(verdict.thresholds),
            },
        )  # fmt: skip

    def _curves(self) -> list[Curve]:
        weighted = [layer for layer in self.layers if layer.has_weights]
        others = [layer for layer in self.layers if not layer.has_weights]
        wanted: list[tuple[str, str, list[Layer], _Value]] = [
            ("rank", _LAYERS, weighted, lambda layer: layer.r),
            ("rank", _OTHERS, others, lambda layer: layer.r),
            ("rank", "soft rank", weighted, lambda layer: float(layer.soft_rank)),
            ("gradient", "gradient of the weights", weighted, lambda layer: layer.gradient),
            ("gradient", "gradient of the signal", weighted, lambda layer: layer.signal_gradient),
            ("spread", _LAYERS, weighted, lambda layer: layer.spread),
            ("spread", _OTHERS, others, lambda layer: layer.spread),
            ("scale", _LAYERS, weighted, lambda layer: layer.scale),
            ("scale", _OTHERS, others, lambda layer: layer.scale),
            ("dead", _LAYERS, weighted, lambda layer: layer.dead),
            ("dead", _OTHERS, others, lambda layer: layer.dead),
        ]
        drawn = []
        for panel, label, layers, value in wanted:
            found = [(layer.depth, value(layer)) for layer in layers]
            points = [(x, y) for x, y in found if y is not None and math.isfinite(y) and (y > 0 or panel == "dead")]
            if points:
                xs, ys = zip(*points, strict=True)
                drawn.append(Curve(label, xs, ys, "line+points" if layers is weighted else "points", panel))
        return drawn

    def __str__(self) -> str:
        shown = _thin(self.rows())
        lines = [str(self.verdict), "", *_aligned([COLUMNS, *shown])]
        if len(shown) < len(self.layers):
            lines.append(f"{len(shown)} of {len(self.layers)} signals are shown; .layers has all")
        lines += ["", *self.notes()]
        return visible("\n".join(lines))

    def notes(self) -> list[str]:
        """Measures of the gradients of the last layer, and skipped measures."""
        measured = [
            ("loss", self.loss, ".4g"),
            ("loss relative to that of zero outputs", self.initial_loss_ratio, ".3g"),
            (f"mean |cosine| of two samples' gradients, one neuron of {self.last_layer}", self.alignment, ".6f"),
            (f"mean cosine of two samples' gradients, all of {self.last_layer}", self.sample_cosine, ".4f"),
            (f"gradient of {self.last_layer} on these and on random inputs: cosine", self.input_cosine, ".6f"),
            ("speed at which differences between samples are learned, relative to their mean", self.contrast, ".2e"),
            (f"directions in which samples differ before {self.last_layer}", self.directions, ".3f"),
            ("fraction of this variance explained by the targets, beyond chance", self.explained_variance, ".1%"),
        ]
        lines = [f"{name} {value:{pattern}}" for name, value, pattern in measured if value is not None]
        return [*lines, *(f"not measured: {reason}" for reason in self.skipped)]


def _cells(layer: Layer) -> tuple[str, ...]:
    return (
        str(layer.depth), layer.label, layer.kind, str(layer.n_units), _number(layer.r, ".4g"),
        str(layer.soft_rank) if layer.is_finite else "-", _number(layer.spread, ".2g"), _number(layer.scale, ".2g"),
        _number(layer.dead, ".0%"), _number(layer.gradient, ".2g"), _number(layer.signal_gradient, ".2g"),
    )  # fmt: skip


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None or math.isnan(value) else format(value, pattern)


def _thin(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    if len(rows) <= MAX_ROWS_SHOWN:
        return rows
    return [rows[round(place * (len(rows) - 1) / (MAX_ROWS_SHOWN - 1))] for place in range(MAX_ROWS_SHOWN)]


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The rows as lines with aligned columns: text to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = (1, 2)
    return [
        "  ".join(c.ljust(w) if i in text else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
