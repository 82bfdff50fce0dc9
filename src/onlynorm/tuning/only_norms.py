"""`only_norms`: freeze all parameters of a model except its norms, with a policy for running statistics.

    handle = only_norms(model, also=("head",), statistics="freeze")
    optimizer = torch.optim.AdamW(handle.parameters())

Policies for running statistics:

- "track": updated in training mode, as usual in torch.
- "freeze": never updated, and used in training mode too.
- "recalibrate": like "freeze", but `handle.recalibrate(batches)` computes them again from data.

The policy applies to every module with running statistics, and to every norm with buffers other than scale and shift.
It replaces `train` on the module instance, so it survives `model.train()`, deepcopy, pickle, wrapping and compilation.
Modules that replace others (`SyncBatchNorm.convert_sync_batchnorm`) do not inherit it: convert first.

The model stores the initial values of trained tensors and a digest of all other tensors. `save_adapter` uses them to
make sure that the base model with the adapter is bit-identical to the trained model.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from onlynorm.display import Result
from onlynorm.errors import ConversionError, OnlynormError, UnknownNameError, ValueRangeError, first_line, shown
from onlynorm.modules.norms import (
    NormLayer,
    SkippedNorm,
    can_get_affine,
    find_norms,
    has_statistics,
    may_track,
    need_module,
    plain_name,
    reference_tensor,
    scale_at_zero,
)
from onlynorm.modules.norms import add_affine as give_affine
from onlynorm.modules.walk import input_cure, need_open
from onlynorm.seeds import seeded
from onlynorm.tuning.fingerprint import Digests, digests, hidden_buffers, state_of, ties
from onlynorm.validate import as_tensor, need_choice, need_flag, need_instance, need_items, need_seed

STATISTICS = ("track", "freeze", "recalibrate")
GAMMAS = ("uniform", "ones", "fixed", "positive-negative")
Which = Callable[[NormLayer], bool] | str | None
_NOTE = "onlynorm_tuning"
MAX_ROWS = 12
"""Maximum number of parameters listed in the repr of a `NormHandle`; `print` lists all."""


@dataclass(frozen=True)
class Preparation:
    """What `only_norms` changed in a model, for adapters; it is copied and pickled with the model.

    `trained` has the names of all trained tensors, `added` the norms that got a scale and a shift. `initial` has the
    initial values of trained tensors, `digests` the hashes of all tensors. `hidden` names non-persistent buffers.
    """

    trained: tuple[str, ...]
    also: tuple[str, ...]
    statistics: str
    added: tuple[str, ...]
    initial: dict[str, Tensor]
    digests: Digests
    hidden: frozenset[str] = frozenset()


def preparation_of(model: nn.Module) -> Preparation | None:
    """The `Preparation` stored in the model, None if `only_norms` was not called."""
    found: Preparation | None = model.__dict__.get(_NOTE)
    return found


def need_own_preparation(what: str, model: nn.Module) -> None:
    """Raises if `only_norms` was called on a submodule, as inside a custom wrapper, and not on the model itself."""
    if preparation_of(model) is not None:
        return
    for name, module in model.named_modules():
        if preparation_of(module) is not None:
            raise ConversionError(
                f"{what} needs the model that only_norms prepared; got a {type(model).__name__} around it. Pass the "
                f"module inside: model.get_submodule({plain_name(name)!r})."
            )


class NormHandle(Result):
    """The result of `only_norms`: trainable parameters, their counts, a summary table, and `undo`."""

    def __init__(self, model: nn.Module, *, norms: tuple[NormLayer, ...], skipped: tuple[SkippedNorm, ...],
                 also: tuple[str, ...], statistics: str, undo: list[Callable[[], None]]) -> None:  # fmt: skip
        self.model, self.norms, self.skipped = model, norms, skipped
        self.also, self.statistics = also, statistics
        self._undo = undo

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The trainable parameters with their names."""
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters, for an optimizer."""
        return [p for _, p in self.named_parameters()]

    @property
    def n_trainable(self) -> int:
        """Number of trainable parameters."""
        return sum(p.numel() for p in self.parameters())

    @property
    def n_total(self) -> int:
        """Number of all parameters."""
        return sum(p.numel() for p in self.model.parameters())

    def recalibrate(self, batches: Iterable[Any]) -> None:
        """Computes running statistics again from batches of inputs, as their average over all batches.

        Applies to batch and instance norms of torch and their subclasses; other norms are not changed.
        """
        norms = [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and has_statistics(m)]
        modes = {module: module.training for module in self.model.modules()}
        momenta = [norm.momentum for norm in norms]
        before = [{name: value.clone() for name, value in norm.named_buffers(recurse=False)} for norm in norms]
        n_batches, inputs = 0, None
        try:
            self.model.eval()  # no dropout: only the norms are in training mode
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
            cure = "Pass an iterable of inputs, or of (inputs, labels)."
            raise ConversionError(
                f"recalibrate needs batches of valid inputs; the model failed at batch {n_batches} with: "
                f"{first_line(error)}. {input_cure(self.model, inputs, error, otherwise=cure)}"
            ) from error
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
            for module, mode in modes.items():
                module.training = mode

    def undo(self) -> None:
        """Reverts `only_norms`; trained values are not restored."""
        while self._undo:
            self._undo.pop()()
        self.model.__dict__.pop(_NOTE, None)

    def as_dict(self) -> dict[str, Any]:
        """Plain data: what is trained, and what is skipped and why."""
        return {
            "norms": [norm.name for norm in self.norms], "skipped": [str(item) for item in self.skipped],
            "also": list(self.also), "statistics": self.statistics, "n_trainable": self.n_trainable,
            "n_total": self.n_total,
        }  # fmt: skip

    def __repr__(self) -> str:
        return self._text(MAX_ROWS)

    def __str__(self) -> str:
        return self._text(None)

    def _text(self, n_rows: int | None) -> str:
        """The table of parameters, of which at most `n_rows` are listed, and what else was selected."""
        rows = [(name, " x ".join(map(str, p.shape)), f"{p.numel():,}") for name, p in self.named_parameters()]
        widths = [max(len(row[i]) for row in [*rows, ("parameter", "shape", "count")]) for i in range(3)]
        lines = [
            f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}"
            for a, b, c in [("parameter", "shape", "count"), *rows[:n_rows]]
        ]
        lines += [] if n_rows is None or len(rows) <= n_rows else [f"... {len(rows) - n_rows} more"]
        percent = 100.0 * self.n_trainable / max(1, self.n_total)
        lines.append(f"{self.n_trainable:,} of {self.n_total:,} parameters are trained ({percent:.3g} %)")
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
    """Freezes all parameters of the model except its norms, in place; returns a handle with `parameters` and `undo`.

    `also` names other modules or parameters to train, with wildcards: "head", "blocks.11.*". `which` selects norms by a
    name pattern or a function of the `NormLayer`. `add_affine` adds scale and shift to norms without them. `thaw`
    converts scales and shifts stored as buffers (FrozenBatchNorm) to parameters.

    Examples:
        >>> import onlynorm as on
        >>> from onlynorm.models import load_model
        >>> model = load_model("digits_cnn")
        >>> handle = on.only_norms(model)
        >>> handle.n_trainable, handle.n_total
        (128, 7514)
        >>> handle.undo()  # all parameters are trainable again
    """
    wrapper, model = model, need_module("only_norms", model)
    need_open("only_norms", model)
    need_choice("statistics", statistics, STATISTICS)
    if preparation_of(model) is not None:
        raise ConversionError(
            "only_norms needs a model that is not prepared yet; this one, or the model it is a copy of, is already "
            "prepared. Call undo() on its handle, and copy models before only_norms."
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
    """The work of `only_norms`; functions that revert its steps are appended to `undo`, even if it raises."""
    added: dict[str, Callable[[], None]] = {}
    if add_affine:
        like = reference_tensor(model)
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
            reason = "its scale and shift are buffers; thaw=True converts them to parameters"
            skipped.append(SkippedNorm(norm.name, norm.class_name, reason))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    selected = {id(parameters[name]) for name in _named(model, also)}
    selected |= {id(getattr(model.get_submodule(norm.name), tensor)) for norm in chosen for tensor in norm.tensors}
    if not selected:
        _raise_no_norms(model, found.norms, skipped, which)
    for parameter in parameters.values():
        undo.append(_RestoreGrad(parameter, parameter.requires_grad))
        # By identity: a tied parameter is trained if one of its names is selected.
        if not (parameter.is_floating_point() or parameter.is_complex()):
            continue  # quantized weights cannot require gradients
        parameter.requires_grad_(id(parameter) in selected)
    if statistics != "track":
        undo += [_freeze_statistics(module) for module in model.modules() if may_track(module)]
    state, hidden = state_of(model), hidden_buffers(model)
    trained = {plain_name(name) for name, parameter in parameters.items() if id(parameter) in selected}
    trained |= {name for group in ties(state) if trained & set(group) for name in group}
    initial = {name: state[name].detach().clone() for name in sorted(trained & state.keys())}
    model.__dict__[_NOTE] = Preparation(
        tuple(sorted(trained)), also, statistics, tuple(sorted(added)), initial, digests(state | hidden),
        frozenset(hidden),
    )  # fmt: skip
    return NormHandle(model, norms=tuple(chosen), skipped=tuple(skipped), also=also, statistics=statistics, undo=undo)


def _raise_no_norms(model: nn.Module, norms: tuple[NormLayer, ...], skipped: list[SkippedNorm], which: Which) -> None:
    """Raises the error for a model without anything to train."""
    if norms and which is not None and not any(_is_chosen(norm, which) for norm in norms):
        names = ", ".join(repr(norm.name) for norm in norms[:5])
        got = repr(which) if isinstance(which, str) else "a function that selects none"
        raise ConversionError(f"which needs to match a norm; got {got}, and the norms are {names}. Change the pattern.")
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
    """Raises if DistributedDataParallel expects gradients of parameters that are now frozen, or lacks new ones."""
    after = {p for p in wrapper.parameters() if p.requires_grad}
    for reducer in wrapper.modules():
        if isinstance(reducer, nn.parallel.DistributedDataParallel) and (
            after - before or (before - after and not reducer.find_unused_parameters)
        ):
            raise ConversionError(
                "only_norms needs to be called before DistributedDataParallel, which waits for gradients of all "
                "parameters that required them when it was created; got a wrapped model. Call only_norms(model), then "
                "wrap it."
            )


def init_gamma(handle: NormHandle, *, how: str = "uniform", seed: int = 0) -> None:
    """Initializes the scales of the norms and sets their shifts to zero, with the schemes of Frankle et al.

    "uniform" in [0, 1], "ones", "fixed" at 0.5, "positive-negative" uniform in [-1, 1]. These are effective scales:
    for norms that compute (1 + weight), as in Gemma, the weight is smaller by one.

    Examples:
        >>> import onlynorm as on
        >>> from onlynorm.models import mlp
        >>> from onlynorm.tuning import init_gamma
        >>> model = mlp((8, 4, 2), norm="batch")
        >>> init_gamma(on.only_norms(model), how="fixed")
        >>> model[1].weight.tolist()
        [0.5, 0.5, 0.5, 0.5]
    """
    need_choice("gamma", how, GAMMAS)
    need_instance("init_gamma", handle, NormHandle, cure="Pass the result of only_norms.")
    generator = seeded(need_seed(seed))
    modules = [(norm, handle.model.get_submodule(norm.name)) for norm in handle.norms]
    offsets = [scale_at_zero(module, norm) for norm, module in modules]  # measured before anything is changed
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
            f"which needs a function of a NormLayer; it failed for {norm.name} with {type(error).__name__}: "
            f"{first_line(error)}. Its fields are name, kind, class_name and n_channels, among others."
        ) from error


def _patterns(what: str, given: Iterable[str] | str) -> tuple[str, ...]:
    """The pattern or patterns as a tuple of strings."""
    cure = f"Write {what}='head'."
    listed = [given] if isinstance(given, str) else need_items(what, given, cure=cure)
    return tuple(need_instance(what, pattern, str, cure=cure) for pattern in listed)


def _named(model: nn.Module, patterns: tuple[str, ...]) -> set[str]:
    """Names of parameters that the patterns match by their own name or by their module's; every pattern must match."""
    names = {plain_name(name): name for name, _ in model.named_parameters(remove_duplicate=False)}
    found: set[str] = set()
    for pattern in patterns:
        matches = {n for n in names if fnmatch.fnmatchcase(n, pattern) or fnmatch.fnmatchcase(n, f"{pattern}.*")}
        if not matches:
            raise UnknownNameError("module or parameter", pattern, sorted({n.rpartition(".")[0] for n in names} - {""}))
        found |= {names[name] for name in matches}
    return found


class StayInEvaluation:
    """Replaces `train` of a module whose running statistics are frozen; can be copied and pickled."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, mode: bool = True) -> nn.Module:
        """Sets the mode of all children; the module itself stays in evaluation mode."""
        type(self.module).train(self.module, mode)
        self.module.training = False
        return self.module


def _freeze_statistics(module: nn.Module) -> Callable[[], None]:
    before = module.training
    module.__dict__["train"] = StayInEvaluation(module)
    module.training = False

    def restore() -> None:
        module.__dict__.pop("train", None)
        module.training = before

    return restore


def _thaw(norm: nn.Module, tensors: tuple[str, ...]) -> Callable[[], None]:
    for name in tensors:
        value = norm._buffers.pop(name)
        assert isinstance(value, Tensor)
        norm.register_parameter(name, nn.Parameter(value.detach().clone()))

    def restore() -> None:
        for name in tensors:
            value = norm._parameters.pop(name)
            assert value is not None
            norm.register_buffer(name, value.detach())

    return restore


@dataclass(frozen=True)
class _RestoreGrad:
    """Restores `requires_grad` of a parameter."""

    parameter: nn.Parameter
    before: bool

    def __call__(self) -> None:
        self.parameter.requires_grad_(self.before)
