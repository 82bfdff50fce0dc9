"""`repair`: makes a deep network that has not been trained yet pass signals and gradients on, with the evidence.

Repairs change initial weights, so they are for networks before training: what a trained network has learned is lost,
except by "batch_norm" and "residual" on a network without residual blocks, which keep its weights and change what it
computes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onlynorm.data import seeded
from onlynorm.errors import ShapeError, UnknownNameError, ValueRangeError
from onlynorm.rank.depth_evidence import LayerState, Lesson, Loss, gradient_ratio, harm, look
from onlynorm.rank.insert_norms import insert_batch_norms
from onlynorm.rank.rank_ascent import MOST_STEPS, paper_ascent, rank_ascent, whole_ascent
from onlynorm.rank.reinitialize import mirrored, near_identity, orthogonal
from onlynorm.rank.rescale import lsuv, rescale_residuals
from onlynorm.rank.visits import Route, find_route
from onlynorm.reconstruction.calls import Inputs, as_tuple, copy_network, need_batch

MAX_RATIO = 10.0
"""How much gradients may grow from the last hidden layer to the first before the watch asks for less rank."""
PAPER_STEPS = 25
NOTHING = "nothing"
GOOD_ENOUGH = 3.0
"""A network with less harm than this, see `harm`, is left alone by "auto". ResNets with batch norms have about two."""


@dataclass(frozen=True)
class _Job:
    """A network to be changed in place, and everything the methods need to know."""

    route: Route
    lesson: Lesson
    n_steps: int | None
    target: float | None
    max_ratio: float

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
    """The repaired model, how it was repaired, and what every layer was like before and after."""

    model: nn.Module
    method: str
    remark: str
    before: tuple[LayerState, ...]
    after: tuple[LayerState, ...]
    seconds: float

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
            "layers": [
                {"name": old.name, "before": _numbers(old), "after": _numbers(new)}
                for old, new in zip(self.before, self.after, strict=True)
            ],
        }  # fmt: skip

    def __str__(self) -> str:
        chosen = sorted({0, (len(self.before) - 1) // 2, max(0, len(self.before) - 2)})
        ranks = ", ".join(f"{self.before[i].r:.3g} -> {self.after[i].r:.3g} in {self.before[i].name!r}" for i in chosen)
        done = "left as it is" if self.method == NOTHING else f"repaired by {self.method}"
        told = f"{done} ({self.remark}) in {self.seconds:.1f} s: rank {ranks}"
        if math.isnan(self.ratio_before) and math.isnan(self.ratio_after):  # a single hidden layer has no such ratio
            return told
        ratios = f"{self.ratio_before:.2g} -> {self.ratio_after:.2g}"
        return f"{told}; gradient at the first over the last hidden layer {ratios}"


def repair(
    model: nn.Module,
    inputs: Inputs,
    *,
    method: str = "auto",
    targets: Tensor | None = None,
    loss: Loss | None = None,
    n_steps: int | None = None,
    target_rank: float | None = None,
    max_ratio: float = MAX_RATIO,
    seed: int = 0,
    in_place: bool = False,
) -> Repaired:
    """A copy of the model whose layers pass on signal and gradient, or the model itself, with the evidence for both.

    `inputs` is a batch of some hundred samples. `method` is one of `METHODS`, or "auto": a network that is fine is
    left alone, else the first repair of `AUTO` that makes it so is kept, or what has the least harm. `n_steps` are the
    steps of an ascent per layer, `target_rank` the rank that "rank" and "whole" aim at (sqrt of the width), as far
    as gradients grow no more than `max_ratio`. Gradients are those of the loss (cross entropy) with respect to
    `targets`, or of a random projection.
    """
    started = time.perf_counter()
    given = as_tuple(inputs)
    _check(model, given, method=method, n_steps=n_steps, target=target_rank, max_ratio=max_ratio, seed=seed)

    def job(network: nn.Module) -> _Job:
        lesson = Lesson(targets, loss, seed)
        return _Job(find_route(network, given), lesson, n_steps=n_steps, target=target_rank, max_ratio=max_ratio)

    before = job(model).look()
    made, method, remark = _choose(copy_network(model), method, job=job)
    if in_place:
        if method in METHODS and METHODS[method].is_structural:
            METHODS[method].run(job(model))
        else:
            with torch.no_grad():
                for old, new in zip(model.parameters(), made.parameters(), strict=True):
                    old.copy_(new)
        made = model
    return Repaired(made, method, remark, before, job(made).look(), time.perf_counter() - started)


def _choose(work: nn.Module, method: str, *, job: Callable[[nn.Module], _Job]) -> tuple[nn.Module, str, str]:
    """(network, method, remark) of the repair that was asked for, or of the least harm."""
    if method != "auto":
        return work, method, METHODS[method].run(job(work))
    own = job(work).harm()
    if own <= GOOD_ENOUGH:
        return work, NOTHING, f"it needs no repair: harm {own:.2f}, at most {GOOD_ENOUGH:g}"
    tried = [(own, work, NOTHING, f"no repair does better than its harm, {own:.2f}")]
    for name in AUTO:
        made = copy_network(work)
        remark = METHODS[name].run(job(made))
        tried.append((job(made).harm(), made, name, remark))
        if tried[-1][0] <= GOOD_ENOUGH:
            break
    return min(tried, key=lambda one: one[0])[1:]


def _check(
    model: nn.Module, inputs: tuple[Tensor, ...], *, method: str, n_steps: int | None, target: float | None,
    max_ratio: float, seed: int,
) -> None:  # fmt: skip
    if method != "auto" and method not in METHODS:
        raise UnknownNameError("method", method, ("auto", *METHODS))
    need_batch("repair", model, inputs)
    if min(x.shape[0] if x.ndim else 0 for x in inputs) < 2:
        raise ShapeError(
            f"repair needs two samples or more, since one has rank one in every network; got shapes "
            f"{', '.join(str(tuple(x.shape)) for x in inputs)}. Pass some hundred samples."
        )
    if n_steps is not None and n_steps < 0:
        raise ValueRangeError(f"n_steps needs a whole number from zero on; got {n_steps}. The paper takes 25 or 75.")
    if target is not None and not 1.0 <= target < math.inf:
        raise ValueRangeError(f"target_rank needs a number from one on; got {target}. Try the root of the width.")
    if not max_ratio > 0.0:
        raise ValueRangeError(f"max_ratio needs a positive number; got {max_ratio}. Try {MAX_RATIO:g}.")
    seeded(seed)


def _numbers(state: LayerState) -> dict[str, float]:
    return {key: value for key, value in asdict(state).items() if key != "name"}
