"""Figures of daneshmand2020 on real images: the rank at initialization decides whether a network learns.

The rank is r(H) of the last hidden layer, where H is the input of its activation with one column per position and
image, or the input of the classifier if the activation is not a module. The alignment is the mean of |cos| over all
pairs of images of the inputs of the classifier, which equal the gradients of its neurons up to signs. Accuracies are
measured on training images in training mode, with the statistics of the batch.

Theory: daneshmand2020:prop-8
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

import onlynorm as on
from onlynorm.data import Split, cifar10, fashion_mnist
from onlynorm.display import Curve, Panel, Table
from onlynorm.errors import TrainingError
from onlynorm.evidence.harness import Spread
from onlynorm.evidence.papers.reproduce import Outcome, Run
from onlynorm.models import mlp, resnet, vgg
from onlynorm.rank import as_matrix, cosines, rank_ratio, repair
from onlynorm.seeds import seeded

_DATA: dict[str, Callable[[], Split]] = {"CIFAR-10": cifar10, "Fashion-MNIST": fashion_mnist}
_N_WATCHED = 256
"""Images on which rank, alignment and accuracy are measured, in one batch."""
_VGG19 = ((1, 1), (2, 2), (4, 4, 4, 4), (8, 8, 8, 8), (8, 8, 8, 8))
_N_CLASSES = 10


def best_rate(*, rates: Sequence[float], seed: int, **settings: Any) -> float:
    """The learning rate with the highest final training accuracy, selected with a separate seed."""
    found = {rate: train(rate=rate, seed=seed, **settings)["accuracy"][-1] for rate in rates}
    return max(found, key=lambda rate: found[rate])


def train(
    *, network: Mapping[str, Any], data: str, n_train: int, n_epochs: int, n_evaluations: int, batch_size: int,
    rate: float, seed: int, noise: bool = False, pretraining: int = 0,
) -> dict[str, list[float]]:  # fmt: skip
    """Measurements at evenly spaced steps of training by SGD with a constant learning rate, including step 0.

    With `noise`, images are replaced by uniform noise in the range of the pixels; labels stay the same. `pretraining`
    is the number of steps of the paper's gradient ascent on the rank of each layer before training. Training stops if
    the loss is NaN or infinite: loss and accuracy are then those of chance, the others those of the last measurement.
    """
    inputs, labels = _training_images(data, n_train, noise, seed)
    made = build(seed=seed, inputs=inputs, **network)
    observed = inputs[:_N_WATCHED], labels[:_N_WATCHED]
    if pretraining:
        made = repair(made, observed[0], method="paper", n_steps=pretraining, seed=seed).model
    history: list[dict[str, float]] = [{"step": 0, **observe(made, *observed)}]

    def evaluate(step: int, n_steps: int, _: float) -> None:
        if step * n_evaluations // n_steps > (step - 1) * n_evaluations // n_steps:
            history.append({"step": step, **observe(made, *observed)})

    schedule = on.Schedule(
        epochs=n_epochs, batch_size=batch_size, lr=rate, momentum=0.0, warmup=0.0, drops=(), seed=seed
    )
    try:
        on.fit(made, (inputs, labels), schedule=schedule, on_step=evaluate, accelerator="cpu")
    except TrainingError:
        n_steps = n_epochs * -(-n_train // batch_size)
        guess = {**history[-1], "loss": math.log(_N_CLASSES), "accuracy": 100.0 / _N_CLASSES}
        missing = range(len(history), n_evaluations + 1)
        history += [{**guess, "step": i * n_steps // n_evaluations} for i in missing]
    return {name: [one[name] for one in history] for name in history[0]}


def build(
    *,
    kind: str,
    seed: int,
    inputs: Tensor,
    norm: str = "none",
    init: str = "standard",
    depth: int = 32,
    width: int = 128,
) -> nn.Module:
    """The network of this kind for these inputs: an MLP of this depth, or a VGG-19 or ResNet-50 of this first width.

    The norm "meanless" is a batch norm without mean subtraction.
    """
    is_meanless = norm == "meanless"
    norm = "batch" if is_meanless else norm
    if kind == "mlp":
        widths = [inputs[0].numel(), *[width] * depth, _N_CLASSES]
        made: nn.Module = nn.Sequential(nn.Flatten(), *mlp(widths, norm=norm, init=init, seed=seed))
    elif kind == "vgg":
        stages = [[width * times for times in stage] for stage in _VGG19]
        made = vgg(stages, norm=norm, init=init, in_channels=inputs.shape[1], image_size=inputs.shape[2], seed=seed)
    else:
        made = resnet(
            50, n_classes=_N_CLASSES, width=width, in_channels=inputs.shape[1], norm=norm, init=init, seed=seed
        )
    return without_means(made) if is_meanless else made


class MeanlessBatchNorm2d(nn.Module):
    """Batch norm without mean subtraction: channels over their root mean square, then scaled and shifted."""

    def __init__(self, n_channels: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(n_channels)), nn.Parameter(torch.zeros(n_channels))
        self.eps = eps

    def forward(self, x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
        """The normalised batch; running statistics are not stored."""
        scale = self.weight * (x.square().mean((0, 2, 3)) + self.eps).rsqrt()
        return x * scale[:, None, None] + self.bias[:, None, None]


def without_means(network: nn.Module) -> nn.Module:
    """The network with every BatchNorm2d replaced in place by one without mean subtraction."""
    for name, module in list(network.named_children()):
        if isinstance(module, nn.BatchNorm2d):
            setattr(network, name, MeanlessBatchNorm2d(module.num_features, eps=module.eps))
        else:
            without_means(module)
    return network


@torch.no_grad()
def observe(network: nn.Module, images: Tensor, labels: Tensor) -> dict[str, float]:
    """Loss, accuracy, rank and alignment on these images; running statistics are updated as in training."""
    modules = list(network.modules())
    classifier = next(m for m in reversed(modules) if isinstance(m, nn.Linear))
    activation = next((m for m in reversed(modules) if isinstance(m, nn.ReLU)), None)
    caught: dict[str, Tensor] = {}
    handles = [classifier.register_forward_pre_hook(lambda _, args: caught.update(features=args[0].clone()))]
    if activation is not None:
        handles.append(activation.register_forward_pre_hook(lambda _, args: caught.update(hidden=args[0].clone())))
    try:
        logits = network.train()(images)
    finally:
        for handle in handles:
            handle.remove()
    features = caught["features"]
    hidden = caught.get("hidden", features)
    return {
        "loss": float(functional.cross_entropy(logits, labels)),
        "accuracy": 100.0 * float((logits.argmax(1) == labels).double().mean()),
        "rank": float(rank_ratio(as_matrix(hidden))) if _has_rank(hidden) else math.nan,
        "alignment": float(cosines(features.T).mean_absolute) if _has_rank(features) else math.nan,
    }


def _has_rank(signal: Tensor) -> bool:
    return bool(torch.isfinite(signal).all() and signal.any())


@functools.lru_cache(maxsize=2)
def _training_images(data: str, n_train: int, noise: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Training images selected by the seed, and their labels."""
    split = _split(data)
    generator = seeded(seed)
    chosen = torch.randperm(len(split.train_inputs), generator=generator)[:n_train]
    inputs, labels = split.train_inputs[chosen], split.train_labels[chosen]
    if noise:
        low, high = inputs.aminmax()
        inputs = low + (high - low) * torch.rand(inputs.shape, generator=generator)
    return inputs, labels


@functools.lru_cache(maxsize=1)
def _split(data: str) -> Split:
    return _DATA[data]()


History = Mapping[str, Sequence[float]]
Row = list[float | str]
PILOT = 1_000
"""The seed for the selection of learning rates; it is not used for results."""
WORDS = {"none": "no norms", "batch": "batch norms"}


def figure_5(run: Run) -> Outcome:
    """Training accuracy and rank at initialization against the depth of MLPs. Theory: daneshmand2020:thm-3"""
    depths, training = run.sizes["depths"], run.sizes["training"]
    run.announce(2 * len(depths) * (1 + len(run.seeds)))
    curves: list[Curve] = []
    rows: list[Row] = []
    last = {}
    for norm, word in WORDS.items():
        accuracies, ranks = [], []
        for depth in depths:
            network = {"kind": "mlp", "norm": norm, "depth": depth, "width": run.sizes["width"]}
            rate = run.piece(f"rate {norm} depth={depth}", best_rate, rates=run.sizes["rates"], seed=PILOT,
                             network=network, **training)  # fmt: skip
            histories = _trained(run, f"{norm} depth={depth}", network=network, rate=rate)
            accuracies.append(Spread.of([one["accuracy"][-1] for one in histories]))
            ranks.append(Spread.of([one["rank"][0] for one in histories]))
            rows.append([word, depth, rate, *_cells(accuracies[-1]), *_cells(ranks[-1])])
        for panel, spreads in (("accuracy", accuracies), ("rank", ranks)):
            curves.append(Curve(word, depths, [one.mean for one in spreads], kind="line+points", panel=panel))
        last[norm] = accuracies[-1].mean, ranks[-1].mean, max(one.mean for one in accuracies)
    values = {
        "no norms, deepest: training accuracy, %": last["none"][0],
        "batch norms, deepest: training accuracy, %": last["batch"][0],
        "batch norms: accuracy loss from the best depth to the largest, points": last["batch"][2] - last["batch"][0],
        "no norms, deepest: r at the start": last["none"][1],
        "batch norms, deepest: r at the start": last["batch"][1],
    }
    panels = (
        Panel("accuracy", "After training", "hidden layers", "training accuracy, %", x_log=True),
        Panel("rank", "At initialization", "hidden layers", "r of the last hidden layer", x_log=True, y_log=True),
    )
    columns = ["", "depth", "learning rate", "accuracy, %", "95 % +-", "r at the start", "95 % +-"]
    return Outcome(values=values, curves=curves, panels=panels, table=Table(columns, rows))


def figure_6(run: Run) -> Outcome:
    """Deep MLPs whose rank was raised before training, compared with batch norms with standard and positive weights.

    Theory: daneshmand2020:lemma-1
    """
    few, many = run.sizes["pretraining"]
    raised = {steps: f"no norms, {steps} steps of gradient ascent on the rank" for steps in (few, many)}
    methods: dict[str, dict[str, Any]] = {
        "no norms": {}, raised[few]: {"pretraining": few}, raised[many]: {"pretraining": many},
        "batch norms": {"norm": "batch"}, "batch norms, positive weights": {"norm": "batch", "init": "asymmetric"},
    }  # fmt: skip
    run.announce(len(methods) * (1 + len(run.seeds)))
    curves: list[Curve] = []
    rows: list[Row] = []
    ends, starts = {}, {}
    for word, method in methods.items():
        shape = {"kind": "mlp", "depth": run.sizes["depth"], "width": run.sizes["width"]}
        network = {**shape, **{name: value for name, value in method.items() if name != "pretraining"}}
        settings = {"network": network, **({"pretraining": method["pretraining"]} if "pretraining" in method else {})}
        rate = run.piece(f"rate, {word}", best_rate, rates=run.sizes["rates"], seed=PILOT, **settings,
                         **run.sizes["training"])  # fmt: skip
        histories = _trained(run, word, rate=rate, **settings)
        curves += _mean_curves(histories, {"accuracy": "accuracy", "rank": "rank"}, label=word)
        ends[word], starts[word] = (
            Spread.of([one[k][at] for one in histories]) for k, at in (("accuracy", -1), ("rank", 0))
        )
        rows.append([word, rate, *_cells(ends[word]), *_cells(starts[word])])
    better = max(raised.values(), key=lambda word: ends[word].mean)
    values = {
        "no norms: training accuracy, %": ends["no norms"].mean,
        "rank raised, the better of the two: training accuracy, %": ends[better].mean,
        "batch norms: training accuracy, %": ends["batch norms"].mean,
        "batch norms minus batch norms with positive weights, points": ends["batch norms"].mean
        - ends["batch norms, positive weights"].mean,
        "rank raised: r at the start over r without, smallest": min(starts[word].mean for word in raised.values())
        / starts["no norms"].mean,
    }
    panels = (
        Panel("accuracy", f"Depth {run.sizes['depth']}", "step", "training accuracy, %"),
        Panel("rank", f"Depth {run.sizes['depth']}", "step", "r of the last hidden layer", y_log=True),
    )
    columns = ["", "learning rate", "accuracy, %", "95 % +-", "r at the start", "95 % +-"]
    return Outcome(values=values, curves=curves, panels=panels, table=Table(columns, rows))


def figure_7(run: Run) -> Outcome:
    """A VGG-19 and a ResNet-50 with batch norms, with standard and with positive initial weights.

    Theory: daneshmand2020:lemma-6
    """
    kinds, inits = {"vgg": "VGG-19", "resnet": "ResNet-50"}, ("standard", "asymmetric")
    run.announce(len(kinds) * len(inits) * len(run.seeds))
    curves: list[Curve] = []
    rows: list[Row] = []
    values: dict[str, float] = {}
    for kind, name in kinds.items():
        ends = {}
        for init in inits:
            network = {"kind": kind, "norm": "batch", "init": init, "width": run.sizes["width"]}
            histories = _trained(run, f"{kind} {init}", network=network, rate=run.sizes["rate"])
            curves += _mean_curves(histories, {"accuracy": f"{kind} accuracy", "rank": f"{kind} rank"}, label=init)
            ends[init] = (
                Spread.of([one["accuracy"][-1] for one in histories]),
                Spread.of([one["rank"][0] for one in histories]),
            )
            rows.append([name, init, *_cells(ends[init][0]), *_cells(ends[init][1])])
        values |= {
            f"{name}: accuracy gain by standard weights, points": ends["standard"][0].mean - ends["asymmetric"][0].mean,
            f"{name}: accuracy with positive weights, %": ends["asymmetric"][0].mean,
            f"{name}: r at the start with positive weights": ends["asymmetric"][1].mean,
            f"{name}: r at the start, standard over positive": ends["standard"][1].mean / ends["asymmetric"][1].mean,
        }
    panels = [
        panel
        for kind, name in kinds.items()
        for panel in (
            Panel(f"{kind} accuracy", name, "step", "training accuracy, %"),
            Panel(f"{kind} rank", name, "step", "r of the last hidden layer", y_log=True),
        )
    ]
    columns = ["", "initialization", "accuracy, %", "95 % +-", "r at the start", "95 % +-"]
    return Outcome(values=values, curves=curves, panels=panels, table=Table(columns, rows))


def figure_8(run: Run) -> Outcome:
    """A VGG-19 with and without batch norms, at 100 times the learning rate, and on noise.

    Theory: daneshmand2020:prop-8
    """
    rate = run.sizes["rate"]
    methods: dict[str, dict[str, Any]] = {
        "batch norms": {"norm": "batch"}, "no norms": {}, "no norms, 100 times the learning rate": {"rate": 100 * rate},
        "no norms, noise instead of images": {"noise": True},
    }  # fmt: skip
    run.announce(len(methods) * len(run.seeds))
    curves: list[Curve] = []
    rows: list[Row] = []
    found: dict[str, list[History]] = {}
    for word, method in methods.items():
        network = {"kind": "vgg", "norm": method.get("norm", "none"), "width": run.sizes["width"]}
        more = {"noise": True} if "noise" in method else {}
        found[word] = histories = _trained(run, word, network=network, rate=method.get("rate", rate), **more)
        curves += _mean_curves(histories, {"loss": "loss", "alignment": "alignment"}, label=word)
        accuracy, alignment = (
            Spread.of([one[name][at] for one in histories]) for name, at in (("accuracy", -1), ("alignment", 0))
        )
        rows.append([word, *_cells(accuracy), *_cells(alignment)])
    plain, noisy = (found[word] for word in ("no norms", "no norms, noise instead of images"))
    apart = max(abs(a - b) for one, other in zip(plain, noisy, strict=True)
                for a, b in zip(one["loss"], other["loss"], strict=True))  # fmt: skip
    ends = {word: Spread.of([one["accuracy"][-1] for one in histories]).mean for word, histories in found.items()}
    values = {
        "batch norms: training accuracy, %": ends["batch norms"],
        "no norms: training accuracy, %": ends["no norms"],
        "no norms, 100 times the learning rate: training accuracy, %": ends["no norms, 100 times the learning rate"],
        "no norms: alignment of gradients at the start": Spread.of([one["alignment"][0] for one in plain]).mean,
        "batch norms: alignment of gradients at the start": Spread.of(
            [one["alignment"][0] for one in found["batch norms"]]
        ).mean,
        "no norms: loss on images minus loss on noise, largest": apart,
    }
    panels = (
        Panel("loss", "Images and noise", "step", "training loss"),
        Panel("alignment", "The last layer", "step", "mean |cos| of gradients"),
    )
    columns = ["", "accuracy, %", "95 % +-", "alignment at the start", "95 % +-"]
    return Outcome(values=values, curves=curves, panels=panels, table=Table(columns, rows))


def figure_11(run: Run) -> Outcome:
    """A VGG-19 whose batch norms subtract the mean, and one whose do not. Theory: daneshmand2020:thm-3"""
    words = {"batch": "mean subtracted", "meanless": "mean not subtracted"}
    run.announce(len(words) * len(run.seeds))
    curves: list[Curve] = []
    rows: list[Row] = []
    accuracies, ranks = {}, {}
    for norm, word in words.items():
        network = {"kind": "vgg", "norm": norm, "width": run.sizes["width"]}
        histories = _trained(run, word, network=network, rate=run.sizes["rate"])
        curves += _mean_curves(histories, {"accuracy": "accuracy", "rank": "rank"}, label=word)
        accuracies[norm] = Spread.of([one["accuracy"][-1] for one in histories])
        ranks[norm] = Spread.of([one["rank"][-1] for one in histories])
        rows.append([word, *_cells(accuracies[norm]), *_cells(ranks[norm])])
    values = {
        "accuracy with minus without mean subtraction, points": accuracies["batch"].mean - accuracies["meanless"].mean,
        "r after training, with over without mean subtraction": ranks["batch"].mean / ranks["meanless"].mean,
        "r after training without mean subtraction": ranks["meanless"].mean,
    }
    panels = (
        Panel("accuracy", "VGG-19", "step", "training accuracy, %"),
        Panel("rank", "VGG-19", "step", "r of the last hidden layer"),
    )
    columns = ["", "accuracy, %", "95 % +-", "r after training", "95 % +-"]
    return Outcome(values=values, curves=curves, panels=panels, table=Table(columns, rows))


def _trained(run: Run, name: str, **settings: Any) -> list[History]:
    """The measurements during one training per seed."""
    return [
        run.piece(f"{name} seed={seed}", train, seed=seed, **settings, **run.sizes["training"]) for seed in run.seeds
    ]


def _mean_curves(histories: Sequence[History], panels: Mapping[str, str], *, label: str) -> list[Curve]:
    """The mean over seeds of each quantity during training, one curve per panel; NaN and infinity are left out."""
    curves = []
    for name, panel in panels.items():
        means = [Spread.of(values).mean for values in zip(*(one[name] for one in histories), strict=True)]
        finite = [(step, mean) for step, mean in zip(histories[0]["step"], means, strict=True) if math.isfinite(mean)]
        curves.append(Curve(label, [step for step, _ in finite], [mean for _, mean in finite], panel=panel))
    return curves


def _cells(spread: Spread) -> list[float]:
    return [spread.mean, spread.half]
