"""Training norms as if they were weights: any torch optimizer, with its state in the space of effective weights.

A plain step on gamma moves the weight W = M gamma of a layer by -rate M M^T G, with G the gradient at W: the squared
spectrum of M stands between the gradient and the step, and random features have a wide one. Here the optimizer steps on
W itself, and gamma follows by the pseudo-inverse:

    W* = what SGD, Adam, ... make of W and G,        gamma += pinv(M) (W* - M gamma)

With at least as many independent features as weights W follows the path of the ordinary network exactly, whatever the
distribution; with fewer it follows the projection of that path on what the features reach. What rounding leaves of W* -
M gamma is part of the next step, so that errors do not add up.

    optimizer = follow_weights(torch.optim.SGD, model, lr=0.1, momentum=0.9)
    loss.backward(); optimizer.step()                 # gammas are up to date after every step

The optimizer is of the class that was asked for: schedulers, closures and state dicts work as ever. The weights it
steps on are its own, no parameters of the model: `optimizer.zero_grad()` clears them, `model.zero_grad()` does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onlynorm.errors import ConversionError
from onlynorm.layers import NormOnlyLayer
from onlynorm.layers.frozen import RandomMap
from onlynorm.layers.pseudo_inverse import PseudoInverse

__all__ = ["follow_weights", "release"]


def follow_weights(
    kind: Callable[..., Optimizer], model: nn.Module, *, memory: float | None = None, **options: Any
) -> Optimizer:
    """An optimizer of this kind over everything the model trains, with weights in the place of gammas.

    `options` go to the optimizer: lr, momentum, weight_decay and so on; a decay then shrinks weights, not gammas.
    `memory` limits the bytes of each layer's factor, beyond which an iteration takes its place. Make it after the model
    was moved to its device and precision, and after gammas were loaded; `release` ends it.

    Theory: random_features:thm-3.1
    """
    layers = [module for module in model.modules() if isinstance(module, NormOnlyLayer)]
    if not layers:
        raise ConversionError(
            f"follow_weights needs norm-only layers; got none in {type(model).__name__}. Pass the result of norm_only, "
            "or give an ordinary model to torch's optimizer."
        )
    release(model)
    followers: dict[Tensor, _Follower] = {}
    for layer in layers:
        if layer.frozen.is_identity or not layer.gamma.requires_grad:
            continue
        if layer.gamma not in followers:
            followers[layer.gamma] = _Follower(layer, memory)
        layer.held = followers[layer.gamma].held  # tied layers hold one weight
    replaced = {id(gamma) for follower in followers.values() for gamma in follower.layer.gammas}
    trained = [p for p in model.parameters() if p.requires_grad and id(p) not in replaced]
    optimizer = kind([*trained, *(follower.held for follower in followers.values())], **options)

    def update(*_: Any) -> None:
        for follower in followers.values():
            follower.update()

    optimizer.register_step_post_hook(update)
    return optimizer


def release(model: nn.Module) -> None:
    """Lets the layers of the model make their weights from gamma again, as they do without `follow_weights`."""
    for module in model.modules():
        if isinstance(module, NormOnlyLayer):
            module.held = None


class _Follower:
    """The weight of one layer, which an optimizer changes, and the gammas that follow it."""

    def __init__(self, layer: NormOnlyLayer, memory: float | None) -> None:
        self.layer = layer
        self.inverse: PseudoInverse | None = None
        if isinstance(layer.frozen, RandomMap):
            self.inverse = PseudoInverse(layer.frozen.operator(), dtype=layer.gamma.dtype, memory=memory)
        self.made = layer.frozen(*layer.gammas).detach()
        self.rest = torch.zeros_like(self.made)
        self.held = self.made.clone().requires_grad_()
        self.version = layer.gamma._version

    @torch.no_grad()
    def update(self) -> None:
        """Gammas for the weight that the optimizer made, and that weight set to what they reach."""
        if self.layer.gamma._version != self.version:  # gammas were loaded since the last step
            self.made, self.rest = self.layer.frozen(*self.layer.gammas), torch.zeros_like(self.rest)
        if self.inverse is None:
            self.layer.set_weight(self.held)
        else:
            frozen, gamma = self.layer.frozen, self.layer.gamma
            assert isinstance(frozen, RandomMap)
            change = self.held - self.made + self.rest
            gamma.add_(self.inverse(frozen.as_blocks(change)).flatten().to(gamma))
        made = self.layer.frozen(*self.layer.gammas)
        if self.inverse is not None and self.inverse.is_wide:
            self.rest = self.rest + (self.held - made)
        self.made = made
        self.held.copy_(made)
        self.version = self.layer.gamma._version
