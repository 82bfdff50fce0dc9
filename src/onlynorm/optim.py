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
steps on are its own, no parameters of the model: `optimizer.zero_grad()` clears their gradients, `model.zero_grad()`
does not, and gradients are clipped over the parameters of `optimizer.param_groups`, not over `model.parameters()`.
Gammas that are loaded or changed by hand are taken up, weight and all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onlynorm.errors import ConversionError, shown
from onlynorm.frozen import NormOnlyLayer
from onlynorm.frozen.maps import RandomMap
from onlynorm.modules import unwrap, without_autocast
from onlynorm.solvers.methods.pseudo_inverse import PseudoInverse
from onlynorm.validate import need_instance, need_number

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
    if not callable(kind) or isinstance(kind, nn.Module) or not isinstance(model, nn.Module):
        raise ConversionError(
            f"follow_weights needs a class of optimizers and a model; got {shown(kind)} and {shown(model)}. Write "
            "follow_weights(torch.optim.SGD, model, lr=0.1)."
        )
    if isinstance(kind, type) and not issubclass(kind, Optimizer):
        raise ConversionError(
            f"follow_weights needs a class of optimizers; got {shown(kind)}. Pass torch.optim.SGD, for example."
        )
    if memory is not None:
        memory = need_number("memory", memory, low=0.0, open_low=True, cure="Leave it out for what is free.")
    model = unwrap(model)
    layers = [module for module in model.modules() if isinstance(module, NormOnlyLayer)]
    if not layers:
        raise ConversionError(
            f"follow_weights needs norm-only layers; got none in {type(model).__name__}. Pass the result of norm_only, "
            "or give an ordinary model to torch's optimizer."
        )
    release(model)
    followers: dict[Tensor, _Follower] = {}
    for layer in layers:
        if layer.frozen.is_identity or not all(gamma.requires_grad for gamma in layer.gammas):
            continue
        if layer.gamma not in followers:
            followers[layer.gamma] = _Follower(layer, memory)
        layer.follower = followers[layer.gamma]  # tied layers hold one weight
    replaced = {id(gamma) for follower in followers.values() for gamma in follower.gammas}
    trained = [p for p in model.parameters() if p.requires_grad and id(p) not in replaced]
    made: Any = kind([*trained, *(follower.held for follower in followers.values())], **options)
    if not isinstance(made, Optimizer):
        release(model)
        raise ConversionError(
            f"follow_weights needs something that makes an optimizer; {shown(kind)} made {shown(made)}. Pass "
            "torch.optim.SGD, for example."
        )
    optimizer = made

    def prepare(*_: Any) -> None:
        for follower in followers.values():
            follower.renew_if_stale()

    def update(*_: Any) -> None:
        for follower in followers.values():
            follower.update()

    optimizer.register_step_pre_hook(prepare)
    optimizer.register_step_post_hook(update)
    return optimizer


def release(model: nn.Module) -> None:
    """Lets the layers of the model make their weights from gamma again, as they do without `follow_weights`."""
    need_instance("release", model, nn.Module, cure="Pass the model itself.")
    for module in model.modules():
        if isinstance(module, NormOnlyLayer):
            module.follower = None


class _Follower:
    """The weight of one layer, which an optimizer changes, and the gammas that follow it."""

    def __init__(self, layer: NormOnlyLayer, memory: float | None) -> None:
        self.layer, self.gammas = layer, layer.gammas
        self.inverse: PseudoInverse | None = None
        if isinstance(layer.frozen, RandomMap):
            with without_autocast(layer.gamma.device):
                self.inverse = PseudoInverse(layer.frozen.operator(), dtype=layer.gamma.dtype, memory=memory)
        self.made = layer.frozen(*layer.gammas).detach()
        self.rest = torch.zeros_like(self.made)
        self.held = self.made.clone().requires_grad_()
        self.versions = self._versions()

    def weight_for(self, gammas: tuple[Tensor, ...]) -> Tensor:
        """The held weight; what the gammas make where others stand in for the model's, as in `functional_call`."""
        if any(given is not own for given, own in zip(gammas, self.gammas, strict=True)):
            made: Tensor = self.layer.frozen(*gammas)
            return made
        like = self.layer.frozen.like
        if (like.dtype, like.device) != (self.held.dtype, self.held.device):
            raise ConversionError(
                f"follow_weights needs the precision and device it was made with, {self.held.dtype} on "
                f"{self.held.device}; got {like.dtype} on {like.device}. Call it after moving the model."
            )
        if not torch.compiler.is_compiling():
            self.renew_if_stale()
        return self.held if all(gamma.requires_grad for gamma in self.gammas) else self.held.detach()

    def renew_if_stale(self) -> None:
        """Takes up gammas that something else changed since the last step."""
        if self._versions() != self.versions:
            self.renew(self.gammas)

    @torch.no_grad()
    def renew(self, gammas: tuple[nn.Parameter, ...]) -> None:
        """Lets the held weight be what these gammas make."""
        self.gammas = gammas
        self.made = self.layer.frozen(*gammas)
        self.rest = torch.zeros_like(self.made)
        self.held.copy_(self.made)
        self.versions = self._versions()

    def update(self) -> None:
        """Gammas for the weight that the optimizer made, and that weight set to what they reach."""
        with torch.no_grad(), without_autocast(self.held.device):  # a step may be taken inside autocast
            self._update()

    def _update(self) -> None:
        frozen = self.layer.frozen
        if self.inverse is None:
            for gamma, values in zip(self.gammas, frozen.solve(self.held), strict=True):
                gamma.copy_(values)
        else:
            assert isinstance(frozen, RandomMap)
            change = self.held - self.made + self.rest
            self.gammas[0].add_(self.inverse(frozen.as_blocks(change)).flatten().to(self.gammas[0]))
        made = frozen(*self.gammas)
        if self.inverse is not None and self.inverse.is_wide:
            self.rest = self.rest + (self.held - made)
        self.made = made
        self.held.copy_(made)
        self.versions = self._versions()

    def _versions(self) -> tuple[int, ...]:
        return tuple(gamma._version for gamma in self.gammas)
