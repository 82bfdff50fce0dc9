"""`contrast`: how much of the network's motion tells samples apart, beside the motion that moves all of them alike.

The loss asks every output for a change a_i; their mean over samples asks all for the same one. Let J be the Jacobian of
the outputs by the parameters. A step of gradient descent moves along J^T a, and |J^T a|^2 / |a|^2 is how fast the
outputs follow such a wish. Where signals have collapsed they follow the common one much faster, so the largest rate
that is stable for the common one is too small for what differs. By linearity one more backward pass, with the mean
wish, is enough: the rest is the difference to the gradient that is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onlynorm.rank.probes import norm_of


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
