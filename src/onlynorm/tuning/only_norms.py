"""`only_norms`: everything but the norms of a model is frozen, and batch statistics do what was asked for.

    handle = only_norms(model, also=("head",), statistics="freeze")
    optimizer = torch.optim.AdamW(handle.parameters())

What happens to running statistics is a policy, not an accident of `model.train()`:

- "track": they follow the batches while training, as torch does it.
- "freeze": they stay as they are and are used in training too, whatever mode the model is in.
- "recalibrate": as "freeze", and `handle.recalibrate(batches)` computes them again from data when asked.

The policy covers every module that holds running statistics, with or without scale and shift, and every norm that has
buffers beside its scale and shift, whatever they are called. It is a `train` method on the module's own instance, so it
survives `model.train()`, deepcopy, pickle, wrapping and compilation. A module that takes the place of another
(`SyncBatchNorm.convert_sync_batchnorm`) has no such method: convert first.

The model also remembers what it was: the values of what is trained, and a digest of everything else. An adapter is
saved only if the base model with the adapter is the trained model to the last bit.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, OnlynormError, UnknownNameError, ValueRangeError, shown
from onlynorm.modules.norms import (
    NormLayer,
    SkippedNorm,
    can_get_affine,
    find_norms,
    has_statistics,
    may_track,
    need_module,
    number_like,
    plain_name,
    scale_at_zero,
)
from onlynorm.modules.norms import add_affine as give_affine
from onlynorm.seeds import seeded
from onlynorm.tuning.fingerprint import Digests, digests, hidden_buffers, state_of, ties
from onlynorm.validate import as_tensor, need_choice, need_flag, need_instance, need_items, need_seed

STATISTICS = ("track", "freeze", "recalibrate")
GAMMAS = ("uniform", "ones", "fixed", "positive-negative")
Which = Callable[[NormLayer], bool] | str | None
_NOTE = "onlynorm_tuning"


@dataclass(frozen=True)
class Preparation:
    """What `only_norms` did to a model, as far as adapters need it; it is copied and pickled with the model.

    `trained` has the names of all trained tensors, `added` the norms that got a scale and a shift. `initial` holds the
    values that trained tensors had, and `digests` those of every tensor of the model. `hidden` names the buffers that
    are not in its state dict.
    """

    trained: tuple[str, ...]
    also: tuple[str, ...]
    statistics: str
    added: tuple[str, ...]
    initial: dict[str, Tensor]
    digests: Digests
    hidden: frozenset[str] = frozenset()


def preparation_of(model: nn.Module) -> Preparation | None:
    """What `only_norms` did to the model, None if it was not called."""
    found: Preparation | None = model.__dict__.get(_NOTE)
    return found


def need_own_preparation(what: str, model: nn.Module) -> None:
    """Raises if `only_norms` was called on a module inside the model, such as a custom wrapper, and not on it."""
    if preparation_of(model) is not None:
        return
    for name, module in model.named_modules():
        if preparation_of(module) is not None:
            raise ConversionError(
                f"{what} needs the model that only_norms prepared; got a {type(model).__name__} around it. Pass the "
                f"module inside: model.get_submodule({plain_name(name)!r})."
            )


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
        """Computes the running statistics again from batches of inputs, as the average over all of them.

        Batch and instance norms of torch, and classes derived from them, are recalibrated; norms of other classes keep
        the statistics they have.
        """
        norms = [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and has_statistics(m)]
        modes = {module: module.training for module in self.model.modules()}
        momenta = [norm.momentum for norm in norms]
        before = [{name: value.clone() for name, value in norm.named_buffers(recurse=False)} for norm in norms]
        n_batches = 0
        try:
            self.model.eval()  # dropout and the like stay off: only the norms look at the batches
            for norm in norms:
                norm.training = True
            for batch in batches:
                if n_batches == 0:
                    for norm in norms:
                        norm.reset_running_stats()
                n_batches += 1
                for norm in norms:
                    norm.momentum = 1.0 / n_batches  # the average over all batches so far
                with torch.no_grad():
                    inputs = batch[0] if isinstance(batch, list | tuple) else batch
                    self.model(as_tensor("recalibrate", inputs) if isinstance(inputs, np.ndarray) else inputs)
            if n_batches == 0:
                raise ValueRangeError("recalibrate needs at least one batch; got none. Pass a list of inputs.")
        except BaseException as error:
            for norm, values in zip(norms, before, strict=True):
                for name, value in values.items():
                    norm.get_buffer(name).copy_(value)
            if isinstance(error, OnlynormError) or not isinstance(error, Exception):
                raise
            raise ConversionError(
                f"recalibrate needs batches of inputs that the model takes; it failed at batch {n_batches} with: "
                f"{error}. Pass an iterable of inputs, or of (inputs, labels)."
            ) from error
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
            for module, mode in modes.items():
                module.training = mode

    def undo(self) -> None:
        """The model as it was before, except for the values that were trained."""
        while self._undo:
            self._undo.pop()()
        self.model.__dict__.pop(_NOTE, None)

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
    wrapper, model = model, need_module("only_norms", model)
    need_choice("statistics", statistics, STATISTICS)
    if preparation_of(model) is not None:
        raise ConversionError(
            "only_norms needs a model it has not prepared yet; this one, or the model it is a copy of, is already "
            "prepared. Call undo() on its handle; copy a model before it is prepared."
        )
    patterns = _patterns("also", also)
    if which is not None and not isinstance(which, str) and not callable(which):
        raise ConversionError(
            f"which needs a pattern or a function of a NormLayer; got {shown(which)}. Write which='layer4.*'."
        )
    add_affine, thaw = need_flag("add_affine", add_affine), need_flag("thaw", thaw)
    undo: list[Callable[[], None]] = []
    before = {p for p in model.parameters() if p.requires_grad}
    try:
        handle = _prepare(model, patterns, statistics, which, add_affine=add_affine, thaw=thaw, undo=undo)
        _need_no_reducer(wrapper, before)
    except BaseException:
        while undo:
            undo.pop()()
        model.__dict__.pop(_NOTE, None)
        raise
    return handle


def _prepare(
    model: nn.Module,
    also: tuple[str, ...],
    statistics: str,
    which: Which,
    *,
    add_affine: bool,
    thaw: bool,
    undo: list[Callable[[], None]],
) -> NormHandle:
    """Does what `only_norms` says; `undo` collects the way back as it goes, also if something raises."""
    added: dict[str, Callable[[], None]] = {}
    if add_affine:
        like = number_like(model)
        for item in find_norms(model).skipped:
            if can_get_affine(module := model.get_submodule(item.name)):
                added[item.name] = give_affine(module, like)
                undo.append(added[item.name])
    for norm in find_norms(model).norms:
        if norm.name in added and not _is_chosen(norm, which):
            added.pop(norm.name)()
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
    parameters = dict(model.named_parameters(remove_duplicate=False))
    kept = {id(parameters[name]) for name in _named(model, also)}
    kept |= {id(getattr(model.get_submodule(norm.name), tensor)) for norm in chosen for tensor in norm.tensors}
    if not kept:
        _refuse(model, found.norms, skipped, which)
    for parameter in parameters.values():
        undo.append(_Setter(parameter, parameter.requires_grad))
        # By the parameter, not by its name: a tied one is trained if one of its names is.
        if not (parameter.is_floating_point() or parameter.is_complex()):
            continue  # quantized weights cannot require gradients
        parameter.requires_grad_(id(parameter) in kept)
    if statistics != "track":
        undo += [_keep_statistics(module) for module in model.modules() if may_track(module)]
    state, hidden = state_of(model), hidden_buffers(model)
    trained = {plain_name(name) for name, parameter in parameters.items() if id(parameter) in kept}
    trained |= {name for group in ties(state) if trained & set(group) for name in group}
    initial = {name: state[name].detach().clone() for name in sorted(trained & state.keys())}
    model.__dict__[_NOTE] = Preparation(
        tuple(sorted(trained)), also, statistics, tuple(sorted(added)), initial, digests(state | hidden),
        frozenset(hidden),
    )  # fmt: skip
    return NormHandle(model, norms=tuple(chosen), skipped=tuple(skipped), also=also, statistics=statistics, undo=undo)


def _refuse(model: nn.Module, norms: tuple[NormLayer, ...], skipped: list[SkippedNorm], which: Which) -> None:
    """Raises the error for a model of which nothing would be trained."""
    if norms and which is not None and not any(_is_chosen(norm, which) for norm in norms):
        names = ", ".join(repr(norm.name) for norm in norms[:5])
        asked = repr(which) if isinstance(which, str) else "a function that takes none"
        raise ConversionError(f"which needs to fit a norm; got {asked}, and norms are {names}. Pass another pattern.")
    listed = "; ".join(str(item) for item in skipped[:3]) or "no module that looks like a norm"
    cures = ["insert norms", "name modules in also="]
    if any(can_get_affine(model.get_submodule(item.name)) for item in skipped):
        cures.insert(1, "pass add_affine=True")
    if any(norm.is_frozen for norm in norms):
        cures.insert(1, "pass thaw=True")
    advice = ", ".join(cures[:-1]) + f" or {cures[-1]}"
    raise ConversionError(
        f"only_norms needs a model with norms to train; got none in {type(model).__name__} ({listed}). "
        f"{advice[0].upper()}{advice[1:]}."
    )


def _need_no_reducer(wrapper: nn.Module, before: set[nn.Parameter]) -> None:
    """Raises if DistributedDataParallel would wait for gradients that no longer come, or miss new ones."""
    after = {p for p in wrapper.parameters() if p.requires_grad}
    for reducer in wrapper.modules():
        if isinstance(reducer, nn.parallel.DistributedDataParallel) and (
            after - before or (before - after and not reducer.find_unused_parameters)
        ):
            raise ConversionError(
                "only_norms needs to come before DistributedDataParallel, which waits for the gradients of all "
                "parameters that required them when it was made; got a wrapped model. Call only_norms(model), then "
                "wrap it."
            )


def init_gamma(handle: NormHandle, *, how: str = "uniform", seed: int = 0) -> None:
    """Draws new scales for frozen random networks and sets the shifts to zero, as Frankle et al. compared them.

    "uniform" on [0, 1], "ones", "fixed" at one half, "positive-negative" uniform on [-1, 1]. These are the scales that
    are applied: norms that compute (1 + weight), as Gemma's do, get a weight smaller by one.
    """
    need_choice("gamma", how, GAMMAS)
    need_instance("init_gamma", handle, NormHandle, cure="Pass what only_norms returned.")
    generator = seeded(need_seed(seed))
    modules = [(norm, handle.model.get_submodule(norm.name)) for norm in handle.norms]
    offsets = [scale_at_zero(module, norm) for norm, module in modules]  # all of them before anything is changed
    with torch.no_grad():
        for (norm, module), offset in zip(modules, offsets, strict=True):
            for name in norm.tensors:
                tensor = getattr(module, name)
                drawn = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
                fresh = {"uniform": drawn, "ones": torch.ones_like(drawn), "fixed": torch.full_like(drawn, 0.5),
                         "positive-negative": 2.0 * drawn - 1.0}[how] - offset  # fmt: skip
                tensor.copy_(torch.zeros_like(drawn) if name == norm.shift else fresh)


def _is_chosen(norm: NormLayer, which: Which) -> bool:
    if which is None:
        return True
    if isinstance(which, str):
        return any(fnmatch.fnmatchcase(name, which) for name in norm.names)
    try:
        return bool(which(norm))
    except OnlynormError:
        raise
    except Exception as error:
        raise ConversionError(
            f"which needs a function of a NormLayer; it failed at {norm.name} with {type(error).__name__}: {error}. "
            "Its fields are name, kind, class_name and n_channels, among others."
        ) from error


def _patterns(what: str, given: Iterable[str] | str) -> tuple[str, ...]:
    """One pattern or several as a tuple of strings."""
    cure = f"Write {what}='head'."
    listed = [given] if isinstance(given, str) else need_items(what, given, cure=cure)
    return tuple(need_instance(what, pattern, str, cure=cure) for pattern in listed)


def _named(model: nn.Module, patterns: tuple[str, ...]) -> set[str]:
    """The parameters under the modules, or with the names, that the patterns match; each must match something."""
    names = {plain_name(name): name for name, _ in model.named_parameters(remove_duplicate=False)}
    found: set[str] = set()
    for pattern in patterns:
        hit = {n for n in names if fnmatch.fnmatchcase(n, pattern) or fnmatch.fnmatchcase(n, f"{pattern}.*")}
        if not hit:
            raise UnknownNameError("module or parameter", pattern, sorted({n.rpartition(".")[0] for n in names} - {""}))
        found |= {names[name] for name in hit}
    return found


class StayInEvaluation:
    """Stands in for `train` on a module whose running statistics must not move; it can be copied and pickled."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, mode: bool = True) -> nn.Module:
        """`module.train(mode)` for all children, with the module itself in evaluation mode."""
        type(self.module).train(self.module, mode)
        self.module.training = False
        return self.module


def _keep_statistics(module: nn.Module) -> Callable[[], None]:
    before = module.training
    module.__dict__["train"] = StayInEvaluation(module)
    module.training = False

    def back() -> None:
        module.__dict__.pop("train", None)
        module.training = before

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


@dataclass(frozen=True)
class _Setter:
    """Sets `requires_grad` of a parameter back."""

    parameter: nn.Parameter
    before: bool

    def __call__(self) -> None:
        self.parameter.requires_grad_(self.before)
