"""`judge`: the verdict on the measures of a diagnosis, by fixed thresholds.

Every criterion is a value v, the larger the better, with a threshold t: its part of the score is v / (v + t), one half
at the threshold and 0.9 at nine times the threshold. The score is the smallest part. Below one half the network is
unhealthy, below 0.9 suspect. The thresholds were calibrated by training with plain SGD for a few hundred steps; they do
not apply to Adam, which trained half of the unhealthy networks.

If `contrast` and `directions` were both measured, rank, alignment and vanishing gradients only explain a low score.
They would be too strict: a signal of rank one may separate classes, and the last layers may learn while the first do
not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from onlynorm.display import Result
from onlynorm.errors import ShapeError
from onlynorm.rank.diagnosis.signals import Layer
from onlynorm.validate import need_instance, need_items, need_number

MIN_TRAINABLE = 0.5
"""Lower scores are unhealthy."""
MIN_HEALTHY = 0.9
"""Scores of at least this are healthy."""
DIFFERENCES = frozenset({"contrast", "directions"})
"""Criteria for the differences between samples."""
EXPLANATIONS = frozenset({"rank", "alignment", "vanishing"})
"""Criteria that replace `DIFFERENCES` if these were not measured, and else explain them."""
UNLIKELY = "Plain SGD is unlikely to train this network; Adam may."
"""The meaning of a score below one half."""
ADVICE_ON_LOSS = "Check the targets (NaN, or too large for the precision), and the loss for labels that it ignores."
MAX_UNOBSERVED = 0.1
"""Fraction of unobserved parameters above which the findings mention them."""
MIN_EXPLAINED = 0.1
"""Added to the explained variance, because earlier layers may increase it during training."""


@dataclass(frozen=True)
class Thresholds(Result):
    """The value of each criterion at which its part of the score is one half; see docs/diagnose.md for the defaults.

    `contrast` is for contrast * (explained_variance + 0.1), `directions` for (directions - 1 + explained_variance)^2,
    `initial_loss` for (loss - loss of zero outputs) / loss of zero outputs. Hidden signals are the inputs of layers
    with weights after the first. `rank` is for the smallest r - 1 of them; `alignment` and `input` for one minus the
    cosines of the last layer's gradients; `vanishing` and `exploding` for the gradient of the first layer over that of
    the last, the latter without norms and with; `shrinking` and `growing` for the scale of hidden signals over that of
    the first; `alive` for the smallest fraction of units that are not dead.
    """

    contrast: float = 4e-5
    directions: float = 0.04
    initial_loss: float = 3.0
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
class HealthVerdict(Result):
    """Whether plain SGD is likely to train a network: a score from 0 to 1, its parts by name, findings and advice."""

    score: float
    parts: Mapping[str, float]
    findings: tuple[str, ...]
    advice: str
    thresholds: Thresholds

    @property
    def is_trainable(self) -> bool:
        """Whether the score is at least one half, so that plain SGD may train the network."""
        return self.score >= MIN_TRAINABLE

    @property
    def word(self) -> str:
        """The verdict: "healthy", "suspect" or "unhealthy"."""
        return "healthy" if self.score >= MIN_HEALTHY else ("suspect" if self.is_trainable else "unhealthy")

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return {
            "verdict": self.word, "is_trainable": self.is_trainable, "score": self.score, "parts": dict(self.parts),
            "findings": list(self.findings), "advice": self.advice, "thresholds": asdict(self.thresholds),
        }  # fmt: skip

    def __str__(self) -> str:
        return f"{self.word} (score {self.score:.2f}): {'; '.join(self.findings)}. {self.advice}".strip()


def judge(
    layers: Sequence[Layer],
    *,
    alignment: float | None,
    input_cosine: float | None,
    contrast: float | None = None,
    directions: float | None = None,
    explained_variance: float | None = None,
    initial_loss_ratio: float | None = None,
    loss: float | None = None,
    unobserved: float = 0.0,
    thresholds: Thresholds,
    can_repair: Callable[[], bool] | None = None,
) -> HealthVerdict:
    """The verdict on these measures; None means not measured.

    `unobserved` is the fraction of the parameters in unobserved layers. `can_repair` is called before a repair is
    recommended. Theory: daneshmand2020:prop-8

    Examples:
        >>> import onlynorm as on
        >>> from onlynorm.data import digits
        >>> from onlynorm.models import mlp
        >>> from onlynorm.rank import Thresholds, judge
        >>> found = on.diagnose(mlp((64, *[64] * 30, 10)), *digits().train)
        >>> judge(found.layers, alignment=None, input_cosine=None, thresholds=Thresholds()).is_trainable
        False
    """
    layers = need_items("layers", layers, cure="Pass those of a Diagnosis.")
    for layer in layers:
        need_instance("layers", layer, Layer, cure="Pass those of a Diagnosis.")
    if not layers:
        raise ShapeError("judge needs at least one layer; got none. Pass those of a Diagnosis.")
    need_instance("thresholds", thresholds, Thresholds, cure="Pass onlynorm.rank.Thresholds().")
    values = {"alignment": alignment, "input_cosine": input_cosine, "contrast": contrast, "directions": directions,
              "explained_variance": explained_variance, "initial_loss_ratio": initial_loss_ratio,
              "loss": loss}  # fmt: skip
    alignment, input_cosine, contrast, directions, explained_variance, initial_loss_ratio, loss = (
        value if value is None or (isinstance(value, float) and not math.isfinite(value))
        else need_number(name, value, cure="Pass None if it was not measured.")
        for name, value in values.items()
    )  # fmt: skip
    unobserved = need_number("unobserved", unobserved, low=0.0, high=1.0, cure="Leave it out if all were observed.")
    broken = next((layer for layer in layers if not layer.is_finite), None)
    if broken is not None:
        where = f"{broken.label} ({broken.kind}), layer {broken.depth} of {layers[-1].depth}"
        findings = (f"first NaN or infinity at {where}", *_unobserved(unobserved))
        return HealthVerdict(0.0, {"finite": 0.0}, findings, _advice_on_nonfinite(broken), thresholds)
    if loss is not None and not math.isfinite(loss):
        findings = (f"the loss is {loss}, but every signal is finite", *_unobserved(unobserved))
        return HealthVerdict(0.0, {"finite": 0.0}, findings, ADVICE_ON_LOSS, thresholds)
    differences = [
        *_contrast(contrast, explained_variance, thresholds),
        *_directions(directions, explained_variance, thresholds),
    ]
    criteria = [  # causes first
        *_dead(layers, thresholds), *_scales(layers, thresholds), *_initial_loss(initial_loss_ratio, thresholds),
        *_rank(layers, thresholds), *differences, *_cosines(alignment, input_cosine, thresholds),
        *_gradients(layers, thresholds),
    ]  # fmt: skip
    reasons = EXPLANATIONS if {criterion.name for criterion in differences} == DIFFERENCES else frozenset()
    scored = [criterion for criterion in criteria if criterion.name not in reasons]
    parts = {criterion.name: criterion.part for criterion in scored}
    low = [criterion for criterion in scored if criterion.part < MIN_HEALTHY]
    problems = [
        criterion for criterion in low if criterion.part < MIN_TRAINABLE
    ] or low  # suspect ones only if nothing is worse
    if DIFFERENCES & {criterion.name for criterion in problems}:
        problems += [
            criterion for criterion in criteria if criterion.name in reasons and criterion.part < MIN_TRAINABLE
        ]
    problems.sort(key=criteria.index)
    score = min(parts.values(), default=1.0)
    names = [criterion.name for criterion in problems]
    advice = _advice(names, has_norms=_has_norms(layers), is_fatal=score < MIN_TRAINABLE, can_repair=can_repair)
    words = tuple(criterion.text for criterion in problems)
    findings = (*(words or _no_problem(layers)), *_unobserved(unobserved))
    return HealthVerdict(score, parts, findings, advice, thresholds)


@dataclass(frozen=True)
class _Criterion:
    name: str
    value: float
    threshold: float
    text: str

    @property
    def part(self) -> float:
        if math.isinf(self.value):
            return 1.0
        value = max(self.value, 0.0)
        return value / (value + self.threshold)


def _rank(layers: Sequence[Layer], t: Thresholds) -> Iterable[_Criterion]:
    hidden = _hidden(layers)
    if hidden:
        worst = min(hidden, key=lambda layer: layer.r)
        first = next((layer for layer in hidden if layer.r - 1.0 < t.rank), worst)
        words = (
            f"the signal collapses to rank {first.r:.3f} at layer {first.depth} of {layers[-1].depth} ({first.label})"
        )
        yield _Criterion("rank", worst.r - 1.0, t.rank, words)


def _initial_loss(ratio: float | None, t: Thresholds) -> Iterable[_Criterion]:
    if ratio is not None:
        words = f"the initial loss is {ratio:.3g} times that of zero outputs"
        yield _Criterion("initial_loss", 1.0 / (ratio - 1.0) if ratio > 1.0 else math.inf, 1.0 / t.initial_loss, words)


def _contrast(contrast: float | None, explained_variance: float | None, t: Thresholds) -> Iterable[_Criterion]:
    if contrast is not None:
        slower = f"are learned {1.0 / contrast:.1e} times slower" if contrast > 0.0 else "are not learned"
        words = f"the gradient moves all outputs together; differences between samples {slower}"
        yield _Criterion("contrast", contrast * (MIN_EXPLAINED + (explained_variance or 0.0)), t.contrast, words)


def _directions(directions: float | None, explained_variance: float | None, t: Thresholds) -> Iterable[_Criterion]:
    if directions is not None and explained_variance is not None:
        words = (
            f"the inputs of the last layer vary in {directions:.2f} directions, and the targets explain "
            f"{explained_variance:.0%} of the variance"
        )
        beyond = directions - 1.0 + explained_variance
        yield _Criterion("directions", beyond * beyond, t.directions, words)


def _cosines(alignment: float | None, input_cosine: float | None, t: Thresholds) -> Iterable[_Criterion]:
    if alignment is not None and not math.isnan(alignment):
        words = f"gradients of different samples in the last layer are parallel (mean |cosine| {alignment:.4f})"
        yield _Criterion("alignment", 1.0 - alignment, t.alignment, words)
    if input_cosine is not None and not math.isnan(input_cosine):
        words = f"the last layer's gradient is the same for random inputs (cosine {input_cosine:.4f})"
        yield _Criterion("input", 1.0 - input_cosine, t.input, words)


def _gradients(layers: Sequence[Layer], t: Thresholds) -> Iterable[_Criterion]:
    norms = [layer.gradient for layer in layers if layer.has_weights and layer.gradient is not None]
    if len(norms) < 2:
        return
    first, last = norms[0], norms[-1]
    if not all(map(math.isfinite, norms)):
        yield _Criterion("gradient", 0.0, 1.0, "some gradients are NaN or infinite, but the loss is finite")
    elif last == 0.0:
        yield _Criterion("gradient", 0.0, 1.0, "the gradient of the last layer is zero")
    elif layers[-1].scale > 0.0:  # a zero last layer blocks all gradients in the first step only
        ratio = first / last
        yield _Criterion(
            "vanishing", ratio, t.vanishing, f"the gradient of the first layer is {ratio:.1e} times that of the last"
        )
        most = t.exploding_normed if _has_norms(layers) else t.exploding
        words = f"the gradient of the first layer is {ratio:.1e} times that of the last"
        yield _Criterion("exploding", 1.0 / ratio if ratio else math.inf, 1.0 / most, words)


def _scales(layers: Sequence[Layer], t: Thresholds) -> Iterable[_Criterion]:
    hidden = _hidden(layers)
    if not hidden:
        return
    first = hidden[0].scale
    largest = max([*hidden, *_last(layers)], key=lambda layer: layer.scale)
    smallest = min(hidden, key=lambda layer: layer.scale)  # without the last layer, which is often small by design
    grown, shrunk = largest.scale / first, smallest.scale / first
    words = f"the signal grows by a factor of {grown:.1e} from the first layer to {largest.label}"
    yield _Criterion("growing", 1.0 / grown, 1.0 / t.growing, words)
    words = f"the signal shrinks by a factor of {shrunk:.1e} from the first layer to {smallest.label}"
    yield _Criterion("shrinking", shrunk, t.shrinking, words)


def _dead(layers: Sequence[Layer], t: Thresholds) -> Iterable[_Criterion]:
    inputs = _layer_inputs(layers)
    if inputs:
        worst = max(inputs, key=lambda layer: layer.dead)
        words = f"{worst.dead:.0%} of the units of {worst.label} are dead (zero for every sample)"
        yield _Criterion("alive", 1.0 - worst.dead, t.alive, words)


def _layer_inputs(layers: Sequence[Layer]) -> list[Layer]:
    """The inputs of layers with weights after the first: outputs of norms, activations and skip connections."""
    return [layer for layer in layers if layer.is_layer_input and layer.depth]


def _hidden(layers: Sequence[Layer]) -> list[Layer]:
    """The layer inputs with a rank: a single unit always has rank one, and a zero signal has none."""
    return [layer for layer in _layer_inputs(layers) if layer.n_units > 1 and not math.isnan(layer.r)]


def _last(layers: Sequence[Layer]) -> list[Layer]:
    return [layer for layer in layers if layer.has_weights][-1:]


def _has_norms(layers: Sequence[Layer]) -> bool:
    return any(layer.kind.endswith(" norm") for layer in layers)


def _no_problem(layers: Sequence[Layer]) -> tuple[str, ...]:
    hidden = _hidden(layers)
    least = f", and its rank r is at least {min(layer.r for layer in hidden):.3g}" if hidden else ""
    return (f"the signal survives all {layers[-1].depth} layers{least}",)


def _unobserved(fraction: float) -> tuple[str, ...]:
    if fraction < MAX_UNOBSERVED:
        return ()
    return (f"{fraction:.1%} of the parameters are outside the called layers, and were not measured",)


def _advice(problems: Sequence[str], *, has_norms: bool, is_fatal: bool, can_repair: Callable[[], bool] | None) -> str:
    """Advice on the first problem, which causes the others."""
    if not problems:
        return ""
    outlook = f"{UNLIKELY} " if is_fatal else ""
    if problems[0] == "alive":
        return outlook + "Raise the biases of that layer, or use a leaky activation."
    if problems[0] in ("growing", "exploding", "initial_loss"):
        return outlook + "Draw smaller weights (orthogonal, or He's), add norms, or scale residual branches down."
    if problems[0] in ("shrinking", "gradient"):
        return outlook + "Draw larger weights (He's), or add norms."
    steps = ["draw the weights symmetric around zero", "use batch norms"] if has_norms else ["add batch norms"]
    steps += ["run repair"] if can_repair is None or can_repair() else []
    advice = " or ".join(filter(None, [", ".join(steps[:-1]), steps[-1]]))
    return f"{outlook}{advice[0].upper()}{advice[1:]}."


def _advice_on_nonfinite(broken: Layer) -> str:
    if broken.kind == "input":
        return "The inputs contain NaN or infinity: clean the data first."
    return "Check the weights of that layer and the scale of its inputs."
