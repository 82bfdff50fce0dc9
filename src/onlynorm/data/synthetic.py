"""A synthetic task: gaussian inputs, labelled by a random network."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from onlynorm.data.split import Split, seeded
from onlynorm.errors import ValueRangeError

_N_CENTRING = 4096


def teacher(
    widths: Sequence[int] = (64, 64, 10),
    *,
    n_train: int = 4000,
    n_test: int = 1000,
    seed: int = 0,
) -> Split:
    """Gaussian inputs of widths[0] numbers with the labels that a random ReLU network gives them.

    Layers of the teacher go through the widths, the last one being the number of classes, with weights from
    N(0, 2 / inputs). Its outputs are centred by their mean over inputs of its own, so that no class takes all: the
    label is a function of the input alone. The parts share no sample, and a longer part begins as a shorter one.
    """
    if len(widths) < 2 or min(widths) < 1 or widths[-1] < 2 or n_train < 1 or n_test < 1:
        raise ValueRangeError(
            "teacher needs two widths or more, all positive, two classes or more and samples in both parts; got "
            f"{tuple(widths)}, n_train={n_train}, n_test={n_test}. Try (64, 64, 10)."
        )
    source = seeded(seed)
    weights = [
        torch.randn(n_out, n_in, generator=source, dtype=torch.float64) * (2.0 / n_in) ** 0.5
        for n_in, n_out in itertools.pairwise(widths)
    ]

    def outputs(x: torch.Tensor) -> torch.Tensor:
        for weight in weights[:-1]:
            x = torch.relu(x @ weight.mT)
        return x @ weights[-1].mT

    def inputs(n: int, generator: torch.Generator) -> torch.Tensor:
        # In float32 first: the labels belong to the very numbers that are handed out.
        return torch.randn(n, widths[0], generator=generator)

    centre = outputs(inputs(_N_CENTRING, source).double()).mean(0)
    parts = []
    for n, word in zip((n_train, n_test), torch.randint(2**62, (2,), generator=source).tolist(), strict=True):
        made = inputs(n, seeded(word))
        parts += [made, (outputs(made.double()) - centre).argmax(1)]
    return Split("teacher", *parts)
