"""What `diagnose` measures: signals, gradients and their alignment against slow references."""

from __future__ import annotations

import pytest
import torch
from diagnosed import CLASSES, INPUTS, deep, named
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.errors import ValueRangeError
from onlynorm.models import mlp
from onlynorm.rank import as_matrix, cosines, diagnose, rank_ratio, read_signal, soft_rank, unit_scale
from onlynorm.rank.diagnosis.gradients import (
    MAX_SAMPLES,
    cosine_between,
    layer_gradient,
    neuron_alignment,
    noise_like,
    sample_cosine,
)
from onlynorm.rank.diagnosis.probes import LastLayer
from onlynorm.seeds import seeded

EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize("shape", [(20, 12), (6, 30), (5, 4, 3, 3), (3, 40, 2, 2)])
def test_a_signal_is_read_as_the_measures_define_it(shape: tuple[int, ...]) -> None:
    activation = torch.randn(shape, generator=seeded(1)) + 0.3
    found = read_signal(activation, generator=None)
    H = as_matrix(activation)
    assert found.r == pytest.approx(float(rank_ratio(H)), rel=100 * EPS)
    assert found.soft_rank == int(soft_rank(unit_scale(H), 0.5))
    assert found.scale == pytest.approx(float(activation.square().mean().sqrt()), rel=100 * EPS)
    deviation = activation - activation.mean(0)
    assert found.spread == pytest.approx(float(deviation.square().sum() / activation.square().sum()), rel=100 * EPS)
    assert (found.n_units, found.n_columns, found.dead, found.is_finite) == (*H.shape, 0.0, True)


def test_channels_last_are_the_same_signal() -> None:
    activation = torch.randn(4, 6, 5, generator=seeded(2))
    first = read_signal(activation, channels=1, generator=None)
    last = read_signal(activation.mT.contiguous(), channels=-1, generator=None)
    assert last.r == pytest.approx(first.r, rel=100 * EPS)
    assert last.soft_rank == first.soft_rank
    assert (last.n_units, last.n_columns) == (first.n_units, first.n_columns) == (6, 20)


def test_scales_near_the_ends_of_the_numbers_are_read_too() -> None:
    activation = torch.randn(8, 5, generator=seeded(3))
    plain = read_signal(activation, generator=None)
    for factor in (1e30, 1e-30):
        found = read_signal(activation * factor, generator=None)
        assert found.r == pytest.approx(plain.r, rel=100 * EPS)
        assert found.scale == pytest.approx(factor * plain.scale, rel=100 * EPS)


def test_fewer_columns_change_r_by_no_more_than_their_number_explains() -> None:
    mixing = torch.randn(24, 24, generator=seeded(4)) * torch.logspace(0, -1, 24)
    activation = torch.einsum("ij,njp->nip", mixing, torch.randn(8, 24, 4096, generator=seeded(5)))
    whole = read_signal(activation, max_columns=None, generator=None)
    part = read_signal(activation, max_columns=1024, generator=seeded(0))
    assert (whole.n_columns, part.n_columns) == (8 * 4096, 1024)
    assert part.r == pytest.approx(1 / (1 / whole.r + 1 / 1024), rel=3 / 1024**0.5)  # three deviations of a mean
    assert part == read_signal(activation, max_columns=1024, generator=seeded(0))


def test_dead_units_are_those_that_are_zero_for_every_sample_and_position() -> None:
    activation = torch.relu(torch.randn(6, 8, 5, 5, generator=seeded(6)))
    activation[:, [1, 4]] = 0.0
    assert read_signal(activation, generator=None).dead == 0.25
    assert read_signal(torch.zeros(4, 3), generator=None).dead == 1.0


def test_one_column_is_refused() -> None:
    with pytest.raises(ValueRangeError, match=r"max_columns .* from 2; got 1"):
        read_signal(torch.ones(3, 3), max_columns=1, generator=None)


def test_every_layer_of_a_plain_network_is_read_in_its_order() -> None:
    network = mlp((64, 16, 12, 10), norm="batch")
    found = diagnose(network, INPUTS, CLASSES)
    assert [(layer.label, layer.kind, layer.depth) for layer in found.layers] == [
        ("input", "input", 0),
        ("0", "Linear", 1), ("1", "batch norm", 1), ("2", "ReLU", 1),
        ("3", "Linear", 2), ("4", "batch norm", 2), ("5", "ReLU", 2),
        ("6", "Linear", 3),
    ]  # fmt: skip
    assert [layer.label for layer in found.layers if layer.is_layer_input] == ["input", "2", "5"]
    hidden = network.train()[:4](INPUTS)
    assert named(found)["3"].r == pytest.approx(float(rank_ratio(as_matrix(hidden.detach()))), rel=1e-4)


def test_gradients_are_those_of_a_backward_pass() -> None:
    network = mlp((64, 16, 10), norm="batch").train()
    found = named(diagnose(network, INPUTS, CLASSES))
    hidden = network[0](INPUTS)
    hidden.retain_grad()
    loss = functional.cross_entropy(network[1:](hidden), CLASSES)
    loss.backward()
    for name, layer in network.named_children():
        norms = [float(p.grad.norm()) for p in layer.parameters() if p.grad is not None]
        expected = None if not norms else pytest.approx(sum(n * n for n in norms) ** 0.5, rel=1e-4)
        assert found[name].gradient == expected
    assert hidden.grad is not None
    assert found["0"].signal_gradient == pytest.approx(float(hidden.grad.norm()), rel=1e-4)
    assert found["input"].signal_gradient is None


def loop_over_samples(network: nn.Module, layer: nn.Linear, inputs: Tensor, classes: Tensor) -> Tensor:
    """The gradient of the layer's weights for each sample by itself, flattened."""
    gradients = []
    for x, y in zip(inputs, classes, strict=True):
        loss = functional.cross_entropy(network(x[None]), y[None])
        gradients.append(torch.autograd.grad(loss, layer.weight)[0])
    return torch.stack(gradients).double()


def test_the_alignment_is_that_of_per_sample_gradients_one_by_one() -> None:
    network = deep(depth=4, width=24)
    found = diagnose(network, INPUTS[:20], CLASSES[:20])
    gradients = loop_over_samples(network, network[-1], INPUTS[:20], CLASSES[:20])
    whole = cosines(gradients.flatten(1).mT)
    assert found.sample_cosine == pytest.approx(float(whole.mean), abs=1e-5)
    for neuron in (0, 7):
        lines = cosines(gradients[:, neuron].mT)
        assert found.alignment == pytest.approx(float(lines.mean_absolute), abs=1e-5)


def test_with_positions_the_gradient_of_a_sample_is_the_sum_over_them() -> None:
    h, delta = torch.randn(5, 3, 4, generator=seeded(7)), torch.randn(5, 3, 2, generator=seeded(8))
    formed = torch.einsum("npo,npi->noi", delta, h).flatten(1)
    assert sample_cosine(LastLayer("x", h, delta)) == pytest.approx(float(cosines(formed.mT).mean), abs=1e-5)


def test_many_samples_are_thinned_out() -> None:
    n = 2 * MAX_SAMPLES + 1
    h = torch.ones(n, 1, 2)
    h[1::3] = -1.0  # every kept sample is the same up to its sign
    assert neuron_alignment(LastLayer("x", h, torch.ones(n, 1, 1))) == pytest.approx(1.0)


def test_the_gradient_on_random_inputs_is_compared_with_a_full_backward_pass() -> None:
    network = deep(depth=3, width=24)
    found = diagnose(network, INPUTS, CLASSES, seed=3)
    gradients = []
    for batch in (INPUTS, noise_like(INPUTS, seed=3)):
        gradients.append(torch.autograd.grad(functional.cross_entropy(network(batch), CLASSES), network[-1].weight)[0])
    expected = functional.cosine_similarity(gradients[0].flatten(), gradients[1].flatten(), dim=0)
    assert found.input_cosine == pytest.approx(float(expected), abs=1e-5)


def test_meaningless_inputs_have_the_same_mean_and_deviation_and_the_same_tokens() -> None:
    inputs = {"x": 5 + 3 * torch.randn(200, 50, generator=seeded(0)), "ids": torch.tensor([[3, 7], [7, 7]]), "p": 0.5}
    made = noise_like(inputs, seed=1)
    assert float(made["x"].mean()) == pytest.approx(float(inputs["x"].mean()), abs=5 * 3 / 100)  # five deviations
    assert float(made["x"].std()) == pytest.approx(float(inputs["x"].std()), rel=5 / 140)
    assert not torch.equal(made["x"], inputs["x"])
    assert set(made["ids"].flatten().tolist()) <= {3, 7}
    assert made["p"] == 0.5
    drawn = torch.randn(1000, generator=seeded(0))
    assert abs(cosine_between(noise_like(drawn, seed=0), drawn)) < 5 / 1000**0.5  # nobody is compared with itself


def test_directions_survive_numbers_whose_squares_do_not() -> None:
    a, b = torch.tensor([[1e-30, 2e-30]]), torch.tensor([[2e25, 4e25]])
    assert cosine_between(a, b) == pytest.approx(1.0)
    assert torch.isfinite(layer_gradient(LastLayer("x", a[:, None], b[:, None]))).all()
