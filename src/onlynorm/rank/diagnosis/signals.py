"""`read_signal`: rank, scale and dead units of one activation, at a cost independent of the image size.

The activation is a matrix of channels x (samples * positions). Positions are sampled, the same ones for every sample,
so that there are at most `max_columns` columns, and the smaller of the two Gram matrices is formed once. The memory for
n samples is channels * max(n, max_columns) entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onlynorm.display import Result
from onlynorm.errors import ShapeError
from onlynorm.rank.measures import count_at_least
from onlynorm.validate import as_real, need_integer

MAX_COLUMNS = 1024
"""Default number of columns. N columns of a signal with ratio r give about 1 / (1/r + 1/N)."""
TAU = 0.5
"""The soft rank counts eigenvalues of M that are at least this fraction of the mean of its diagonal."""
DEAD = 1e-6
"""A unit is dead if it is below this fraction of the layer's largest output for all samples and positions."""


@dataclass(frozen=True)
class Signal(Result):
    """Measures of one activation; ranks and spread are NaN if it is zero or not finite.

    `r` is its rank ratio, `scale` its root mean square, `dead` the fraction of units that are zero for every sample.
    `spread` is the variance over samples relative to the mean square: zero if all samples are equal.
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
    """A named signal: the output of a layer or of a block, or another input of a layer.

    `depth` counts the layers with weights up to this signal, `call` the calls of the same module. `is_layer_input` is
    True for the input of a layer with weights. `gradient` is the norm of the gradient of the layer's parameters, over
    all its calls, `signal_gradient` that of the signal; None if there is none.
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
        """The name, with the number of the call if it is not the first."""
        return self.name if self.call == 1 else f"{self.name} (call {self.call})"


def gradient_ratio(layers: Sequence[Layer]) -> float:
    """The output gradient of the first hidden layer relative to that of the last; NaN with fewer than two.

    Hidden layers are those with weights except the last; layers without an output gradient are ignored.
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
    """The measures of an activation (samples, ...) with its channels on the axis `channels`.

    Positions are sampled with the generator, or are the first ones without it. `max_columns=None` uses all.

    Examples:
        >>> import torch
        >>> from onlynorm.rank import read_signal
        >>> signal = read_signal(torch.ones(16, 4), generator=None)  # 16 equal samples
        >>> round(signal.r, 4)
        1.0
    """
    if max_columns is not None:
        max_columns = need_integer("max_columns", max_columns, low=2, cure="Pass None to use all columns.")
    activation = as_real("an activation", activation).detach()
    channels = need_integer("channels", channels, low=-activation.ndim, high=activation.ndim - 1, cure="Pass an axis.")
    if activation.ndim < 2 or channels % activation.ndim == 0 or not activation.numel():
        raise ShapeError(
            f"a signal needs activations (samples, channels, ...) and an axis of channels after the first; got "
            f"{tuple(activation.shape)} and channels={channels}. Pass a whole batch."
        )
    values = activation.movedim(channels, 1)[..., None].flatten(2)  # (samples, units, positions)
    n_samples, n_units, n_positions = values.shape
    peaks = torch.maximum(values.amax((0, 2)), -values.amin((0, 2))).double()  # both propagate NaN
    peak = float(peaks.max())
    most = n_positions if max_columns is None else min(n_positions, max(1, max_columns // n_samples))
    n_columns = n_samples * most
    if not math.isfinite(peak) or peak == 0.0:
        dead = 1.0 if peak == 0.0 else math.nan
        scale = 0.0 if peak == 0.0 else math.nan
        return Signal(math.nan, 0, math.nan, scale, dead, n_units, n_columns, math.isfinite(peak))
    if most < n_positions:
        order = torch.arange(n_positions) if generator is None else torch.randperm(n_positions, generator=generator)
        values = values.index_select(2, order[:most].to(values.device))
    # scaled, so that fourth powers do not overflow
    values = (values / peak if values.dtype == torch.float64 else values.float() / peak).float()
    H = values.movedim(1, 0).reshape(n_units, n_columns)
    G = H @ H.mT if n_units <= n_columns else H.mT @ H
    trace = float(G.diagonal().sum())
    return Signal(
        r=trace**2 / float(G.square().sum()),
        soft_rank=int(count_at_least(G * (n_units / trace), TAU)),
        spread=float((values - values.mean(0)).square().sum()) / trace,
        scale=peak * math.sqrt(trace / (n_units * n_columns)),
        dead=float((peaks <= DEAD * peak).float().mean()),
        n_units=n_units,
        n_columns=n_columns,
        is_finite=True,
    )
