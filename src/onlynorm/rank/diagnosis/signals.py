"""`read_signal`: rank, scale and dead units of one activation, at a cost that does not grow with the images.

The activation is a matrix of channels x (samples * positions). Positions are sampled, the same ones for every sample,
so that there are at most `max_columns` columns, and the smaller of the two Gram matrices is formed once. The memory for
n samples is channels * max(n, max_columns) entries, whatever the size of the images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onlynorm.errors import ShapeError
from onlynorm.rank.measures import count_at_least
from onlynorm.validate import as_real, need_integer

MAX_COLUMNS = 1024
"""Columns by default. N columns of a signal with ratio r give about 1 / (1/r + 1/N)."""
TAU = 0.5
"""The soft rank counts eigenvalues of M of at least half the mean of its diagonal."""
DEAD = 1e-6
"""A unit is dead if it stays below this fraction of the layer's largest output, for every sample and position."""


@dataclass(frozen=True)
class Signal:
    """Measures of one activation; ranks and spread are NaN where it is zero or not finite.

    `r` is its rank ratio, `scale` its root mean square, `dead` the fraction of units that are zero for every sample.
    `spread` is the fraction of its squares that is not common to all samples: zero if the inputs make no difference.
    """

    r: float
    soft_rank: int
    spread: float
    scale: float
    dead: float
    n_units: int
    n_columns: int
    is_finite: bool


@dataclass(frozen=True)
class Layer(Signal):
    """A signal with its name: the output of a layer or of a block, or an input that is no layer's output.

    `depth` counts the layers with weights up to here, `call` the calls of the same module. `is_layer_input` says that
    the signal is the input of a layer with weights. `gradient` is the norm of the gradient of the layer's own
    parameters, over all its calls, `signal_gradient` that of the signal; None if there is none.
    """

    name: str
    kind: str
    call: int
    depth: int
    has_weights: bool
    is_layer_input: bool
    shape: tuple[int, ...]
    gradient: float | None = None
    signal_gradient: float | None = None

    @property
    def label(self) -> str:
        """The name, followed by the number of the call if it is not the first."""
        return self.name if self.call == 1 else f"{self.name} (call {self.call})"


def gradient_ratio(layers: Sequence[Layer]) -> float:
    """The gradient of the first hidden layer's output over that of the last; one is ideal, NaN with fewer than two.

    Hidden layers are those with weights but the last; layers whose outputs get no gradient are left out.
    """
    hidden = [layer for layer in layers if layer.has_weights][:-1]
    found = [layer.signal_gradient for layer in hidden if layer.signal_gradient is not None]
    if len(found) < 2:
        return math.nan
    first, last = found[0], found[-1]
    return first / last if last > 0.0 else (math.inf if first > 0.0 else 0.0)


@torch.no_grad()
def read_signal(
    activation: Tensor, *, channels: int = 1, max_columns: int | None = MAX_COLUMNS, generator: torch.Generator | None
) -> Signal:
    """The measures of an activation (samples, ...) with its channels on the axis `channels`; it is not stored.

    The positions are drawn from the generator, or are the first ones without. `max_columns=None` uses all.
    """
    if max_columns is not None:
        max_columns = need_integer("max_columns", max_columns, low=2, cure="None takes all columns.")
    activation = as_real("an activation", activation).detach()
    channels = need_integer("channels", channels, low=-activation.ndim, high=activation.ndim - 1, cure="Pass an axis.")
    if activation.ndim < 2 or channels % activation.ndim == 0 or not activation.numel():
        raise ShapeError(
            f"a signal needs activations (samples, channels, ...) and an axis of channels after the first; got "
            f"{tuple(activation.shape)} and channels={channels}. Pass a whole batch."
        )
    seen = activation.movedim(channels, 1)[..., None].flatten(2)  # (samples, units, positions)
    n_samples, n_units, n_positions = seen.shape
    peaks = torch.maximum(seen.amax((0, 2)), -seen.amin((0, 2))).double()  # NaN goes through both
    peak = float(peaks.max())
    most = n_positions if max_columns is None else min(n_positions, max(1, max_columns // n_samples))
    n_columns = n_samples * most
    if not math.isfinite(peak) or peak == 0.0:
        dead = 1.0 if peak == 0.0 else math.nan
        nothing = 0.0 if peak == 0.0 else math.nan
        return Signal(math.nan, 0, math.nan, nothing, dead, n_units, n_columns, math.isfinite(peak))
    if most < n_positions:
        order = torch.arange(n_positions) if generator is None else torch.randperm(n_positions, generator=generator)
        seen = seen.index_select(2, order[:most].to(seen.device))
    seen = (seen / peak if seen.dtype == torch.float64 else seen.float() / peak).float()  # fourth powers stay in range
    H = seen.movedim(1, 0).reshape(n_units, n_columns)
    G = H @ H.mT if n_units <= n_columns else H.mT @ H
    trace = float(G.diagonal().sum())
    return Signal(
        r=trace**2 / float(G.square().sum()),
        soft_rank=int(count_at_least(G * (n_units / trace), TAU)),
        spread=float((seen - seen.mean(0)).square().sum()) / trace,
        scale=peak * math.sqrt(trace / (n_units * n_columns)),
        dead=float((peaks <= DEAD * peak).float().mean()),
        n_units=n_units,
        n_columns=n_columns,
        is_finite=True,
    )
