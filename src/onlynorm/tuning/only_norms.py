"""`only_norms`: everything but the norms of a model is frozen, and batch statistics do what was asked for.

    handle = only_norms(model, also=("head",), statistics="freeze")
    optimizer = torch.optim.AdamW(handle.parameters())

What happens to running statistics is a policy, not an accident of `model.train()`:

- "track": they follow the batches while training, as torch does it.
- "freeze": they stay as they are and are used in training too, whatever mode the model is in.
- "recalibrate": as "freeze", and `handle.recalibrate(batches)` computes them anew from data when asked.

The policy is a `train` method on each norm's own instance, so it survives `model.train()`, deepcopy, wrapping and
compilation.
"""

from __future__ import annotations

import fnmatch
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.data import seeded
from onlynorm.errors import ConversionError, UnknownNameError
from onlynorm.tuning.norms import NormLayer, SkippedNorm, find_norms

STATISTICS = ("track", "freeze", "recalibrate")
GAMMAS = ("uniform", "ones", "fixed", "positive-negative")
_AFFINE_FREE = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)
Which = Callable[[NormLayer], bool] | str | None


class NormHandle:
    """What `only_norms` returns: the parameters to train, their counts, a table, and the way back."""

    def __init__(self, model: nn.Module, *, norms: tuple[NormLayer, ...], skipped: tuple[SkippedNorm, ...],
                 also: tuple[str, ...], statistics: str, undo: list[Callable[[], None]]) -> None:  # fmt: skip
        self.model, self.norms, self.skipped = model, norms, skipped
        self.also, self.statistics = also, statistics
        self._undo = undo

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that are trained, by name."""
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are trained, for an optimizer."""
        return [p for _, p in self.named_parameters()]

    @property
    def n_trainable(self) -> int:
        """Numbers that are trained."""
        return sum(p.numel() for p in self.parameters())

    @property
    def n_total(self) -> int:
        """Numbers in all parameters of the model."""
        return sum(p.numel() for p in self.model.parameters())

    def recalibrate(self, batches: Iterable[Any]) -> None:
        """Computes the running statistics anew from batches of inputs, as the average over all of them."""
        norms = [self.model.get_submodule(norm.name) for norm in self.norms if norm.has_statistics]
        kept = {norm: norm.__dict__.pop("train") for norm in norms if "train" in norm.__dict__}
        was_training = self.model.training
        others = {m: m.training for m in self.model.modules()}
        try:
            self.model.eval()  # dropout and the like stay off: only the norms look at the batches
            for norm in norms:
                norm.train()
            # update_bn puts its whole model into training mode, so it gets one that holds the norms alone.
            torch.optim.swa_utils.update_bn(batches, _Calibration(self.model, norms))
        finally:
            for module, mode in others.items():
                module.training = mode
            self.model.training = was_training
            for norm, train in kept.items():
                norm.__dict__["train"] = train
                norm.training = False

    def undo(self) -> None:
        """The model as it was before, except for the values that were trained."""
        while self._undo:
            self._undo.pop()()
        self.model.__dict__.pop("onlynorm_tuning", None)

    def __str__(self) -> str:
        rows = [(name, " x ".join(map(str, p.shape)), f"{p.numel():,}") for name, p in self.named_parameters()]
        widths = [max(len(row[i]) for row in [*rows, ("parameter", "shape", "numbers")]) for i in range(3)]
        lines = [
            f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}"
            for a, b, c in [("parameter", "shape", "numbers"), *rows]
        ]
        share = 100.0 * self.n_trainable / max(1, self.n_total)
        lines.append(f"{self.n_trainable:,} of {self.n_total:,} parameters are trained ({share:.3g} %)")
        lines.append(
            f"{len(self.norms)} norms, statistics: {self.statistics}; also: {', '.join(self.also) or 'nothing'}"
        )
        lines += [f"skipped: {item}" for item in self.skipped]
        return "\n".join(lines)


class _Calibration(nn.Module):
    """The norms alone, to be put into training mode, with the whole model's forward."""

    def __init__(self, model: nn.Module, norms: list[nn.Module]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norms)
        self._forward = model.forward

    def forward(self, *inputs: Any) -> Any:
        return self._forward(*inputs)


def only_norms(
    model: nn.Module,
    *,
    also: Iterable[str] | str = (),
    statistics: str = "track",
    which: Which = None,
    add_affine: bool = False,
    thaw: bool = False,
) -> NormHandle:
    """Freezes all but the norms of the model, in place; the handle knows what is trained and how to go back.

    `also` names modules or parameters that are trained beside the norms, with wildcards: "head", "blocks.11.*".
    `which` chooses norms by a pattern on their names or by a function of the `NormLayer`. `add_affine` gives norms
    without scale and shift both; `thaw` makes parameters of scales and shifts that are buffers (FrozenBatchNorm).
    """
    if statistics not in STATISTICS:
        raise UnknownNameError("statistics", str(statistics), STATISTICS)
    if "onlynorm_tuning" in model.__dict__:
        raise ConversionError(
            "only_norms needs a model it has not prepared yet; this one is already prepared. Call undo() on its handle."
        )
    undo: list[Callable[[], None]] = []
    if add_affine:
        undo += [_add_affine(model.get_submodule(item.name)) for item in find_norms(model).skipped
                 if isinstance(model.get_submodule(item.name), _AFFINE_FREE)]  # fmt: skip
    found = find_norms(model)
    chosen = [norm for norm in found.norms if _is_chosen(norm, which)]
    skipped = list(found.skipped)
    for norm in [norm for norm in chosen if norm.is_frozen]:
        if thaw:
            undo.append(_thaw(model.get_submodule(norm.name), norm.tensors))
        else:
            chosen.remove(norm)
            reason = "its scale and shift are buffers; thaw=True makes them parameters"
            skipped.append(SkippedNorm(norm.name, norm.class_name, reason))
    also = (also,) if isinstance(also, str) else tuple(also)
    trained = {f"{norm.name}.{tensor}".lstrip(".") for norm in chosen for tensor in norm.tensors} | _named(model, also)
    if not trained:
        while undo:
            undo.pop()()
        if found.norms and which is not None and not any(_is_chosen(norm, which) for norm in found.norms):
            names = ", ".join(repr(norm.name) for norm in found.norms[:5])
            asked = repr(which) if isinstance(which, str) else "a function that takes none"
            raise ConversionError(
                f"which needs to fit a norm; got {asked}, and norms are {names}. Pass another pattern."
            )
        listed = "; ".join(str(item) for item in skipped[:3]) or "no module that looks like a norm"
        raise ConversionError(
            f"only_norms needs a model with norms to train; got none in {type(model).__name__} ({listed}). "
            "Insert norms, pass add_affine=True or thaw=True, or name modules in also=."
        )
    for name, parameter in model.named_parameters(remove_duplicate=False):
        undo.append(_setter(parameter, parameter.requires_grad))
        if name not in trained:
            parameter.requires_grad_(False)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in trained:  # after the others, so that a tied parameter is trained if one of its names is
            parameter.requires_grad_(True)
    if statistics != "track":
        undo += [_keep_statistics(model.get_submodule(norm.name)) for norm in found.norms if norm.has_statistics]
    model.__dict__["onlynorm_tuning"] = {"trained": sorted(trained), "also": also, "statistics": statistics}
    return NormHandle(model, norms=tuple(chosen), skipped=tuple(skipped), also=also, statistics=statistics, undo=undo)


def init_gamma(handle: NormHandle, *, how: str = "uniform", seed: int = 0) -> None:
    """Draws the scales of frozen random networks anew and sets the shifts to zero, as Frankle et al. compared them.

    "uniform" on [0, 1], "ones", "fixed" at one half, "positive-negative" uniform on [-1, 1].
    """
    if how not in GAMMAS:
        raise UnknownNameError("gamma", how, GAMMAS)
    generator = seeded(seed)
    with torch.no_grad():
        for norm in handle.norms:
            module = handle.model.get_submodule(norm.name)
            for name, value in ((norm.scale, None), (norm.shift, 0.0)):
                if name is None:
                    continue
                tensor = getattr(module, name)
                drawn = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
                fresh = {"uniform": drawn, "ones": torch.ones_like(drawn), "fixed": torch.full_like(drawn, 0.5),
                         "positive-negative": 2.0 * drawn - 1.0}[how]  # fmt: skip
                tensor.copy_(torch.zeros_like(drawn) if value is not None else fresh)


def _is_chosen(norm: NormLayer, which: Which) -> bool:
    if which is None:
        return True
    if isinstance(which, str):
        return any(fnmatch.fnmatchcase(name, which) for name in norm.names)
    return bool(which(norm))


def _named(model: nn.Module, patterns: tuple[str, ...]) -> set[str]:
    """The parameters under the modules, or with the names, that the patterns match; each must match something."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found: set[str] = set()
    for pattern in patterns:
        hit = {n for n in names if fnmatch.fnmatchcase(n, pattern) or fnmatch.fnmatchcase(n, f"{pattern}.*")}
        if not hit:
            raise UnknownNameError("module or parameter", pattern, sorted({n.rpartition(".")[0] for n in names} - {""}))
        found |= hit
    return found


def _stay_in_evaluation(self: nn.Module, mode: bool = True) -> nn.Module:
    """Stands in for `train` on a norm whose running statistics must not move."""
    type(self).train(self, mode)
    self.training = False
    return self


def _keep_statistics(norm: nn.Module) -> Callable[[], None]:
    before = norm.training
    norm.__dict__["train"] = types.MethodType(_stay_in_evaluation, norm)
    norm.training = False

    def back() -> None:
        norm.__dict__.pop("train", None)
        norm.training = before

    return back


def _add_affine(norm: nn.Module) -> Callable[[], None]:
    """Gives the norm a scale of one and a shift of zero: its function stays the same."""
    flag = "affine" if hasattr(norm, "affine") else "elementwise_affine"
    shape: Any = getattr(norm, "normalized_shape", None) or (getattr(norm, "num_features", None) or norm.num_channels,)
    like = next((b for b in norm.buffers() if b.is_floating_point()), torch.empty(0))
    norm.weight = nn.Parameter(torch.ones(shape, dtype=like.dtype, device=like.device))
    if not isinstance(norm, nn.RMSNorm):
        norm.bias = nn.Parameter(torch.zeros(shape, dtype=like.dtype, device=like.device))
    setattr(norm, flag, True)

    def back() -> None:
        norm._parameters.update(dict.fromkeys(norm._parameters))
        setattr(norm, flag, False)

    return back


def _thaw(norm: nn.Module, tensors: tuple[str, ...]) -> Callable[[], None]:
    for name in tensors:
        value = norm._buffers.pop(name)
        assert isinstance(value, Tensor)
        norm.register_parameter(name, nn.Parameter(value.detach().clone()))

    def back() -> None:
        for name in tensors:
            value = norm._parameters.pop(name)
            assert value is not None
            norm.register_buffer(name, value.detach())

    return back


def _setter(parameter: nn.Parameter, requires_grad: bool) -> Callable[[], None]:
    def back() -> None:
        parameter.requires_grad_(requires_grad)

    return back
