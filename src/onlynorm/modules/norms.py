"""`find_norms`: every normalization layer of a model, by class or by name.

Norms of torch are found by class. Others (of timm, transformers, torchvision, or custom ones) are recognized without
importing these packages: a class with "norm" in its name, without children that have parameters, and with
one-dimensional tensors as scale and shift. Norms without parameters are listed with the reason.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.display import Result
from onlynorm.errors import ConversionError, ShapeError
from onlynorm.modules.walk import need_model, places_of, unwrap
from onlynorm.validate import need_instance

_TABLE: tuple[tuple[type[nn.Module], str, int], ...] = (
    (nn.modules.batchnorm._BatchNorm, "batch", 1),
    (nn.modules.instancenorm._InstanceNorm, "instance", 1),
    (nn.LayerNorm, "layer", -1),
    (nn.RMSNorm, "rms", -1),
    (nn.GroupNorm, "group", 1),
    (nn.LocalResponseNorm, "other", 1),
)
"""The norms of torch: class, kind, axis of the channels."""
NORMS = tuple(known for known, _, _ in _TABLE)


class FoldedNorm(nn.Identity):
    """Identity in place of a norm that was folded into the preceding layer.

    `n_axes` is the required number of dimensions of the input after a Linear.
    """

    def __init__(self, n_axes: int | None = None) -> None:
        super().__init__()
        self.n_axes = n_axes

    def forward(self, x: Tensor) -> Tensor:
        """The input, which the layer has already scaled and shifted."""
        if self.n_axes is not None and x.ndim != self.n_axes:
            raise ShapeError(
                f"a norm folded into a Linear needs inputs with {self.n_axes} dimensions; got {tuple(x.shape)}, which "
                "the norm would have scaled along another dimension. Unfold the network, or reshape the inputs."
            )
        return x


def folded_places(network: nn.Module) -> list[str]:
    """All places of the network at which a norm was folded."""
    return [n for n, module in network.named_modules(remove_duplicate=False) if isinstance(module, FoldedNorm)]


SCALES = ("weight", "gamma", "scale", "g", "a_2")
SHIFTS = ("bias", "beta", "shift", "b", "b_2")
"""Names of the two parameters of norms, most common first."""
_WORDS = (("batch", "batch"), ("instance", "instance"), ("rms", "rms"), ("group", "group"), ("layer", "layer"))
_ENDINGS = (("GRN", "other"), ("BN", "batch"), ("LN", "layer"))
"""Endings of class names: global response norm, batch norm, layer norm."""
_PLACES = ("norm", "bn", "ln")
_STATISTICS = ("running_", "moving_", "num_batches")
"""Prefixes of the names of buffers with running statistics."""
_WRAPPER = "_orig_mod"
"""Part that torch.compile adds to the names of modules and tensors."""
_MULTIPLY = (*(known.forward for known in NORMS), nn.SyncBatchNorm.forward)
"""The forward passes of torch's norms: their weight is the scale."""


@dataclass(frozen=True)
class NormLayer(Result):
    """A norm. `names` lists all places of the module; `scale` and `shift` name its tensors, None if missing.

    `is_frozen`: scale and shift are buffers, as in FrozenBatchNorm. `has_statistics`: it has running statistics.
    """

    names: tuple[str, ...]
    kind: str
    class_name: str
    n_channels: int
    scale: str | None
    shift: str | None
    has_statistics: bool
    is_frozen: bool

    @property
    def name(self) -> str:
        """The first place of the norm."""
        return self.names[0]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of scale and shift in the module, without missing ones."""
        return tuple(name for name in (self.scale, self.shift) if name is not None)

    def __str__(self) -> str:
        held = " and ".join(self.tensors) + (" (buffers)" if self.is_frozen else "")
        return f"{self.name} ({self.class_name}, {self.n_channels} channels): {held}"


@dataclass(frozen=True)
class SkippedNorm(Result):
    """A norm without parameters to tune, and why."""

    name: str
    class_name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.class_name}): {self.reason}"


@dataclass(frozen=True)
class Norms(Result):
    """The result of `find_norms`: norms to tune, skipped norms, and weight norms, which normalise weights."""

    norms: tuple[NormLayer, ...]
    skipped: tuple[SkippedNorm, ...]
    weight_norms: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.norms)} norms, {sum(n.n_channels for n in self.norms):,} channels"]
        lines += [f"  {norm}" for norm in self.norms]
        lines += [f"  skipped: {norm}" for norm in self.skipped]
        lines += [f"  weight norm (normalises a weight, not a signal): {name}" for name in self.weight_norms]
        return "\n".join(lines)


def need_module(what: str, model: Any) -> nn.Module:
    """The model inside DDP, DataParallel, torch.compile and Fabric wrappers; raises unless it is a valid model."""
    return unwrap(need_model(what, model))


def plain_name(name: str) -> str:
    """The name of a module or tensor without the part that torch.compile adds."""
    return ".".join(part for part in name.split(".") if part != _WRAPPER) if _WRAPPER in name else name


def is_statistic(name: str) -> bool:
    """Whether a buffer of this name holds running statistics."""
    return name.rpartition(".")[2].startswith(_STATISTICS)


def has_statistics(module: nn.Module) -> bool:
    """Whether the module itself, and not only its children, holds running statistics."""
    return any(is_statistic(name) for name, _ in module.named_buffers(recurse=False))


def may_track(module: nn.Module) -> bool:
    """Whether training may change buffers of the module: running statistics, or other buffers of a norm."""
    if has_statistics(module):
        return True
    buffers = [name for name, b in module.named_buffers(recurse=False) if b.is_floating_point()]
    return any(name not in SCALES + SHIFTS for name in buffers) and norm_kind(module) is not None


def find_norms(model: nn.Module) -> Norms:
    """All normalization layers of the model, each once, in the order of its modules.

    Examples:
        >>> from onlynorm.models import mlp
        >>> from onlynorm.modules import find_norms
        >>> [norm.name for norm in find_norms(mlp((8, 16, 4), norm="batch")).norms]
        ['1']
    """
    model = unwrap(need_instance("find_norms", model, nn.Module, cure="Pass the model itself."))
    kinds = {module: kind for _, module, kind in norm_modules(model)}
    norms: list[NormLayer] = []
    skipped: list[SkippedNorm] = []
    weight_norms: list[str] = []
    for module, places in places_of(model).items():
        names = tuple(map(plain_name, places))
        name = names[0]
        weight_norms += [f"{name}.{weight}".lstrip(".") for weight in _normalised_weights(module)]
        if type(module) is nn.Identity and any(word in name.rpartition(".")[2].lower() for word in _PLACES):
            skipped.append(SkippedNorm(name, "Identity", "an Identity in place of a norm"))
        found = _describe(names, module, kinds[module]) if module in kinds else None
        if isinstance(found, NormLayer):
            norms.append(found)
        elif found is not None:
            skipped.append(found)
    return Norms(tuple(norms), tuple(skipped), tuple(weight_norms))


def norm_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(name, module, kind) of every norm of the model, each once, in the order of its modules."""
    for name, module in model.named_modules():
        kind = norm_kind(module)
        if kind is not None:
            yield name, module, kind


def channel_axis(norm: nn.Module) -> int | None:
    """The axis of the channels of a norm of torch; None for any other module."""
    return next((axis for known, _, axis in _TABLE if isinstance(norm, known)), None)


def norm_kind(module: nn.Module) -> str | None:
    """batch, instance, layer, rms, group or other for a norm, None for any other module."""
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
        return None
    for known, kind, _ in _TABLE:
        if isinstance(module, known):
            return kind
    class_name = type(module).__name__
    name = class_name.lower()
    short = next((kind for ending, kind in _ENDINGS if class_name.endswith(ending)), None)
    is_named = ("norm" in name or short is not None) and "parametriz" not in type(module).__module__
    if not is_named or any(True for child in module.children() for _ in child.parameters()):
        return None  # a wrapper around a norm and other layers: its children are visited separately
    kind = next((kind for word, kind in _WORDS if word in name), short or "other")
    if kind != "other" and name.endswith("norm"):
        return kind  # it may have a matrix: one scale per channel and head
    if any(tensor.ndim > 1 and max(tensor.shape) != tensor.numel() for tensor in _own(module).values()):
        return None  # has a matrix: a layer with "norm" in its name
    return kind


def _describe(names: tuple[str, ...], module: nn.Module, kind: str) -> NormLayer | SkippedNorm:
    own = _own(module)
    scale = next((name for name in SCALES if name in own), None)
    shift = next((name for name in SHIFTS if name in own), None)
    class_name = type(module).__name__
    if scale is None and shift is None:
        if isinstance(module, FoldedNorm):
            reason = "folded into the preceding layer; unfold(model) restores it"
        elif not own and can_get_affine(module):
            reason = "no scale and no shift (affine=False); add_affine=True adds both"
        elif not own:
            reason = f"no scale and no shift, and {class_name} has no option for them; replace it by a norm of torch"
        else:
            reason = f"its tensors ({', '.join(own)}) are not named like a scale or a shift"
        return SkippedNorm(names[0], class_name, reason)
    sizes = [own[name].numel() for name in (scale, shift) if name is not None]
    parameters = dict(module.named_parameters(recurse=False))
    held = [name for name in (scale, shift) if name is not None]
    return NormLayer(
        names, kind, class_name, max(sizes), scale, shift,
        has_statistics=has_statistics(module),
        is_frozen=not any(name in parameters for name in held),
    )  # fmt: skip


def _own(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of the module itself, without running statistics."""
    tensors: Iterator[tuple[str, Tensor]] = iter(
        [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    )
    return {name: t for name, t in tensors if not is_statistic(name)}


def can_get_affine(module: nn.Module) -> bool:
    """Whether this norm has no scale and shift and `add_affine` can add them."""
    is_bare = isinstance(module, NORMS) and module._parameters.get("weight", module) is None
    return is_bare and (type(module).forward in _MULTIPLY or _uses_scale(module))


@torch.no_grad()
def _uses_scale(norm: nn.Module) -> bool:
    """Whether a norm subclass that overrides forward uses its scale; True if no probe input shows it."""
    probe = copy.deepcopy(norm).float().eval()
    add_affine(probe, torch.empty(0))
    scale = probe.weight
    assert isinstance(scale, Tensor)
    for x in _probe_inputs(tuple(scale.shape), scale.numel(), scale.device):
        try:
            scale.fill_(1.0)
            at_one = probe.forward(x)
            scale.fill_(2.0)
            at_two = probe.forward(x)
        except Exception:  # forward may raise anything for an unsupported shape
            continue
        if isinstance(at_one, Tensor) and isinstance(at_two, Tensor) and bool(at_one.any()):
            return not torch.equal(at_one, at_two)
    return True


def _probe_inputs(shape: tuple[int, ...], n_channels: int, device: torch.device) -> Iterator[Tensor]:
    """Two samples of each shape that a norm with `n_channels` channels may accept."""
    generator, n = torch.Generator().manual_seed(0), n_channels
    for one in (shape, (n,), (3, n), (n, 3), (3, 3, n), (n, 3, 3), (n, 3, 3, 3)):
        yield torch.randn(2, *one, generator=generator).to(device)


def affine_shape(norm: nn.Module) -> tuple[int, ...]:
    """The shape of the scale that `add_affine` adds to a norm of torch."""
    shape: Any = getattr(norm, "normalized_shape", None)
    if shape is None:
        shape = (norm.num_channels if isinstance(norm, nn.GroupNorm) else norm.num_features,)
    return tuple(shape)


def add_affine(norm: nn.Module, like: Tensor) -> Callable[[], None]:
    """Adds a scale of one and a shift of zero to the norm; returns a function that removes both."""
    flag = "affine" if hasattr(norm, "affine") else "elementwise_affine"
    own = next((b for b in norm.buffers(recurse=False) if b.is_floating_point()), like)
    shape = affine_shape(norm)
    norm.weight = nn.Parameter(torch.ones(shape, dtype=own.dtype, device=own.device))
    if not isinstance(norm, nn.RMSNorm):
        norm.bias = nn.Parameter(torch.zeros(shape, dtype=own.dtype, device=own.device))
    setattr(norm, flag, True)

    def remove() -> None:
        remove_affine(norm)

    return remove


def remove_affine(norm: nn.Module) -> None:
    """Removes scale and shift of a norm of torch."""
    norm.register_parameter("weight", None)
    if not isinstance(norm, nn.RMSNorm):
        norm.register_parameter("bias", None)
    setattr(norm, "affine" if hasattr(norm, "affine") else "elementwise_affine", False)


def reference_tensor(model: nn.Module) -> Tensor:
    """A floating-point tensor of the model, for its dtype and device."""
    tensors = (t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point() and not t.is_meta)
    return next(tensors, torch.empty(0))


@torch.no_grad()
def scale_at_zero(module: nn.Module, norm: NormLayer) -> float:
    """The effective scale of a norm if its scale tensor is zero: 0, or 1 for norms that compute (1 + weight).

    Measured on a copy of the norm, unless its forward is that of a norm of torch.
    """
    if norm.scale is None or type(module).forward in _MULTIPLY:
        return 0.0
    probe = copy.deepcopy(module).float().eval()
    scale = getattr(probe, norm.scale)
    for name in norm.tensors:
        getattr(probe, name).zero_()
    for x in _probe_inputs(tuple(scale.shape), norm.n_channels, scale.device):
        try:
            scale.zero_()
            at_zero = probe.forward(x)
            scale.fill_(1.0)
            at_one = probe.forward(x)
        except Exception:  # forward may raise anything for an unsupported shape
            continue
        if not isinstance(at_zero, Tensor) or not isinstance(at_one, Tensor) or not bool(at_one.any()):
            continue
        at_zero, at_one = at_zero.float(), at_one.float()  # some norms return a fixed lower-precision dtype
        if not bool(at_zero.any()):
            return 0.0
        if at_zero.shape == x.shape and bool(torch.allclose(at_zero, x, rtol=1e-3, atol=1e-4)):
            return 1.0  # global response norm: it adds zero to its input
        if bool(torch.allclose(at_one, 2.0 * at_zero, rtol=1e-2, atol=1e-3)):
            return 1.0
    raise ConversionError(
        f"the scale of {norm.name} ({norm.class_name}) needs to be measured; got no output that distinguishes weight "
        "from 1 + weight. Set its weight directly, and exclude it with which=."
    )


def _normalised_weights(module: nn.Module) -> list[str]:
    """Weights of the module with torch's weight_norm, as hook or parametrization."""
    found = [name.removesuffix("_g") for name, _ in module.named_parameters(recurse=False)
             if name.endswith("_g") and hasattr(module, name.removesuffix("_g") + "_v")]  # fmt: skip
    parametrizations = getattr(module, "parametrizations", None)
    if isinstance(parametrizations, nn.ModuleDict):
        found += [
            name for name, stack in parametrizations.items()
            if any("WeightNorm" in type(step).__name__ for step in stack.children())
        ]  # fmt: skip
    return found
