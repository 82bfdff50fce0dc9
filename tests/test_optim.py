"""Optimizers in the space of effective weights: the ordinary path for any features, its projection below the bound."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensors import normal, relative
from torch import Tensor, nn

from onlynorm.errors import ConversionError, InsufficientFeaturesError
from onlynorm.features import draw
from onlynorm.frozen import NormOnlyLayer, NormOnlyLinear, to_norm_only
from onlynorm.optim import follow_weights, release
from onlynorm.seeds import own_randomness
from onlynorm.solvers import KhatriRao
from onlynorm.solvers.methods.pseudo_inverse import ENOUGH, PseudoInverse

EPS = torch.finfo(torch.float64).eps
N_STEPS = 12
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
}


def network() -> nn.Module:
    with own_randomness(0):
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 4, 3, stride=2), nn.ReLU(),
            nn.Flatten(), nn.Linear(36, 5),
        ).double()  # fmt: skip


def weights(model: nn.Module) -> list[Tensor]:
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d | NormOnlyLayer)]
    return [layer.weight.detach().clone() for layer in layers]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *, n_steps: int = N_STEPS, first: int = 0) -> Any:
    """The weights after every step."""
    seen = []
    for step in range(first, first + n_steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(normal(8, 2, 8, 8, seed=step)), torch.arange(8) % 5)
        loss.backward()
        optimizer.step()
        seen.append(weights(model))
    return seen


def distance(one: Any, other: Any) -> float:
    return max(relative(a, b) for xs, ys in zip(one, other, strict=True) for a, b in zip(xs, ys, strict=True))


# ------------------------------------------------------------------------------- the ordinary path


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "choices",
    [
        {"features": "he_normal", "excess": 1.25},
        {"features": "he_normal", "excess": 1.25, "keep": "6"},
        {"features": "orthogonal", "excess": 1.5},
        {"features": "ortho_cond"},
        {"features": "fast_ortho_cond"},
        {"features": "kron_normal"},
        {"features": "id_cond_minimal"},
        {"features": "id_cond"},
        {"features": "id_cond", "spectrum": 1000.0},
    ],
    ids=lambda choices: " ".join(map(str, choices.values())),
)
def test_the_weights_follow_the_ordinary_network_step_by_step(choices: dict[str, Any], name: str) -> None:
    model = network()
    kind, options = OPTIMIZERS[name]
    mine = to_norm_only(model, seed=1, **choices)
    found = train(mine, follow_weights(mine, kind, **options))
    wanted = train(model, kind(model.parameters(), **options))
    assert distance(found, wanted) <= 1000 * EPS  # rounding of 12 steps through layers with up to 180 weights
    assert relative(wanted[-1][0], wanted[0][0]) > 0.01


def test_at_the_bound_itself_the_path_is_the_same_because_errors_do_not_add_up() -> None:
    model = network()
    mine = to_norm_only(model, features="he_normal", excess=1.0, seed=1)
    found = train(mine, follow_weights(mine, torch.optim.SGD, lr=0.05))
    wanted = train(model, torch.optim.SGD(model.parameters(), lr=0.05))
    # Condition numbers are of the order of the number of weights, 180, or a few times that: eps times their square.
    assert distance(found, wanted) <= 1e6 * EPS


@pytest.mark.parametrize("n_blocks", [2, 4])
def test_blocks_follow_it_too(n_blocks: int) -> None:
    model = network()
    mine = to_norm_only(model, features="he_normal", n_blocks=n_blocks, keep="6", seed=1)
    found = train(mine, follow_weights(mine, torch.optim.SGD, lr=0.05))
    wanted = train(model, torch.optim.SGD(model.parameters(), lr=0.05))
    assert distance(found, wanted) <= 1000 * EPS


def test_an_iteration_in_the_place_of_the_factor_follows_it_too() -> None:
    model = network()
    mine = to_norm_only(model, features="he_normal", excess=1.5, seed=1)
    found = train(mine, follow_weights(mine, torch.optim.SGD, memory=1.0, lr=0.05), n_steps=3)
    wanted = train(model, torch.optim.SGD(model.parameters(), lr=0.05), n_steps=3)
    assert distance(found, wanted) <= ENOUGH  # of a step, which the next step takes up
    assert distance(found[-1:], wanted[-1:]) < 0.1 * relative(wanted[-1][0], wanted[-2][0]), "less than a step behind"


def test_gamma_is_the_whole_state_of_the_network_after_every_step() -> None:
    model = to_norm_only(network(), features="he_normal", seed=1)
    optimizer = follow_weights(model, torch.optim.Adam, lr=0.01)
    train(model, optimizer, n_steps=3)
    held = weights(model)
    other = to_norm_only(network(), features="he_normal", seed=1)
    other.load_state_dict(model.state_dict())
    assert all(map(torch.equal, weights(other), held))
    assert all(map(torch.equal, weights(copy.deepcopy(model)), held))
    release(model)
    assert all(map(torch.equal, weights(model), held))
    assert all(p.grad is None for name, p in model.named_parameters() if name.endswith("gamma"))


def test_float32_networks_follow_in_their_own_precision() -> None:
    model = network().float()
    mine = to_norm_only(model, features="he_normal", excess=1.5, seed=1)
    optimizers = follow_weights(mine, torch.optim.SGD, lr=0.05), torch.optim.SGD(model.parameters(), lr=0.05)
    for one, optimizer in zip((mine, model), optimizers, strict=True):
        for step in range(5):
            optimizer.zero_grad()
            out = one(normal(8, 2, 8, 8, seed=step).float())
            nn.functional.cross_entropy(out, torch.arange(8) % 5).backward()
            optimizer.step()
    # Float32 rounds gammas whose products cancel: eps times a condition number of ten, over five steps.
    assert distance([weights(mine)], [weights(model)]) <= 100 * torch.finfo(torch.float32).eps


# ------------------------------------------------------------------------------- below the bound


def test_below_the_bound_a_step_is_the_projection_of_the_ordinary_one() -> None:
    layer = NormOnlyLinear(6, 5, features="he_normal", excess=0.6, seed=2, dtype=torch.float64)
    before = layer.weight.detach().clone()
    plain = layer.to_plain()
    x = normal(9, 6)
    optimizers = (
        follow_weights(layer, torch.optim.SGD, lr=0.1, momentum=0.9),
        torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9),
    )
    for one, optimizer in zip((layer, plain), optimizers, strict=True):
        one(x).square().sum().backward()
        optimizer.step()
    M = KhatriRao(*_factors(layer)).materialise()
    U = torch.linalg.svd(M, full_matrices=False)[0]
    ordinary = (plain.weight.detach() - before).flatten()
    moved = (layer.weight.detach() - before).flatten()
    assert layer.gamma.numel() == 18
    assert relative(moved, U @ (U.mT @ ordinary)) <= 1e-12
    assert relative(moved, ordinary) > 0.1, "not everything can be reached"


def test_below_the_bound_many_steps_lower_the_loss_faster_than_plain_ones() -> None:
    def loss_after(is_followed: bool) -> float:
        layer = NormOnlyLinear(12, 8, features="he_normal", excess=0.9, seed=2, dtype=torch.float64)
        x, y = normal(64, 12), normal(64, 8, seed=1)
        lr = 0.5
        optimizer = (
            follow_weights(layer, torch.optim.SGD, lr=lr) if is_followed else torch.optim.SGD([layer.gamma], lr=lr)
        )
        for _ in range(100):
            optimizer.zero_grad()
            loss = (layer(x) - y).square().mean()
            loss.backward()
            optimizer.step()
        return float(loss.detach())

    assert loss_after(True) < loss_after(False)


def _factors(layer: NormOnlyLayer) -> tuple[Tensor, Tensor]:
    features = layer.frozen.features
    return features.left(), features.right()


# ------------------------------------------------------------------------------- the pseudo-inverse


@pytest.mark.parametrize("excess", [0.5, 1.0, 1.25])
@pytest.mark.parametrize("memory", [None, 1.0])
def test_the_pseudo_inverse_is_that_of_the_materialised_matrix(excess: float, memory: float | None) -> None:
    features = draw("he_normal", (4, 7), excess=excess, seed=3)
    operator = KhatriRao(features.left(), features.right())
    inverse = PseudoInverse(operator, memory=memory)
    assert (inverse.factor is None) == (memory is not None)
    target = normal(3, 4, 7)
    unit, lengths = operator.unit()
    wanted = (torch.linalg.pinv(unit.materialise()) @ target.flatten(1).mT).mT / lengths
    # The factor loses the square of the condition number (below 1e4 here), the iteration what it stops at times it.
    assert relative(inverse(target), wanted) <= (1e8 * EPS if memory is None else 1.0 if excess == 1.0 else 30 * ENOUGH)


def test_the_factor_is_kept_in_the_precision_of_the_layer_unless_that_loses_too_much() -> None:
    kept = {}
    for distance in (1.0, 1e-3):
        features = draw("he_normal", (6, 30), excess=1.5, seed=3)
        left = features.left().clone()
        left[1] = (
            left[0] + distance * left[1]
        )  # two outputs at this distance: kappa(M M^T) grows with its inverse square
        operator = KhatriRao(left, features.right())
        # A float32 factor loses about eps32 kappa(M M^T): a thousandth of ENOUGH at 1.0, a thousand times it at 1e-3.
        lost = torch.finfo(torch.float32).eps * float(torch.linalg.cond(operator.unit()[0].row_gram()))
        assert lost < ENOUGH / 10 if distance == 1.0 else lost > 1000 * ENOUGH
        inverse = PseudoInverse(operator, dtype=torch.float32)
        assert inverse.factor is not None
        assert inverse.factor.dtype == inverse.operator.dtype
        kept[distance] = inverse.factor.dtype
    assert kept == {1.0: torch.float32, 1e-3: torch.float64}


# ------------------------------------------------------------------------------- ties, resuming, schedules


def test_tied_layers_hold_one_weight() -> None:
    with own_randomness(0):
        one, other = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
        other.weight = one.weight
    model = nn.Sequential(one, nn.Tanh(), other)
    mine = to_norm_only(model, features="he_normal", seed=1)
    x = normal(5, 6)
    optimizers = follow_weights(mine, torch.optim.SGD, lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        for m, optimizer in zip((mine, model), optimizers, strict=True):
            optimizer.zero_grad()
            m(x).square().sum().backward()
            optimizer.step()
    assert distance([weights(mine)], [weights(model)]) <= 1000 * EPS
    assert mine[0].gamma is mine[2].gamma


def test_a_run_resumes_from_state_dicts() -> None:
    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = to_norm_only(network(), features="he_normal", seed=1)
        return model, follow_weights(model, torch.optim.SGD, lr=0.05, momentum=0.9)

    model, optimizer = start()
    train(model, optimizer, n_steps=4)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    wanted = train(model, optimizer, n_steps=4, first=4)
    again, optimizer = start()
    again.load_state_dict(kept[0])  # after the optimizer was made: what it holds goes along
    optimizer.load_state_dict(kept[1])
    assert distance(train(again, optimizer, n_steps=4, first=4), wanted) <= 1000 * EPS


def test_schedules_and_closures_work_as_ever() -> None:
    model = to_norm_only(network(), features="he_normal", seed=1)
    optimizer = follow_weights(model, torch.optim.SGD, lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    x = normal(8, 2, 8, 8)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(model(x), torch.arange(8) % 5)
        value.backward()
        return value

    first = optimizer.step(loss).item()  # type: ignore[call-overload]
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert loss().item() < first


def test_layers_that_are_frozen_stay_as_they_are() -> None:
    model = to_norm_only(network(), features="he_normal", seed=1)
    first = model[0]
    first.gamma.requires_grad_(False)
    before = weights(model)
    train(model, follow_weights(model, torch.optim.SGD, lr=0.05), n_steps=2)
    after = weights(model)
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])


# ------------------------------------------------------------------------------- misuse


def test_a_model_without_norm_only_layers_is_refused() -> None:
    with pytest.raises(ConversionError, match="needs norm-only layers; got none in Sequential"):
        follow_weights(network(), torch.optim.SGD, lr=0.1)


def test_dependent_features_are_refused() -> None:
    left = torch.ones(2, 6, dtype=torch.float64)
    with pytest.raises(InsufficientFeaturesError, match="needs independent features"):
        PseudoInverse(KhatriRao(left, torch.ones(6, 3, dtype=torch.float64)))
