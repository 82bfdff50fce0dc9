"""`NormOnlyLinear` and `NormOnlyConv1d`, `2d`, `3d`: the layers of torch.nn with norms as their only parameters.

    layer = NormOnlyLinear(64, 10, features="id_cond", seed=0)
    layer.gamma          one scale per frozen feature
    layer.beta           one shift per output
    layer.weight         the effective weight, from gamma and the frozen features

The initial weight is that of the layer of torch.nn with the same seed, or the closest that the features can represent.
Training is then the same as that of the torch.nn layer: for ID cond with any optimizer, for Ortho cond with SGD with or
without momentum, which is invariant to rotations, and for id_cond_minimal and random features with `onlynorm.optim`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.errors import FormatError, ShapeError, ValueRangeError, shown
from onlynorm.frozen.form import FrozenLayer
from onlynorm.frozen.maps import FrozenMap, make_map, map_from_settings
from onlynorm.frozen.options import PRECISIONS, STORAGES, FrozenOptions
from onlynorm.modules import without_autocast
from onlynorm.modules.convolution import convolve, explicit_padding
from onlynorm.modules.layers import CONVOLUTIONS, LINEAR, layer_options, options_from_settings, plain_layer
from onlynorm.seeds import own_randomness
from onlynorm.validate import as_real, need_choice, need_flag, need_instance, need_integer, need_seed, need_sizes

Plain = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
PLAIN = LINEAR + CONVOLUTIONS
Sizes = int | tuple[int, ...]
Padding = Literal["zeros", "reflect", "replicate", "circular"]
_ORIGIN = "onlynorm_frozen"


class Follower(Protocol):
    """Set by `onlynorm.optim`: holds the weight that is trained instead of gamma."""

    held: Tensor

    def weight_for(self, gammas: tuple[Tensor, ...]) -> Tensor:
        """The effective weight for these gammas."""

    def renew(self, gammas: tuple[Tensor, ...]) -> None:
        """Sets the held weight from these gammas."""


class NormOnlyLayer(FrozenLayer):
    """Base class of norm-only layers: gamma, beta, and the frozen map from gamma to the weight.

    `output_gamma` exists for id_cond_minimal only. `follower` is set while `onlynorm.optim` trains the weight instead
    of gamma; it is not copied or saved.
    """

    kind = "norm_only"
    frozen: FrozenMap
    follower: Follower | None

    def __init__(
        self,
        plain: Plain,
        options: FrozenOptions | None = None,
        *,
        seed: int = 0,
        layer: str = "",
        is_filled: bool = True,
    ) -> None:
        """The replacement of `plain` with the same weight; with `is_filled=False`, gamma is zero."""
        super().__init__()
        need_instance("a norm-only layer", plain, PLAIN, cure="Pass a Linear or Conv layer.")
        options = FrozenOptions() if options is None else options
        need_instance("a norm-only layer", options, FrozenOptions, cure="Write FrozenOptions(features='id_cond').")
        is_filled = need_flag("is_filled", is_filled) and not plain.weight.is_meta
        if is_filled:
            _need_finite(plain)
        like = plain.weight
        frozen = make_map(
            tuple(like.shape), options, seed=need_seed(seed), layer=_need_name(layer), dtype=like.dtype,
            device=like.device, groups=getattr(plain, "groups", 1),
        )  # fmt: skip
        self._set_tensors(frozen, layer_options(plain), None if plain.bias is None else plain.bias.detach().clone())
        if is_filled:
            self.set_weight(like)
            if not all(bool(gamma.isfinite().all()) for gamma in self.gammas):
                raise ValueRangeError(
                    f"a norm-only layer needs gammas in the range of {self.gamma.dtype}; got larger ones for this "
                    f"weight and {options.features} features. Use a smaller condition number or a higher precision."
                )

    def _set_tensors(self, frozen: FrozenMap, options: dict[str, Any], bias: Tensor | None) -> None:
        self.options, self.frozen, self.follower = options, frozen, None
        like = frozen.like
        self.gamma = nn.Parameter(like.new_zeros(frozen.n_features, dtype=frozen.gamma_dtype))
        out = frozen.shape[0] if frozen.has_output_gamma else None
        self.output_gamma = None if out is None else nn.Parameter(self.gamma.new_zeros(out))
        self.beta = None if bias is None else nn.Parameter(bias)

    def settings(self) -> dict[str, Any]:
        dtype = str(self.frozen.like.dtype).removeprefix("torch.")
        has_bias = self.beta is not None
        return {"options": self.options, "frozen": self.frozen.settings(), "has_bias": has_bias, "dtype": dtype}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], *, activation: nn.Module | None, storage: str) -> NormOnlyLayer:
        need_instance("settings", settings, dict, cure="Pass layer.settings().")
        is_stored = need_choice("storage", storage, STORAGES) == "dense"
        try:
            frozen = map_from_settings(settings["frozen"], is_stored=is_stored, dtype=PRECISIONS[settings["dtype"]])
            kind = KINDS[len(frozen.shape) - 2]
            layer = kind.__new__(kind)
            nn.Module.__init__(layer)
            bias = frozen.like.new_zeros(frozen.shape[0]) if settings["has_bias"] else None
            layer._set_tensors(frozen, options_from_settings(settings["options"]), bias)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise FormatError(f"a norm-only layer needs its settings; got others ({error!r:.100}).") from error
        return layer

    @property
    def gammas(self) -> tuple[Tensor, ...]:
        """Gamma, and the output gamma if there is one."""
        return (self.gamma,) if self.output_gamma is None else (self.gamma, self.output_gamma)

    @property
    def held(self) -> Tensor | None:
        """The weight that is trained instead of gamma; None without a follower."""
        return None if self.follower is None else self.follower.held

    @property
    def weight(self) -> Tensor:
        """The effective weight, in the shape of the torch.nn layer."""
        gammas = self.gammas
        made: Tensor = self.frozen(*gammas) if self.follower is None else self.follower.weight_for(gammas)
        return made

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype of the weight; gammas may have a higher precision."""
        return self.frozen.like.dtype

    @property
    def bias(self) -> Tensor | None:
        """The shift `beta`, under the name of torch.nn layers."""
        return self.beta

    @torch.no_grad()
    def set_weight(self, weight: Tensor) -> None:
        """Sets gamma so that the weight is this one, or the closest that the features can represent."""
        weight = as_real("weight", weight, is_finite=True)
        if tuple(weight.shape) != self.frozen.shape:
            raise ShapeError(
                f"set_weight needs a weight of shape {self.frozen.shape}; got {tuple(weight.shape)}. Pass a weight in "
                "the shape of the torch.nn layer."
            )
        with without_autocast(self.gamma.device):
            for gamma, values in zip(self.gammas, self.frozen.solve(weight), strict=True):
                gamma.copy_(values)
        if self.follower is not None:
            self.follower.renew(self.gammas)

    @torch.no_grad()
    def to_plain(self) -> Plain:
        """The torch.nn layer with this weight and shift."""
        bias = None if self.beta is None else self.beta.detach().clone()
        plain = plain_layer(self.weight.detach().clone(), bias, self.options)
        assert isinstance(plain, Plain)
        plain.weight.requires_grad_(self.gamma.requires_grad)
        if plain.bias is not None and self.beta is not None:
            plain.bias.requires_grad_(self.beta.requires_grad)
        return plain.train(self.training)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):  # saved with the state dict, also by torch.save
            destination._metadata[prefix[:-1]][_ORIGIN] = self.frozen.origin()

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *arguments: Any
    ) -> None:
        there, here = local_metadata.get(_ORIGIN), self.frozen.origin()
        if there is not None and there != here:
            raise FormatError(
                f"the layer at {prefix[:-1]!r} needs gammas for its frozen features, {here}; got gammas for {there}. "
                "Create the model with the same features, seed and layer names."
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *arguments)
        if self.follower is not None:
            self.follower.renew(self.gammas)

    def needs_float32(self, tensor: Tensor) -> bool:
        """Gammas that are not the weight itself need float32."""
        precise = (t for gamma in self.gammas for t in (gamma, gamma.grad))
        return self.frozen.keeps_float32 and any(tensor is one for one in precise)

    def plain_parameters(self) -> dict[str, nn.Parameter]:
        return {"weight": self.gamma} | ({} if self.beta is None else {"bias": self.beta})

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "follower": None}


class NormOnlyLinear(NormOnlyLayer):
    """An `nn.Linear` with norms as its only parameters; takes its arguments, the fields of `FrozenOptions` and a seed.

    `layer` names the frozen features: those of different names are independent.

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> layer = on.NormOnlyLinear(16, 8)
        >>> layer(torch.rand(5, 16)).shape
        torch.Size([5, 8])
        >>> {name: tuple(p.shape) for name, p in layer.named_parameters()}
        {'gamma': (128,), 'beta': (8,)}
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        features: str = "id_cond",
        excess: float | None = None,
        density: float | None = None,
        n_blocks: int = 1,
        spectrum: float | Tensor | None = None,
        shared_column: int = 0,
        seed: int = 0,
        layer: str = "",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options = FrozenOptions(
            features=features, excess=excess, density=density, n_blocks=n_blocks, spectrum=spectrum,
            shared_column=shared_column,
        )  # fmt: skip
        sizes = (need_size("in_features", in_features), need_size("out_features", out_features))
        bias = need_flag("bias", bias)
        with own_randomness(need_seed(seed)), _ordinary_layer():
            plain = nn.Linear(*sizes, bias=bias, dtype=dtype, device=device)
        super().__init__(plain, options, seed=seed, layer=layer)

    @property
    def in_features(self) -> int:
        """Number of inputs."""
        return self.frozen.shape[1]

    @property
    def out_features(self) -> int:
        """Number of outputs."""
        return self.frozen.shape[0]

    def extra_repr(self) -> str:
        """The sizes, as of a Linear."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.beta is not None}"

    def forward(self, x: Tensor) -> Tensor:
        """W x + beta."""
        if self.follower is not None:
            return functional.linear(x, self.weight, self.beta)
        return self.frozen.linear(x, self.gammas, self.beta)


class NormOnlyConv(NormOnlyLayer):
    """A convolution with norms as its only parameters; takes torch's arguments, the fields of `FrozenOptions`, a seed.

    `layer` names the frozen features: those of different names are independent. Each feature belongs to one group; all
    groups have the same frozen weights, except for id_cond, which has none.
    """

    axes: ClassVar[int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: str | Sizes = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Padding = "zeros",
        *,
        features: str = "id_cond",
        excess: float | None = None,
        density: float | None = None,
        n_blocks: int = 1,
        spectrum: float | Tensor | None = None,
        shared_column: int = 0,
        seed: int = 0,
        layer: str = "",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options = FrozenOptions(
            features=features, excess=excess, density=density, n_blocks=n_blocks, spectrum=spectrum,
            shared_column=shared_column,
        )  # fmt: skip
        channels = (need_size("in_channels", in_channels), need_size("out_channels", out_channels))
        sizes: dict[str, Any] = {
            "kernel_size": self._sizes("kernel_size", kernel_size, low=1),
            "stride": self._sizes("stride", stride, low=1),
            "padding": padding if isinstance(padding, str) else self._sizes("padding", padding, low=0),
            "dilation": self._sizes("dilation", dilation, low=1), "groups": need_size("groups", groups),
            "padding_mode": need_choice("padding_mode", padding_mode, ("zeros", "reflect", "replicate", "circular")),
        }  # fmt: skip
        bias = need_flag("bias", bias)
        with own_randomness(need_seed(seed)), _ordinary_layer():
            plain = CONVOLUTIONS[self.axes - 1](*channels, bias=bias, dtype=dtype, device=device, **sizes)
        super().__init__(plain, options, seed=seed, layer=layer)

    @property
    def in_channels(self) -> int:
        """Number of input channels."""
        return self.frozen.shape[1] * int(self.options["groups"])

    @property
    def out_channels(self) -> int:
        """Number of output channels."""
        return self.frozen.shape[0]

    def extra_repr(self) -> str:
        """The sizes, as of a convolution."""
        usual = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "padding_mode": "zeros"}
        sizes = {"kernel_size": self.options["kernel_size"], "bias": self.beta is not None}
        for name, value in usual.items():
            given = self.options[name]
            if given != (value if name in ("groups", "padding_mode") else (value,) * self.axes):
                sizes[name] = given
        return ", ".join([f"{self.in_channels}, {self.out_channels}", *(f"{n}={v!r}" for n, v in sizes.items())])

    def forward(self, x: Tensor) -> Tensor:
        """W * x + beta."""
        o, padding = self.options, self.options["padding"]
        if o["padding_mode"] != "zeros":
            x, padding = functional.pad(x, explicit_padding(o), mode=o["padding_mode"]), 0
        sizes = {name: o[name] for name in ("stride", "dilation", "groups")}
        return convolve(x, self.weight, bias=self.beta, padding=padding, **sizes)

    def _sizes(self, name: str, value: Any, *, low: int) -> tuple[int, ...]:
        """A size for every axis; an integer is used for all axes."""
        cure = f"Pass one integer or {self.axes}."
        if isinstance(value, list | tuple):
            sizes = need_sizes(name, value, low=low, n_least=self.axes, cure=cure)
            if len(sizes) != self.axes:
                raise ShapeError(f"{name} needs one integer or {self.axes}; got {shown(value)}. {cure}")
            return tuple(sizes)
        return (need_integer(name, value, low=low, high=2**31 - 1, cure=cure),) * self.axes


class NormOnlyConv1d(NormOnlyConv):
    """An `nn.Conv1d` with norms as its only parameters, see `NormOnlyConv`."""

    axes = 1


class NormOnlyConv2d(NormOnlyConv):
    """An `nn.Conv2d` with norms as its only parameters, see `NormOnlyConv`.

    Examples:
        >>> import torch
        >>> import onlynorm as on
        >>> layer = on.NormOnlyConv2d(3, 8, kernel_size=3, padding=1)
        >>> layer(torch.rand(2, 3, 16, 16)).shape
        torch.Size([2, 8, 16, 16])
    """

    axes = 2


class NormOnlyConv3d(NormOnlyConv):
    """An `nn.Conv3d` with norms as its only parameters, see `NormOnlyConv`."""

    axes = 3


KINDS: tuple[type[NormOnlyLayer], ...] = (NormOnlyLinear, NormOnlyConv1d, NormOnlyConv2d, NormOnlyConv3d)
"""The classes by the number of kernel axes."""


def wrap(
    plain: Plain,
    options: FrozenOptions | None = None,
    *,
    seed: int = 0,
    layer: str = "",
    is_filled: bool = True,
) -> NormOnlyLayer:
    """The norm-only layer that replaces a Linear or Conv layer, with the same weight.

    Examples:
        >>> import torch
        >>> from onlynorm.frozen import FrozenOptions, wrap
        >>> plain, inputs = torch.nn.Linear(8, 4), torch.rand(5, 8)
        >>> layer = wrap(plain, FrozenOptions(features="he_normal"))
        >>> torch.allclose(layer(inputs), plain(inputs), atol=1e-4)
        True
    """
    need_instance("wrap", plain, PLAIN, cure="Pass a Linear or Conv layer.")
    kind = KINDS[plain.weight.ndim - 2]
    made = kind.__new__(kind)
    NormOnlyLayer.__init__(made, plain, options, seed=seed, layer=layer, is_filled=is_filled)
    return made.train(plain.training)


def need_size(name: str, value: Any) -> int:
    """The size of an axis as an int."""
    return need_integer(name, value, low=1, high=2**31 - 1, cure="Pass a positive integer.")


def _need_name(layer: object) -> str:
    if not isinstance(layer, str):
        raise ValueRangeError(f"layer needs a string; got {shown(layer)}. Leave it out.")
    return layer


@contextlib.contextmanager
def _ordinary_layer() -> Iterator[None]:
    """Raises errors of torch about the options of a layer as `ValueRangeError`."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, AssertionError, MemoryError, AttributeError) as error:
        first = str(error).partition("\n")[0]
        raise ValueRangeError(
            f"a norm-only layer needs valid options of the torch.nn layer; got {first:.200}. Try them with nn.Linear "
            "or nn.Conv2d."
        ) from error


def _need_finite(plain: Plain) -> None:
    """Raises unless weight and bias are real and finite."""
    for what, values in (("weight", plain.weight), ("bias", plain.bias)):
        if values is None or (values.is_floating_point() and bool(values.isfinite().all())):
            continue
        got = "a NaN or an infinity" if values.is_floating_point() else str(values.dtype)
        raise ValueRangeError(
            f"a norm-only layer needs finite real weights; got {got} in the {what} of {plain}. Use real weights from "
            "before the training diverged."
        )
