"""`find_norms`: every normalization layer of a model, by type and by what it looks like.

Torch's own norms are known by type. Others (timm's, transformers', torchvision's, one's own) are recognised without
importing anything: a class whose name says norm, without weighty children, that scales and perhaps shifts channels by
one-dimensional tensors. What looks like a norm but has nothing to tune is listed with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from onlynorm.reconstruction.folding import FoldedNorm

SCALES = ("weight", "gamma", "scale", "g", "a_2")
SHIFTS = ("bias", "beta", "shift", "b", "b_2")
"""Names under which norms keep their two parameters, most common first."""

_KINDS: tuple[tuple[type[nn.Module] | tuple[type[nn.Module], ...], str], ...] = (
    (nn.modules.batchnorm._BatchNorm, "batch"),
    (nn.modules.instancenorm._InstanceNorm, "instance"),
    (nn.LayerNorm, "layer"),
    (nn.RMSNorm, "rms"),
    (nn.GroupNorm, "group"),
)
_WORDS = (("batch", "batch"), ("instance", "instance"), ("rms", "rms"), ("group", "group"), ("layer", "layer"))
_ENDINGS = (("GRN", "other"), ("BN", "batch"), ("LN", "layer"))
"""Short forms with which class names end: global response norm, batch norm, layer norm."""
_PLACES = ("norm", "bn", "ln")


@dataclass(frozen=True)
class NormLayer:
    """One norm. `names` lists every place of the same module; `scale` and `shift` name its tensors, if it has them.

    `is_frozen` says that they are buffers, as in a FrozenBatchNorm; `has_statistics`, that running statistics are kept.
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
        """The names of scale and shift inside the module, as far as it has them."""
        return tuple(name for name in (self.scale, self.shift) if name is not None)

    def __str__(self) -> str:
        held = " and ".join(self.tensors) + (" (buffers)" if self.is_frozen else "")
        return f"{self.name} ({self.class_name}, {self.n_channels} channels): {held}"


@dataclass(frozen=True)
class SkippedNorm:
    """Something that is called a norm but has nothing to tune, and why."""

    name: str
    class_name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.class_name}): {self.reason}"


@dataclass(frozen=True)
class Norms:
    """What `find_norms` found: norms to tune, what was skipped, and weight norms, which normalise weights."""

    norms: tuple[NormLayer, ...]
    skipped: tuple[SkippedNorm, ...]
    weight_norms: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.norms)} norms, {sum(n.n_channels for n in self.norms):,} channels"]
        lines += [f"  {norm}" for norm in self.norms]
        lines += [f"  skipped: {norm}" for norm in self.skipped]
        lines += [f"  weight norm (normalises a weight, not a signal): {name}" for name in self.weight_norms]
        return "\n".join(lines)


def find_norms(model: nn.Module) -> Norms:
    """Every normalization layer of the model, each once, in the order of its modules."""
    places: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        places.setdefault(id(module), []).append(name)
    norms: list[NormLayer] = []
    skipped: list[SkippedNorm] = []
    weight_norms: list[str] = []
    for name, module in model.named_modules():
        weight_norms += [f"{name}.{weight}".lstrip(".") for weight in _normalised_weights(module)]
        if type(module) is nn.Identity and any(word in name.rpartition(".")[2].lower() for word in _PLACES):
            skipped.append(SkippedNorm(name, "Identity", "an Identity stands where a norm would"))
        kind = norm_kind(module)
        if kind is None:
            continue
        found = _describe(tuple(places[id(module)]), module, kind)
        if isinstance(found, NormLayer):
            norms.append(found)
        else:
            skipped.append(found)
    return Norms(tuple(norms), tuple(skipped), tuple(weight_norms))


def norm_kind(module: nn.Module) -> str | None:
    """batch, instance, layer, rms, group or other for a norm, None for any other module."""
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
        return None
    for known, kind in _KINDS:
        if isinstance(module, known):
            return kind
    class_name = type(module).__name__
    name = class_name.lower()
    short = next((kind for ending, kind in _ENDINGS if class_name.endswith(ending)), None)
    is_named = ("norm" in name or short is not None) and "parametriz" not in type(module).__module__
    if not is_named or any(True for child in module.children() for _ in child.parameters()):
        return None  # a wrapper around a norm and other layers: its children are visited on their own
    kind = next((kind for word, kind in _WORDS if word in name), short or "other")
    if kind != "other" and name.endswith("norm"):
        return kind  # it may hold a matrix: a scale for each channel of each head
    if any(tensor.ndim > 1 and max(tensor.shape) != tensor.numel() for tensor in _own(module).values()):
        return None  # holds a matrix: a layer with a norm in its name
    return kind


def _describe(names: tuple[str, ...], module: nn.Module, kind: str) -> NormLayer | SkippedNorm:
    own = _own(module)
    scale = next((name for name in SCALES if name in own), None)
    shift = next((name for name in SHIFTS if name in own), None)
    class_name = type(module).__name__
    if scale is None and shift is None:
        if isinstance(module, FoldedNorm):
            reason = "part of the layer before it (folded); unfold(model) brings it back"
        elif not own:
            reason = "no scale and no shift (affine=False); add_affine=True gives it both"
        else:
            reason = f"its tensors ({', '.join(own)}) are not called like a scale or a shift"
        return SkippedNorm(names[0], class_name, reason)
    sizes = [own[name].numel() for name in (scale, shift) if name is not None]
    parameters = dict(module.named_parameters(recurse=False))
    held = [name for name in (scale, shift) if name is not None]
    return NormLayer(
        names, kind, class_name, max(sizes), scale, shift,
        has_statistics=isinstance(getattr(module, "running_mean", None), Tensor),
        is_frozen=not any(name in parameters for name in held),
    )  # fmt: skip


def _own(module: nn.Module) -> dict[str, Tensor]:
    """The module's own parameters and buffers, running statistics left out."""
    tensors: Iterator[tuple[str, Tensor]] = iter(
        [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    )
    return {name: t for name, t in tensors if not name.startswith(("running_", "num_batches"))}


def _normalised_weights(module: nn.Module) -> list[str]:
    """Weights of the module that torch's weight_norm, old or new, writes as length times direction."""
    found = [name.removesuffix("_g") for name, _ in module.named_parameters(recurse=False)
             if name.endswith("_g") and hasattr(module, name.removesuffix("_g") + "_v")]  # fmt: skip
    parametrizations = getattr(module, "parametrizations", None)
    if isinstance(parametrizations, nn.ModuleDict):
        found += [
            name for name, stack in parametrizations.items()
            if any("WeightNorm" in type(step).__name__ for step in stack.children())
        ]  # fmt: skip
    return found
