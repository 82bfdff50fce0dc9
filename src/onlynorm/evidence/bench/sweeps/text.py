"""A text classifier tuned by its norms: accuracy and number of parameters, compared with full fine-tuning.

MiniLM with a linear head on the mean of its outputs is trained to classify film reviews as positive or negative by five
methods: head only, norms and head, all parameters, and PEFT's LN tuning and LoRA, both with the head. All are trained
by `fit` with the same schedule except for the learning rate, which is selected from one grid on validation texts with
seed 0. The other seeds determine training texts, head and order, the same for all methods; all are tested on the same
texts.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from onlynorm.errors import TrainingError
from onlynorm.evidence.bench import tuners
from onlynorm.evidence.bench.networks import PaddedClassifier, text_encoder
from onlynorm.evidence.bench.sweeps.reviews import ReviewSplits, divide, read_reviews
from onlynorm.evidence.bench.tasks import text_task
from onlynorm.evidence.bench.tuners import FULL, HEAD, METHODS, NORMS, PEFT_LN
from onlynorm.evidence.harness import NARROW, Goal, Sizes, number, setting
from onlynorm.evidence.sweep import Results, Sweep, TrainingRun, first, mean, percent
from onlynorm.evidence.timing import warm_up_training
from onlynorm.seeds import own_randomness
from onlynorm.storage import tensors_digest
from onlynorm.tuning import Schedule, accuracy, fit

LRS = (1e-4, 7e-4, 5e-3, 3e-2)
"""Learning rates of AdamW, a factor of seven apart: full fine-tuning needs low ones, few parameters high ones."""
SMALL = 0.01
"""Maximum size of an adapter, as a fraction of the file of full fine-tuning."""


@dataclass(frozen=True)
class TextSizes(Sizes):
    """Numbers of texts for training, validation and test, their length, epochs and seeds.

    A quick run has a tiny random BERT and few texts, so its accuracies mean little.
    """

    seeds: int = setting(3, quick=2, low=2, help="Runs of each method.", is_key=False)
    texts: int = setting(1024, quick=64, help="Texts to train on.")
    n_validation: int = setting(500, quick=32)
    n_test: int = setting(2000, quick=64)
    tokens: int = setting(64, quick=16)
    epochs: int = setting(3, quick=1)
    batch_size: int = setting(32, quick=16)


class TextCase(NamedTuple):
    """The method of training."""

    method: str


@dataclass(frozen=True)
class Tuned:
    """One classifier after training, in a file, and loaded again."""

    accuracy: float
    n_trained: int
    file_size: int
    drift: float
    seconds: float


def methods() -> dict[str, type[tuners.Tuner]]:
    """The available methods by name."""
    return {kind.name: kind for kind in tuners.installed(METHODS)}


def _fraction(results: Results[TextSizes, TextCase], case: TextCase, _: Any) -> str:
    """The fraction of the gain of full fine-tuning over the head alone."""
    found, low, high = (results.spread(one).mean for one in (case, TextCase(HEAD), TextCase(FULL)))
    return number(100 * (found - low) / (high - low) if high > low else math.nan, ".0f")


encoder = functools.lru_cache(maxsize=1)(lambda quick: text_encoder(quick=quick))


@functools.lru_cache(maxsize=1)
def parts(sizes: TextSizes) -> ReviewSplits:
    """Training, validation and test texts as tokens."""
    return divide(
        read_reviews(), encoder(sizes.quick), n_validation=sizes.n_validation, n_test=sizes.n_test,
        n_tokens=sizes.tokens,
    )  # fmt: skip


sweep = Sweep(
    "text", "MiniLM on film reviews: norms, head, all parameters, and PEFT.", TextSizes,
    cases=lambda _: [TextCase(name) for name in methods()], lrs=LRS, first_seed=1, trial_seeds=lambda _: (0,),
    width=120,
    made_of=lambda _, sizes: {
        "body": tensors_digest(encoder(sizes.quick).body.state_dict()), "data": parts(sizes).digest()
    },
    columns={
        "accuracy %": percent("accuracy"), "of the gain %": _fraction, "trained": first("n_trained", ","),
        "file": lambda _, __, runs: f"{runs['file_size'].max():,} B",
        "drift": lambda _, __, runs: f"{runs['drift'].max():.1e}", "seconds": mean("seconds", ".0f"),
    },
)  # fmt: skip


@sweep.trial
def validation_accuracy(case: TextCase, run: TrainingRun, sizes: TextSizes) -> float:
    """The accuracy on validation texts; NaN if the training diverges."""
    try:
        tuner, _ = tuned(case, run, sizes)
    except TrainingError:
        return math.nan
    return accuracy(tuner.network, parts(sizes).validation, batch_size=100)


@sweep.measure
def tune_and_test(case: TextCase, run: TrainingRun, sizes: TextSizes) -> Tuned:
    """One method, trained, tested, and saved."""
    try:
        tuner, seconds = tuned(case, run, sizes)
    except TrainingError:
        return Tuned(math.nan, 0, 0, math.nan, math.nan)
    right = accuracy(tuner.network, parts(sizes).test, batch_size=100)
    size, drift, _ = tuners.save_and_reload(tuner)
    return Tuned(right, sum(p.numel() for p in tuner.parameters()), size, drift, seconds)


def tuned(case: TextCase, run: TrainingRun, sizes: TextSizes) -> tuple[tuners.Tuner, float]:
    """The trained classifier, and the seconds of its training."""
    made, given = encoder(sizes.quick), parts(sizes)
    inputs, labels = given.draw(sizes.texts, seed=run.seed)
    with own_randomness(run.seed):
        base = PaddedClassifier(copy.deepcopy(made.body), made.n_features).eval()
    subject = text_task(made, base, inputs, labels, given.test[0][:16])
    tuner = methods()[case.method](subject)
    schedule = Schedule(
        epochs=sizes.epochs, batch_size=sizes.batch_size, optimizer="adamw", lr=run.lr, warmup=0.1, clip=1.0,
        seed=run.seed,
    )  # fmt: skip
    warm_up_training()
    fitted = fit(tuner.network, (inputs, labels), schedule=schedule, accelerator="cpu", on_step=run.on_step)
    return tuner, fitted.seconds


@sweep.facts
def summary(results: Results[TextSizes, TextCase], _: Any) -> dict[str, Any]:
    """The methods with their intervals, those that are not available, and whether the encoder is pretrained."""
    missing = {kind.name for kind in METHODS} - set(methods())
    return {
        "rows": {case.method: asdict(results.spread(case)) for case in results.cases},
        "not_run": dict.fromkeys(sorted(missing), tuners.NOT_INSTALLED),
        "is_trained": encoder(results.sizes.quick).is_trained,
    }


@sweep.goals
def goals(results: Results[TextSizes, TextCase]) -> Iterator[Goal]:
    """Differences are computed for each seed: both methods have the same training texts, head and order."""
    ours = results.of(TextCase(NORMS))
    if ours.empty:
        return
    drift, size = float(ours["drift"].max()), int(ours["file_size"].max())
    yield Goal("a reloaded classifier has bit-identical outputs", f"drift {drift:.1e}", drift == 0.0)
    head, peft = (results.gap(TextCase(NORMS), TextCase(name)) for name in (HEAD, PEFT_LN))
    is_trained = results.facts.get("is_trained", True)
    if head.n and is_trained:
        aim = "norms and head are significantly more accurate than the head alone"
        yield Goal(aim, f"{100 * head.mean:+.2f} ± {100 * head.half:.2f} points", head.low > 0.0)
    if peft.n and is_trained:
        aim = "norms and head are not significantly less accurate than PEFT's LN tuning"
        is_met = -peft.mean <= peft.half <= NARROW
        yield Goal(aim, f"{100 * peft.mean:+.2f} ± {100 * peft.half:.2f} points", is_met)
    full = results.of(TextCase(FULL))
    if not full.empty:
        fraction = size / float(full["file_size"].max())
        aim = f"the adapter is smaller than {100 * SMALL:.0f} % of the file of full fine-tuning"
        yield Goal(aim, f"{size:,} B, {100 * fraction:.3f} %", fraction < SMALL)
