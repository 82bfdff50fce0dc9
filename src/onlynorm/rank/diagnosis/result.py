"""The result of a diagnosis: every signal in the order of depth, measures of the gradients, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from onlynorm.rank.diagnosis.signals import Layer, gradient_ratio
from onlynorm.rank.diagnosis.verdict import HealthVerdict

COLUMNS = ("depth", "signal", "kind", "units", "r", "soft rank", "spread", "scale", "dead", "gradient", "of signal")
MAX_ROWS_SHOWN = 40
"""Longer tables show evenly spaced rows; `layers` has all."""


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`. `layers` are all signals in the order in which they were computed.

    `alignment` is the mean absolute cosine between the gradients of two samples, for one neuron of the last linear
    layer, `sample_cosine` the mean cosine between their gradients of the whole layer, `input_cosine` the cosine between
    the layer's gradients on the inputs and on noise. `contrast` is the speed at which differences between samples are
    learned, relative to their mean. `directions` is the number of directions in which the inputs of the last layer
    differ between samples, `explained_variance` the fraction of this variance that the targets explain.
    `initial_loss_ratio` is the loss over that of zero outputs. What could not be measured is None, and `skipped` says
    why.
    """

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
            "n_samples", "mode", "loss", "initial_loss_ratio", "gradient_ratio", "alignment", "sample_cosine",
            "input_cosine", "contrast", "directions", "explained_variance", "last_layer", "seconds",
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
        """Measures of the gradients of the last layer, and what was not measured."""
        measured = [
            ("loss", self.loss, ".4g"),
            ("loss relative to that of zero outputs", self.initial_loss_ratio, ".3g"),
            (f"mean |cosine| of two samples' gradients, one neuron of {self.last_layer}", self.alignment, ".6f"),
            (f"mean cosine of two samples' gradients, all of {self.last_layer}", self.sample_cosine, ".4f"),
            (f"gradient of {self.last_layer} on these and on random inputs: cosine", self.input_cosine, ".6f"),
            ("how fast differences between samples are learned, relative to their mean", self.contrast, ".2e"),
            (f"directions in which samples differ before {self.last_layer}", self.directions, ".3f"),
            ("variance in them that the targets explain, beyond chance", self.explained_variance, ".1%"),
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
    """The rows in columns: text to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = (1, 2)
    return [
        "  ".join(c.ljust(w) if i in text else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
