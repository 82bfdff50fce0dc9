"""The shortest whole walk: train a small network, rebuild one layer from random weights by its norms only, compare.

Target layer W x + b of the trained network; source: frozen random `right`, a norm with the chosen gamma, frozen random
`left`, a norm with beta = b. All random numbers come from one seed, so what has to be kept is the seed and the norms.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onlynorm.data import Split, digits, seeded
from onlynorm.errors import MemoryLimitError
from onlynorm.features import Features, draw
from onlynorm.models import mlp
from onlynorm.solvers import Choice, Solution, choose, solve_features
from onlynorm.solvers.memory import memory_limit, readable

Step = Callable[[str], None]


@dataclass(frozen=True)
class Demo:
    """What the demo did and what came out; `choice` is None for structured features, which have a closed form."""

    data: str
    features: Features
    choice: Choice | None
    solution: Solution
    target_accuracy: float
    network_accuracy: float
    agreement: float
    relative_error: float
    digest: str

    @property
    def is_same_function(self) -> bool:
        """Whether both networks agree on every test image, with outputs equal to 1e-8."""
        return self.agreement == 1.0 and self.relative_error <= 1e-8


def run_demo(
    *, seed: int = 0, features: str = "he_normal", excess: float | None = None, step: Step | None = None
) -> Demo:
    """Trains on the digits, rebuilds the first layer, and compares both networks on the test images in float64."""
    say = step or (lambda _: None)
    say("planning: features, conditioning, method")  # first, so that a misspelt name does not wait for the training
    target = mlp((64, 32, 10), seed=seed)
    first = target[0]
    assert isinstance(first, nn.Linear)
    drawn = draw(features, tuple(first.weight.shape), excess=excess, seed=seed, layer="0")
    limit = memory_limit()
    need = 16 * drawn.n_features * (drawn.rows + drawn.cols)
    if need > limit:
        raise MemoryLimitError(
            f"the frozen weights of the system and of the network need {readable(need)}; the limit is "
            f"{readable(limit)}. Take a smaller excess."
        )
    choice = None
    if not drawn.is_structured:
        choice = choose(drawn.rows, drawn.cols, drawn.n_features, memory=limit)

    say("training a 64-32-10 network on the digits")
    data = digits(seed=seed)
    train(target, data, seed=seed).double().eval()

    say("solving for gamma")
    solution = solve_features(drawn, first.weight.detach())

    say("building the network and comparing")
    network = copy.deepcopy(target)
    network[0] = norm_only_linear(drawn, solution, first.bias.detach())
    network.eval()
    inputs = data.test_inputs.double()
    with torch.no_grad():
        wanted, made = target(inputs), network(inputs)
    return Demo(
        data=str(data),
        features=drawn,
        choice=choice,
        solution=solution,
        target_accuracy=_accuracy(wanted, data.test_labels),
        network_accuracy=_accuracy(made, data.test_labels),
        agreement=float((wanted.argmax(1) == made.argmax(1)).double().mean()),
        relative_error=float(torch.linalg.vector_norm(made - wanted) / torch.linalg.vector_norm(wanted)),
        digest=drawn.weights_digest(),
    )


def train(network: nn.Sequential, data: Split, *, seed: int, epochs: int = 40, batch: int = 128) -> nn.Sequential:
    """The network after a short Adam run on the training part."""
    generator = seeded(seed)
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    for _ in range(epochs):
        for chunk in torch.randperm(len(data.train_inputs), generator=generator).split(batch):
            loss = nn.functional.cross_entropy(network(data.train_inputs[chunk]), data.train_labels[chunk])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return network


def norm_only_linear(features: Features, solution: Solution, bias: Tensor) -> nn.Sequential:
    """Frozen linear, norm, frozen linear, norm: real BatchNorm layers whose statistics are those of the identity."""
    first, middle, second, last = (
        nn.Linear(features.cols, features.n_features, bias=False, dtype=torch.float64),
        nn.BatchNorm1d(features.n_features, dtype=torch.float64),
        nn.Linear(features.n_features, features.rows, bias=False, dtype=torch.float64),
        nn.BatchNorm1d(features.rows, dtype=torch.float64),
    )
    with torch.no_grad():
        first.weight.copy_(features.right())
        second.weight.copy_(features.left())
        middle.weight.copy_(solution.gamma)
        if solution.output_gamma is not None:
            last.weight.copy_(solution.output_gamma)
        last.bias.copy_(bias)
        for norm in (middle, last):
            assert norm.running_var is not None
            norm.running_var.fill_(1.0 - norm.eps)  # so that var + eps is one
    for layer in (first, second):
        layer.weight.requires_grad_(False)
    return nn.Sequential(first, middle, second, last)


def _accuracy(outputs: Tensor, labels: Tensor) -> float:
    return float((outputs.argmax(1) == labels).double().mean())
