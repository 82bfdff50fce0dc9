"""Cosines of per-sample gradients of the last linear layer, without forming the gradients, and noise for comparison.

The gradient of sample i is G_i = delta_i h_i^T, h_i its input and delta_i the gradient of its output, so that inner
products of gradients are products of inner products: <G_i, G_j> = (delta_i . delta_j)(h_i . h_j). With several
positions, G_i is a sum over them. The gradient of one neuron k is (delta_i)_k h_i, parallel to h_i.

`contrast`: how fast differences between samples are learned, relative to their mean.

Let a_i be the gradient of the loss with respect to the output of sample i, and J the Jacobian of the outputs with
respect to the parameters. A step of gradient descent moves along J^T a, and |J^T a|^2 / |a|^2 is the speed at which the
outputs follow a. If signals have collapsed, the outputs follow the mean of a over samples much faster than the rest, so
the largest learning rate that is stable for the mean is too small for the rest. By linearity one more backward pass,
with the mean, is enough: the gradient of the rest is the difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from onlynorm.rank.diagnosis.probes import LastLayer, norm_of
from onlynorm.seeds import seeded


def contrast(
    output: Tensor, parameters: Sequence[nn.Parameter], *, output_grad: Tensor, gradients: Sequence[Tensor | None]
) -> float | None:
    """The speed of learning deviations from the mean output gradient, relative to that of learning the mean.

    `output_grad` is the gradient of the loss with respect to the output (samples first), `gradients` that with respect
    to the parameters. None if the mean or the rest is zero, or no parameter affects the mean. The graph of the output
    is freed.
    """
    mean = output_grad.mean(0, keepdim=True).expand_as(output_grad)
    mean_size, rest_size = norm_of(mean), norm_of(output_grad - mean)
    if mean_size == 0.0 or rest_size == 0.0:
        return None
    of_mean = torch.autograd.grad(output, list(parameters), mean.contiguous(), allow_unused=True)
    pairs = [(g, m) for g, m in zip(gradients, of_mean, strict=True) if g is not None and m is not None]
    mean_norm, rest_norm = math.hypot(*(norm_of(m) for _, m in pairs)), math.hypot(*(norm_of(g - m) for g, m in pairs))
    if not 0.0 < mean_norm < math.inf or not rest_norm < math.inf:
        return None
    return (rest_norm / mean_norm * (mean_size / rest_size)) ** 2


MAX_SAMPLES = 1024
"""Maximum number of samples; of more, an evenly spaced subset is used."""
_OTHER = 0x2D5F91C3
"""XORed with a seed to give another one; torch's CPU generator uses the low 32 bits only."""


def neuron_alignment(last: LastLayer) -> float:
    """Mean absolute cosine between the gradients of two samples for one neuron, which are parallel to their inputs h.

    With several positions, h is the mean over them. One if the gradients of all samples are parallel.
    Theory: daneshmand2020:prop-8
    """
    h = _thinned(last.inputs).mean(1)
    cosines = _cosines(h @ h.mT)
    return float(cosines.abs().mean())


def sample_cosine(last: LastLayer) -> float:
    """Mean cosine between the gradients of two samples of the whole last layer.

    With balanced classes this is near zero even if all samples have the same h, because the deltas of different classes
    have opposite signs.
    """
    h, delta = _thinned(last.inputs), _thinned(last.deltas)
    n, n_positions, _ = h.shape
    products = h.new_zeros(n, n)
    for i in range(n if n_positions > 1 else 0):  # one sample at a time, so that memory is linear in positions
        products[i] = ((h[i] @ h.flatten(0, 1).mT) * (delta[i] @ delta.flatten(0, 1).mT)).sum(0).view(n, -1).sum(1)
    if n_positions == 1:
        products = (h[:, 0] @ h[:, 0].mT) * (delta[:, 0] @ delta[:, 0].mT)
    cosines = _cosines(products)
    return float(cosines.mean())


def layer_gradient(last: LastLayer) -> Float[Tensor, "out inp"]:
    """A multiple of the gradient of the last linear layer's weights, summed over samples: delta^T h."""
    return _scaled(last.deltas).flatten(0, 1).mT @ _scaled(last.inputs).flatten(0, 1)


def cosine_between(a: Tensor, b: Tensor) -> float:
    """The cosine between two flattened tensors; NaN if one of them is zero."""
    a, b = _scaled(a).flatten(), _scaled(b).flatten().to(a.device)
    return float(a @ b / (torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b)))


def noise_like(inputs: Any, *, seed: int) -> Any:
    """Noise of the same shapes and dtypes: normal with equal mean and standard deviation; integers are resampled.

    Tensors in nested lists, tuples and dicts are replaced, except booleans. The noise differs from torch.randn with
    this seed, so that a batch drawn that way is not compared with itself.
    """
    return _replaced(inputs, seeded(seed ^ _OTHER))


def _replaced(inputs: Any, generator: torch.Generator) -> Any:
    if isinstance(inputs, Mapping):
        return {name: _replaced(value, generator) for name, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        return [_replaced(value, generator) for value in inputs]
    if not isinstance(inputs, Tensor) or inputs.dtype == torch.bool:
        return inputs
    if not inputs.is_floating_point():
        drawn = torch.randint(inputs.numel(), inputs.shape, generator=generator)
        return inputs.flatten()[drawn.to(inputs.device)]
    noise = torch.randn(inputs.shape, generator=generator).to(inputs)
    return noise * inputs.std() + inputs.mean()


def _thinned(values: Tensor) -> Tensor:
    every = -(-len(values) // MAX_SAMPLES)
    return _scaled(values[::every]).cpu().double()


def _scaled(values: Tensor) -> Tensor:
    """The values divided by the largest, in float32 at least, so that squares do not overflow."""
    values = values.float() if torch.finfo(values.dtype).bits < 32 else values
    return values / values.abs().amax().clamp(min=torch.finfo(values.dtype).tiny)


def _cosines(products: Tensor) -> Tensor:
    """Cosines of all pairs of different nonzero vectors with these inner products."""
    lengths = products.diagonal().clamp(min=0.0).sqrt()
    alive = lengths > 0
    found = products[alive][:, alive] / (lengths[alive][:, None] * lengths[alive])
    off = ~torch.eye(len(found), dtype=torch.bool, device=found.device)
    return found[off]
