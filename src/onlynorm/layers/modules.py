"""`NormOnlyLinear` and `NormOnlyConv2d`: called like torch's own, with norms as their only parameters.

    layer = NormOnlyLinear(64, 10, features="id_cond", seed=0)
    layer.gamma          one number per frozen feature
    layer.beta           one shift per output
    layer.weight         what gamma makes of the frozen features: the weight that is applied

At the start the weight is that of the ordinary layer with the same seed, or the nearest that the features reach. ID
cond then trains exactly as the ordinary layer does, whatever the optimizer; Ortho cond does under SGD with or without
momentum, which does not see a rotation; id_cond_minimal and random features do with `onlynorm.optim`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.errors import ConversionError
from onlynorm.layers.choice import Choice, make_choice
from onlynorm.layers.frozen import FrozenMap, MinimalMap, make_map
from onlynorm.models import own_randomness
from onlynorm.reconstruction.blocks import explicit_padding, layer_options, plain_layer

Plain = nn.Linear | nn.Conv2d


class NormOnlyLayer(nn.Module):
    """What both layers share: gamma, beta, the frozen map between gamma and the weight.

    `output_gamma` exists for id_cond_minimal only. `held` is a weight that `onlynorm.optim` trains in gamma's place;
    copies and files do not know it.
    """

    held: Tensor | None

    def __init__(self, plain: Plain, choice: Choice, *, is_filled: bool = True) -> None:
        """The layer that takes the place of `plain` and starts with its weight; `is_filled=False` leaves gamma zero."""
        super().__init__()
        groups = plain.groups if isinstance(plain, nn.Conv2d) else 1
        if groups > 1 and choice.features != "id_cond":
            raise ConversionError(
                f"a convolution in {groups} groups needs id_cond features, whose paths stay inside a group; got "
                f"{choice.features}. Take id_cond for this layer."
            )
        like = plain.weight
        self.frozen: FrozenMap = make_map(tuple(like.shape), choice, dtype=like.dtype, device=like.device)
        self.options = layer_options(plain)
        self.gamma = nn.Parameter(like.new_zeros(self.frozen.n_features))
        is_minimal = isinstance(self.frozen, MinimalMap)
        self.output_gamma = nn.Parameter(like.new_zeros(like.shape[0])) if is_minimal else None
        self.beta = None if plain.bias is None else nn.Parameter(plain.bias.detach().clone())
        self.held = None
        if is_filled:
            self.set_weight(like)

    @property
    def gammas(self) -> tuple[nn.Parameter, ...]:
        """Gamma, and the output gamma where there is one."""
        return (self.gamma,) if self.output_gamma is None else (self.gamma, self.output_gamma)

    @property
    def weight(self) -> Tensor:
        """The weight that is applied, in the shape of the ordinary layer's."""
        made: Tensor = self.frozen(*self.gammas) if self.held is None else self.held
        return made

    @torch.no_grad()
    def set_weight(self, weight: Tensor) -> None:
        """Chooses gamma so that the weight is this one, or the nearest that the features reach."""
        for gamma, values in zip(self.gammas, self.frozen.solve(weight), strict=True):
            gamma.copy_(values)

    @torch.no_grad()
    def to_plain(self) -> Plain:
        """The ordinary layer with this weight and shift."""
        bias = None if self.beta is None else self.beta.detach().clone()
        plain = plain_layer(self.weight.detach().clone(), bias, self.options)
        assert isinstance(plain, nn.Linear | nn.Conv2d)
        return plain.train(self.training)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        if self.held is not None:
            with torch.no_grad():
                self.held.copy_(self.frozen(*self.gammas))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "held": None}


class NormOnlyLinear(NormOnlyLayer):
    """A Linear whose only parameters are norms; further options are the fields of `Choice`."""

    def __init__(
        self,
        n_in: int,
        n_out: int,
        *,
        bias: bool = True,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **choices: Any,
    ) -> None:
        choice = make_choice(seed=seed, **choices)
        with own_randomness(seed):
            plain = nn.Linear(n_in, n_out, bias=bias, dtype=dtype, device=device)
        super().__init__(plain, choice)

    def forward(self, x: Tensor) -> Tensor:
        """W x + beta."""
        if self.held is not None:
            return functional.linear(x, self.held, self.beta)
        return self.frozen.linear(x, self.gammas, self.beta)


class NormOnlyConv2d(NormOnlyLayer):
    """A Conv2d whose only parameters are norms; further options are the fields of `Choice`."""

    def __init__(
        self,
        n_in: int,
        n_out: int,
        *,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        bias: bool = True,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **choices: Any,
    ) -> None:
        choice = make_choice(seed=seed, **choices)
        with own_randomness(seed):
            plain = nn.Conv2d(
                n_in, n_out, kernel_size, stride=stride, padding=padding, dilation=dilation, groups=groups, bias=bias,
                padding_mode=padding_mode, dtype=dtype, device=device,
            )  # fmt: skip
        super().__init__(plain, choice)

    def forward(self, x: Tensor) -> Tensor:
        """W * x + beta."""
        o, padding = self.options, self.options["padding"]
        if o["padding_mode"] != "zeros":
            x, padding = functional.pad(x, explicit_padding(o), mode=o["padding_mode"]), 0
        return functional.conv2d(x, self.weight, self.beta, o["stride"], padding, o["dilation"], o["groups"])


def wrap(plain: Plain, choice: Choice, *, is_filled: bool = True) -> NormOnlyLayer:
    """The norm-only layer that takes the place of an ordinary one and starts with its weight."""
    kind = NormOnlyLinear if isinstance(plain, nn.Linear) else NormOnlyConv2d
    layer = kind.__new__(kind)
    NormOnlyLayer.__init__(layer, plain, choice, is_filled=is_filled)
    return layer.train(plain.training)
