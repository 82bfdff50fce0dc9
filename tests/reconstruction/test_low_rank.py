"""Four frozen layers for a target of low rank: found, given, too small, and the same function in one layer again."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rebuilding import reconstruct_with, split_options
from tensors import normal
from torch import Tensor, nn

from onlynorm import LowRank, Ranges
from onlynorm.errors import ToleranceError, ValueRangeError
from onlynorm.frozen.form import find_blocks
from onlynorm.frozen.pair import LowRankBlock
from onlynorm.intervals.tensor import Box
from onlynorm.models import mlp
from onlynorm.modules import find_layers
from onlynorm.modules.layers import layer_options
from onlynorm.reconstruction import Settings, collapse, reconstruct, verify
from onlynorm.reconstruction.constructions.low_rank import estimate, factorise

EXACT = 1e-9
"""The solver leaves 1e-10 per layer; a few layers and their shifts may add up to ten times that."""

LAYERS = {
    "linear": lambda: nn.Linear(6, 7),
    "conv1d": lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1),
    "mixed": lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2),
    "reflect": lambda: nn.Conv2d(2, 4, 3, padding="same", padding_mode="reflect", bias=False),
    "conv3d": lambda: nn.Conv3d(2, 3, 2, padding=1, padding_mode="circular"),
}
CHOICES: dict[str, dict[str, Any]] = {
    "relu": {},
    "linear": {"activation": None},
    "minimum": {"width": "minimum"},
    "larger": {"source_kernel": 4},
}


def layer_of_rank(name: str, rank: int) -> tuple[nn.Sequential, Tensor]:
    layer = LAYERS[name]().double()
    groups, (n_out, n_in), kernel = getattr(layer, "groups", 1), layer.weight.shape[:2], layer.weight.shape[2:]
    left, right = normal(groups, n_out // groups, rank), normal(groups, rank, layer.weight[0].numel(), seed=1)
    layer.weight = nn.Parameter((left @ right).reshape(n_out, n_in, *kernel))
    return nn.Sequential(layer).eval(), normal(5, n_in * groups, *(6,) * len(kernel), seed=2)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
def test_a_layer_of_rank_two_is_rebuilt(name: str, choices: dict[str, Any]) -> None:
    network, inputs = layer_of_rank(name, 2)
    choices = {"activation": nn.ReLU(), **choices}
    made = reconstruct_with(network, inputs, construction="low_rank", **choices)
    check = verify(network, made.network, inputs)
    assert check.relative_error <= EXACT
    assert check.is_reproducible
    assert check.outside == 0.0
    block = made.network[0]
    assert isinstance(block, LowRankBlock)
    assert {one.shape[0] for one in block.first.features} == {2}
    assert made.layers[0].residual <= EXACT
    assert made.layers[0].shortfall == ""

    plain = collapse(made.network)
    assert type(plain[0]) is type(network[0])
    assert verify(network, plain, inputs).relative_error <= EXACT
    if "source_kernel" not in choices:
        assert layer_options(plain[0]) == layer_options(network[0])

    construction, _ = split_options(construction="low_rank", rank=2, **choices)
    costs = estimate(find_layers(network).layers[0], construction, Settings())
    assert costs.n_features == block.n_features
    assert costs.n_norm_parameters == made.n_norm_parameters == sum(p.numel() for p in block.parameters())
    assert costs.n_frozen == sum(one.n_frozen for one in block.sources())

    for storage in ("dense", "seed"):
        words = json.loads(json.dumps(block.settings()))
        again = LowRankBlock.from_settings(words, activation=choices["activation"], storage=storage)
        again.load_state_dict(block.state_dict())
        assert torch.equal(again(inputs), block(inputs))


@given(st.lists(st.integers(1, 8), min_size=2, max_size=4), st.integers(0, 2**32), st.sampled_from([None, nn.ReLU()]))
@settings(max_examples=10)
def test_an_mlp_of_any_widths_is_rebuilt(widths: list[int], seed: int, activation: nn.Module | None) -> None:
    network, inputs = mlp(widths, seed=seed % 1000).double().eval(), normal(20, widths[0])
    made = reconstruct(network, inputs, LowRank(activation=activation), seed=seed)
    assert verify(network, made.network, inputs).relative_error <= EXACT


def test_features_are_of_the_order_of_width_times_rank() -> None:
    network = nn.Sequential(nn.Linear(30, 30, bias=False)).double()
    with torch.no_grad():
        network[0].weight.copy_(normal(30, 3) @ normal(3, 30, seed=1))
    made = reconstruct(network, normal(40, 30), LowRank(excess=1.25), tolerance=1e-9)
    assert made.network[0].n_features == 2 * 113  # 1.25 * 90, rounded up, per factor
    construction, _ = split_options(construction="low_rank", rank=3)
    costs = estimate(find_layers(network).layers[0], construction, Settings())
    assert costs.n_features == made.network[0].n_features
    assert "rank 3; the wide construction needs 1125 features" in costs.note
    construction, _ = split_options(construction="low_rank")
    assert "rank 30 or less" in estimate(find_layers(network).layers[0], construction, Settings()).note


@pytest.mark.parametrize("groups", [1, 3])
def test_factors_are_balanced_and_truncate_like_the_singular_values(groups: int) -> None:
    weight = normal(6, 2, 3)
    singular = torch.stack([torch.linalg.svdvals(part.flatten(1)) for part in weight.chunk(groups)])
    n_ranks = singular.shape[1]
    for rank in range(1, n_ranks + 1):
        factors = factorise(weight, groups, rank=rank)
        left, right = factors.left.chunk(groups), factors.right.chunk(groups)
        made = torch.cat([a.flatten(1) @ b.flatten(1) for a, b in zip(left, right, strict=True)]).reshape(weight.shape)
        error = float(singular[:, rank:].square().sum().sqrt() / weight.norm())
        assert float((made - weight).norm() / weight.norm()) == pytest.approx(error, abs=1e-14)
        assert factors.error == pytest.approx(error, abs=1e-14)
        for a, b in zip(left, right, strict=True):
            assert torch.allclose(a.flatten(1).norm(dim=0), b.flatten(1).norm(dim=1), rtol=1e-12)
    assert factorise(weight, groups, tolerance=0.0).rank == n_ranks
    assert factorise(weight, groups, rank=99).rank == n_ranks
    assert factorise(torch.zeros(3, 4)).rank == 1


def test_the_smallest_rank_within_the_tolerance_is_found() -> None:
    weight = normal(8, 3) @ torch.diag(torch.tensor([1.0, 1e-3, 1e-6], dtype=torch.float64)) @ normal(3, 9, seed=1)
    assert factorise(weight).rank == 3
    assert factorise(weight, tolerance=1e-4).rank == 2
    assert factorise(weight, tolerance=0.1).rank == 1


def test_a_rank_that_is_too_small_reports_what_it_leaves_out_or_raises() -> None:
    network, inputs = nn.Sequential(nn.Linear(6, 5)).double().eval(), normal(20, 6)
    made = reconstruct(network, inputs, LowRank(rank=3, activation=nn.ReLU()))
    singular = torch.linalg.svdvals(network[0].weight.detach())
    error = float(singular[3:].norm() / singular.norm())
    assert made.layers[0].residual == pytest.approx(error, rel=1e-8)
    assert f"rank 3 leaves {error:.1e} of the weight; rank 5 leaves 0.0e+00" in made.layers[0].shortfall
    with pytest.raises(ToleranceError, match=r"residual of 1e-08 at '0'.*rank 3 leaves.*Raise the rank"):
        reconstruct(network, inputs, LowRank(rank=3), tolerance=1e-8)
    with pytest.raises(ValueRangeError, match=r"rank .* integer.*; got 0"):
        reconstruct(network, inputs, LowRank(rank=0))
    with pytest.raises(ValueRangeError, match=r"rank_tolerance .* number in \[0, 1\); got 1.0"):
        reconstruct(network, inputs, LowRank(rank_tolerance=1.0))


def test_a_tolerance_holds_for_the_product_of_both_factors() -> None:
    # 1600 equations at this excess are left to Krylov, which stops right at what it is asked for.
    network, inputs = nn.Sequential(nn.Linear(40, 40)).double().eval(), normal(20, 40)
    made = reconstruct(network, inputs, LowRank(rank=40, excess=1.5), tolerance=1e-6)
    assert made.layers[0].residual <= 1e-6


def test_samples_that_leave_the_range_of_either_half_are_counted() -> None:
    network, inputs = layer_of_rank("linear", 2)
    made = reconstruct(network, inputs, LowRank(activation=nn.ReLU()))
    assert verify(network, made.network, 10.0 * inputs).outside == 1.0
    block = made.network[0]
    block.second.high.fill_(-torch.inf)  # only the second half is left
    assert verify(network, made.network, inputs).outside == 1.0
    assert find_blocks(made.network) == {"0": block}
    block.second.map(0).left[0, 0] += 1e-9
    assert not block.is_reproducible()


@pytest.mark.parametrize("name", LAYERS)
def test_certified_ranges_hold_for_every_input_in_the_box(name: str) -> None:
    network, inputs = layer_of_rank(name, 2)
    centre = inputs.mean(0)
    low, high = centre - 4.0, centre + 4.0
    box = Box(low, high)
    inside = torch.minimum(torch.maximum(inputs, low), high)
    made = reconstruct(network, inside, LowRank(activation=nn.ReLU()), ranges=Ranges(box=box))
    # Corners swing farther than any sample of the batch.
    signs = torch.rand(16, *low.shape, generator=torch.Generator().manual_seed(0)) > 0.5
    check = verify(network, made.network, torch.where(signs, high, low))
    assert check.outside == 0.0
    assert check.relative_error <= EXACT
