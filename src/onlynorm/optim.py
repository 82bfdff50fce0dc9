"""Optimize the effective weights of norm-only layers with any torch optimizer; gammas follow.

A gradient step on gamma changes the weight W = M gamma of a layer by -lr M M^T G, where G is the gradient of W. The
step is distorted by the squared spectrum of M, which is wide for random features. Here the optimizer updates W
itself, and gamma is computed with the pseudo-inverse:

    W* = optimizer(W, G),        gamma += pinv(M) (W* - M gamma)

With at least as many independent features as weights, W is updated exactly as in the ordinary network, for every
distribution of features. With fewer features, the update is projected onto the range of M. The rounding error of
W* - M gamma is added to the next step, so that errors do not accumulate.

    optimizer = follow_weights(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    loss.backward(); optimizer.step()                 # gammas are up to date after every step

The result is an instance of the given optimizer class: schedulers, closures and state dicts work as usual. The weights
belong to the optimizer and are not parameters of the model. `optimizer.zero_grad()` clears their gradients,
`model.zero_grad()` does not. Clip gradients over `optimizer.param_groups`, not over `model.parameters()`. If gammas are
loaded or modified directly, the weights are computed from them again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onlynorm.errors import ConversionError, ValueRangeError, first_line, shown
from onlynorm.features.kronecker import KronInverse
from onlynorm.frozen import NormOnlyLayer
from onlynorm.frozen.maps import GridMap, RandomMap
from onlynorm.modules import unwrap, without_autocast
from onlynorm.solvers.methods.pseudo_inverse import PseudoInverse
from onlynorm.validate import need_instance, need_number

__all__ = ["follow_weights", "release"]


def follow_weights(
    model: nn.Module, kind: Callable[..., Optimizer], *, memory: float | None = None, **options: Any
) -> Optimizer:
    """An optimizer of class `kind` for the trainable parameters of the model, with weights instead of gammas.

    `options` are passed to the optimizer: lr, momentum, weight_decay and so on. Weight decay applies to the weights.
    `memory` limits the size of each layer's factorization in bytes; larger systems are solved iteratively. Create the
    optimizer after the model was moved to its device and dtype; `release` detaches it.

    Theory: random_features:thm-3.1

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> model = on.to_norm_only(torch.nn.Linear(8, 4))
        >>> optimizer = on.optim.follow_weights(model, torch.optim.SGD, lr=0.1)
        >>> loss = model(torch.ones(2, 8)).square().mean()
        >>> loss.backward()
        >>> optimizer.step()
        >>> model(torch.ones(2, 8)).square().mean() < loss
        tensor(True)
    """
    if not callable(kind) or isinstance(kind, nn.Module) or not isinstance(model, nn.Module):
        raise ConversionError(
            f"follow_weights needs a model and an optimizer class; got {shown(model)} and {shown(kind)}. Write "
            "follow_weights(model, torch.optim.SGD, lr=0.1)."
        )
    if isinstance(kind, type) and not issubclass(kind, Optimizer):
        raise ConversionError(
            f"follow_weights needs an optimizer class; got {shown(kind)}. Pass torch.optim.SGD, for example."
        )
    if memory is not None:
        memory = need_number("memory", memory, low=0.0, open_low=True, cure="Leave it out to use the free memory.")
    model = unwrap(model)
    layers = [module for module in model.modules() if isinstance(module, NormOnlyLayer)]
    if not layers:
        raise ConversionError(
            f"follow_weights needs norm-only layers; got none in {type(model).__name__}. Pass the result of "
            "to_norm_only, or use the torch optimizer directly."
        )
    followers: dict[Tensor, _Follower] = {}
    followed: dict[NormOnlyLayer, _Follower] = {}  # attached at the end, so that an error leaves the model as it was
    for layer in layers:
        if layer.frozen.is_identity or not all(gamma.requires_grad for gamma in layer.gammas):
            continue
        if layer.gamma not in followers:
            followers[layer.gamma] = _Follower(layer, memory)
        followed[layer] = followers[layer.gamma]  # tied layers share one weight
    replaced = {id(gamma) for follower in followers.values() for gamma in follower.gammas}
    trained = [p for p in model.parameters() if p.requires_grad and id(p) not in replaced]
    try:
        made: Any = kind([*trained, *(follower.held for follower in followers.values())], **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise (ValueRangeError if isinstance(error, ValueError) else ConversionError)(
            f"follow_weights needs options that the optimizer accepts, and a trainable parameter; {shown(kind)} failed "
            f"with: {first_line(error)}. Check lr= and the other options, and requires_grad of the model."
        ) from error
    if not isinstance(made, Optimizer):
        raise ConversionError(
            f"follow_weights needs a callable that returns an optimizer; {shown(kind)} returned {shown(made)}. Pass "
            "torch.optim.SGD, for example."
        )
    optimizer = made
    release(model)
    for layer, follower in followed.items():
        layer.follower = follower

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
    """Detaches the model from `follow_weights`: its layers compute their weights from gamma again.

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> model = on.to_norm_only(torch.nn.Linear(8, 4))
        >>> optimizer = on.optim.follow_weights(model, torch.optim.SGD, lr=0.1)
        >>> on.optim.release(model)
        >>> model(torch.ones(2, 8)).shape
        torch.Size([2, 4])
    """
    need_instance("release", model, nn.Module, cure="Pass the model itself.")
    for module in model.modules():
        if isinstance(module, NormOnlyLayer):
            module.follower = None


class _Follower:
    """The weight of one layer, updated by an optimizer, and the gammas computed from it."""

    def __init__(self, layer: NormOnlyLayer, memory: float | None) -> None:
        self.layer, self.gammas = layer, layer.gammas
        self.inverse: PseudoInverse | KronInverse | None = None
        if isinstance(layer.frozen, GridMap):
            with without_autocast(layer.gamma.device):
                self.inverse = layer.frozen.inverse()
        elif isinstance(layer.frozen, RandomMap):
            with without_autocast(layer.gamma.device):
                self.inverse = PseudoInverse(layer.frozen.operator(), dtype=layer.gamma.dtype, memory=memory)
        self.made = layer.frozen(*layer.gammas).detach()
        self.remainder = torch.zeros_like(self.made)
        self.held = self.made.clone().requires_grad_()
        self.versions = self._versions()

    def weight_for(self, gammas: tuple[Tensor, ...]) -> Tensor:
        """The stored weight, or the weight of `gammas` if they are not the model's own, as in `functional_call`."""
        if any(given is not own for given, own in zip(gammas, self.gammas, strict=True)):
            made: Tensor = self.layer.frozen(*gammas)
            return made
        like = self.layer.frozen.like
        if (like.dtype, like.device) != (self.held.dtype, self.held.device):
            raise ConversionError(
                f"follow_weights needs the dtype and device it was created with, {self.held.dtype} on "
                f"{self.held.device}; got {like.dtype} on {like.device}. Call it after moving the model."
            )
        if not torch.compiler.is_compiling():
            self.renew_if_stale()
        return self.held if all(gamma.requires_grad for gamma in self.gammas) else self.held.detach()

    def renew_if_stale(self) -> None:
        """Computes the weight again if gammas were modified since the last step."""
        if self._versions() != self.versions:
            self.renew(self.gammas)

    @torch.no_grad()
    def renew(self, gammas: tuple[Tensor, ...]) -> None:
        """Sets the weight to that of these gammas."""
        self.gammas = gammas
        self.made = self.layer.frozen(*gammas)
        self.remainder = torch.zeros_like(self.made)
        self.held.copy_(self.made)
        self.versions = self._versions()

    def update(self) -> None:
        """Computes gammas from the updated weight, then sets the weight to the one that they represent."""
        with torch.no_grad(), without_autocast(self.held.device):  # the caller may step inside autocast
            self._update()

    def _update(self) -> None:
        frozen = self.layer.frozen
        if self.inverse is None:
            for gamma, values in zip(self.gammas, frozen.solve(self.held), strict=True):
                gamma.copy_(values)
        else:
            change = self.held - self.made + self.remainder
            self.gammas[0].add_(self.inverse(frozen.as_blocks(change)).flatten().to(self.gammas[0]))
        made = frozen(*self.gammas)
        if self.inverse is not None and self.inverse.is_wide:
            self.remainder = self.remainder + (self.held - made)
        self.made = made
        self.held.copy_(made)
        self.versions = self._versions()

    def _versions(self) -> tuple[int, ...]:
        return tuple(gamma._version for gamma in self.gammas)
