"""The all-convolutional residual network: its shape, its start near the identity, its head, its variants."""

from __future__ import annotations

import math

import pytest
import torch
from tensors import single_normal
from torch import Tensor, nn

import onlynorm as on
from onlynorm.errors import ConversionError, ShapeError, UnknownNameError
from onlynorm.identity import all_convolutional, branch_bounds
from onlynorm.models import make_model


def batch(n: int = 4, *, size: int = 8, seed: int = 0) -> Tensor:
    return single_normal(n, 3, size, size, seed=seed)


# ------------------------------------------------------------------------------- the shape of it


def test_the_network_of_the_paper_has_55_convolutions_and_13_538_736_trained_numbers() -> None:
    network = all_convolutional()
    by_hand = 9 * (3 * 16 + 16 * 64 + 17 * 64**2 + 64 * 128 + 17 * 128**2 + 128 * 256 + 17 * 256**2)
    assert network.n_convolutions == 55
    assert network.n_trained == by_hand == 13_538_736
    widths = [(block.conv1.in_channels, block.conv2.out_channels, block.stride) for block in network.residual_blocks]
    assert widths == [
        *[(16, 64, 1), *[(64, 64, 1)] * 8],
        *[(64, 128, 2), *[(128, 128, 1)] * 8],
        *[(128, 256, 2), *[(256, 256, 1)] * 8],
    ]
    assert all(layer.bias is None for layer in network.modules() if isinstance(layer, nn.Conv2d))
    assert not any(isinstance(layer, nn.BatchNorm2d | nn.Dropout | nn.MaxPool2d) for layer in network.modules())


@pytest.mark.parametrize(("depth", "width", "n_classes", "size"), [(7, 2, 3, 8), (13, 20, 5, 9), (7, 1, 1, 1)])
def test_depth_width_classes_and_size_are_free(depth: int, width: int, n_classes: int, size: int) -> None:
    network = all_convolutional(depth, width=width, n_classes=n_classes)
    assert network.n_convolutions == depth
    assert network(batch(2, size=size)).shape == (2, n_classes)
    assert len(network.residual_blocks) == (depth - 1) // 2


def test_a_block_is_its_shortcut_plus_two_convolutions() -> None:
    block = all_convolutional(7, width=6).residual_blocks[1]
    x = single_normal(2, 6, 8, 8, seed=1)
    hidden = nn.functional.conv2d(x, block.conv1.weight, stride=2, padding=1).clamp_min(0)
    added = nn.functional.conv2d(hidden, block.conv2.weight, padding=1)
    kept = x.reshape(2, 6, 4, 2, 4, 2).mean((3, 5))
    shortcut = torch.cat([torch.zeros(2, 3, 4, 4), kept, torch.zeros(2, 3, 4, 4)], 1)
    torch.testing.assert_close(block(x), shortcut + added)


def test_a_command_finds_the_network_by_its_factory() -> None:
    assert make_model("onlynorm.identity:all_convolutional").n_convolutions == 55


# ------------------------------------------------------------------------------- the start


@torch.no_grad()
@pytest.mark.parametrize(
    ("init", "deviation"), [("near_identity", 1 / (9 * 32)), ("standard", 1 / (3 * math.sqrt(32)))]
)
def test_weights_start_with_the_stated_deviation(init: str, deviation: float) -> None:
    network = all_convolutional(7, width=32, init=init)
    for layer in (network.residual_blocks[0].conv1, network.residual_blocks[0].conv2):
        n = layer.weight.numel()
        assert float(layer.weight.std()) == pytest.approx(deviation, rel=5 / math.sqrt(2 * n))  # five standard errors
        assert abs(float(layer.weight.mean())) < 5 * deviation / math.sqrt(n)
    assert float(network.stem.weight.std()) == pytest.approx(1 / (3 * 4), rel=5 / math.sqrt(2 * 3 * 16 * 9))


@torch.no_grad()
def test_blocks_start_near_their_shortcuts_and_standard_ones_do_not() -> None:
    """C1 has 9 c inputs of variance 1 / (81 c^2): 1 / (9 c) of the signal's power, C2 the same of half of it."""
    for init, expected in (("near_identity", 1 / (9 * 32) / math.sqrt(2)), ("standard", 1 / math.sqrt(2))):
        block = all_convolutional(13, width=32, init=init).residual_blocks[1]
        x = single_normal(8, 32, 16, 16, seed=2)
        change = float(torch.linalg.vector_norm(block(x) - block.shortcut(x)) / torch.linalg.vector_norm(x))
        # Padding takes up to 1/16 of the inputs at the border; the weights' own sums scatter by a few per cent.
        assert change == pytest.approx(expected, rel=0.15)


@torch.no_grad()
def test_bounds_hold_for_the_change_between_any_two_inputs() -> None:
    network = all_convolutional(13, width=4)
    for block, bound in zip(network.residual_blocks, branch_bounds(network), strict=True):
        x = torch.randn(1, block.conv1.in_channels, 8, 8, generator=torch.Generator().manual_seed(3)).double()
        block.double()
        y = x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(4), dtype=x.dtype)
        moved = torch.linalg.vector_norm(block.branch(x) - block.branch(y)) / torch.linalg.vector_norm(x - y)
        assert 0 < float(moved) <= bound


@torch.no_grad()
def test_the_bound_of_a_convolution_is_above_its_spectral_norm_and_below_three_times_it() -> None:
    layer = all_convolutional(7, width=3).residual_blocks[2].conv2.double()
    one = torch.eye(12 * 25, dtype=torch.float64).reshape(-1, 12, 5, 5)
    norm = float(torch.linalg.matrix_norm(layer(one).flatten(1), ord=2))
    bound = 3 * float(torch.linalg.matrix_norm(layer.weight.flatten(1), ord=2))
    assert norm <= bound <= 3 * norm  # the patch around an inner pixel alone has the norm of the matrix


def test_every_branch_of_the_papers_start_has_a_lipschitz_constant_far_below_one() -> None:
    """A Gaussian (c, 9 c) matrix has a norm near 4 sqrt(c) deviations, so |C1| |C2| is near (4 / 3)^2 / c."""
    near = branch_bounds(all_convolutional(13, width=64))
    assert near[1] == pytest.approx(16 / 9 / 64, rel=0.05)
    assert max(near) < 0.05
    assert min(branch_bounds(all_convolutional(13, width=8, init="standard"))) > 1


def test_bounds_of_a_network_with_norms_are_refused() -> None:
    with pytest.raises(ConversionError, match=r"without norms.*norm=None"):
        branch_bounds(all_convolutional(7, width=2, norm="batch"))


# ------------------------------------------------------------------------------- head, variants, seeds


def test_the_fixed_head_is_drawn_from_the_seed_and_never_trained() -> None:
    network = all_convolutional(7, width=64, n_classes=10, seed=5)
    before = network.head.weight.clone()
    assert "head.weight" in dict(network.named_buffers())
    assert float(before.var()) == pytest.approx(1 / 256, rel=5 * math.sqrt(2 / before.numel()))
    labels = torch.arange(8) % 10
    on.fit(network, (batch(8), labels), schedule=on.Schedule(epochs=1, batch_size=4), accelerator="cpu")
    assert torch.equal(network.head.weight, before)


def test_a_trained_head_starts_from_the_same_numbers_and_is_counted() -> None:
    fixed, trained = (all_convolutional(7, width=2, head=head) for head in ("fixed", "trained"))
    x = batch()
    assert torch.equal(fixed(x), trained(x))
    assert trained.n_trained - fixed.n_trained == 8 * 10
    labels = torch.arange(8) % 10
    before = trained.head.weight.detach().clone()
    on.fit(trained, (batch(8), labels), schedule=on.Schedule(epochs=1, batch_size=4), accelerator="cpu")
    assert not torch.equal(trained.head.weight, before)


def test_batch_norms_follow_every_convolution() -> None:
    network = all_convolutional(7, width=2, norm="batch")
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in network.modules()) == 7
    block, x = network.residual_blocks[0], single_normal(64, 2, 8, 8)
    added = block.train().branch(x)
    torch.testing.assert_close(added.mean((0, 2, 3)), torch.zeros(2), atol=1e-5, rtol=0)
    assert float(added.detach().var((0, 2, 3), correction=0).max()) <= 1.0 + 1e-5


def test_networks_are_functions_of_their_seed_and_leave_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    first, second, third = (all_convolutional(7, width=2, seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(first[name], third[name]) for name in first)


@pytest.mark.parametrize("depth", [0, 1, 8, 54])
def test_a_depth_that_is_no_whole_number_of_blocks_is_refused(depth: int) -> None:
    with pytest.raises(ShapeError, match=rf"6 n \+ 1; got {depth}"):
        all_convolutional(depth)


@pytest.mark.parametrize("name", ["width", "n_classes", "in_channels"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(ShapeError, match=f"positive {name}; got 0"):
        all_convolutional(7, **{name: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [("init", "zero"), ("norm", "layer"), ("head", "random")])
def test_unknown_variants_are_refused(name: str, value: str) -> None:
    with pytest.raises(UnknownNameError, match=f"{name} needs a known name; got '{value}'"):
        all_convolutional(7, width=2, **{name: value})  # type: ignore[arg-type]
