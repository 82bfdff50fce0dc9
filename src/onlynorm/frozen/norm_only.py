"""`NormOnlyLinear` and `NormOnlyConv1d`, `2d`, `3d`: called like torch's own, with norms as their only parameters.

    layer = NormOnlyLinear(64, 10, features="id_cond", seed=0)
    layer.gamma          one number per frozen feature
    layer.beta           one shift per output
    layer.weight         what gamma makes of the frozen features: the weight that is applied

At the start the weight is that of the ordinary layer with the same seed, or the nearest that the features reach. ID
cond then trains exactly as the ordinary layer does, whatever the optimizer; Ortho cond does under SGD with or without
momentum, which does not see a rotation; id_cond_minimal and random features do with `onlynorm.optim`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.errors import FormatError, ShapeError, ValueRangeError, shown
from onlynorm.frozen.form import FrozenLayer
from onlynorm.frozen.maps import FrozenMap, MinimalMap, make_map
from onlynorm.frozen.options import Choice, make_choice
from onlynorm.modules import without_autocast
from onlynorm.modules.convolution import explicit_padding
from onlynorm.modules.layers import CONVOLUTIONS, LINEAR, layer_options, plain_layer
from onlynorm.seeds import own_randomness
from onlynorm.validate import as_real, need_choice, need_flag, need_instance, need_integer, need_sizes

Plain = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
PLAIN = LINEAR + CONVOLUTIONS
Sizes = int | tuple[int, ...]
_ORIGIN = "onlynorm_frozen"


class Follower(Protocol):
    """What `onlynorm.optim` puts between a layer and its gammas: a weight that is trained and that gammas follow."""

    held: Tensor

    def weight_for(self, gammas: tuple[Tensor, ...]) -> Tensor:
        """The weight to apply for these gammas."""

    def renew(self, gammas: tuple[nn.Parameter, ...]) -> None:
        """Lets the held weight be what these gammas make."""


class NormOnlyLayer(FrozenLayer):
    """What these layers share: gamma, beta, the frozen map between gamma and the weight.

    `output_gamma` exists for id_cond_minimal only. While `onlynorm.optim` trains a weight in gamma's place there is a
    `follower`; copies and files do not know it.
    """

    follower: Follower | None

    def __init__(self, plain: Plain, choice: Choice, *, is_filled: bool = True) -> None:
        """The layer that takes the place of `plain` and starts with its weight; `is_filled=False` leaves gamma zero."""
        super().__init__()
        need_instance("a norm-only layer", plain, PLAIN, cure="Pass the ordinary layer.")
        need_instance("a norm-only layer", choice, Choice, cure="Write Choice(features='id_cond').")
        is_filled = need_flag("is_filled", is_filled)
        like, is_filled = plain.weight, is_filled and not plain.weight.is_meta
        if is_filled:
            _need_numbers(plain)
        self.options = layer_options(plain)
        self.frozen: FrozenMap = make_map(
            tuple(like.shape), choice, dtype=like.dtype, device=like.device, groups=self.options.get("groups", 1)
        )
        self.gamma = nn.Parameter(like.new_zeros(self.frozen.n_features, dtype=self.frozen.gamma_dtype))
        is_minimal = isinstance(self.frozen, MinimalMap)
        self.output_gamma = nn.Parameter(self.gamma.new_zeros(like.shape[0])) if is_minimal else None
        self.beta = None if plain.bias is None else nn.Parameter(plain.bias.detach().clone())
        self.follower = None
        if is_filled:
            self.set_weight(like)
            if not all(bool(gamma.isfinite().all()) for gamma in self.gammas):
                raise ValueRangeError(
                    f"a norm-only layer needs gammas that {self.gamma.dtype} can hold; got larger ones for this weight "
                    f"and {choice.features} features. Take a smaller condition number, or a higher precision."
                )

    @property
    def n_features(self) -> int:
        return self.frozen.n_features

    @property
    def n_frozen(self) -> int:
        return self.frozen.n_frozen

    def is_reproducible(self) -> bool:
        return self.frozen.is_reproducible()

    @property
    def gammas(self) -> tuple[nn.Parameter, ...]:
        """Gamma, and the output gamma where there is one."""
        return (self.gamma,) if self.output_gamma is None else (self.gamma, self.output_gamma)

    @property
    def held(self) -> Tensor | None:
        """The weight that is trained in gamma's place, None without a follower."""
        return None if self.follower is None else self.follower.held

    @property
    def weight(self) -> Tensor:
        """The weight that is applied, in the shape of the ordinary layer's."""
        gammas = self.gammas
        made: Tensor = self.frozen(*gammas) if self.follower is None else self.follower.weight_for(gammas)
        return made

    @property
    def bias(self) -> Tensor | None:
        """The shift, under the name that code written for ordinary layers reads."""
        return self.beta

    @torch.no_grad()
    def set_weight(self, weight: Tensor) -> None:
        """Chooses gamma so that the weight is this one, or the nearest that the features reach."""
        weight = as_real("weight", weight, is_finite=True)
        if tuple(weight.shape) != self.frozen.shape:
            raise ShapeError(
                f"set_weight needs a weight of shape {self.frozen.shape}; got {tuple(weight.shape)}. Pass one of the "
                "ordinary layer's shape."
            )
        with without_autocast(self.gamma.device):
            for gamma, values in zip(self.gammas, self.frozen.solve(weight), strict=True):
                gamma.copy_(values)
        if self.follower is not None:
            self.follower.renew(self.gammas)

    @torch.no_grad()
    def to_plain(self) -> Plain:
        """The ordinary layer with this weight and shift."""
        bias = None if self.beta is None else self.beta.detach().clone()
        plain = plain_layer(self.weight.detach().clone(), bias, self.options)
        assert isinstance(plain, Plain)
        return plain.train(self.training)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):  # travels with the state dict, also through torch.save
            destination._metadata[prefix[:-1]][_ORIGIN] = self.frozen.origin()

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *arguments: Any
    ) -> None:
        there, here = local_metadata.get(_ORIGIN), self.frozen.origin()
        if there is not None and there != here:
            raise FormatError(
                f"the layer at {prefix[:-1]!r} needs gammas of its own frozen features, {here}; got those of {there}. "
                "Make the model with the features, seed and layer names that the gammas are from."
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *arguments)
        if self.follower is not None:
            self.follower.renew(self.gammas)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> NormOnlyLayer:
        """Moves and casts the layer; gammas that need float32 keep it where the layer gets half precision."""
        precise: set[int] = set()
        if self.frozen.keeps_float32:
            precise = {id(t) for gamma in self.gammas for t in (gamma, gamma.grad) if t is not None}

        def apply(tensor: Tensor) -> Tensor:
            made = fn(tensor)
            if id(tensor) in precise and made.dtype in (torch.float16, torch.bfloat16):
                return tensor.to(made.device, torch.float32)
            return made

        super()._apply(apply, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "follower": None}


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
        sizes = (("n_in", n_in), ("n_out", n_out))
        n_in, n_out = (need_integer(name, n, low=1, high=2**31 - 1, cure="Pass a size.") for name, n in sizes)
        bias = need_flag("bias", bias)
        with own_randomness(choice.seed), _ordinary_layer():
            plain = nn.Linear(n_in, n_out, bias=bias, dtype=dtype, device=device)
        super().__init__(plain, choice)

    @property
    def in_features(self) -> int:
        """Inputs, under the name that nn.Linear gives them."""
        return self.frozen.shape[1]

    @property
    def out_features(self) -> int:
        """Outputs, under the name that nn.Linear gives them."""
        return self.frozen.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """W x + beta."""
        if self.follower is not None:
            return functional.linear(x, self.weight, self.beta)
        return self.frozen.linear(x, self.gammas, self.beta)


class NormOnlyConv(NormOnlyLayer):
    """A convolution whose only parameters are norms; further options are the fields of `Choice`.

    A feature stays inside a group; all groups have the same frozen numbers, except for id_cond, which has none.
    """

    axes: ClassVar[int]

    def __init__(
        self,
        n_in: int,
        n_out: int,
        *,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: str | Sizes = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        bias: bool = True,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **choices: Any,
    ) -> None:
        choice = make_choice(seed=seed, **choices)
        sizes = (("n_in", n_in), ("n_out", n_out), ("groups", groups))
        n_in, n_out, groups = (need_integer(name, n, low=1, high=2**31 - 1, cure="Pass a size.") for name, n in sizes)
        kernel_size = self._sizes("kernel_size", kernel_size, low=1)
        stride, dilation = self._sizes("stride", stride, low=1), self._sizes("dilation", dilation, low=1)
        if not isinstance(padding, str):
            padding = self._sizes("padding", padding, low=0)
        bias = need_flag("bias", bias)
        need_choice("padding_mode", padding_mode, ("zeros", "reflect", "replicate", "circular"))
        options: dict[str, Any] = {
            "kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation
        }  # fmt: skip
        with own_randomness(choice.seed), _ordinary_layer():
            plain = CONVOLUTIONS[self.axes - 1](
                n_in, n_out, groups=groups, bias=bias, padding_mode=padding_mode, dtype=dtype,
                device=device, **options,
            )  # fmt: skip
        super().__init__(plain, choice)

    @property
    def in_channels(self) -> int:
        """Channels that come in, under the name that torch gives them."""
        return self.frozen.shape[1] * int(self.options["groups"])

    @property
    def out_channels(self) -> int:
        """Channels that go out, under the name that torch gives them."""
        return self.frozen.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """W * x + beta."""
        o, padding = self.options, self.options["padding"]
        if o["padding_mode"] != "zeros":
            x, padding = functional.pad(x, explicit_padding(o), mode=o["padding_mode"]), 0
        convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[self.axes - 1]
        return convolve(x, self.weight, self.beta, o["stride"], padding, o["dilation"], o["groups"])

    def _sizes(self, name: str, value: Any, *, low: int) -> tuple[int, ...]:
        """A size along every axis of the positions; one number stands for all."""
        cure = f"Pass one whole number or {self.axes}."
        if isinstance(value, list | tuple):
            sizes = need_sizes(name, value, low=low, n_least=self.axes, cure=cure)
            if len(sizes) != self.axes:
                raise ShapeError(f"{name} needs one whole number or {self.axes}; got {shown(value)}. {cure}")
            return tuple(sizes)
        return (need_integer(name, value, low=low, high=2**31 - 1, cure=cure),) * self.axes


class NormOnlyConv1d(NormOnlyConv):
    """A Conv1d whose only parameters are norms; further options are the fields of `Choice`."""

    axes = 1


class NormOnlyConv2d(NormOnlyConv):
    """A Conv2d whose only parameters are norms; further options are the fields of `Choice`."""

    axes = 2


class NormOnlyConv3d(NormOnlyConv):
    """A Conv3d whose only parameters are norms; further options are the fields of `Choice`."""

    axes = 3


@contextlib.contextmanager
def _ordinary_layer() -> Iterator[None]:
    """Turns what torch has against the options of a layer into an error of our own."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, AssertionError, MemoryError, AttributeError) as error:
        first = str(error).partition("\n")[0]
        raise ValueRangeError(
            f"a norm-only layer needs options that the ordinary layer takes; torch says: {first:.200}. Try them on "
            "nn.Linear or nn.Conv2d."
        ) from error


def wrap(plain: Plain, choice: Choice, *, is_filled: bool = True) -> NormOnlyLayer:
    """The norm-only layer that takes the place of an ordinary one and starts with its weight."""
    need_instance("wrap", plain, PLAIN, cure="Pass the ordinary layer.")
    kinds = (NormOnlyLinear, NormOnlyConv1d, NormOnlyConv2d, NormOnlyConv3d)
    kind = kinds[0 if isinstance(plain, nn.Linear) else plain.weight.ndim - 2]
    layer = kind.__new__(kind)
    NormOnlyLayer.__init__(layer, plain, choice, is_filled=is_filled)
    return layer.train(plain.training)


def _need_numbers(plain: Plain) -> None:
    """Raises unless weight and bias are real and finite."""
    for what, values in (("weight", plain.weight), ("bias", plain.bias)):
        if values is None or (values.is_floating_point() and bool(values.isfinite().all())):
            continue
        got = "a NaN or an infinity" if values.is_floating_point() else f"numbers of {values.dtype}"
        raise ValueRangeError(
            f"a norm-only layer needs real finite numbers to start from; got {got} in the {what} of {plain}. Take real "
            "weights from before a training diverged."
        )
