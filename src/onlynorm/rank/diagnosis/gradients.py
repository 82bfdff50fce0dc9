"""Per-sample gradients of the last linear layer without forming them, and inputs that mean nothing to compare with.

The gradient of sample i is G_i = delta_i h_i^T, h_i its input and delta_i the gradient of its output, so that inner
products of gradients are products of inner products: <G_i, G_j> = (delta_i . delta_j)(h_i . h_j). With several
positions, G_i is a sum over them. The gradient of one neuron k is (delta_i)_k h_i: up to sign and length, h_i alone.

`contrast`: how much of the network's motion tells samples apart, beside the motion that moves all of them alike.

The loss asks every output for a change a_i; their mean over samples asks all for the same one. Let J be the Jacobian of
the outputs by the parameters. A step of gradient descent moves along J^T a, and |J^T a|^2 / |a|^2 is how fast the
outputs follow such a wish. Where signals have collapsed they follow the common one much faster, so the largest rate
that is stable for the common one is too small for what differs. By linearity one more backward pass, with the mean
wish, is enough: the rest is the difference to the gradient that is known.
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
    output: Tensor, parameters: Sequence[nn.Parameter], *, wish: Tensor, gradients: Sequence[Tensor | None]
) -> float | None:
    """The speed at which outputs follow what the loss wishes differently for each sample, over that of the mean wish.

    `wish` is the gradient of the loss by the output (samples first), `gradients` that by the parameters. None where no
    wish is common, all of it is, or no parameter follows it. The graph of the output is used up.
    """
    common = wish.mean(0, keepdim=True).expand_as(wish)
    wished_alike, wished_apart = norm_of(common), norm_of(wish - common)
    if wished_alike == 0.0 or wished_apart == 0.0:
        return None
    together = torch.autograd.grad(output, list(parameters), common.contiguous(), allow_unused=True)
    pairs = [(g, c) for g, c in zip(gradients, together, strict=True) if g is not None and c is not None]
    alike, apart = math.hypot(*(norm_of(c) for _, c in pairs)), math.hypot(*(norm_of(g - c) for g, c in pairs))
    if not 0.0 < alike < math.inf or not apart < math.inf:
        return None
    return (apart / alike * (wished_alike / wished_apart)) ** 2


MAX_SAMPLES = 1024
"""More samples than these are thinned out before pairs are compared."""
_OTHER = 0x2D5F91C3
"""Turns a seed into another one; torch's generator on CPUs knows the low 32 bits only."""


def neuron_alignment(last: LastLayer) -> float:
    """Mean size of the cosine between the gradients of two samples of one neuron, which are along their inputs h.

    With positions, the mean input of a sample stands for it. One if all samples pull a neuron along one line.
    Theory: daneshmand2020:prop-8
    """
    h = _thinned(last.inputs).mean(1)
    cosines = _cosines(h @ h.mT)
    return float(cosines.abs().mean())


def sample_cosine(last: LastLayer) -> float:
    """Mean cosine between the gradients of two samples of the whole last layer.

    With balanced classes this is near zero even if all samples have the same h: the delta of different classes point
    away from each other.
    """
    h, delta = _thinned(last.inputs), _thinned(last.deltas)
    n, n_positions, _ = h.shape
    products = h.new_zeros(n, n)
    for i in range(n if n_positions > 1 else 0):  # one sample against all, so that memory stays linear in positions
        products[i] = ((h[i] @ h.flatten(0, 1).mT) * (delta[i] @ delta.flatten(0, 1).mT)).sum(0).view(n, -1).sum(1)
    if n_positions == 1:
        products = (h[:, 0] @ h[:, 0].mT) * (delta[:, 0] @ delta[:, 0].mT)
    cosines = _cosines(products)
    return float(cosines.mean())


def layer_gradient(last: LastLayer) -> Float[Tensor, "out inp"]:
    """A multiple of the gradient of the last linear layer's weights, summed over samples: delta^T h."""
    return _scaled(last.deltas).flatten(0, 1).mT @ _scaled(last.inputs).flatten(0, 1)


def cosine_between(a: Tensor, b: Tensor) -> float:
    """The cosine between two tensors as vectors, or NaN where one of them is zero."""
    a, b = _scaled(a).flatten(), _scaled(b).flatten().to(a.device)
    return float(a @ b / (torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b)))


def meaningless(inputs: Any, *, seed: int) -> Any:
    """Inputs of the same make without meaning: normal numbers of equal mean and deviation, tokens drawn from the same.

    Every tensor of nested lists, tuples and dicts is replaced; booleans and all else stay as they are. The numbers are
    not those of torch.randn with this seed: a batch that was drawn that way would be compared with itself.
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
    """The values over the largest of them, in float32 at least: directions survive where squares would overflow."""
    values = values.float() if torch.finfo(values.dtype).bits < 32 else values
    return values / values.abs().amax().clamp(min=torch.finfo(values.dtype).tiny)


def _cosines(products: Tensor) -> Tensor:
    """Cosines of all pairs of different vectors with these inner products; zero vectors have none."""
    lengths = products.diagonal().clamp(min=0.0).sqrt()
    alive = lengths > 0
    kept = products[alive][:, alive] / (lengths[alive][:, None] * lengths[alive])
    off = ~torch.eye(len(kept), dtype=torch.bool, device=kept.device)
    return kept[off]
