"""A synthetic task: gaussian inputs, labelled by a random network."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from onlynorm.data.split import Split
from onlynorm.errors import ValueRangeError
from onlynorm.seeds import seeded
from onlynorm.validate import need_free_memory, need_integer, need_sizes

_N_CENTRING = 4096


def teacher(
    widths: Sequence[int] = (64, 64, 10),
    *,
    n_train: int = 4000,
    n_test: int = 1000,
    seed: int = 0,
) -> Split:
    """Gaussian inputs with widths[0] features, labelled by a random ReLU network.

    `widths` are the layer widths of the teacher, the last one the number of classes; its weights are N(0, 2 / fan in).
    Its outputs are centred by their mean over separate inputs, so that classes are balanced and a label depends on its
    input only. Train and test set are disjoint, and a larger set starts with the samples of a smaller one.

    Examples:
        >>> from onlynorm.data import teacher
        >>> data = teacher((8, 16, 3), n_train=100, n_test=20)
        >>> data.train_inputs.shape, data.test_labels.shape
        (torch.Size([100, 8]), torch.Size([20]))
    """
    cure = "Pass widths such as (64, 64, 10)."
    widths = need_sizes("widths", widths, n_least=2, cure=cure)
    n_train = need_integer("n_train", n_train, low=1, cure="Pass the number of samples, such as 4000.")
    n_test = need_integer("n_test", n_test, low=1, cure="Pass the number of samples, such as 1000.")
    entries = (n_train + n_test) * max(widths) + sum(one * two for one, two in itertools.pairwise(widths))
    need_free_memory("teacher", 8.0 * entries, cure="Use fewer samples, or smaller widths.")
    if widths[-1] < 2:
        raise ValueRangeError(f"teacher needs at least two widths and two classes; got {widths}. {cure}")
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
        # In float32, so that labels are computed from the returned inputs.
        return torch.randn(n, widths[0], generator=generator)

    centre = outputs(inputs(_N_CENTRING, source).double()).mean(0)
    parts = []
    for n, word in zip((n_train, n_test), torch.randint(2**62, (2,), generator=source).tolist(), strict=True):
        made = inputs(n, seeded(word))
        parts += [made, (outputs(made.double()) - centre).argmax(1)]
    return Split("teacher", *parts)
