"""The result of a diagnosis: every signal in the order of depth, measures of the gradients, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from onlynorm.rank.diagnosis.signals import Layer, gradient_ratio
from onlynorm.rank.diagnosis.verdict import Verdict

COLUMNS = ("depth", "signal", "kind", "units", "r", "soft rank", "spread", "scale", "dead", "gradient", "of signal")
MOST_ROWS = 40
"""Longer tables show evenly chosen rows; `layers` has all."""


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found. `layers` are all signals in the order in which they came to be.

    `alignment` is the mean size of the cosine between the gradients of two samples of one neuron of the last linear
    layer, `sample_cosine` the mean cosine of their gradients of the whole layer, `input_cosine` the cosine between the
    layer's gradients on the inputs and on random ones. `contrast` is how fast outputs follow what the loss asks of each
    sample, over how fast they follow what it asks of all alike. `directions` counts those of the last layer's inputs
    that differ between samples, and `told` is the share of them that goes with the targets. `start` is the loss over
    that of outputs of zero. What could not be measured is None, and `skipped` says why.
    """

    layers: tuple[Layer, ...]
    verdict: Verdict
    loss: float | None
    alignment: float | None
    sample_cosine: float | None
    input_cosine: float | None
    contrast: float | None
    directions: float | None
    told: float | None
    start: float | None
    last_layer: str | None
    skipped: tuple[str, ...]
    n_samples: int
    mode: str
    seconds: float = field(compare=False)

    @property
    def score(self) -> float:
        """How healthy the network is, from 0 to 1."""
        return self.verdict.score

    @property
    def is_trainable(self) -> bool:
        """Whether the score is one half or more: nothing was found that makes it unlikely that plain SGD trains it."""
        return self.verdict.is_trainable

    @property
    def gradient_ratio(self) -> float:
        """The gradient of the first hidden layer's output over that of the last hidden one; one is ideal."""
        return gradient_ratio(self.layers)

    @property
    def weighted_layers(self) -> tuple[Layer, ...]:
        """The outputs of layers with weights, each as often as it was called."""
        return tuple(layer for layer in self.layers if layer.has_weights)

    @property
    def n_layers(self) -> int:
        """Layers with weights, each as often as it was called."""
        return max((layer.depth for layer in self.layers), default=0)

    def rows(self) -> list[tuple[str, ...]]:
        """The table as text, one row for each signal."""
        return [_cells(layer) for layer in self.layers]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        facts = {name: getattr(self, name) for name in (
            "n_samples", "mode", "loss", "alignment", "sample_cosine", "input_cosine", "contrast", "directions", "told",
            "start", "gradient_ratio", "last_layer", "seconds",
        )}  # fmt: skip
        return {
            **self.verdict.as_dict(),
            **facts,
            "skipped": list(self.skipped),
            "layers": [asdict(layer) | {"shape": list(layer.shape)} for layer in self.layers],
        }

    def __str__(self) -> str:
        shown = _thin(self.rows())
        lines = [str(self.verdict), "", *_aligned([COLUMNS, *shown])]
        if len(shown) < len(self.layers):
            lines.append(f"{len(shown)} of {len(self.layers)} signals are shown; .layers has all")
        lines += ["", *self.notes()]
        return "\n".join(lines)

    def notes(self) -> list[str]:
        """Measures of the gradients of the last layer, and what was left out."""
        measured = [
            ("loss", self.loss, ".4g"),
            ("loss relative to that of zero outputs", self.start, ".3g"),
            (f"mean |cosine| of two samples' gradients, one neuron of {self.last_layer}", self.alignment, ".6f"),
            (f"mean cosine of two samples' gradients, all of {self.last_layer}", self.sample_cosine, ".4f"),
            (f"gradient of {self.last_layer} on these and on random inputs: cosine", self.input_cosine, ".6f"),
            ("how fast differences between samples are learned, relative to their mean", self.contrast, ".2e"),
            (f"directions in which samples differ before {self.last_layer}", self.directions, ".3f"),
            ("variance in them that the targets explain, beyond chance", self.told, ".1%"),
        ]
        lines = [f"{name} {value:{pattern}}" for name, value, pattern in measured if value is not None]
        return [*lines, *(f"not measured: {reason}" for reason in self.skipped)]


def _cells(layer: Layer) -> tuple[str, ...]:
    return (
        str(layer.depth), layer.place, layer.kind, str(layer.n_units), _number(layer.r, ".4g"),
        str(layer.soft_rank) if layer.is_finite else "-", _number(layer.spread, ".2g"), _number(layer.scale, ".2g"),
        _number(layer.dead, ".0%"), _number(layer.gradient, ".2g"), _number(layer.signal_gradient, ".2g"),
    )  # fmt: skip


def _number(value: float | None, pattern: str) -> str:
    return "-" if value is None or math.isnan(value) else format(value, pattern)


def _thin(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    if len(rows) <= MOST_ROWS:
        return rows
    return [rows[round(place * (len(rows) - 1) / (MOST_ROWS - 1))] for place in range(MOST_ROWS)]


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The rows in columns: words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    words = (1, 2)
    return [
        "  ".join(c.ljust(w) if i in words else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
