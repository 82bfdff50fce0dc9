"""Plans: what they promise is what reconstruct makes, they cost next to nothing, and they leave the target alone."""

from __future__ import annotations

import copy
import importlib
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from onlynorm.errors import ConversionError, UnknownNameError, ValueRangeError
from onlynorm.models import mlp
from onlynorm.reconstruction import constructions, plan, reconstruct, verify
from onlynorm.reconstruction.blocks import Block
from onlynorm.reconstruction.plan import COLUMNS, UNITS, short
from onlynorm.solvers.memory import MemoryMeter, release_free_memory


class Varied(nn.Module):
    """A convolution with stride, one with groups that is called twice, a linear layer over tokens, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.shared = nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False)
        self.again = self.shared
        self.tokens = nn.Linear(4, 3)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.first(x)))
        h = self.again(torch.relu(self.shared(h)))
        return self.head(self.drop(self.tokens(h.flatten(2).mT)).mean(1))


def images(n: int = 3) -> Tensor:
    return torch.randn(n, 2, 8, 8, generator=torch.Generator().manual_seed(0))


# Four times four positions after the stride; the grouped convolution is called twice.
POSITIONS = {"first": 16, "shared": 32, "tokens": 16, "head": 1}


@pytest.mark.parametrize("n_samples", [1, 3])
def test_positions_are_counted_per_sample_over_all_calls(n_samples: int) -> None:
    planned = plan(Varied(), inputs=images(n_samples))
    assert {row.name: row.n_positions for row in planned.layers} == POSITIONS


@pytest.mark.parametrize(
    "choices",
    [{}, {"features": "id_cond"}, {"excess": 0.5}, {"kernel": "second"}, {"excess": 2.0, "features": "orthogonal"}],
    ids=str,
)
def test_what_is_planned_is_what_reconstruct_makes(choices: dict[str, Any]) -> None:
    network, inputs = Varied().double().eval(), images().double()
    planned = plan(network, inputs=inputs, **choices)
    made = reconstruct(network, inputs=inputs, **choices)
    blocks = {name: module for name, module in made.network.named_modules() if isinstance(module, Block)}
    for row, layer in zip(planned.layers, made.layers, strict=True):
        assert row.costs is not None
        block, target = blocks[row.name], network.get_submodule(row.name)
        sources = block.sources()
        assert (row.name, row.shape) == (layer.name, layer.shape)
        assert row.costs.n_features == block.n_features
        assert row.costs.equations == sum(source.equations for source in sources)
        assert row.costs.n_norm_parameters == sum(p.numel() for p in block.parameters())
        assert row.n_target_parameters == sum(p.numel() for p in target.parameters())
        frozen = sum(source.left().numel() + source.right().numel() for source in sources)
        assert row.costs.n_frozen == frozen
        assert row.n_multiplications == POSITIONS[row.name] * frozen
        assert row.costs.method == layer.method
    total = planned.total
    assert total.costs is not None
    assert total.costs.n_frozen == verify(network, made.network, inputs).n_frozen
    assert total.costs.n_norm_parameters == made.n_norm_parameters
    assert total.n_multiplications == sum(row.n_multiplications for row in planned.layers)


@pytest.mark.parametrize("excess", [1.25, 2.0])
def test_the_predicted_error_bounds_the_residual(excess: float) -> None:
    network, inputs = mlp((20, 30, 10)).double(), torch.rand(5, 20, dtype=torch.float64)
    planned = plan(network, inputs=inputs, excess=excess)
    made = reconstruct(network, inputs=inputs, excess=excess)
    for row, layer in zip(planned.layers, made.layers, strict=True):
        assert row.costs is not None
        # The prediction is of the order of what comes: rounding of direct methods is known to a factor only.
        assert layer.residual <= 10 * row.costs.error


def test_too_few_features_are_predicted_to_leave_what_they_leave() -> None:
    network, inputs = mlp((40, 30)).double(), torch.rand(5, 40, dtype=torch.float64)
    planned = plan(network, inputs=inputs, excess=0.75)
    made = reconstruct(network, inputs=inputs, excess=0.75)
    assert planned.layers[0].costs is not None
    # A share 1 - 0.75 of 1,200 equations is left: its square root is known to about 1 / sqrt(1200) of a random target.
    assert made.layers[0].residual == pytest.approx(planned.layers[0].costs.error, rel=0.1)
    assert "300 features too few: least squares" in str(planned)


RECIPES = [
    {"width": "minimum", "excess": 1.0},
    {"features": "id_cond_minimal"},
    {"features": "ortho_cond"},
    {"features": "sparse_he_normal", "density": 0.3},
    {"storage": "seed", "norms": "affine", "activation": nn.Tanh(), "tolerance": 1e-12, "margin": 0.5},
    {"excess": 0.1},
]


@pytest.mark.parametrize("choices", [*RECIPES, *({"construction": name} for name in constructions())], ids=str)
def test_every_recipe_has_a_plan(choices: dict[str, Any]) -> None:
    planned = plan(mlp((6, 6, 4)), inputs=torch.zeros(1, 6), **choices)
    assert planned.is_feasible
    assert [row.name for row in planned.layers] == ["0", "2"]
    for row in planned.layers:
        assert row.costs is not None
        assert row.costs.n_features > 0
        assert row.costs.seconds > 0.0
        assert row.costs.condition >= 1.0
    json.dumps(planned.as_dict(), allow_nan=False)


@pytest.mark.parametrize("is_training", [True, False])
def test_the_target_is_left_alone(is_training: bool) -> None:
    network = Varied().train(is_training)
    before, state = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    plan(network, inputs=images())
    assert network.training is is_training
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert not any(module._forward_hooks for module in network.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_plan_allocates_nothing_large() -> None:
    network, inputs = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1)), torch.zeros(1, 64, 4, 4)
    plan(network, inputs=inputs)  # the rate of the machine is measured once
    release_free_memory()
    with MemoryMeter() as meter:
        planned = plan(network, inputs=inputs)
    assert planned.layers[0].costs is not None
    assert planned.layers[0].costs.memory > 200e6
    assert meter.peak < 20e6


def test_what_does_not_fit_is_said_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    network = mlp((64, 64, 4))
    rooms = [importlib.import_module(f"onlynorm.reconstruction.{name}") for name in ("plan", "costs")]
    for room in rooms:
        monkeypatch.setattr(room, "memory_limit", lambda: 600_000)
    planned = plan(network, inputs=torch.zeros(1, 64))
    assert [row.is_feasible for row in planned.layers] == [False, True]
    assert not planned.is_feasible
    assert planned.layers[0].costs is None
    assert "0: solving 4096 equations with 5120 features needs at least" in str(planned)
    assert json.loads(json.dumps(planned.as_dict()))["layers"][0]["note"]
    # The solver would do with less than the frozen weights themselves need.
    for room in rooms:
        monkeypatch.setattr(room, "memory_limit", lambda: 4_500_000)
    planned = plan(network, inputs=torch.zeros(1, 64))
    assert not planned.is_feasible
    assert planned.layers[0].costs is not None
    assert "more than the 4.5 MB that may be used" in planned.remarks[0]


def test_a_layer_that_the_batch_does_not_reach_is_named() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(4, 3), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    planned = plan(Spare(), inputs=torch.zeros(1, 4))
    assert planned.remarks == ("spare: not called on this batch, so it cannot be calibrated",)
    assert planned.layers[1].n_multiplications == 0


def test_what_is_left_is_listed_or_refused() -> None:
    network = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
    tokens = torch.tensor([[1, 2, 3]])
    planned = plan(network, inputs=tokens)
    assert planned.remarks == ("left as it is: 0 (Embedding): neither linear nor convolutional",)
    assert planned.layers[0].n_positions == 3
    with pytest.raises(ConversionError, match=r"got 1 other modules.*Leave strict out"):
        plan(network, inputs=tokens, strict=True)


def test_a_plan_reads_as_a_table() -> None:
    lines = str(plan(Varied(), inputs=images())).splitlines()
    assert lines[0].split() == list(COLUMNS)
    assert [line.split()[0] for line in lines[1:]] == ["first", "shared", "tokens", "head", "total"]
    assert len({len(line) for line in lines}) == 1
    assert all(len(line.split()) >= len(COLUMNS) for line in lines[1:-1])


def test_bad_input_is_refused() -> None:
    network, inputs = mlp((6, 5, 4)), torch.zeros(1, 6)
    with pytest.raises(UnknownNameError, match=r"field of a recipe needs a known name; got 'exces'"):
        plan(network, inputs=inputs, exces=2.0)
    with pytest.raises(ValueRangeError, match=r"a plan needs a batch of finite inputs; got shape \(0, 6\)"):
        plan(network, inputs=inputs[:0])
    with pytest.raises(ConversionError, match=r"the network needs to take the inputs, \(1, 7\)"):
        plan(network, inputs=torch.zeros(1, 7))


@given(st.integers(0, 10**20))
def test_counts_are_short_and_true_to_three_digits(number: int) -> None:
    text = short(number)
    unit = text[-1] if text[-1] in UNITS else ""
    size = float(text.removesuffix(unit)) * 1000.0 ** UNITS.index(unit)
    assert abs(size - number) <= 0.005 * number
    assert len(text) <= 5
