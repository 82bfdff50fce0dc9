"""`repair`: makes a deep network that has not been trained yet pass signals and gradients on, with the evidence.

Repairs change initial weights, so they are for networks before training: what a trained network has learned is lost,
except by "batch_norm" and "residual" on a network without residual blocks, which keep its weights and change what it
computes. A network that looks trained, and a weight that is tied to an embedding, are not changed without `force`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from onlynorm.errors import ConversionError, ShapeError
from onlynorm.modules import Loss, Output, find_output
from onlynorm.modules.untouched import full_precision, need_layers
from onlynorm.modules.validate import need_batch
from onlynorm.modules.walk import copy_network
from onlynorm.rank.coverage import Unseen, tie_like
from onlynorm.rank.repairs.ascent import MOST_STEPS, paper_ascent, rank_ascent, whole_ascent
from onlynorm.rank.repairs.depth_evidence import LayerState, Lesson, gradient_ratio, harm, look
from onlynorm.rank.repairs.insert_norms import insert_batch_norms
from onlynorm.rank.repairs.redraw import mirrored, near_identity, orthogonal
from onlynorm.rank.repairs.rescale import lsuv, rescale_residuals
from onlynorm.rank.repairs.visits import Route, find_route
from onlynorm.rank.trained import find_norms, find_training
from onlynorm.validate import as_tensor, need_callable, need_choice, need_flag, need_integer, need_number, need_seed

MAX_RATIO = 10.0
"""How much gradients may grow from the last hidden layer to the first before the watch asks for less rank."""
PAPER_STEPS = 25
NOTHING = "nothing"
GOOD_ENOUGH = 3.0
"""A network with less badness than this (`harm`) is left alone by "auto". ResNets with batch norms have about two."""
MOST_NAMED = 4
"""Modules that a text names of those that a repair does not see; `unseen` has all."""


@dataclass(frozen=True)
class _Job:
    """A network to be changed in place, and everything the methods need to know."""

    route: Route
    lesson: Lesson
    n_steps: int | None
    target: float | None
    max_ratio: float
    force: bool

    def find_training(self) -> str:
        """The first sign that the network was trained, or nothing where that does not matter."""
        if self.force:
            return ""
        places = self.route.free
        layers = ((place.name, place.layer, place.weight, place is places[-1]) for place in places)
        return find_training(layers, find_norms(self.route.model))

    def look(self) -> tuple[LayerState, ...]:
        return look(self.route, self.lesson)

    def ratio(self) -> float:
        return gradient_ratio(self.look())

    def harm(self) -> float:
        return harm(self.look(), self.route)

    @property
    def climb(self) -> dict[str, Any]:
        """What both ascents with a target are told."""
        n_steps = MOST_STEPS if self.n_steps is None else self.n_steps
        return {"target": self.target, "max_ratio": self.max_ratio, "n_steps": n_steps, "ratio": self.ratio}


@dataclass(frozen=True)
class _Method:
    """How to repair in place, returning a remark, and whether modules are put in."""

    run: Callable[[_Job], str]
    is_structural: bool = False


def _run_mirrored(job: _Job) -> str:
    scale, _ = mirrored(job.route, seed=job.lesson.seed, ratio=job.ratio)
    return f"mirrored orthogonal weights, hidden signals of scale {scale:g}"


def _run_rank(job: _Job) -> str:
    share, _ = rank_ascent(job.route, **job.climb)
    return f"ascent to {100 * share:.3g} % of the rank asked for beyond one, the most the gradients allow"


def _run_whole(job: _Job) -> str:
    n_steps, _ = whole_ascent(job.route, **job.climb)
    return f"{n_steps} steps of ascent with all layers at once"


def _run_paper(job: _Job) -> str:
    n_steps = PAPER_STEPS if job.n_steps is None else job.n_steps
    paper_ascent(job.route, n_steps=n_steps, seed=job.lesson.seed)
    return f"{n_steps} steps of ascent per layer, as in the paper"


def _run_batch_norm(job: _Job) -> str:
    return f"{insert_batch_norms(job.route)} batch norms put in"


def _run_residual(job: _Job) -> str:
    return f"{rescale_residuals(job.route)} residual branches scaled"


def _drawing(draw: Callable[..., None], remark: str) -> Callable[[_Job], str]:
    def run(job: _Job) -> str:
        draw(job.route, seed=job.lesson.seed)
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
    "near_identity": _Method(_drawing(near_identity, "the identity and a little noise")),
}
"""Repairs by name; "auto" chooses among those of `AUTO`."""
AUTO = ("mirrored", "rank")


@dataclass(frozen=True, eq=False)
class Repaired:
    """The repaired model, how it was repaired, and the state of every layer before and after.

    `unseen` are modules with weights that a repair cannot change, with the reason, largest first; `n_parameters` counts
    all parameters of the model.
    """

    model: nn.Module
    method: str
    remark: str
    before: tuple[LayerState, ...]
    after: tuple[LayerState, ...]
    unseen: tuple[Unseen, ...]
    n_parameters: int
    seconds: float

    @property
    def unseen_fraction(self) -> float:
        """The fraction of the parameters in modules that a repair cannot change."""
        return sum(one.n_parameters for one in self.unseen) / max(self.n_parameters, 1)

    @property
    def ratio_before(self) -> float:
        """The gradient at the first layer over that at the last hidden one, before the repair; one is ideal."""
        return gradient_ratio(self.before)

    @property
    def ratio_after(self) -> float:
        """The same after the repair."""
        return gradient_ratio(self.after)

    def rows(self) -> list[tuple[str, ...]]:
        """For every layer its name, then rank, scale and gradient, each before and after, as text."""
        pairs = zip(self.before, self.after, strict=True)
        return [
            (old.name, *(f"{value:.3g}" for value in (old.r, new.r, old.scale, new.scale, old.gradient, new.gradient)))
            for old, new in pairs
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain data: everything but the model."""
        return {
            "method": self.method, "remark": self.remark, "seconds": self.seconds,
            "gradient_ratio": {"before": self.ratio_before, "after": self.ratio_after},
            "n_parameters": self.n_parameters, "unseen_fraction": self.unseen_fraction,
            "unseen": [one.as_dict() for one in self.unseen],
            "layers": [
                {"name": old.name, "before": _numbers(old), "after": _numbers(new)}
                for old, new in zip(self.before, self.after, strict=True)
            ],
        }  # fmt: skip

    def __str__(self) -> str:
        chosen = sorted({0, (len(self.before) - 1) // 2, max(0, len(self.before) - 2)})
        ranks = ", ".join(f"{self.before[i].r:.3g} -> {self.after[i].r:.3g} in {self.before[i].name!r}" for i in chosen)
        done = "left as it is" if self.method == NOTHING else f"repaired by {self.method}"
        parts = [f"{done} ({self.remark}) in {self.seconds:.1f} s: rank {ranks}"]
        if not math.isnan(self.ratio_before) or not math.isnan(self.ratio_after):  # needs two hidden layers
            ratios = f"{self.ratio_before:.2g} -> {self.ratio_after:.2g}"
            parts.append(f"gradient at the first over the last hidden layer {ratios}")
        if self.unseen:
            more = f" and {len(self.unseen) - MOST_NAMED} more" if len(self.unseen) > MOST_NAMED else ""
            named = ", ".join(map(str, self.unseen[:MOST_NAMED]))
            parts.append(f"not seen, with {self.unseen_fraction:.1%} of the parameters: {named}{more}")
        return "; ".join(parts)


def repair(
    model: nn.Module,
    inputs: Any,
    *,
    method: str = "auto",
    targets: Any = None,
    loss: Loss | None = None,
    output: Output | None = None,
    n_steps: int | None = None,
    target_rank: float | None = None,
    max_ratio: float = MAX_RATIO,
    seed: int = 0,
    in_place: bool = False,
    force: bool = False,
) -> Repaired:
    """A copy of the model whose layers pass on signal and gradient, or the model itself, with the evidence for both.

    `inputs` is a batch of some hundred samples, or a tuple of batches (tensors or NumPy arrays). `method` is one of
    `METHODS`, or "auto": a network that is fine is left alone, else the first repair of `AUTO` that makes it so is
    kept, or the network with the least badness. `n_steps` are the steps of an ascent per layer, `target_rank` the rank
    that "rank" and "whole" aim at (sqrt of the width), as far as gradients grow no more than `max_ratio`. Gradients are
    those of the loss of `output(returned)` and `targets`, as in `diagnose`, or of a random projection of the outputs.

    Without `force`, weights that are tied to another module's stay as they are, and so does a network that looks
    trained: "auto" returns it unchanged, other methods raise. `unseen` of the result lists the modules that were not
    changed for such reasons. The model inside DistributedDataParallel, DataParallel and torch.compile is repaired.
    Autocast is switched off.
    """
    started = time.perf_counter()
    network = need_layers("repair", model)
    given = _ready(network, inputs)
    settings = _check(method=method, n_steps=n_steps, target=target_rank, max_ratio=max_ratio)
    need_flag("in_place", in_place)
    need_flag("force", force)
    for name, function in (("loss", loss), ("output", output)):
        if function is not None:
            need_callable(name, function, cure="Leave it out for the default.")
    if targets is not None and (loss is None or isinstance(targets, np.ndarray)):
        targets = as_tensor("targets", targets)
    lesson = Lesson(targets, loss, need_seed(seed), output or find_output)

    def job(network: nn.Module) -> _Job:
        return _Job(find_route(network, given, force=force), lesson, force=force, **settings)

    with torch.inference_mode(False), full_precision():
        first = job(network)
        before = first.look()
        made, method, remark = _choose(_copy(network), method, job=job)
        if in_place:
            if method in METHODS and METHODS[method].is_structural:
                METHODS[method].run(job(network))
            else:
                _copy_parameters(made, network)
            made = network
        after = job(made).look()
    n_parameters = sum(p.numel() for p in network.parameters())
    seconds = time.perf_counter() - started
    result = model if in_place and isinstance(model, nn.Module) else made
    return Repaired(result, method, remark, before, after, first.route.unseen, n_parameters, seconds)


def _choose(work: nn.Module, method: str, *, job: Callable[[nn.Module], _Job]) -> tuple[nn.Module, str, str]:
    """(network, method, remark) of the repair that was asked for, or of the least badness."""
    first = job(work)
    if method != "auto":
        sign = first.find_training()
        if sign:
            raise ConversionError(
                f"repair needs a network before training; this one looks trained: {sign}. What it has learned would be "
                "lost. Pass force=True if it is not trained, or to change it anyway."
            )
        return work, method, METHODS[method].run(first)
    own = first.harm()
    seen = "the layers that it sees need" if first.route.unseen else "it needs"
    if len(first.route.places) < 3:
        return work, NOTHING, "fewer than two hidden layers are seen, so that there is nothing to compare"
    if own <= GOOD_ENOUGH:
        return work, NOTHING, f"{seen} no repair: badness {own:.2f}, at most {GOOD_ENOUGH:g}"
    sign = first.find_training()
    if sign:
        return work, NOTHING, f"badness {own:.2f}, but it looks trained: {sign}; force=True changes it anyway"
    tried = [(own, work, NOTHING, f"no repair does better than its badness, {own:.2f}")]
    for name in AUTO:
        made = _copy(work)
        remark = METHODS[name].run(job(made))
        tried.append((job(made).harm(), made, name, remark))
        if tried[-1][0] <= GOOD_ENOUGH:
            break
    return min(tried, key=lambda one: one[0])[1:]


def _copy(network: nn.Module) -> nn.Module:
    copied = copy_network(network)
    tie_like(copied, network)
    return copied


@torch.no_grad()
def _copy_parameters(source: nn.Module, network: nn.Module) -> None:
    """Copies the parameters that were changed, and touches no other."""
    for old, new in zip(network.parameters(), source.parameters(), strict=True):
        if not torch.equal(old, new):
            old.copy_(new)


def _ready(network: nn.Module, inputs: Any) -> tuple[Tensor, ...]:
    """The inputs as a tuple of tensors, if they are batches of two samples or more."""
    items = inputs if isinstance(inputs, tuple | list) else (inputs,)
    if isinstance(inputs, Mapping):
        raise ConversionError(
            "repair needs a batch, or a tuple of batches in the order of the model's arguments; got a dict. Pass "
            "tuple(inputs.values()), or a module that calls the model with its names."
        )
    given = tuple(as_tensor("inputs of repair", x) if isinstance(x, np.ndarray | Tensor) else x for x in items)
    need_batch("repair", network, given)
    if min(x.shape[0] if x.ndim else 0 for x in given) < 2:
        raise ShapeError(
            f"repair needs two samples or more, since one has rank one in every network; got shapes "
            f"{', '.join(str(tuple(x.shape)) for x in given)}. Pass some hundred samples."
        )
    with torch.inference_mode(False):
        return tuple(x.clone() if x.is_inference() else x for x in given)


def _check(*, method: str, n_steps: int | None, target: float | None, max_ratio: float) -> dict[str, Any]:
    """The settings of a job in their plain types."""
    need_choice("method", method, ("auto", *METHODS))
    if n_steps is not None:
        n_steps = need_integer("n_steps", n_steps, low=0, cure="The paper takes 25 or 75.")
    if target is not None:
        target = need_number("target_rank", target, low=1.0, cure="Try the root of the width.")
    limit = need_number("max_ratio", max_ratio, low=0.0, open_low=True, cure=f"Try {MAX_RATIO:g}.")
    return {"n_steps": n_steps, "target": target, "max_ratio": limit}


def _numbers(state: LayerState) -> dict[str, float]:
    return {key: value for key, value in asdict(state).items() if key != "name"}
