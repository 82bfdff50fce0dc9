"""Reference networks: their shapes, their seeds, and that building one spends nobody else's random numbers."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from onlynorm.errors import ShapeError, ValueRangeError
from onlynorm.models import mlp


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.integers(0, 2**64 - 1))
def test_an_mlp_walks_through_its_widths_with_activations_in_between(widths: list[int], seed: int) -> None:
    network = mlp(widths, seed=seed)
    linears, activations = list(network)[::2], list(network)[1::2]
    assert [(layer.in_features, layer.out_features) for layer in linears] == list(itertools.pairwise(widths))
    assert len(activations) == len(linears) - 1
    assert all(isinstance(layer, nn.ReLU) for layer in activations)
    assert network(torch.ones(4, widths[0])).shape == (4, widths[-1])


def test_the_activation_is_the_one_that_was_asked_for() -> None:
    network = mlp((3, 4, 5, 2), activation=nn.Tanh)
    assert [type(layer) for layer in network] == [nn.Linear, nn.Tanh, nn.Linear, nn.Tanh, nn.Linear]
    assert network[1] is not network[3]


def test_equal_seeds_give_equal_networks_and_different_seeds_do_not() -> None:
    first, again, other = (mlp((6, 5, 4), seed=seed) for seed in (1, 1, 2))
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
        assert not torch.equal(weight, other.state_dict()[name])


def test_the_weights_are_those_torch_gives_at_this_seed() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        reference = nn.Linear(6, 5)
    assert torch.equal(mlp((6, 5), seed=11)[0].weight, reference.weight)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    mlp((6, 5, 4), seed=9)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_generators_of_gpus_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(seed: int) -> None:
        raise AssertionError(f"torch.manual_seed({seed}) seeds every device")

    monkeypatch.setattr(torch, "manual_seed", refuse)
    mlp((6, 5, 4), seed=9)


@pytest.mark.parametrize("widths", [(), (3,), (3, 0), (0, 3), (3, -1, 2)])
def test_widths_that_make_no_network_are_refused(widths: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"mlp needs at least two widths, all positive; got .*Try \(64, 32, 10\)"):
        mlp(widths)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_that_is_no_word_of_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(ValueRangeError, match=r"seed needs a whole number in \[0, 2\^64\); got "):
        mlp((3, 2), seed=seed)
