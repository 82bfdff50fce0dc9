"""`follow_weights` beside what else people do to a model: load, freeze, move, set, call with other parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tensors import normal, relative
from torch import Tensor, nn

from onlynorm.errors import ConversionError, ValueRangeError
from onlynorm.frozen import NormOnlyLinear, to_norm_only
from onlynorm.optim import follow_weights, release
from onlynorm.seeds import own_randomness

EPS = torch.finfo(torch.float64).eps
FOLLOWED = ["he_normal", "ortho_cond", "fast_ortho_cond", "kron_normal", "id_cond_minimal"]


def layer(features: str, *, seed: int = 0) -> tuple[NormOnlyLinear, nn.Linear]:
    """A norm-only layer, and the ordinary one that it starts as."""
    with own_randomness(seed):
        plain = nn.Linear(3, 4).double()
    made = to_norm_only(plain, features=features)
    assert isinstance(made, NormOnlyLinear)
    return made, plain


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(normal(5, 3)).square().sum().backward()
    optimizer.step()


def distance(mine: NormOnlyLinear, wanted: Tensor) -> float:
    """How far both the weight that is applied and the one that gammas make are from the wanted one."""
    made = mine.frozen(*mine.gammas)
    return float(torch.stack([(mine.weight - wanted).abs().max(), (made - wanted).abs().max()]).max().detach())


@pytest.mark.parametrize("features", FOLLOWED)
def test_a_weight_that_is_set_is_taken_up(features: str) -> None:
    mine, plain = layer(features)
    optimizers = [follow_weights(mine, torch.optim.SGD, lr=0.01), torch.optim.SGD(plain.parameters(), lr=0.01)]
    wanted = normal(4, 3, seed=5)
    mine.set_weight(wanted)
    assert distance(mine, wanted) <= 1000 * EPS
    with torch.no_grad():
        plain.weight.copy_(wanted)
    for model, optimizer in zip((mine, plain), optimizers, strict=True):
        step(model, optimizer)
    assert distance(mine, plain.weight.detach()) <= 1000 * EPS


@pytest.mark.parametrize("features", FOLLOWED)
@pytest.mark.parametrize("when", ["before the forward pass", "before the step"])
def test_gammas_changed_by_hand_are_taken_up(features: str, when: str) -> None:
    mine, plain = layer(features)
    optimizer, ordinary = follow_weights(mine, torch.optim.SGD, lr=0.01), torch.optim.SGD(plain.parameters(), lr=0.01)
    for model in (mine, plain):
        number = mine.gammas[-1] if model is mine else plain.weight  # the last one scales the whole weight
        if when == "before the step":
            model(normal(5, 3)).square().sum().backward()
        with torch.no_grad():
            number.mul_(2.0)
        if when != "before the step":
            model(normal(5, 3)).square().sum().backward()
    optimizer.step()
    ordinary.step()
    assert distance(mine, plain.weight.detach()) <= 1000 * EPS


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("features", "name"), [("he_normal", "gamma"), ("id_cond_minimal", "output_gamma")])
def test_other_parameters_are_used_where_a_call_brings_them(features: str, name: str) -> None:
    mine, _ = layer(features)
    follow_weights(mine, torch.optim.SGD, lr=0.01)
    others = {name: 2.0 * mine.state_dict()[name]}
    found = torch.func.functional_call(mine, others, (normal(5, 3),))
    assert torch.equal(found, torch.func.functional_call(copy.deepcopy(mine), others, (normal(5, 3),)))
    assert float((found - mine(normal(5, 3))).detach().abs().max()) > 0.1


@pytest.mark.parametrize("assign", [False, True])
def test_loaded_gammas_are_trained_on(assign: bool) -> None:
    mine, _ = layer("he_normal")
    other, there = layer("he_normal", seed=1)
    optimizer = follow_weights(mine, torch.optim.SGD, lr=0.01)
    step(mine, optimizer)
    mine.load_state_dict(other.state_dict(), assign=assign)
    assert distance(mine, there.weight.detach()) <= 1000 * EPS
    step(mine, optimizer)
    step(there, torch.optim.SGD(there.parameters(), lr=0.01))
    assert distance(mine, there.weight.detach()) <= 1000 * EPS


def test_an_optimizer_of_before_leaves_the_training_of_the_next_alone() -> None:
    mine, plain = layer("he_normal")
    first = follow_weights(mine, torch.optim.SGD, lr=0.01)
    second = follow_weights(mine, torch.optim.SGD, lr=0.01)
    step(mine, second)
    step(plain, torch.optim.SGD(plain.parameters(), lr=0.01))
    first.step()
    assert distance(mine, plain.weight.detach()) <= 1000 * EPS
    release(mine)
    second.zero_grad()
    second.step()
    assert mine.held is None
    assert distance(mine, plain.weight.detach()) <= 1000 * EPS


@pytest.mark.parametrize("features", FOLLOWED)
def test_a_layer_frozen_later_stays_as_it_is(features: str) -> None:
    mine, _ = layer(features)
    optimizer = follow_weights(mine, torch.optim.SGD, lr=0.01)
    step(mine, optimizer)
    before = mine.weight.detach().clone()
    mine.gamma.requires_grad_(False)
    step(mine, optimizer)
    assert distance(mine, before) <= 10 * EPS


def test_a_layer_of_which_one_gamma_is_frozen_is_trained_the_plain_way() -> None:
    mine, _ = layer("id_cond_minimal")
    assert mine.output_gamma is not None
    mine.output_gamma.requires_grad_(False)
    before = mine.output_gamma.clone(), mine.gamma.detach().clone()
    step(mine, follow_weights(mine, torch.optim.SGD, lr=0.01))
    assert torch.equal(mine.output_gamma, before[0])
    assert not torch.equal(mine.gamma, before[1])


def test_moving_the_model_afterwards_is_named() -> None:
    mine, _ = layer("he_normal")
    follow_weights(mine, torch.optim.SGD, lr=0.01)
    mine.float()
    with pytest.raises(ConversionError, match=r"torch.float64 on cpu; got torch.float32 on cpu.*after moving"):
        mine(normal(5, 3).float())


@pytest.mark.parametrize("memory", [None, 1.0])
def test_a_gradient_that_is_no_number_is_not_hidden(memory: float | None) -> None:
    mine, _ = layer("he_normal")
    optimizer = follow_weights(mine, torch.optim.SGD, memory=memory, lr=0.01)
    mine(normal(5, 3) * torch.nan).sum().backward()
    optimizer.step()
    assert bool(mine.weight.isnan().any())


@pytest.mark.parametrize(
    ("kind", "model"),
    [("sgd", nn.Linear(2, 2)), (nn.Linear(2, 2), torch.optim.SGD), (torch.optim.SGD, [nn.Linear(2, 2)])],
)
@pytest.mark.usefixtures("unchecked")
def test_arguments_of_the_wrong_kind_are_named(kind: Any, model: Any) -> None:
    with pytest.raises(ConversionError, match=r"a model and .*optimizer"):
        follow_weights(model, kind, lr=0.1)


@pytest.mark.parametrize(
    ("kind", "options", "error", "match"),
    [
        (torch.optim.SGD, {"lr": -1.0}, ValueRangeError, r"-1\.0"),
        (torch.optim.SGD, {"lr": 0.1, "speed": 2}, ConversionError, "speed"),
        (torch.optim.Adam, {"betas": 0.9}, ConversionError, "Adam"),
        (lambda parameters: torch.optim.SGD([]), {}, ValueRangeError, "empty parameter list"),
        (lambda parameters: None, {}, ConversionError, "None"),
    ],
)
def test_a_model_is_not_attached_to_an_optimizer_that_cannot_be_made(
    kind: Any, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    mine, _ = layer("he_normal")
    with pytest.raises(error, match=match):
        follow_weights(mine, kind, **options)
    before = mine.gamma.detach().clone()
    step(mine, torch.optim.SGD(mine.parameters(), lr=0.01))
    assert not torch.equal(mine.gamma, before)


def test_an_optimizer_of_before_is_kept_if_the_next_cannot_be_made() -> None:
    mine, plain = layer("he_normal")
    optimizer = follow_weights(mine, torch.optim.SGD, lr=0.01)
    with pytest.raises(ValueRangeError, match="lr"):
        follow_weights(mine, torch.optim.SGD, lr=-1.0)
    step(mine, optimizer)
    step(plain, torch.optim.SGD(plain.parameters(), lr=0.01))
    assert distance(mine, plain.weight.detach()) <= 1e4 * EPS


# ------------------------------------------------------------------------------- precision


def wide(excess: float = 1.0) -> nn.Module:
    return NormOnlyLinear(48, 32, features="he_normal", excess=excess, seed=0)


def test_a_refresh_and_a_step_inside_autocast_give_the_weights_of_a_step_outside() -> None:
    x = normal(7, 48).float()
    weights = []
    for is_inside in (False, True):
        model = wide()
        optimizer = follow_weights(model, torch.optim.SGD, lr=0.01)
        with torch.no_grad():
            model.gamma.mul_(1.5)  # changed by hand: the next pass makes the weight again
        model(x).square().sum().backward()
        if is_inside:
            optimizer.zero_grad()
            with torch.no_grad():
                model.gamma.add_(0.0)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                refreshed = model.weight.detach().clone()
            assert torch.equal(refreshed, weights[0])
            model(x).square().sum().backward()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                optimizer.step()
        else:
            weights.append(model.weight.detach().clone())
            optimizer.step()
        weights.append(model.weight.detach().clone())
    assert torch.equal(weights[1], weights[2])


def test_a_run_under_autocast_follows_the_ordinary_network_under_autocast() -> None:
    mine = wide(1.25)
    plain = mine.to_plain()
    optimizers = [follow_weights(mine, torch.optim.SGD, lr=0.01), torch.optim.SGD(plain.parameters(), lr=0.01)]
    x = normal(7, 48).float()
    for _ in range(5):
        for model, optimizer in zip((mine, plain), optimizers, strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
    # Float32 rounding, magnified by a condition number of some hundreds, may turn the rounding of a weight to bfloat16.
    assert relative(mine.weight.detach(), plain.weight.detach()) <= 5 * torch.finfo(torch.bfloat16).eps


def test_a_scaled_loss_is_unscaled_and_a_step_with_infinite_gradients_is_skipped() -> None:
    mine = wide(1.25)
    plain = mine.to_plain()
    optimizers = [follow_weights(mine, torch.optim.SGD, lr=0.01), torch.optim.SGD(plain.parameters(), lr=0.01)]
    x = normal(7, 48).float()
    for model, optimizer in zip((mine, plain), optimizers, strict=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(factor * model(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0, "one step was skipped"
    # Two steps of float32, magnified by a condition number of some hundreds.
    assert relative(mine.weight.detach(), plain.weight.detach()) <= 1e4 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gammas_follow_weights_of_half_precision(dtype: torch.dtype) -> None:
    mine = wide().to(dtype)
    plain = mine.to_plain()
    assert plain.weight.dtype == dtype
    optimizers = [follow_weights(mine, torch.optim.SGD, lr=0.05), torch.optim.SGD(plain.parameters(), lr=0.05)]
    x = normal(7, 48).to(dtype)
    for _ in range(5):
        for model, optimizer in zip((mine, plain), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).float().square().mean().backward()
            optimizer.step()
    assert mine.weight.dtype == dtype
    assert mine.gamma.dtype == torch.float32
    # Each of five steps may round the last digit of a weight another way.
    assert relative(mine.weight.detach().double(), plain.weight.detach().double()) <= 5 * torch.finfo(dtype).eps
