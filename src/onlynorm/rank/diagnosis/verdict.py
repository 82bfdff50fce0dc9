"""`judge`: what the numbers of a diagnosis mean, in plain words, by thresholds that are written down.

Every sign of illness is one number v that is good when large, with a threshold t: its part of the score is v / (v + t),
one half at the threshold and 0.9 at nine times it. The score is the smallest part: one illness is enough. Below a half
the network is called unhealthy, below 0.9 suspect. The thresholds come from training by plain SGD for some hundred
steps: an unhealthy network is unlikely to learn that way, and says nothing about Adam, which trained half of them.

Where it was measured what becomes of the samples' differences (`contrast`, and `directions` with what they tell), that
is judged; rank, alignment and vanishing gradients, which are signs of the same, then only explain it. Alone they would
be too strict: a signal of rank one may tell classes apart, and the last layers may learn while the first do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from onlynorm.errors import ShapeError
from onlynorm.rank.diagnosis.signals import Layer
from onlynorm.validate import need_instance, need_items, need_number

HALF = 0.5
"""Scores below it are unhealthy."""
CLEAR = 0.9
"""Scores from it on are healthy."""
DIFFERENCES = frozenset({"contrast", "directions"})
"""Signs of what becomes of the samples' differences."""
EXPLAINED = frozenset({"rank", "alignment", "vanishing"})
"""Signs that stand in for them where they were not measured, and explain them where they were."""
UNLIKELY = "Plain SGD is unlikely to train this network; Adam may."
"""What a score below one half means."""
ADVICE_ON_LOSS = "Check the targets (NaN, or too large for the precision), and the loss for labels that it ignores."
MOST_UNOBSERVED = 0.1
"""Fraction of the parameters that may go unobserved before a healthy verdict says so."""
HOPE = 0.1
"""The share that the targets are granted of differences in which they do not show: earlier layers may learn to."""


@dataclass(frozen=True)
class Thresholds:
    """Where a sign of illness is worth one half; the defaults come from networks that were trained (docs/diagnose.md).

    `contrast` is for contrast * (told + 0.1), `directions` for the square of directions - 1 + told, `start` for how far
    the loss is above that of outputs of zero, in units of the latter. Hidden signals are those that layers with weights
    take in, behind the first. `rank` is for r - 1 of the worst of them; `alignment` and `input` for one minus the
    cosines of the last layer's gradients; `vanishing` and `exploding` for the gradient of the first layer over that of
    the last, the latter without norms and with; `shrinking` and `growing` for the scale of hidden signals over that of
    the first; `alive` for the share of units of the worst that are not dead.
    """

    contrast: float = 4e-5
    directions: float = 0.04
    start: float = 3.0
    rank: float = 1e-3
    alignment: float = 3e-4
    input: float = 1e-4
    vanishing: float = 1e-4
    exploding: float = 3e2
    exploding_normed: float = 1e5
    shrinking: float = 1e-4
    growing: float = 3e2
    alive: float = 0.02


@dataclass(frozen=True)
class Verdict:
    """How likely plain SGD can train a network: a word, a score from 0 to 1, its parts by name, and what to do."""

    score: float
    parts: Mapping[str, float]
    findings: tuple[str, ...]
    advice: str
    thresholds: Thresholds

    @property
    def is_trainable(self) -> bool:
        """Whether the score is one half or more: nothing was found that makes it unlikely that plain SGD trains it."""
        return self.score >= HALF

    @property
    def word(self) -> str:
        """healthy, suspect or unhealthy."""
        return "healthy" if self.score >= CLEAR else ("suspect" if self.is_trainable else "unhealthy")

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "verdict": self.word, "is_trainable": self.is_trainable, "score": self.score, "parts": dict(self.parts),
            "findings": list(self.findings), "advice": self.advice, "thresholds": asdict(self.thresholds),
        }  # fmt: skip

    def __str__(self) -> str:
        said = "; ".join(self.findings)
        return f"{self.word} (score {self.score:.2f}): {said}. {self.advice}".strip()


def judge(
    layers: Sequence[Layer],
    *,
    alignment: float | None,
    input_cosine: float | None,
    contrast: float | None = None,
    directions: float | None = None,
    told: float | None = None,
    start: float | None = None,
    loss: float | None = None,
    unobserved: float = 0.0,
    thresholds: Thresholds,
    can_repair: Callable[[], bool] | None = None,
) -> Verdict:
    """The verdict on these signals and cosines; what was not measured is not judged.

    `unobserved` is the fraction of the parameters in layers that were not observed. `can_repair` is asked before a
    repair is recommended. Theory: daneshmand2020:prop-8
    """
    layers = need_items("layers", layers, cure="Pass those of a Diagnosis.")
    for layer in layers:
        need_instance("layers", layer, Layer, cure="Pass those of a Diagnosis.")
    if not layers:
        raise ShapeError("judge needs a layer or more; got none. Pass those of a Diagnosis.")
    need_instance("thresholds", thresholds, Thresholds, cure="Pass onlynorm.rank.Thresholds().")
    values = {"alignment": alignment, "input_cosine": input_cosine, "contrast": contrast, "directions": directions,
              "told": told, "start": start, "loss": loss}  # fmt: skip
    alignment, input_cosine, contrast, directions, told, start, loss = (
        value if value is None or (isinstance(value, float) and not math.isfinite(value))
        else need_number(name, value, cure="Pass None where it was not measured.")
        for name, value in values.items()
    )  # fmt: skip
    unobserved = need_number("unobserved", unobserved, low=0.0, high=1.0, cure="Leave it out where all was observed.")
    odd = next((layer for layer in layers if not layer.is_finite), None)
    if odd is not None:
        where = f"{odd.place} ({odd.kind}), layer {odd.depth} of {layers[-1].depth}"
        return Verdict(0.0, {"finite": 0.0}, (f"first NaN or infinity at {where}",),
                       _advice_on_numbers(odd), thresholds)  # fmt: skip
    if loss is not None and not math.isfinite(loss):
        finding = f"the loss is {loss}, though every signal is finite"
        return Verdict(0.0, {"finite": 0.0}, (finding,), ADVICE_ON_LOSS, thresholds)
    differences = [*_contrast(contrast, told, thresholds), *_directions(directions, told, thresholds)]
    signs = [  # causes before what follows from them
        *_dead(layers, thresholds), *_scales(layers, thresholds), *_start(start, thresholds),
        *_rank(layers, thresholds), *differences, *_cosines(alignment, input_cosine, thresholds),
        *_gradients(layers, thresholds),
    ]  # fmt: skip
    reasons = EXPLAINED if {sign.name for sign in differences} == DIFFERENCES else frozenset()
    judged = [sign for sign in signs if sign.name not in reasons]
    parts = {sign.name: sign.part for sign in judged}
    ill = [sign for sign in judged if sign.part < CLEAR]
    complaints = [sign for sign in ill if sign.part < HALF] or ill  # what is only suspect is not reported beside it
    if DIFFERENCES & {sign.name for sign in complaints}:
        complaints += [sign for sign in signs if sign.name in reasons and sign.part < HALF]
    complaints.sort(key=signs.index)
    score = min(parts.values(), default=1.0)
    names = [sign.name for sign in complaints]
    advice = _advice(names, has_norms=_has_norms(layers), is_fatal=score < HALF, can_repair=can_repair)
    words = tuple(sign.words for sign in complaints)
    return Verdict(score, parts, words or _all_well(layers, unobserved), advice, thresholds)


@dataclass(frozen=True)
class _Sign:
    name: str
    value: float
    threshold: float
    words: str

    @property
    def part(self) -> float:
        if math.isinf(self.value):
            return 1.0
        value = max(self.value, 0.0)
        return value / (value + self.threshold)


def _rank(layers: Sequence[Layer], t: Thresholds) -> Iterable[_Sign]:
    hidden = _hidden(layers)
    if hidden:
        worst = min(hidden, key=lambda layer: layer.r)
        first = next((layer for layer in hidden if layer.r - 1.0 < t.rank), worst)
        words = (
            f"the signal collapses to rank {first.r:.3f} at layer {first.depth} of {layers[-1].depth} ({first.place})"
        )
        yield _Sign("rank", worst.r - 1.0, t.rank, words)


def _start(start: float | None, t: Thresholds) -> Iterable[_Sign]:
    if start is not None:
        words = f"the initial loss is {start:.3g} times that of zero outputs"
        yield _Sign("start", 1.0 / (start - 1.0) if start > 1.0 else math.inf, 1.0 / t.start, words)


def _contrast(contrast: float | None, told: float | None, t: Thresholds) -> Iterable[_Sign]:
    if contrast is not None:
        slower = f"are learned {1.0 / contrast:.1e} times slower" if contrast > 0.0 else "are not learned"
        words = f"the gradient moves all outputs together; differences between samples {slower}"
        yield _Sign("contrast", contrast * (HOPE + (told or 0.0)), t.contrast, words)


def _directions(directions: float | None, told: float | None, t: Thresholds) -> Iterable[_Sign]:
    if directions is not None and told is not None:
        words = (
            f"the inputs of the last layer vary in {directions:.2f} directions, and the targets explain {told:.0%} of "
            "the variance"
        )
        beyond = directions - 1.0 + told
        yield _Sign("directions", beyond * beyond, t.directions, words)


def _cosines(alignment: float | None, input_cosine: float | None, t: Thresholds) -> Iterable[_Sign]:
    if alignment is not None and not math.isnan(alignment):
        words = f"gradients of different samples in the last layer are parallel (mean |cosine| {alignment:.4f})"
        yield _Sign("alignment", 1.0 - alignment, t.alignment, words)
    if input_cosine is not None and not math.isnan(input_cosine):
        words = f"the last layer's gradient is the same for random inputs (cosine {input_cosine:.4f})"
        yield _Sign("input", 1.0 - input_cosine, t.input, words)


def _gradients(layers: Sequence[Layer], t: Thresholds) -> Iterable[_Sign]:
    norms = [layer.gradient for layer in layers if layer.has_weights and layer.gradient is not None]
    if len(norms) < 2:
        return
    first, last = norms[0], norms[-1]
    if not all(map(math.isfinite, norms)):
        yield _Sign("gradient", 0.0, 1.0, "some gradients are NaN or infinite, but the loss is finite")
    elif last == 0.0:
        yield _Sign("gradient", 0.0, 1.0, "the gradient of the last layer is zero")
    elif layers[-1].scale > 0.0:  # a last layer of zeros holds back all gradients in the first step only
        ratio = first / last
        yield _Sign(
            "vanishing", ratio, t.vanishing, f"the gradient of the first layer is {ratio:.1e} times that of the last"
        )
        most = t.exploding_normed if _has_norms(layers) else t.exploding
        words = f"the gradient of the first layer is {ratio:.1e} times that of the last"
        yield _Sign("exploding", 1.0 / ratio if ratio else math.inf, 1.0 / most, words)


def _scales(layers: Sequence[Layer], t: Thresholds) -> Iterable[_Sign]:
    hidden = _hidden(layers)
    if not hidden:
        return
    start = hidden[0].scale
    largest = max([*hidden, *_last(layers)], key=lambda layer: layer.scale)
    smallest = min(hidden, key=lambda layer: layer.scale)  # a small last layer is a choice
    grown, shrunk = largest.scale / start, smallest.scale / start
    words = f"the signal grows by a factor of {grown:.1e} from the first layer to {largest.place}"
    yield _Sign("growing", 1.0 / grown, 1.0 / t.growing, words)
    words = f"the signal shrinks by a factor of {shrunk:.1e} from the first layer to {smallest.place}"
    yield _Sign("shrinking", shrunk, t.shrinking, words)


def _dead(layers: Sequence[Layer], t: Thresholds) -> Iterable[_Sign]:
    taken = _taken_in(layers)
    if taken:
        worst = max(taken, key=lambda layer: layer.dead)
        words = f"{worst.dead:.0%} of the units of {worst.place} are dead (zero for every sample)"
        yield _Sign("alive", 1.0 - worst.dead, t.alive, words)


def _taken_in(layers: Sequence[Layer]) -> list[Layer]:
    """Signals that layers with weights take in, behind the first: what norms, activations and skips have made."""
    return [layer for layer in layers if layer.is_taken_in and layer.depth]


def _hidden(layers: Sequence[Layer]) -> list[Layer]:
    """Those of them that have a rank: a single unit has rank one whatever it does, a zero signal has none."""
    return [layer for layer in _taken_in(layers) if layer.n_units > 1 and not math.isnan(layer.r)]


def _last(layers: Sequence[Layer]) -> list[Layer]:
    return [layer for layer in layers if layer.has_weights][-1:]


def _has_norms(layers: Sequence[Layer]) -> bool:
    return any(layer.kind.endswith(" norm") for layer in layers)


def _all_well(layers: Sequence[Layer], unobserved: float) -> tuple[str, ...]:
    hidden = _hidden(layers)
    least = f", and its rank r is at least {min(layer.r for layer in hidden):.3g}" if hidden else ""
    well = f"the signal survives all {layers[-1].depth} layers{least}"
    if unobserved < MOST_UNOBSERVED:
        return (well,)
    return (well, f"{unobserved:.0%} of the parameters belong to no layer that was called, and were not judged")


def _advice(
    complaints: Sequence[str], *, has_norms: bool, is_fatal: bool, can_repair: Callable[[], bool] | None
) -> str:
    """What to do about the first complaint, which causes the others."""
    if not complaints:
        return ""
    outlook = f"{UNLIKELY} " if is_fatal else ""
    if complaints[0] == "alive":
        return outlook + "Raise the biases of that layer, or use a leaky activation."
    if complaints[0] in ("growing", "exploding", "start"):
        return outlook + "Draw smaller weights (orthogonal, or He's), add norms, or scale residual branches down."
    if complaints[0] in ("shrinking", "gradient"):
        return outlook + "Draw larger weights (He's), or add norms."
    steps = ["draw the weights symmetric around zero", "use batch norms"] if has_norms else ["add batch norms"]
    steps += ["run repair"] if can_repair is None or can_repair() else []
    advice = " or ".join(filter(None, [", ".join(steps[:-1]), steps[-1]]))
    return f"{outlook}{advice[0].upper()}{advice[1:]}."


def _advice_on_numbers(odd: Layer) -> str:
    if odd.kind == "input":
        return "The inputs contain them: clean the data first."
    return "Check the weights of that layer and the scale of its inputs."
