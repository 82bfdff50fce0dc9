"""`repair`: what it promises of the model it gets, what each method does to rank, scale and gradient, bad input."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.data import seeded
from onlynorm.errors import ConversionError, ShapeError, UnknownNameError, ValueRangeError
from onlynorm.models import cifar_resnet, mlp, vgg, vit
from onlynorm.rank.depth_evidence import LayerState, Lesson, gradient_ratio, harm, look
from onlynorm.rank.repair import METHODS, NOTHING, repair
from onlynorm.rank.visits import Route, find_route

repairing = importlib.import_module("onlynorm.rank.repair")
DEPTH, WIDTH = 8, 16
FLOAT = 1e-4
"""Of float32 sums over a few thousand numbers, relative."""


def deep(activation: Callable[[], nn.Module] = nn.ReLU, **options: Any) -> nn.Sequential:
    return mlp((20, *[WIDTH] * DEPTH, 5), activation=activation, **{"seed": 1, **options})


def batch(n: int = 32, *shape: int, seed: int = 0) -> Tensor:
    """Samples around a mean that is not zero, as images are."""
    return torch.randn(n, *(shape or (20,)), generator=seeded(seed)) + 0.5


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def is_same(model: nn.Module, kept: dict[str, Tensor]) -> bool:
    now = model.state_dict()
    return now.keys() == kept.keys() and all(torch.equal(now[name], value) for name, value in kept.items())


# ---------------------------------------------------------------------------------------------- the front door


@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_the_model_is_left_alone_and_its_copy_repaired(method: str) -> None:
    model = deep().eval()
    kept, dice = state(model), torch.get_rng_state()
    result = repair(model, batch(), method=method, n_steps=5)
    assert is_same(model, kept)
    assert torch.equal(torch.get_rng_state(), dice)
    assert result.model is not model
    assert not any(module.training for module in result.model.modules())
    assert result.method == ("mirrored" if method == "auto" else method)
    assert len(result.before) == len(result.after) == DEPTH + 1
    assert abs(math.log(result.ratio_after)) < abs(math.log(result.ratio_before))
    hidden = [s.r for s in result.after[:-1]]
    assert min(hidden) >= min(s.r for s in result.before[:-1])


@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_in_place_changes_the_very_parameters_and_gives_the_same_numbers(method: str) -> None:
    model = deep()
    own = set(map(id, model.parameters()))
    copied = repair(model, batch(), method=method, seed=3, n_steps=2)
    result = repair(model, batch(), method=method, seed=3, n_steps=2, in_place=True)
    assert result.model is model
    assert own <= set(map(id, model.parameters()))
    assert is_same(model, state(copied.model))
    assert result.after == copied.after


def test_the_repair_is_a_function_of_its_seed() -> None:
    first, again, other = (repair(deep(), batch(), seed=seed).model for seed in (1, 1, 2))
    assert is_same(first, state(again))
    assert not is_same(first, state(other))


def test_a_healthy_network_is_left_as_it_is_by_auto() -> None:
    healthy = repair(deep(), batch()).model
    result = repair(healthy, batch())
    assert result.method == NOTHING
    assert str(result).startswith("left as it is (it needs no repair: harm 0.")
    assert is_same(result.model, state(healthy))


def test_a_network_that_no_repair_makes_better_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = dataclasses.replace(METHODS["mirrored"], run=lambda _: "idle")
    monkeypatch.setattr(repairing, "METHODS", dict.fromkeys(METHODS, idle))
    result = repair(deep(), batch())
    assert result.method == NOTHING
    assert result.remark.startswith("no repair does better than its harm, ")


def test_the_result_reads_well_and_is_plain_data() -> None:
    result = repair(deep(), batch(), targets=torch.arange(32) % 5)
    text = str(result)
    assert text.startswith("repaired by mirrored (")
    assert "in '0'" in text
    assert f"-> {result.ratio_after:.2g}" in text
    plain = json.loads(json.dumps(result.as_dict()))
    assert [layer["name"] for layer in plain["layers"]] == [row[0] for row in result.rows()]
    assert plain["layers"][3]["after"]["r"] == result.after[3].r
    assert plain["gradient_ratio"]["before"] == result.ratio_before


# ---------------------------------------------------------------------------------------------- the evidence


def test_evidence_is_that_of_a_plain_forward_and_backward_pass() -> None:
    model, inputs, labels = deep(), batch(), torch.arange(32) % 5
    states = look(find_route(model, (inputs,)), Lesson(labels))
    signal, outputs = inputs, []
    for layer in model:
        signal = layer(signal)
        if isinstance(layer, nn.Linear):
            signal.retain_grad()
            outputs.append(signal)
    functional.cross_entropy(signal, labels).backward()
    for found, output in zip(states, outputs, strict=True):
        H = output.detach().double().mT
        values = torch.linalg.svdvals(H).square()
        assert found.r == pytest.approx(float(values.sum().square() / values.square().sum()), rel=FLOAT)
        assert found.scale == pytest.approx(float(H.square().mean().sqrt()), rel=FLOAT)
        assert output.grad is not None
        assert found.gradient == pytest.approx(float(output.grad.norm()), rel=FLOAT)
    assert gradient_ratio(states) == pytest.approx(states[0].gradient / states[-2].gradient)


def test_looking_leaves_statistics_and_modes_and_takes_the_batch_as_training_does() -> None:
    model = deep(norm="batch").eval()
    kept = state(model)
    states = look(find_route(model, (batch(),)), Lesson())
    assert is_same(model, kept)
    assert not any(module.training for module in model.modules())
    model.train()
    assert states == look(find_route(model, (batch(),)), Lesson())


def test_harm_counts_lost_rank_and_gradients_that_grow_or_shrink() -> None:
    whole = find_route(deep(), (batch(),))
    route = Route(whole.model, whole.inputs, whole.places[:4])

    def states(ranks: list[float], gradients: list[float]) -> list[LayerState]:
        return [LayerState(str(i), r, 1.0, g) for i, (r, g) in enumerate(zip(ranks, gradients, strict=True))]

    assert harm(states([4.0, 4.0, 4.0, 1.0], [1.0, 5.0, 1.0, 9.0]), route) == 0.0
    assert harm(states([4.0, 2.0, 4.0, 1.0], [1.0, 1.0, 1.0, 1.0]), route) == pytest.approx(math.log(2.0))
    assert harm(states([4.0, 9.0, 4.0, 1.0], [1.0, 1.0, 3.0, 1.0]), route) == pytest.approx(math.log(3.0))
    # more rank than the root of the width is nothing that could be lost
    assert harm(states([20.0, 6.0, 6.0, 1.0], [1.0] * 4), route) == 0.0
    assert harm(states([4.0, math.nan, 4.0, 1.0], [1.0] * 4), route) == math.inf
    assert harm(states([4.0, 4.0, 4.0, 1.0], [0.0, 0.0, 1.0, 1.0]), route) == math.inf


# ---------------------------------------------------------------------------------------------- any architecture


class Shared(nn.Module):
    """One hidden layer that is called five times, in-place activations, a dict as output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(20, 16), nn.Linear(16, 16), nn.Linear(16, 5)
        self.activation, self.unused = nn.ReLU(inplace=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.activation(self.first(x))
        for _ in range(5):
            x = self.activation(self.shared(x))
        return {"logits": self.last(x)}


@pytest.mark.parametrize("method", ["mirrored", "rank", "whole", "paper", "lsuv", "near_identity", "orthogonal"])
def test_a_shared_layer_is_changed_once_and_an_unused_one_not_at_all(method: str) -> None:
    model = Shared()
    result = repair(model, batch(), method=method, targets=torch.arange(32) % 5, n_steps=3)
    assert [layer.name for layer in result.after] == ["first", "shared", "last"]
    made = result.model
    assert isinstance(made, Shared)
    assert torch.equal(made.unused.weight, model.unused.weight)
    assert not torch.equal(made.shared.weight, model.shared.weight)
    if method in ("mirrored", "lsuv", "rank"):
        assert result.after[1].scale == pytest.approx(1.0, rel=FLOAT)  # at its first call, where it was set


@pytest.mark.parametrize(
    "make",
    [
        lambda: vgg([[8, 8], [8, 8]], norm="none", image_size=16),
        lambda: cifar_resnet(8, width=4),
        lambda: vit(image_size=16, patch=4, width=16, depth=2, heads=2),
    ],
    ids=["vgg", "resnet", "vit"],
)
@pytest.mark.parametrize("method", ["mirrored", "rank", "near_identity"])
def test_convolutions_skips_and_tokens_are_repaired_too(make: Callable[[], nn.Module], method: str) -> None:
    model, images = make(), batch(8, 3, 16, 16)
    result = repair(model, images, method=method, targets=torch.arange(8), n_steps=2)
    assert all(math.isfinite(layer.r) and layer.r >= 1.0 - FLOAT for layer in result.after)
    assert 0.0 < result.ratio_after < math.inf
    out = result.model(images)
    assert bool(torch.isfinite(out).all())


def test_frozen_layers_stay() -> None:
    model = deep()
    frozen = model[4]
    frozen.requires_grad_(False)
    made = repair(model, batch(), method="lsuv").model
    assert isinstance(made, nn.Sequential)
    assert torch.equal(made[4].weight, frozen.weight)  # type: ignore[arg-type]
    assert not torch.equal(made[2].weight, model[2].weight)  # type: ignore[arg-type]


def test_several_inputs_and_a_loss_of_ones_own() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = deep()

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, str]:
            return self.body(x + y), "more"

    def loss(returned: Any, targets: Tensor) -> Tensor:
        return functional.mse_loss(returned[0], targets)

    result = repair(Two(), (batch(), batch(seed=1)), targets=torch.zeros(32, 5), loss=loss)
    assert result.ratio_after == pytest.approx(1.0, abs=0.5)


# ---------------------------------------------------------------------------------------------- bad input


def test_bad_input_is_refused() -> None:
    model = deep()
    with pytest.raises(UnknownNameError, match=r"method needs a known name; got 'miror'\. Did you mean 'mirrored'"):
        repair(model, batch(), method="miror")
    with pytest.raises(ShapeError, match=r"repair needs two samples or more.*\(1, 20\)"):
        repair(model, batch(1))
    with pytest.raises(ValueRangeError, match="repair needs a batch of finite inputs"):
        repair(model, batch() * math.nan)
    with pytest.raises(ValueRangeError, match=r"target_rank needs a number from one on; got 0\.5"):
        repair(model, batch(), target_rank=0.5)
    with pytest.raises(ValueRangeError, match="max_ratio needs a positive number; got nan"):
        repair(model, batch(), max_ratio=math.nan)
    with pytest.raises(ValueRangeError, match="n_steps needs a whole number from zero on; got -1"):
        repair(model, batch(), n_steps=-1)
    with pytest.raises(ConversionError, match=r"a repair needs Linear or convolutional layers.*ReLU calls none"):
        repair(nn.ReLU(), batch())
    with pytest.raises(ShapeError, match=r"cross entropy needs a class for every sample.*got targets \(7,\)"):
        repair(model, batch(), targets=torch.zeros(7, dtype=torch.long))
    with pytest.raises(ConversionError, match=r"the network needs to take the inputs, \(32, 7\)"):
        repair(model, batch(32, 7))


def test_weights_that_are_no_numbers_are_named() -> None:
    model = deep()
    nn.init.constant_(model[6].weight, math.nan)  # type: ignore[arg-type]
    with pytest.raises(ValueRangeError, match=r"finite signals; layer '6' gives NaN"):
        repair(model, batch())


@pytest.mark.parametrize("method", ["rank", "whole", "residual"])
def test_a_dead_network_is_refused_by_what_only_scales_it_and_stays_whole(method: str) -> None:
    model = deep()
    for parameter in model[4].parameters():
        nn.init.zeros_(parameter)
    kept = state(model)
    with pytest.raises(
        ValueRangeError, match=r"'[46](\.layer)?' \([34] of 9\) gives only zeros|matrix that is not zero"
    ):
        repair(model, batch(), method=method, in_place=True)
    assert is_same(model, kept)


def test_a_dead_network_can_be_drawn_anew() -> None:
    model = deep()
    for parameter in model[4].parameters():
        nn.init.zeros_(parameter)
    result = repair(model, batch(), method="mirrored")
    assert math.isnan(result.before[2].r)
    assert result.ratio_before == 0.0
    assert result.ratio_after == pytest.approx(1.0, rel=0.05)


def test_a_single_hidden_layer_has_no_ratio_of_gradients_to_tell() -> None:
    result = repair(mlp((6, 8, 3), seed=0), torch.randn(32, 6, generator=seeded(0)), method="paper")
    assert math.isnan(result.ratio_after)
    assert "nan" not in str(result)
    assert "gradient" not in str(result)
