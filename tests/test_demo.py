"""The demo: one trained layer from random weights, by its norms only, and the comparison that would notice a fault."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onlynorm import demo as demo_module
from onlynorm.data import Split, digits
from onlynorm.demo import Demo, norm_only_linear, run_demo, train
from onlynorm.errors import MemoryLimitError, UnknownNameError, ValueRangeError
from onlynorm.features import Features, draw
from onlynorm.models import mlp
from onlynorm.solvers import Solution, solve_features

EPS = torch.finfo(torch.float64).eps
EVERY_KIND = ("he_normal", "orthogonal", "id_cond", "id_cond_minimal", "ortho_cond")


@pytest.fixture(scope="module")
def trained() -> nn.Sequential:
    """The network of seed 0, trained once for all tests of this file."""
    return train(mlp((64, 32, 10), seed=0), digits(seed=0), seed=0)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch, trained: nn.Sequential) -> None:
    """Training that takes the network of seed 0 from the shelf."""

    def fetch(network: nn.Sequential, data: Split, *, seed: int) -> nn.Sequential:
        network.load_state_dict(trained.state_dict())
        return network

    monkeypatch.setattr(demo_module, "train", fetch)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("features", EVERY_KIND)
def test_the_norm_only_network_computes_the_same_function(features: str) -> None:
    result = run_demo(features=features)
    assert result.is_same_function
    assert result.agreement == 1.0
    assert result.network_accuracy == result.target_accuracy
    assert result.target_accuracy > 0.9
    assert result.solution.is_exact
    assert result.features.name == features
    assert (result.choice is None) == result.features.is_structured


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("features", ["he_normal", "ortho_cond"])
def test_equal_seeds_give_equal_results_to_the_last_bit(features: str) -> None:
    first, again = (run_demo(features=features) for _ in range(2))
    assert first.digest == again.digest
    assert first.solution.residual == again.solution.residual
    assert torch.equal(first.solution.gamma, again.solution.gamma)
    assert first.relative_error == again.relative_error


def test_training_is_a_function_of_its_seed_and_leaves_the_global_generator_alone(trained: nn.Sequential) -> None:
    before = torch.get_rng_state()
    again = train(mlp((64, 32, 10), seed=0), digits(seed=0), seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    for name, weight in trained.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])


def test_another_seed_gives_other_data_another_network_and_other_frozen_weights() -> None:
    first, other = (run_demo(features="ortho_cond", seed=seed) for seed in (0, 1))
    assert first.digest != other.digest
    assert not torch.equal(first.solution.gamma, other.solution.gamma)
    assert first.is_same_function
    assert other.is_same_function


@pytest.mark.usefixtures("at_once")
def test_too_few_features_are_reported_not_hidden() -> None:
    result = run_demo(excess=0.25)
    assert result.solution.residual > result.solution.tolerance
    assert result.solution.shortfall
    assert not result.is_same_function


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("share", [1e-6, 1e-2])
def test_a_perturbed_gamma_is_noticed(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    def solve_badly(features: Features, target: Tensor) -> Solution:
        solution = solve_features(features, target)
        return dataclasses.replace(solution, gamma=solution.gamma * (1.0 + share))

    monkeypatch.setattr(demo_module, "solve_features", solve_badly)
    result = run_demo(features="id_cond")
    assert not result.is_same_function
    assert result.relative_error > 1e-8


@pytest.mark.parametrize(
    ("agreement", "relative_error", "is_same"),
    [(1.0, 0.0, True), (1.0, 1e-8, True), (1.0, 1.1e-8, False), (0.999, 0.0, False), (1.0, float("nan"), False)],
)
def test_same_function_means_every_prediction_and_outputs_to_1e_8(
    agreement: float, relative_error: float, is_same: bool
) -> None:
    features = draw("id_cond", (2, 3))
    solution = solve_features(features, torch.ones(2, 3, dtype=torch.float64))
    result = Demo("", features, None, solution, 0.9, 0.9, agreement, relative_error, "")
    assert result.is_same_function is is_same


@pytest.mark.parametrize("features", EVERY_KIND)
def test_the_block_is_two_frozen_linears_and_two_real_norms(features: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    bias = torch.randn(5, generator=generator, dtype=torch.float64)
    inputs = torch.randn(11, 7, generator=generator, dtype=torch.float64)
    drawn = draw(features, (5, 7))
    solution = solve_features(drawn, weight)
    block = norm_only_linear(drawn, solution, bias).eval()

    first, middle, second, last = block
    assert [type(layer) for layer in block] == [nn.Linear, nn.BatchNorm1d, nn.Linear, nn.BatchNorm1d]
    assert first.bias is None
    assert second.bias is None
    assert torch.equal(first.weight, drawn.right())
    assert torch.equal(second.weight, drawn.left())
    learned = {id(p) for p in block.parameters() if p.requires_grad}
    assert learned == {id(p) for norm in (middle, last) for p in norm.parameters()}

    # Each of the n_features products of an output is rounded about once per layer.
    sizes = drawn.left().abs() @ (solution.gamma.abs()[:, None] * drawn.right().abs())
    scale = 1.0 if solution.output_gamma is None else float(solution.output_gamma.abs().max())
    bound = scale * float((inputs.abs() @ sizes.mT).max()) + float(bias.abs().max())
    tolerance = 4 * (drawn.n_features + drawn.cols) * EPS * bound + solution.residual * float(
        torch.linalg.vector_norm(weight) * torch.linalg.vector_norm(inputs)
    )
    wanted = inputs @ weight.mT + bias
    assert (block(inputs) - wanted).abs().max() <= tolerance


def test_the_norms_hold_the_statistics_of_the_identity() -> None:
    drawn = draw("id_cond", (2, 3))
    solution = solve_features(drawn, torch.ones(2, 3, dtype=torch.float64))
    block = norm_only_linear(drawn, solution, torch.zeros(2, dtype=torch.float64))
    for norm in (block[1], block[3]):
        assert torch.equal(norm.running_mean, torch.zeros_like(norm.running_mean))
        assert (norm.running_var + norm.eps - 1.0).abs().max() <= EPS


def test_minimal_features_refuse_weights_they_cannot_make(
    monkeypatch: pytest.MonkeyPatch, trained: nn.Sequential
) -> None:
    def without_one_weight(network: nn.Sequential, data: Split, *, seed: int) -> nn.Sequential:
        network.load_state_dict(trained.state_dict())
        with torch.no_grad():
            network[0].weight[3, 0] = 0.0
        return network

    monkeypatch.setattr(demo_module, "train", without_one_weight)
    with pytest.raises(ValueRangeError, match=r"got zeros in outputs 3\. Draw with shared_column=1"):
        run_demo(features="id_cond_minimal")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"features": "he_norml"}, UnknownNameError, "Did you mean 'he_normal'"),
        ({"excess": 0.0}, ValueRangeError, "excess needs a positive finite number"),
        ({"excess": float("nan")}, ValueRangeError, "excess needs a positive finite number"),
        ({"excess": 1e9}, MemoryLimitError, "the frozen weights .* Take a smaller excess"),
        ({"features": "id_cond", "excess": 2.0}, ValueRangeError, "exactly its own 2048 features"),
        ({"seed": -1}, ValueRangeError, "seed needs a whole number"),
        ({"seed": 2**64}, ValueRangeError, "seed needs a whole number"),
    ],
)
def test_wrong_use_is_refused_before_the_training(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    monkeypatch.setattr(demo_module, "train", lambda *args, **rest: pytest.fail("trained in vain"))
    with pytest.raises(error, match=message):
        run_demo(**options)


@pytest.mark.usefixtures("at_once")
def test_the_steps_are_told_in_order() -> None:
    steps: list[str] = []
    run_demo(features="id_cond", step=steps.append)
    assert [step.split()[0].rstrip(":") for step in steps] == ["planning", "training", "solving", "building"]
