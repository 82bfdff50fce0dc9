"""The demo: a network rebuilt by its norms, a comparison that notices faults, and a deep network that is repaired."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from onlynorm.cli.commands import demo as demo_module
from onlynorm.cli.commands.demo import SCHEDULE, Demo, make_target, run_demo, run_repair, train
from onlynorm.data import Split, digits
from onlynorm.errors import MemoryLimitError, UnknownNameError, ValueRangeError
from onlynorm.frozen.form import FrozenBlock
from onlynorm.reconstruction import Reconstruction, Verification, plan, reconstruct
from onlynorm.reconstruction.verify import Comparison


@pytest.fixture(scope="module")
def trained() -> nn.Sequential:
    """The network of seed 0, trained once for all tests of this file."""
    return train(make_target(seed=0), digits(seed=0), seed=0)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch, trained: nn.Sequential) -> None:
    """Training that takes the network of seed 0 from the shelf."""

    def fetch(network: nn.Sequential, data: Split, *, seed: int) -> nn.Sequential:
        network.load_state_dict(trained.state_dict())
        return network

    monkeypatch.setattr(demo_module, "train", fetch)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("features", ["he_normal", "ortho_cond"])
def test_the_norm_only_network_computes_the_same_function(features: str) -> None:
    made = run_demo(features=features)
    assert made.is_same_function
    assert made.comparison.network_accuracy == made.comparison.target_accuracy
    assert made.comparison.target_accuracy is not None
    assert made.comparison.target_accuracy > 0.9
    assert made.result.construction.features == features
    assert len(made.result.layers) == len(made.plan.layers) == 4
    assert made.comparison.check.is_only_norms


@pytest.mark.usefixtures("at_once")
def test_the_steps_are_told_in_order_and_the_sizes_are_those_of_the_networks() -> None:
    told: list[tuple[int, int, str]] = []
    made = run_demo(features="id_cond", progress=lambda *news: told.append(news))
    assert [(done, total) for done, total, _ in told] == [(done, 8) for done in range(5)]
    words = [message.split()[0].rstrip(":") for _, _, message in told]
    assert words == ["planning", "training", "rebuilding", "saving", "comparing"]
    check = made.comparison.check
    blocks = [module for module in made.result.network.modules() if isinstance(module, FrozenBlock)]
    frozen = sum(source.n_frozen for block in blocks for source in block.sources())
    assert check.n_frozen == frozen
    assert made.whole_size == made.file_size + 8 * frozen
    # Every norm of the network is in the file, in float64.
    assert made.file_size > 8 * made.result.n_norm_parameters
    parameters = sum(value.numel() for value in make_target(seed=0).state_dict().values())
    assert 8 * parameters <= made.target_size <= 8 * parameters + 4096


def test_training_is_a_function_of_its_seed_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, again = (train(make_target(seed=0), digits(seed=0), seed=0, epochs=1).state_dict() for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(weight, again[name]) for name, weight in first.items())


def test_another_seed_gives_another_network_and_other_frozen_weights() -> None:
    first, other = (make_target(seed=seed) for seed in (0, 1))
    assert not torch.equal(first[1].weight, other[1].weight)


@pytest.mark.usefixtures("at_once")
def test_too_few_features_are_reported_not_hidden() -> None:
    made = run_demo(excess=0.25)
    assert all(layer.shortfall for layer in made.result.layers)
    assert not made.is_same_function


@pytest.mark.usefixtures("at_once")
def test_a_perturbed_norm_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def rebuild_badly(*args: Any, **options: Any) -> Reconstruction:
        made = reconstruct(*args, **options)
        block = next(module for module in made.network.modules() if isinstance(module, FrozenBlock))
        with torch.no_grad():
            next(block.parameters()).mul_(1.0 + 1e-6)
        return made

    monkeypatch.setattr(demo_module, "reconstruct", rebuild_badly)
    made = run_demo(features="id_cond")
    assert not made.is_same_function
    assert made.comparison.check.relative_error > 1e-8


def test_same_function_means_every_prediction_outputs_to_1e_8_and_weights_from_the_seed() -> None:
    target = nn.Sequential(nn.Linear(3, 2)).double()
    inputs = torch.ones(4, 3, dtype=torch.float64)
    planned, made = plan(target, inputs), reconstruct(target, inputs)
    good = Verification(0.0, 0.0, 1.0, 0.0, True, 4)

    def judged(**changes: Any) -> bool:
        comparison = Comparison(dataclasses.replace(good, **changes), 1.0, 1.0, 0.0)
        return Demo("", planned, made, comparison, 1, 1, 1, 0.0).is_same_function

    assert judged()
    assert judged(relative_error=1e-8)
    assert not judged(relative_error=1.1e-8)
    assert not judged(relative_error=float("nan"))
    assert not judged(agreement=0.999)
    assert not judged(is_reproducible=False)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"features": "he_norml"}, UnknownNameError, "Did you mean 'he_normal'"),
        ({"excess": 0.0}, ValueRangeError, "excess .* number in \\(0, inf\\)"),
        ({"excess": float("nan")}, ValueRangeError, "excess .* number in \\(0, inf\\)"),
        ({"excess": 1e9}, MemoryLimitError, "the demo needs a plan that fits .*; .* smaller excess"),
        ({"features": "id_cond", "excess": 2.0}, ValueRangeError, "number of features; got excess=2.0"),
        ({"seed": -1}, ValueRangeError, "seed .* integer"),
        ({"seed": 2**64}, ValueRangeError, "seed .* integer"),
    ],
)
def test_wrong_use_is_refused_before_the_training(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    monkeypatch.setattr(demo_module, "train", lambda *args, **rest: pytest.fail("trained in vain"))
    with pytest.raises(error, match=message):
        run_demo(**options)


@pytest.mark.slow
def test_the_deep_network_learns_after_the_repair_and_not_before() -> None:
    told: list[tuple[int, int, str]] = []
    made = run_repair(progress=lambda *news: told.append(news))
    assert [(done, total) for done, total, _ in told] == [(done, 8) for done in (5, 6, 7)]
    before, after = made.accuracies
    assert before < 0.2
    assert after > 0.9
    assert made.has_learned
    assert (made.repaired.before.verdict.word, made.repaired.after.verdict.word) == ("unhealthy", "healthy")
    n_steps = SCHEDULE.epochs * -(-1438 // SCHEDULE.batch_size)
    assert made.before[-1][0] == made.after[-1][0] == n_steps
    panels = {curve.panel for curve in made.plot().curves}
    assert panels == {"accuracy", "r", "signal_gradient"}
