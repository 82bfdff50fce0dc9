"""Deep networks as they are, with batch norms, and after a repair: accuracy and rank over depth.

Writes depth.svg, and depth_phone.svg with the panels below each other. Every method and depth has its own learning
rate, selected on validation images with another seed.
"""

from collections.abc import Sequence
from statistics import pstdev

import onlynorm as on
from onlynorm.data import digits
from onlynorm.display import Curve, Figure, Panel
from onlynorm.errors import TrainingError
from onlynorm.models import mlp
from onlynorm.tuning import accuracy

WIDTH, EPOCHS = 64, 10
RATES = (0.003, 0.01, 0.03, 0.1)
KINDS = ("as it is", "batch norm", "repaired")
data = digits()
inputs, labels = data.train
training, validation = (inputs[:1150], labels[:1150]), (inputs[1150:], labels[1150:])


def make(kind: str, depth: int, seed: int):
    """A ReLU network with `depth` hidden layers."""
    model = mlp((64, *[WIDTH] * depth, 10), norm="batch" if kind == "batch norm" else "none", seed=seed)
    return on.repair(model, *training, seed=seed).model if kind == "repaired" else model


def train(kind: str, depth: int, lr: float, seed: int, test) -> float:
    """The accuracy in percent after training; 0 if it diverges."""
    model = make(kind, depth, seed)
    try:
        on.fit(model, training, schedule=on.Schedule(epochs=EPOCHS, lr=lr, seed=seed))
    except TrainingError:
        return 0.0
    return 100 * accuracy(model, test)


def draw(depths: Sequence[int] = (4, 8, 16, 32, 64), n_seeds: int = 3, rates: Sequence[float] = RATES) -> Figure:
    """Mean test accuracy with its standard error, and the rank of the signals in the deepest network but one."""
    curves = []
    for kind in KINDS:
        means, errors = [], []
        for depth in depths:
            lr = max(rates, key=lambda lr, depth=depth: train(kind, depth, lr, 100, validation))
            found = [train(kind, depth, lr, seed, data.test) for seed in range(n_seeds)]
            means.append(sum(found) / n_seeds)
            errors.append(pstdev(found) / max(n_seeds - 1, 1) ** 0.5)
            print(f"{depth} layers, {kind}, learning rate {lr}: {means[-1]:.1f} %", flush=True)
        curves.append(Curve(kind, depths, means, "line+points", "accuracy", y_error=errors))
    depth = depths[-2]
    for kind in KINDS:
        layers = on.diagnose(make(kind, depth, 0), *training).weighted_layers
        curves.append(Curve(kind, [layer.depth for layer in layers], [layer.r for layer in layers], panel="rank"))
    return Figure(
        curves,
        (
            Panel("accuracy", f"Accuracy after {EPOCHS} epochs of SGD", "hidden layers", "test images, %", x_log=True),
            Panel("rank", f"Rank of the signal before training, {depth} layers", "layer", "rank ratio", y_log=True),
        ),
    )


if __name__ == "__main__":
    figure = draw()
    figure.save("depth.svg")
    figure.save("depth_phone.svg", n_columns=1)
