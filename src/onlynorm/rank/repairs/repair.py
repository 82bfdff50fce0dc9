"""`repair`: new initial weights for a deep network that cannot be trained, with a diagnosis before and after.

Repairs are for networks before training: they replace the weights, except "batch_norm" and, for a network without
residual blocks, "residual", which change the function only. Networks that look trained, and weights tied to an
embedding, are not changed without `force`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from onlynorm.display import Curve, Figure, Panel, ShownResult, Table, View
from onlynorm.errors import ConversionError, ShapeError, ValueRangeError
from onlynorm.modules import Loss, Output
from onlynorm.modules.losses import random_projection
from onlynorm.modules.untouched import full_precision, need_layers
from onlynorm.modules.walk import copy_network, need_batch
from onlynorm.progress import with_progress
from onlynorm.rank.coverage import Unseen, tie_like
from onlynorm.rank.diagnosis.diagnose import diagnose
from onlynorm.rank.diagnosis.passes import measure_layers
from onlynorm.rank.diagnosis.result import TONES, Diagnosis
from onlynorm.rank.diagnosis.signals import Layer, gradient_ratio
from onlynorm.rank.repairs.ascent import MAX_STEPS, paper_ascent, rank_ascent, whole_ascent
from onlynorm.rank.repairs.insert_norms import insert_batch_norms
from onlynorm.rank.repairs.redraw import mirrored, near_identity, orthogonal
from onlynorm.rank.repairs.rescale import lsuv, rescale_residuals
from onlynorm.rank.repairs.visits import Route, find_route
from onlynorm.rank.trained import find_training
from onlynorm.validate import (
    Progress,
    as_tensor,
    need_choice,
    need_flag,
    need_integer,
    need_number,
    need_progress,
    need_seed,
)

MAX_RATIO = 10.0
"""Maximum gradient ratio of the first to the last hidden layer in a rank ascent."""
PAPER_STEPS = 25
NOTHING = "nothing"
_COMPARED = ("r", "scale", "signal_gradient")
COLUMNS = ("layer", "rank before", "after", "scale before", "after", "gradient before", "after")
"""Columns of the rows of a `Repaired`."""
_DEPTH = "layers with weights so far"
PANELS = (
    Panel("r", "Rank ratio", _DEPTH, y_log=True),
    Panel("scale", "Scale of the signal", _DEPTH, "root mean square", y_log=True),
    Panel("signal_gradient", "Gradient of the signal", _DEPTH, "norm", y_log=True),
)
MAX_NAMED = 4
"""Number of unchanged modules listed in the text; `unseen` has all."""


@dataclass(frozen=True)
class _Job:
    """A network to be changed in place, and the arguments of the methods."""

    route: Route
    targets: Any
    loss: Loss | None
    output: Output | None
    seed: int
    n_steps: int | None
    target: float | None
    max_ratio: float
    force: bool

    @property
    def model(self) -> nn.Module:
        return self.route.model

    def find_training(self) -> str:
        """The first sign that the network was trained; empty if there is none or with `force`."""
        if self.force:
            return ""
        free = self.route.free
        return find_training(self.model, ((one.name, one.module, one.weight, one is free[-1]) for one in free))

    def diagnose(self) -> Diagnosis:
        return diagnose(self.model, self.route.inputs, self.targets, loss=self.loss, output=self.output, seed=self.seed)

    def ratio(self) -> float:
        """The gradient ratio from one forward and one backward pass."""
        layers = measure_layers(
            self.model, self.route.inputs, self.targets, loss=self.loss, output=self.output, seed=self.seed
        )
        return gradient_ratio(layers)

    @property
    def ascent(self) -> dict[str, Any]:
        """The arguments of both ascents with a target."""
        n_steps = MAX_STEPS if self.n_steps is None else self.n_steps
        return {"target": self.target, "max_ratio": self.max_ratio, "n_steps": n_steps, "ratio": self.ratio}


@dataclass(frozen=True)
class _Method:
    """A function that repairs in place and returns a remark; `is_structural` if it inserts modules."""

    run: Callable[[_Job], str]
    is_structural: bool = False


def _run_mirrored(job: _Job) -> str:
    scale, _ = mirrored(job.route, seed=job.seed, ratio=job.ratio)
    return f"mirrored orthogonal weights, hidden signals of scale {scale:g}"


def _run_rank(job: _Job) -> str:
    fraction, _ = rank_ascent(job.route, **job.ascent)
    if not fraction:
        return (
            "zero biases and unit scales without any ascent, since the gradient ratio exceeds its bound at every "
            "higher rank tried"
        )
    return f"ascent to {100 * fraction:.3g} % of the target rank above one, limited by the gradient ratio"


def _run_whole(job: _Job) -> str:
    n_steps, _ = whole_ascent(job.route, **job.ascent)
    return f"{n_steps} ascent steps of all layers together"


def _run_paper(job: _Job) -> str:
    n_steps = PAPER_STEPS if job.n_steps is None else job.n_steps
    paper_ascent(job.route, n_steps=n_steps, seed=job.seed)
    return f"{n_steps} ascent steps per layer, as in the paper"


def _run_batch_norm(job: _Job) -> str:
    return f"{insert_batch_norms(job.route)} batch norms inserted"


def _run_residual(job: _Job) -> str:
    return f"{rescale_residuals(job.route)} residual branches scaled"


def _drawing(draw: Callable[..., None], remark: str) -> Callable[[_Job], str]:
    def run(job: _Job) -> str:
        draw(job.route, seed=job.seed)
        return remark

    return run


METHODS: Mapping[str, _Method] = {
    "mirrored": _Method(_run_mirrored),
    "rank": _Method(_run_rank),
    "whole": _Method(_run_whole),
    "paper": _Method(_run_paper),
    "batch_norm": _Method(_run_batch_norm, is_structural=True),
    "lsuv": _Method(_drawing(lsuv, "orthogonal weights, every output of unit scale")),
    "orthogonal": _Method(_drawing(orthogonal, "orthogonal weights with one gain")),
    "residual": _Method(_run_residual, is_structural=True),
    "near_identity": _Method(_drawing(near_identity, "the identity plus noise")),
}
"""Repairs by name."""
AUTO = ("mirrored", "rank")
"""Repairs that "auto" tries, best accuracy after training first."""


@dataclass(frozen=True, eq=False, repr=False)
class Repaired(ShownResult):
    """The repaired model, the method, and the diagnoses before and after.

    `unseen` lists modules with weights that a repair cannot change, with the reason, largest first; `n_parameters` is
    the number of all parameters of the model.
    """

    columns: ClassVar[tuple[str, ...]] = COLUMNS

    model: nn.Module
    method: str
    remark: str
    before: Diagnosis
    after: Diagnosis
    unseen: tuple[Unseen, ...]
    n_parameters: int
    seconds: float

    @property
    def unseen_fraction(self) -> float:
        """The fraction of the parameters in modules that a repair cannot change."""
        return sum(one.n_parameters for one in self.unseen) / max(self.n_parameters, 1)

    @property
    def _done(self) -> str:
        """What became of the network: "repaired" only if its score has not fallen and is one half or more."""
        if self.method == NOTHING:
            return "not changed"
        is_repaired = self.after.is_trainable and self.after.score >= self.before.score
        return "repaired" if is_repaired else "changed"

    @property
    def _now(self) -> str:
        """The verdict after the repair."""
        is_same = self.method != NOTHING and self.before.verdict.word == self.after.verdict.word == "unhealthy"
        return f"still {self.after.verdict.word}" if is_same else self.after.verdict.word

    def rows(self) -> list[tuple[str, ...]]:
        """For every layer with weights its name, and rank, scale and gradient before and after, as text."""
        return [
            (old.label, *(_shown(getattr(layer, name)) for name in _COMPARED for layer in (old, new)))
            for old, new in self._pairs()
        ]

    def as_dict(self) -> dict[str, Any]:
        """All fields except the model as JSON types."""
        return {
            "method": self.method, "remark": self.remark, "seconds": self.seconds,
            "n_parameters": self.n_parameters, "unseen_fraction": self.unseen_fraction,
            "unseen": [one.as_dict() for one in self.unseen],
            "before": self.before.as_dict(), "after": self.after.as_dict(),
        }  # fmt: skip

    def plot(self) -> Figure:
        """Rank, scale and gradient of the layers with weights over depth, before and after."""
        curves = []
        for name, panel in zip(_COMPARED, PANELS, strict=True):
            for label, found in (("before", self.before), ("after", self.after)):
                pairs = [(layer.depth, getattr(layer, name)) for layer in found.weighted_layers]
                points = [(x, y) for x, y in pairs if y is not None and math.isfinite(y) and y > 0]
                if points:
                    xs, ys = zip(*points, strict=True)
                    curves.append(Curve(label, xs, ys, "line+points", panel.name))
        return Figure(curves, PANELS)

    def view(self) -> View:
        """The method, the verdicts before and after, and every layer with weights."""
        before, after = self.before.verdict, self.after.verdict
        lines = [f"{label}: {', '.join(found.findings)}." for label, found in (("Before", before), ("After", after))]
        title = "Network without a repair" if self.method == NOTHING else f"{self._done.capitalize()} network"
        return View(
            title, f"{before.word} → {self._now}", TONES[after.word], lines, after.advice,
            facts={
                "method": self.method, "remark": self.remark, "score before": before.score, "score after": after.score,
                "seconds": self.seconds, "parameters in unchanged modules": f"{self.unseen_fraction:.1%}",
            },
            tables={"Layers": Table(COLUMNS, self.rows())},
        )  # fmt: skip

    def __str__(self) -> str:
        done = self._done if self.method == NOTHING else f"{self._done} by {self.method}"
        before, after = (f"(score {found.score:.2f})" for found in (self.before, self.after))
        words = f"{self.before.verdict.word} {before} -> {self._now} {after}"
        pairs = self._pairs()
        chosen = sorted({0, (len(pairs) - 1) // 2, max(0, len(pairs) - 2)})
        ranks = ", ".join(f"{pairs[i][0].r:.3g} -> {pairs[i][1].r:.3g} in {pairs[i][0].label!r}" for i in chosen)
        parts = [f"{done} ({self.remark}) in {self.seconds:.1f} s: {words}", f"rank {ranks}"]
        ratios = self.before.gradient_ratio, self.after.gradient_ratio
        if not all(map(math.isnan, ratios)):  # needs two hidden layers
            parts.append(f"gradient at the first over the last hidden layer {ratios[0]:.2g} -> {ratios[1]:.2g}")
        if self.unseen:
            more = f" and {len(self.unseen) - MAX_NAMED} more" if len(self.unseen) > MAX_NAMED else ""
            named = ", ".join(map(str, self.unseen[:MAX_NAMED]))
            parts.append(f"modules without repair, with {self.unseen_fraction:.1%} of the parameters: {named}{more}")
        return "; ".join(parts)

    def _pairs(self) -> list[tuple[Layer, Layer]]:
        """Every layer with weights before and after; names may differ if modules were inserted."""
        return list(zip(self.before.weighted_layers, self.after.weighted_layers, strict=False))


@with_progress
def repair(
    model: nn.Module,
    inputs: Any,
    targets: Any = None,
    *,
    method: str = "auto",
    loss: Loss | None = None,
    output: Output | None = None,
    n_steps: int | None = None,
    target_rank: float | None = None,
    max_ratio: float = MAX_RATIO,
    seed: int = 0,
    in_place: bool = False,
    force: bool = False,
    progress: Progress | bool | None = None,
) -> Repaired:
    """A copy of the model, or the model itself if `in_place`, repaired for training, with diagnoses before and after.

    `inputs` is a batch of a few hundred samples, or a tuple of batches (tensors or NumPy arrays). `method` is one of
    `METHODS`, or "auto": a network with a healthy diagnosis is not changed; else the first repair of `AUTO` is used
    that raises its score to one half or more, or the one with the highest score, if any raises it. `n_steps` is the
    number of ascent steps per layer, `target_rank` the target of "rank" and "whole" (by default the square root of the
    width), subject to a gradient ratio of at most `max_ratio`. Gradients are those of the loss of `output(returned)`
    and `targets`, as in `diagnose`, or of a random projection of the outputs.

    Without `force`, weights tied to another module are not changed, and neither is a network that looks trained:
    "auto" returns it unchanged, other methods raise. `unseen` of the result lists the modules that were not changed.
    Wrappers (DDP, DataParallel, torch.compile) are removed first. Autocast is disabled. `progress=True` shows a bar; a
    function is called with (methods tried, methods to try, method).

    Examples:
        >>> import onlynorm as on
        >>> from onlynorm.data import digits
        >>> from onlynorm.models import mlp
        >>> inputs, labels = (part[:256] for part in digits().train)
        >>> repaired = on.repair(mlp((64, *[64] * 30, 10)), inputs, labels)
        >>> repaired.method
        'mirrored'
        >>> repaired.before.is_trainable, repaired.after.is_trainable
        (False, True)
    """
    progress = need_progress(progress)
    started = time.perf_counter()
    network = need_layers("repair", model)
    given = _ready(network, inputs)
    settings = _check(method=method, n_steps=n_steps, target=target_rank, max_ratio=max_ratio)
    need_flag("in_place", in_place)
    need_flag("force", force)
    if targets is not None and (loss is None or isinstance(targets, np.ndarray)):
        targets = as_tensor("targets", targets)
    seed = need_seed(seed)
    if targets is None and loss is None:
        loss, output = random_projection(seed), _all_outputs

    def job(network: nn.Module) -> _Job:
        route = find_route(network, given, force=force)
        return _Job(route, targets, loss, output, seed, force=force, **settings)

    with torch.inference_mode(False), full_precision():
        first = job(network)
        before = first.diagnose()
        _need_signals(before)
        made, method, remark = _choose(_copy(network), before, method, job=job, progress=progress)
        if in_place:
            if method in METHODS and METHODS[method].is_structural:
                METHODS[method].run(job(network))
            else:
                _copy_parameters(made, network)
            made = network
        after = before if method == NOTHING else job(made).diagnose()
    n_parameters = sum(p.numel() for p in network.parameters())
    seconds = time.perf_counter() - started
    result = model if in_place and isinstance(model, nn.Module) else made
    return Repaired(result, method, remark, before, after, first.route.unseen, n_parameters, seconds)


def _choose(
    work: nn.Module, before: Diagnosis, method: str, *, job: Callable[[nn.Module], _Job], progress: Progress | None
) -> tuple[nn.Module, str, str]:
    """(network, method, remark) of the given method, or of the one that "auto" chooses."""
    if method == "auto" and before.verdict.word == "healthy":
        return work, NOTHING, f"the diagnosis is healthy, score {before.score:.2f}"
    first = job(work)
    sign = first.find_training()
    if sign and method == "auto":
        return work, NOTHING, f"it looks trained: {sign}; force=True changes it anyway"
    if sign:
        raise ConversionError(
            f"repair needs a network before training; this one looks trained: {sign}. Its weights would be "
            "lost. Pass force=True to change it anyway."
        )
    report = _ignore if progress is None else progress
    if method != "auto":
        report(0, 1, method)
        remark = METHODS[method].run(first)
        report(1, 1, method)
        return work, method, remark
    tried = [(before.score, work, NOTHING, f"no repair improves the score of {before.score:.2f}")]
    for number, name in enumerate(AUTO):
        report(number, len(AUTO), name)
        made = _copy(work)
        remark = METHODS[name].run(job(made))
        after = job(made).diagnose()
        # the score predicts whether a network learns, not how well; `AUTO` is ordered by accuracy
        if after.is_trainable and after.score > before.score:
            report(number + 1, number + 1, name)
            return made, name, remark
        tried.append((after.score, made, name, remark))
    report(len(AUTO), len(AUTO), "all methods tried")
    return max(tried, key=lambda one: one[0])[1:]


def _ignore(done: int, total: int, message: str) -> None:
    pass


def _need_signals(found: Diagnosis) -> None:
    """Raises unless the outputs of all layers with weights are finite, and have gradients of a finite loss."""
    is_finite = all(layer.is_finite for layer in found.weighted_layers)
    if not is_finite or (found.loss is not None and not math.isfinite(found.loss)):
        raise ValueRangeError(f"repair needs finite signals; {found.verdict.findings[0]}. {found.verdict.advice}")
    if all(layer.signal_gradient is None for layer in found.weighted_layers):
        raise ConversionError(
            "repair needs a loss that depends on the weights; got one without a gradient. Do not detach it."
        )


def _all_outputs(returned: Any) -> Any:
    return returned


def _copy(network: nn.Module) -> nn.Module:
    copied = copy_network(network)
    tie_like(copied, network)
    return copied


@torch.no_grad()
def _copy_parameters(source: nn.Module, network: nn.Module) -> None:
    """Copies only the parameters that were changed."""
    for old, new in zip(network.parameters(), source.parameters(), strict=True):
        if not torch.equal(old, new):
            old.copy_(new)


def _ready(network: nn.Module, inputs: Any) -> tuple[Tensor, ...]:
    """The inputs as a tuple of tensors; raises unless they are batches of two samples or more."""
    items = inputs if isinstance(inputs, tuple | list) else (inputs,)
    if isinstance(inputs, Mapping):
        raise ConversionError(
            "repair needs a batch, or a tuple of batches in the order of the model's arguments; got a dict. Pass "
            "tuple(inputs.values()), or wrap the model in a module that passes keyword arguments."
        )
    given = tuple(as_tensor("inputs of repair", x) if isinstance(x, np.ndarray | Tensor) else x for x in items)
    need_batch("repair", network, given)
    if min(x.shape[0] if x.ndim else 0 for x in given) < 2:
        raise ShapeError(
            f"repair needs two samples or more, since one sample always has rank one; got shapes "
            f"{', '.join(str(tuple(x.shape)) for x in given)}. Pass a few hundred samples."
        )
    with torch.inference_mode(False):
        return tuple(x.clone() if x.is_inference() else x for x in given)


def _check(*, method: str, n_steps: int | None, target: float | None, max_ratio: float) -> dict[str, Any]:
    """The validated settings of a job."""
    need_choice("method", method, ("auto", *METHODS))
    if n_steps is not None:
        n_steps = need_integer("n_steps", n_steps, low=0, cure="The paper takes 25 or 75.")
    if target is not None:
        target = need_number("target_rank", target, low=1.0, cure="Try the root of the width.")
    limit = need_number("max_ratio", max_ratio, low=0.0, open_low=True, cure=f"Try {MAX_RATIO:g}.")
    return {"n_steps": n_steps, "target": target, "max_ratio": limit}


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
