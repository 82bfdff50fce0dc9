"""Layers of norms alone: they start as the ordinary layer, train as it does, and keep no more than their structure."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensors import normal, relative
from torch import Tensor, nn

from onlynorm.errors import InsufficientFeaturesError, ShapeError, UnknownNameError, ValueRangeError
from onlynorm.features import draw, draw_blocks, names, semicircle_spectrum
from onlynorm.frozen import NormOnlyConv2d, NormOnlyLayer, NormOnlyLinear, to_norm_only
from onlynorm.seeds import own_randomness
from onlynorm.solvers import KhatriRao
from onlynorm.solvers.methods import blocks as solve_blocks_module
from onlynorm.solvers.methods.blocks import BlockOperator

EPS = torch.finfo(torch.float64).eps
DOUBLE: dict[str, Any] = {"dtype": torch.float64}
N_STEPS = 25
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def network(seed: int = 0) -> nn.Module:
    """A small network with convolutions, a norm, a skip's 1 x 1 convolution and a linear head."""
    with own_randomness(seed):
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 6, 3, stride=2, bias=False),
            nn.GELU(), nn.Conv2d(6, 3, 1), nn.Flatten(), nn.Linear(27, 5),
        ).double()  # fmt: skip


def weights(model: nn.Module) -> list[Tensor]:
    """The weights that are applied, of ordinary and norm-only layers alike, and all shifts."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d | NormOnlyLayer)]
    shifts = [layer.beta if isinstance(layer, NormOnlyLayer) else layer.bias for layer in layers]
    return [layer.weight.detach() for layer in layers] + [b.detach() for b in shifts if b is not None]


def paths(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
    """The effective parameters after every step on random batches."""
    seen = []
    for step in range(N_STEPS):
        x, y = normal(8, 2, 8, 8, seed=step), torch.arange(8) % 5
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        seen.append([w.clone() for w in weights(model)])
    return seen


def distance(one: list[list[Tensor]], other: list[list[Tensor]]) -> float:
    """The largest relative difference over all steps and tensors."""
    return max(relative(a, b) for xs, ys in zip(one, other, strict=True) for a, b in zip(xs, ys, strict=True))


# ------------------------------------------------------------------------------- where they start


@pytest.mark.parametrize("features", names())
def test_every_distribution_starts_with_the_weight_of_the_ordinary_layer(features: str) -> None:
    with own_randomness(3):
        linear, conv = nn.Linear(7, 5, **DOUBLE), nn.Conv2d(3, 4, 3, **DOUBLE)
    mine = NormOnlyLinear(7, 5, features=features, seed=3, **DOUBLE)
    # The condition number of random features at excess 1.25 is below 1000 at these sizes.
    assert relative(mine.weight, linear.weight) <= 1000 * 35 * EPS
    assert torch.equal(mine.beta.detach(), linear.bias)
    with own_randomness(3):
        conv = nn.Conv2d(3, 4, 3, **DOUBLE)
    mine = NormOnlyConv2d(3, 4, kernel_size=3, features=features, seed=3, **DOUBLE)
    assert relative(mine.weight, conv.weight) <= 1000 * 108 * EPS
    x = normal(2, 3, 6, 6)
    assert relative(mine(x), conv(x)) <= 1000 * 108 * EPS


@pytest.mark.parametrize("features", names())
def test_only_norms_are_parameters_and_nothing_frozen_is_saved(features: str) -> None:
    layer = NormOnlyLinear(6, 4, features=features, seed=1)
    wanted = {"gamma", "beta"} | ({"output_gamma"} if features == "id_cond_minimal" else set())
    assert {name for name, _ in layer.named_parameters()} == set(layer.state_dict()) == wanted
    assert layer.gamma.numel() == draw(features, (4, 6)).n_features
    assert NormOnlyLinear(6, 4, features=features, bias=False).beta is None


def test_the_weight_is_made_of_the_frozen_features_that_draw_gives() -> None:
    for features in (
        "he_normal",
        "orthogonal",
        "ortho_cond",
        "fast_ortho_cond",
        "kron_normal",
        "id_cond",
        "sparse_he_normal",
    ):
        layer = NormOnlyConv2d(3, 4, kernel_size=2, features=features, seed=5, layer="here", **DOUBLE)
        made = draw(features, (4, 3, 2, 2), seed=5, layer="here")
        by_hand = (made.left() * layer.gamma) @ made.right()
        assert relative(layer.weight.reshape(4, -1), by_hand) <= 100 * EPS


def test_the_global_generator_is_not_touched() -> None:
    before = torch.get_rng_state()
    NormOnlyLinear(6, 4, features="he_normal", seed=1)
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------------------- how they train


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_id_cond_follows_the_ordinary_network_step_by_step(name: str) -> None:
    model = network()
    mine = to_norm_only(model, features="id_cond")
    found, wanted = (paths(m, OPTIMIZERS[name](m.parameters())) for m in (mine, model))
    assert distance(found, wanted) <= 10 * EPS
    assert relative(wanted[-1][0], wanted[0][0]) > 0.01, "the weights moved"


@pytest.mark.parametrize("name", ["sgd", "momentum"])
def test_ortho_cond_follows_it_too_because_a_rotation_does_not_change_these_steps(name: str) -> None:
    model = network()
    mine = to_norm_only(model, features="ortho_cond", seed=2)
    found, wanted = (paths(m, OPTIMIZERS[name](m.parameters())) for m in (mine, model))
    assert distance(found, wanted) <= 100 * EPS  # rounding of the products with the factors


def test_adam_does_see_the_rotation() -> None:
    model = network()
    mine = to_norm_only(model, features="ortho_cond", seed=2)
    found, wanted = (paths(m, OPTIMIZERS["adam"](m.parameters())) for m in (mine, model))
    assert distance(found, wanted) > 0.01


@pytest.mark.parametrize("features", ["id_cond_minimal", "he_normal"])
def test_plain_sgd_on_other_features_takes_another_path(features: str) -> None:
    model = network()
    mine = to_norm_only(model, features=features)
    found, wanted = (paths(m, OPTIMIZERS["sgd"](m.parameters())) for m in (mine, model))
    assert distance(found[:1], wanted[:1]) > 1e-4


def test_a_sparse_layer_trains_like_a_masked_one() -> None:
    model = network()
    mine = to_norm_only(model, features="id_cond", density=0.3, seed=4)
    masks = [layer.weight.detach() != 0 for layer in mine.modules() if isinstance(layer, NormOnlyLayer)]
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    for layer, mask in zip(layers, masks, strict=True):
        layer.weight.data *= mask
        layer.weight.register_hook(lambda g, mask=mask: g * mask)
    found, wanted = (paths(m, OPTIMIZERS["adam"](m.parameters())) for m in (mine, model))
    assert distance(found, wanted) <= 100 * EPS
    n_kept = sum(int(mask.sum()) for mask in masks)
    assert n_kept == sum(m.gamma.numel() for m in mine.modules() if isinstance(m, NormOnlyLayer))
    assert 0.2 < n_kept / sum(mask.numel() for mask in masks) < 0.4


@pytest.mark.parametrize("features", ["he_normal", "ortho_cond", "fast_ortho_cond", "kron_normal", "id_cond_minimal"])
def test_gradients_are_those_of_finite_differences(features: str) -> None:
    layer = NormOnlyLinear(3, 4, features=features, seed=1, **DOUBLE)
    x = normal(5, 3)
    layer(x).square().sum().backward()
    for gamma in layer.gammas:
        direction = normal(gamma.numel(), seed=9)
        values, step = gamma.detach().clone(), 1e-6
        sums = []
        for sign in (1.0, -1.0):
            gamma.data = values + sign * step * direction
            sums.append(float(layer(x).detach().square().sum()))
        gamma.data = values
        slope = (sums[0] - sums[1]) / (2 * step)
        assert slope == pytest.approx(float(gamma.grad @ direction), rel=1e-6)  # step^2 and eps / step


def test_blocks_train_as_the_two_layers_that_they_stand_for() -> None:
    layer = NormOnlyLinear(5, 6, features="he_normal", n_blocks=3, seed=1, **DOUBLE)
    features = draw_blocks("he_normal", (6, 5), n_blocks=3, seed=1)
    gamma = layer.gamma.detach().clone().requires_grad_()
    x = normal(7, 5)
    layer(x).square().sum().backward()
    by_hand = ((x @ features.right().mT) * gamma) @ features.left().mT + layer.beta.detach()
    by_hand.square().sum().backward()
    assert relative(layer.gamma.grad, gamma.grad) <= 1000 * EPS


def test_block_features_have_a_block_diagonal_matrix_of_equal_blocks() -> None:
    features = draw_blocks("he_normal", (6, 2, 3), n_blocks=3, excess=1.5, seed=1)
    M = KhatriRao(features.left(), features.right()).materialise()
    one = KhatriRao(features.base.left(), features.base.right()).materialise()
    assert features.n_features == 54
    assert torch.equal(M, torch.block_diag(one, one, one))
    assert torch.equal(features.left(20, 30), features.left()[:, 20:30])
    assert torch.equal(features.right(20, 30), features.right()[20:30])
    assert "3 blocks of he_normal features" in str(features)
    layer = NormOnlyLinear(6, 6, features="he_normal", n_blocks=3, excess=1.5, seed=1, **DOUBLE)
    # The least-norm gamma of the whole is that of the blocks, one by one.
    unit, lengths = KhatriRao(features.left(), features.right()).unit()
    assert relative(layer.gamma, torch.linalg.pinv(unit.materialise()) @ layer.weight.flatten() / lengths) <= 1e4 * EPS
    with pytest.raises(ShapeError, match=r"needs a weight of shape \(6, 2, 3\)"):
        features.as_blocks(torch.ones(6, 6))


@pytest.mark.parametrize(("n_in", "n_out"), [(7, 4), (4, 7), (5, 5)])
@pytest.mark.parametrize("n_samples", [0, 1, 3, 5, 6, 9])  # both factors turn the samples, one of them, none
def test_ortho_cond_may_turn_the_samples_in_place_of_the_weight(n_in: int, n_out: int, n_samples: int) -> None:
    layer = NormOnlyLinear(n_in, n_out, features="ortho_cond", seed=2, **DOUBLE)
    x, towards = normal(n_samples, n_in).requires_grad_(), normal(n_samples, n_out, seed=1)
    wanted = [x, *layer.parameters()]
    found = torch.autograd.grad(layer(x), wanted, towards)
    expected = torch.autograd.grad(nn.functional.linear(x, layer.weight, layer.beta), wanted, towards)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.beta), rtol=0, atol=1000 * EPS)
    torch.testing.assert_close(found, expected, rtol=0, atol=1000 * EPS)


@pytest.mark.parametrize("way", ["factor", "iteration", "one by one", "too few"])
def test_blocks_are_solved_to_the_least_norm_in_every_way(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(solve_blocks_module, "EQUATIONS_PER_BLOCK", 0 if way == "iteration" else 1000)
    excess = {"one by one": 1.0, "too few": 0.5}.get(way, 1.5)
    features = draw_blocks("he_normal", (12, 7), n_blocks=4, excess=excess, seed=1)
    block = KhatriRao(features.base.left(), features.base.right())
    targets = normal(4, 3, 7)
    gamma = solve_blocks_module.solve_blocks(block, targets)
    unit, lengths = block.unit()
    wanted = targets.flatten(1) @ torch.linalg.pinv(unit.materialise()).mT / lengths
    # The tolerance of 1e-10 times a condition number below 1e4.
    assert relative(gamma, wanted) <= 1e-6


@pytest.mark.parametrize("way", ["factor", "iteration"])
def test_a_block_that_is_small_beside_others_is_solved_as_well(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(solve_blocks_module, "EQUATIONS_PER_BLOCK", 0 if way == "iteration" else 1000)
    features = draw_blocks("he_normal", (12, 7), n_blocks=4, excess=1.5, seed=1)
    block = KhatriRao(features.base.left(), features.base.right())
    targets = normal(4, 3, 7) * torch.tensor([1e-12, 1.0, 0.0, 1e12], dtype=torch.float64)[:, None, None]
    gamma = solve_blocks_module.solve_blocks(block, targets)
    for made, target in zip(block.apply(gamma)[[0, 1, 3]], targets[[0, 1, 3]], strict=True):
        assert relative(made, target) <= 10 * solve_blocks_module.TOLERANCE
    assert not bool(gamma[2].any())


def test_blocks_whose_factor_is_too_coarse_are_solved_by_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    features = draw_blocks("he_normal", (12, 7), n_blocks=4, excess=1.5, seed=1)
    block = KhatriRao(features.base.left(), features.base.right())
    targets, turns = normal(4, 3, 7), list[Tensor]()
    iterate = solve_blocks_module._by_iteration

    def count(whole: BlockOperator, target: Tensor) -> Tensor:
        turns.append(target)
        return iterate(whole, target)

    monkeypatch.setattr(solve_blocks_module, "_by_iteration", count)
    for gram in (lambda _: -torch.eye(21), lambda _: 100 * torch.eye(21)):  # not positive, and far from the Gram matrix
        monkeypatch.setattr(KhatriRao, "row_gram", gram)
        gamma = solve_blocks_module.solve_blocks(block, targets)
        assert relative(block.apply(gamma), targets) <= solve_blocks_module.TOLERANCE
    assert len(turns) == 2


def test_the_operator_of_all_blocks_is_that_of_its_matrix() -> None:
    features = draw_blocks("he_normal", (6, 5), n_blocks=3, seed=1)
    whole = BlockOperator(KhatriRao(features.base.left(), features.base.right()), 3)
    M, gamma, R = whole.materialise(), normal(features.n_features), normal(6, 5)
    assert relative(whole.apply(gamma).flatten(), M @ gamma) <= 100 * EPS
    assert relative(whole.transpose(R), M.mT @ R.flatten()) <= 100 * EPS
    assert relative(whole.row_gram_apply(R).flatten(), M @ (M.mT @ R.flatten())) <= 100 * EPS
    assert relative(whole.gram(), M.mT @ M) <= 100 * EPS
    assert relative(whole.row_gram(), M @ M.mT) <= 100 * EPS
    assert whole.one_norm() == pytest.approx(float(M.abs().sum(0).max()))
    assert whole.to(torch.float32).apply(gamma.float()).dtype == torch.float32


# ------------------------------------------------------------------------------- what they keep


def test_structured_layers_keep_what_their_structure_needs() -> None:
    kept = {
        name: NormOnlyConv2d(8, 16, kernel_size=3, features=name, density=density).frozen.n_frozen
        for name, density in (("id_cond", None), ("id_cond_minimal", None), ("ortho_cond", None))
    }
    assert kept == {"id_cond": 0, "id_cond_minimal": 0, "ortho_cond": 16**2 + 72**2}
    sparse = NormOnlyConv2d(8, 16, kernel_size=3, density=0.2)
    assert sparse.frozen.n_frozen == sparse.gamma.numel() < 0.3 * 16 * 72


def test_frozen_numbers_are_made_anew_when_the_precision_changes() -> None:
    for features in ("he_normal", "ortho_cond"):
        layer = NormOnlyLinear(6, 4, features=features, seed=1, **DOUBLE)
        gamma = layer.gamma.detach().clone()
        wanted = layer.weight.detach().clone()
        layer.float().double()
        layer.gamma.data = gamma
        assert torch.equal(layer.weight.detach(), wanted)


def test_a_layer_can_be_made_ordinary_again_and_copied() -> None:
    layer = NormOnlyConv2d(
        4, 6, kernel_size=3, padding=1, padding_mode="circular", stride=2, groups=2, density=0.5, **DOUBLE
    )
    x = normal(2, 4, 7, 7)
    assert torch.equal(layer.to_plain()(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    same = NormOnlyConv2d(4, 6, kernel_size=3, padding="same", **DOUBLE)
    assert torch.equal(same.to_plain()(x), same(x))


# ------------------------------------------------------------------------------- spectra of one's own


@pytest.mark.parametrize("condition", [1.0, 10.0, 5413.0, 1541601.0])
def test_a_semicircle_spectrum_has_its_condition_number_and_its_law(condition: float) -> None:
    n = 4000
    values = semicircle_spectrum(n, condition=condition, seed=1)
    assert float(values.max() / values.min()) == pytest.approx(condition, rel=1e-6)  # float32 rounds both
    assert float(values.square().mean()) == pytest.approx(1.0, rel=1e-6)
    assert not torch.equal(values, semicircle_spectrum(n, condition=condition, seed=2)) or condition == 1.0
    if condition > 1000.0:  # nearly the whole law: its mean square is one, its mean 8 / (3 pi)
        assert float(values.mean()) == pytest.approx(
            8 / (3 * torch.pi), rel=2e-3
        )  # 1 / n, and the cut at 2 / condition
        below = float((values < 1.0).double().mean())
        assert below == pytest.approx(1 / 3 + 3**0.5 / (2 * torch.pi), abs=2e-3)


def test_a_scaled_layer_moves_by_the_square_of_its_spectrum() -> None:
    spectrum = semicircle_spectrum(24, condition=50.0)
    scaled = NormOnlyLinear(6, 4, spectrum=spectrum, **DOUBLE)
    by_condition = NormOnlyLinear(6, 4, spectrum=50.0, **DOUBLE)
    plain = scaled.to_plain()
    assert torch.equal(scaled.weight, by_condition.weight)
    x, before = normal(3, 6), plain.weight.detach().clone()
    for layer in (scaled, plain):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        layer(x).square().sum().backward()
        optimizer.step()
    moved = spectrum.reshape(4, 6).square() * (plain.weight.detach() - before)
    assert relative(scaled.weight.detach() - before, moved) <= 1000 * EPS


def test_a_scaled_layer_with_a_spectrum_of_ones_is_id_cond() -> None:
    model = network()
    mine = to_norm_only(model, spectrum=1.0)
    found, wanted = (paths(m, OPTIMIZERS["adam"](m.parameters())) for m in (mine, model))
    assert distance(found, wanted) <= 10 * EPS


# ------------------------------------------------------------------------------- misuse


@pytest.mark.parametrize(
    ("choices", "error", "match"),
    [
        ({"density": 0.0}, ValueRangeError, r"density .*number in \(0, 1\]"),
        ({"density": 1.5}, ValueRangeError, r"density .*number in \(0, 1\]"),
        ({"density": 0.5, "features": "he_normal"}, ValueRangeError, "density needs a sparse distribution"),
        ({"density": 1e-9}, InsufficientFeaturesError, "at least one feature"),
        ({"spectrum": torch.zeros(24)}, ValueRangeError, "positive finite values; got 0.0 at feature 0 and 24"),
        ({"spectrum": -torch.ones(24)}, ValueRangeError, "positive finite values; got -1.0"),
        ({"spectrum": torch.full((24,), torch.nan)}, ValueRangeError, "positive finite values; got nan"),
        ({"spectrum": torch.ones(23)}, ShapeError, "one value per feature, 24; got 23"),
        ({"spectrum": 0.5}, ValueRangeError, "condition of at least 1"),
        ({"spectrum": 5.0, "features": "ortho_cond"}, ValueRangeError, "needs id_cond features"),
        ({"features": "ortho_cond", "excess": 1.25}, ValueRangeError, "square orthogonal factors"),
        ({"features": "id_cond", "excess": 1.25}, ValueRangeError, "one path per weight"),
        ({"features": "id_cond", "n_blocks": 2}, ValueRangeError, "n_blocks needs a random distribution"),
        ({"features": "he_normal", "n_blocks": 3}, ValueRangeError, r"divisor of the 4 outputs; got 3.*\[1, 2, 4\]"),
        ({"features": "id_cond_minimal", "shared_column": 6}, ValueRangeError, "shared_column"),
        ({"features": "he_normal", "shared_column": 1}, ValueRangeError, "shared_column needs id_cond_minimal"),
        ({"features": "id_conf"}, UnknownNameError, "id_cond"),
    ],
)
def test_a_layer_that_cannot_be_is_refused(choices: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        NormOnlyLinear(6, 4, **choices)


def test_one_weight_alone_has_no_condition_number() -> None:
    with pytest.raises(ValueRangeError, match="at least two values"):
        NormOnlyLinear(1, 1, spectrum=2.0)


def test_a_shape_without_weights_admits_no_features() -> None:
    with pytest.raises(ValueRangeError, match=r"in_features .* from 1"):
        NormOnlyLinear(0, 4)
    with pytest.raises(ValueRangeError, match="block features need a random distribution"):
        draw_blocks("ortho_cond", (4, 6))
