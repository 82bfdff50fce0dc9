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
from tensors import single_normal
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.errors import ConversionError, ShapeError, UnknownNameError, ValueRangeError
from onlynorm.models import cifar_resnet, mlp, vgg, vit
from onlynorm.rank import Layer, diagnose
from onlynorm.rank.diagnosis.signals import gradient_ratio
from onlynorm.rank.repairs.repair import METHODS, NOTHING, repair
from onlynorm.seeds import seeded

repairing = importlib.import_module("onlynorm.rank.repairs.repair")
DEPTH, WIDTH = 8, 16
FLOAT = 1e-4
"""Of float32 sums over a few thousand numbers, relative."""


def deep(activation: Callable[[], nn.Module] = nn.ReLU, **options: Any) -> nn.Sequential:
    return mlp((20, *[WIDTH] * DEPTH, 5), activation=activation, **{"seed": 1, **options})


def batch(n: int = 32, *shape: int, seed: int = 0) -> Tensor:
    """Samples around a mean that is not zero, as images are."""
    return single_normal(n, *(shape or (20,)), seed=seed) + 0.5


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def is_same(model: nn.Module, kept: dict[str, Tensor]) -> bool:
    now = model.state_dict()
    return now.keys() == kept.keys() and all(torch.equal(now[name], value) for name, value in kept.items())


# ---------------------------------------------------------------------------------------------- the front door


@pytest.mark.parametrize("method", ["auto", *METHODS])
def test_the_model_is_left_alone_and_its_copy_repaired(method: str) -> None:
    model = deep().eval()
    kept, generator_state = state(model), torch.get_rng_state()
    result = repair(model, batch(), method=method, n_steps=5)
    assert is_same(model, kept)
    assert torch.equal(torch.get_rng_state(), generator_state)
    assert result.model is not model
    assert not any(module.training for module in result.model.modules())
    assert result.method == ("mirrored" if method == "auto" else method)
    assert len(result.before.weighted_layers) == len(result.after.weighted_layers) == DEPTH + 1
    assert abs(math.log(result.after.gradient_ratio)) < abs(math.log(result.before.gradient_ratio))
    hidden = [s.r for s in result.after.weighted_layers[:-1]]
    assert min(hidden) >= min(s.r for s in result.before.weighted_layers[:-1])


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
    assert str(result).startswith("not changed (the diagnosis is healthy, score 0.9")
    assert is_same(result.model, state(healthy))


def test_a_network_that_no_repair_makes_better_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = dataclasses.replace(METHODS["mirrored"], run=lambda _: "idle")
    monkeypatch.setattr(repairing, "METHODS", dict.fromkeys(METHODS, idle))
    result = repair(deep(), batch())
    assert result.method == NOTHING
    assert result.remark.startswith("no repair improves the score of 0.00")


def test_the_result_reads_well_and_is_plain_data() -> None:
    result = repair(deep(), batch(), targets=torch.arange(32) % 5)
    text = str(result)
    assert text.startswith("repaired by mirrored (")
    assert "in '0'" in text
    assert f"-> {result.after.gradient_ratio:.2g}" in text
    plain = json.loads(json.dumps(result.as_dict()))
    assert [row[0] for row in result.rows()] == [layer.name for layer in result.before.weighted_layers]
    assert plain["after"]["layers"][3]["r"] == result.after.layers[3].r
    assert plain["before"]["gradient_ratio"] == result.before.gradient_ratio


# ---------------------------------------------------------------------------------------------- the evidence


def test_the_report_is_the_diagnosis_of_the_network_before_and_of_the_result_after() -> None:
    model, inputs, labels = deep(norm="batch", init="asymmetric").eval(), batch(), torch.arange(32) % 5
    result = repair(model, inputs, labels, seed=3)
    assert result.method == "mirrored"
    assert result.before == diagnose(model, inputs, labels, seed=3)
    assert result.after == diagnose(result.model, inputs, labels, seed=3)
    assert result.before.score < 0.5 < 0.9 < result.after.score


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.Sigmoid])
@pytest.mark.parametrize("norm", ["none", "batch"])
def test_repair_acts_where_diagnose_advises_it(norm: str, activation: type[nn.Module]) -> None:
    n_advised = 0
    for init in ("standard", "asymmetric"):
        model, labels = deep(activation, norm=norm, init=init), torch.arange(32) % 5
        found = diagnose(model, batch(), labels)
        result = repair(model, batch(), labels)
        if "run repair" in found.verdict.advice:
            n_advised += 1
            assert result.method != NOTHING
            assert result.after.score > found.score
        elif found.verdict.word == "healthy":
            assert result.method == NOTHING
            assert result.after is result.before
    assert n_advised


def test_a_loss_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueRangeError, match="repair needs finite signals; the loss is nan"):
        repair(deep(), batch(), torch.full((32, 5), math.nan))


def test_gradients_are_those_of_a_plain_backward_pass() -> None:
    model, inputs, labels = deep(), batch(), torch.arange(32) % 5
    found = repair(model, inputs, labels).before.weighted_layers
    signal, outputs = inputs, []
    for layer in model:
        signal = layer(signal)
        if isinstance(layer, nn.Linear):
            signal.retain_grad()
            outputs.append(signal)
    functional.cross_entropy(signal, labels).backward()
    for layer, output in zip(found, outputs, strict=True):
        assert output.grad is not None
        assert layer.signal_gradient == pytest.approx(float(output.grad.norm()), rel=FLOAT)


@pytest.mark.parametrize(
    ("gradients", "ratio"),
    [([1.0, 5.0, 2.0, 9.0], 0.5), ([None, 3.0, 1.0, 1.0], 3.0), ([0.0, 0.0, 0.0, 1.0], 0.0),
     ([1.0, 0.0, 0.0, 1.0], math.inf), ([1.0, 2.0], math.nan), ([], math.nan)],
)  # fmt: skip
def test_the_gradient_ratio_compares_first_and_last_hidden_layer(gradients: list[float | None], ratio: float) -> None:
    layers = [
        Layer(
            r=1.0, soft_rank=1, spread=1.0, scale=1.0, dead=0.0, n_units=4, n_columns=4, is_finite=True, name=str(i),
            kind="Linear", call=1, depth=i + 1, has_weights=True, is_layer_input=True, shape=(4, 4), signal_gradient=g,
        )
        for i, g in enumerate(gradients)
    ]  # fmt: skip
    assert gradient_ratio(layers) == pytest.approx(ratio, nan_ok=True)


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
    assert [layer.label for layer in result.after.weighted_layers[:3]] == ["first", "shared", "shared (call 2)"]
    made = result.model
    assert isinstance(made, Shared)
    assert torch.equal(made.unused.weight, model.unused.weight)
    assert not torch.equal(made.shared.weight, model.shared.weight)
    if method in ("mirrored", "lsuv", "rank"):
        assert result.after.weighted_layers[1].scale == pytest.approx(
            1.0, rel=FLOAT
        )  # at its first call, where it was set


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
    assert all(math.isfinite(layer.r) and layer.r >= 1.0 - FLOAT for layer in result.after.weighted_layers)
    assert 0.0 < result.after.gradient_ratio < math.inf
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

    def loss(returned: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(returned, targets)

    result = repair(Two(), (batch(), batch(seed=1)), targets=torch.zeros(32, 5), loss=loss)
    assert result.after.gradient_ratio == pytest.approx(1.0, abs=0.5)


# ---------------------------------------------------------------------------------------------- bad input


def test_bad_input_is_refused() -> None:
    model = deep()
    with pytest.raises(UnknownNameError, match=r"method needs a known name; got 'miror'\. Did you mean 'mirrored'"):
        repair(model, batch(), method="miror")
    with pytest.raises(ShapeError, match=r"repair needs two samples.*\(1, 20\)"):
        repair(model, batch(1))
    with pytest.raises(ValueRangeError, match="repair needs a batch of finite inputs"):
        repair(model, batch() * math.nan)
    with pytest.raises(ValueRangeError, match=r"target_rank .* number in \[1, inf\); got 0\.5"):
        repair(model, batch(), target_rank=0.5)
    with pytest.raises(ValueRangeError, match=r"max_ratio .* number in \(0, inf\); got nan"):
        repair(model, batch(), max_ratio=math.nan)
    with pytest.raises(ValueRangeError, match=r"n_steps .* from 0; got -1"):
        repair(model, batch(), n_steps=-1)
    with pytest.raises(ConversionError, match=r"a repair needs Linear or convolutional layers.*ReLU, which calls none"):
        repair(nn.ReLU(), batch())
    with pytest.raises(ShapeError, match=r"cross entropy needs one class for each sample.*and targets \(7,\)"):
        repair(model, batch(), targets=torch.zeros(7, dtype=torch.long))
    with pytest.raises(ConversionError, match=r"repair needs inputs that the model .*; got \(32, 7\)"):
        repair(model, batch(32, 7))


def test_weights_that_are_no_numbers_are_named() -> None:
    model = deep()
    nn.init.constant_(model[6].weight, math.nan)  # type: ignore[arg-type]
    with pytest.raises(ValueRangeError, match=r"finite signals; first NaN or infinity at 6 \(Linear\)"):
        repair(model, batch())


@pytest.mark.parametrize("method", ["rank", "whole", "residual"])
def test_a_dead_network_is_refused_by_what_only_scales_it_and_stays_whole(method: str) -> None:
    model = deep()
    for parameter in model[4].parameters():
        nn.init.zeros_(parameter)
    kept = state(model)
    with pytest.raises(ValueRangeError, match=r"'[46](\.layer)?' \([34] of 9\) gives only zeros|nonzero matrix"):
        repair(model, batch(), method=method, in_place=True)
    assert is_same(model, kept)


def test_a_dead_network_can_be_drawn_anew() -> None:
    model = deep()
    for parameter in model[4].parameters():
        nn.init.zeros_(parameter)
    result = repair(model, batch(), method="mirrored")
    assert math.isnan(result.before.weighted_layers[2].r)
    assert result.before.gradient_ratio == 0.0
    assert result.after.gradient_ratio == pytest.approx(1.0, rel=0.05)


def test_a_single_hidden_layer_has_no_ratio_of_gradients_to_tell() -> None:
    result = repair(mlp((6, 8, 3), seed=0), torch.randn(32, 6, generator=seeded(0)), method="paper")
    assert math.isnan(result.after.gradient_ratio)
    assert "nan" not in str(result)
    assert "gradient" not in str(result)


# ---------------------------------------------------------------------------------------------- what is not seen


class Recurrent(nn.Module):
    """A linear layer, an LSTM that no repair can change, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lstm, self.head = nn.Linear(20, 16), nn.LSTM(16, 16, 3, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.first(x)[:, None])[0][:, 0])
        return logits


class Tied(nn.Module):
    """A language model whose head has the weight of its token embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body = nn.Embedding(30, 16), mlp((16, *[16] * DEPTH, 16), seed=1)
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.tokens(tokens)))
        return logits


TOKENS = torch.randint(30, (16, 4), generator=seeded(0))


def test_modules_that_no_repair_can_change_are_reported_with_their_part_of_the_parameters() -> None:
    model = Recurrent()
    result = repair(model, batch())
    (unseen,) = result.unseen
    assert (unseen.name, unseen.kind, unseen.reason) == ("lstm", "LSTM", "no repair for this kind of module")
    assert unseen.n_parameters == sum(p.numel() for p in model.lstm.parameters())
    total = sum(p.numel() for p in model.parameters())
    assert result.unseen_fraction == pytest.approx(unseen.n_parameters / total)
    assert "needs no repair" not in str(result)
    assert f"with {unseen.n_parameters / total:.1%} of the parameters: 'lstm' (LSTM" in str(result)
    plain = json.loads(json.dumps(result.as_dict()))
    assert plain["unseen"] == [unseen.as_dict()]
    assert plain["unseen_fraction"] == result.unseen_fraction
    assert plain["n_parameters"] == total


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.utils.parametrizations.weight_norm(nn.Linear(20, 20)), "its weight is computed from other parameters"),
        (nn.Linear(20, 20).requires_grad_(False), "frozen"),
        (nn.GRU(20, 20), "no repair for this kind of module"),
    ],
    ids=["parametrized", "frozen", "gru"],
)
def test_every_reason_is_given(module: nn.Module, reason: str) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd, self.body = module, deep()
            self.unused = nn.Linear(7, 7)

        def forward(self, x: Tensor) -> Tensor:
            made = self.odd(x)
            logits: Tensor = self.body(made[0] if isinstance(made, tuple) else made)
            return logits

    kept = state(module)
    result = repair(Wrapped(), batch(), method="lsuv")
    assert {one.name: one.reason for one in result.unseen} == {
        "odd": reason, "unused": "not called as a module on these inputs",
    }  # fmt: skip
    assert is_same(result.model.get_submodule("odd"), kept)


def test_attention_is_one_module_that_is_not_seen() -> None:
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    result = repair(encoder, torch.randn(8, 5, 16, generator=seeded(0)), method="lsuv")
    assert [(one.name, one.kind) for one in result.unseen] == [("self_attn", "MultiheadAttention")]
    assert result.unseen[0].n_parameters == 4 * 16 * 16 + 4 * 16
    assert [layer.name for layer in result.after.weighted_layers] == ["self_attn", "linear1", "linear2"]


@pytest.mark.parametrize("method", [name for name in METHODS if name != "batch_norm"])
def test_a_tied_embedding_is_measured_and_not_changed_unless_forced(method: str) -> None:
    model = Tied()
    result = repair(model, TOKENS, targets=TOKENS, method=method, n_steps=2)
    made = result.model
    assert isinstance(made, Tied)
    assert torch.equal(made.tokens.weight, model.tokens.weight)
    assert made.head.weight is made.tokens.weight
    assert result.after.weighted_layers[-1].name == "head"
    assert [one.name for one in result.unseen] == ["tokens", "head"]
    assert "its weight is tied to that of 'tokens'" in str(result)
    assert result.unseen_fraction == pytest.approx(30 * 16 / sum(p.numel() for p in model.parameters()))
    if method not in ("residual",):
        forced = repair(model, TOKENS, targets=TOKENS, method=method, n_steps=2, force=True)
        assert [one.name for one in forced.unseen] == ["tokens"]
        assert torch.equal(forced.model.get_parameter("tokens.weight"), model.tokens.weight) == (method == "paper")


@pytest.mark.parametrize("in_place", [False, True])
def test_weights_that_share_memory_are_tied(in_place: bool) -> None:
    model = Tied()
    model.head.weight = nn.Parameter(torch.empty_like(model.tokens.weight))
    model.head.weight.data = model.tokens.weight.data
    before = model.tokens.weight.detach().clone()
    result = repair(model, TOKENS, targets=TOKENS, method="lsuv", in_place=in_place)
    made = result.model
    assert isinstance(made, Tied)
    assert made.head.weight is not made.tokens.weight
    assert made.head.weight.data_ptr() == made.tokens.weight.data_ptr()
    assert torch.equal(made.tokens.weight, before)
    assert "its weight is tied to that of 'tokens'" in str(result)


def test_without_any_layer_to_change_the_modules_are_named() -> None:
    model = nn.Sequential(nn.Linear(20, 5)).requires_grad_(False)
    with pytest.raises(ConversionError, match=r"that can be trained; got '0' \(Linear: frozen\)"):
        repair(model, batch())


# ---------------------------------------------------------------------------------------------- other kinds of layers


class Transposed(nn.Module):
    """A linear layer whose weight is (in, out), under the name of that of Hugging Face."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach().T.clone())
        self.bias = nn.Parameter(layer.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


Conv1D = type("Conv1D", (Transposed,), {"__module__": "transformers.pytorch_utils"})


@pytest.mark.parametrize("method", ["auto", *(name for name in METHODS if name != "batch_norm")])
def test_conv1d_is_repaired_exactly_like_a_linear_layer(method: str) -> None:
    plain = deep()
    other = nn.Sequential(*(Conv1D(m) if isinstance(m, nn.Linear) else m for m in plain))
    wanted, found = (repair(model, batch(), method=method, n_steps=3) for model in (plain, other))
    assert found.unseen == ()
    for one, two in zip(wanted.after.weighted_layers, found.after.weighted_layers, strict=True):
        assert one.r == pytest.approx(two.r, rel=1e-3)
        assert one.scale == pytest.approx(two.scale, rel=1e-3)
    if method in ("auto", "lsuv", "near_identity"):
        weights = [p for p in wanted.model.parameters() if p.ndim == 2]
        others = [p for p in found.model.parameters() if p.ndim == 2]
        for weight, transposed in zip(weights, others, strict=True):
            torch.testing.assert_close(weight, transposed.T, rtol=1e-3, atol=1e-5)


def upsampling(groups: int = 1) -> nn.Sequential:
    """Transposed convolutions, alone and with strides and overlapping windows."""
    return nn.Sequential(
        nn.ConvTranspose2d(4, 8, 4), nn.ReLU(), nn.ConvTranspose2d(8, 8, 3, 1, 1), nn.ReLU(),
        nn.ConvTranspose2d(8, 8, 4, 2, 1, groups=groups), nn.ReLU(), nn.ConvTranspose2d(8, 8, 2, 2), nn.ReLU(),
        nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 3, 3, 1, 1),
    )  # fmt: skip


@pytest.mark.parametrize("method", [name for name in METHODS if name != "residual"])
def test_transposed_convolutions_are_repaired(method: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = upsampling()
    inputs = batch(16, 4, 1, 1)
    result = repair(model, inputs, method=method, n_steps=3)
    assert result.unseen == ()
    assert len(result.after.weighted_layers) == 6
    assert isinstance(result.model, nn.Sequential)
    signal = inputs
    for layer in result.model if method in ("mirrored", "lsuv") else ():
        with torch.no_grad():
            signal = layer(signal)
        if isinstance(layer, nn.ConvTranspose2d):
            assert float(signal.square().mean().sqrt()) == pytest.approx(1.0, rel=1e-3)
    if method == "mirrored":
        # linear at the start: f(x) + f(-x) = 0
        made = result.model
        with torch.no_grad():
            size = made(inputs).abs().max()
            assert float((made(inputs) + made(-inputs)).abs().max()) < 1e-4 * float(size)
            # and no position of the output is empty
            assert bool((made(inputs).abs().amax((0, 1)) > 0).all())


def test_transposed_convolutions_with_groups_are_reported() -> None:
    result = repair(upsampling(groups=2), batch(16, 4, 1, 1), method="lsuv")
    assert [(one.name, one.reason) for one in result.unseen] == [("4", "transposed and with groups")]


# ---------------------------------------------------------------------------------------------- losses, modes, wrappers


def test_targets_follow_the_one_rule_of_all_verbs() -> None:
    model, inputs = deep(), batch()
    real = torch.randn(32, 5, generator=seeded(1))
    last = repair(model, inputs, real).before.weighted_layers[-1]
    outputs = model(inputs)
    (expected,) = torch.autograd.grad(functional.mse_loss(outputs, real), outputs)
    assert last.signal_gradient == pytest.approx(float(expected.norm()), rel=FLOAT)
    tokens = repair(Tied(), TOKENS, targets=TOKENS)  # classes on the last axis, as in language models
    assert tokens.after
    assert repair(model, inputs.numpy(), targets=(torch.arange(32) % 5).numpy()).method == "mirrored"
    with pytest.raises(ValueRangeError, match=r"class labels need to be integers from 0 to 4.*got 5"):
        repair(model, inputs, targets=torch.arange(32) % 6)


def test_a_loss_without_targets_and_an_output_of_ones_own_are_used() -> None:
    seen: list[Any] = []

    def loss(output: Any, targets: Any) -> Tensor:
        seen.append((tuple(output), targets))
        return output["a"].square().mean()

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = deep()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"a": self.body(x)}

    repair(Named(), batch(), loss=loss, output=lambda returned: returned)
    assert set(seen) == {(("a",), None)}
    for bad, got in ((lambda o, t: o, r"shape \(32, 5\)"), (lambda o, t: 3.0, "float")):
        with pytest.raises(ShapeError, match=f"the loss needs to be one real number as a tensor; got {got}"):
            repair(deep(), batch(), loss=bad)
    with pytest.raises(ConversionError, match="repair needs a loss that depends on the weights"):
        repair(deep(), batch(), loss=lambda o, t: o.detach().sum())


def test_autocast_does_not_hide_what_was_changed() -> None:
    model = deep()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = repair(model, batch(), method="lsuv")
    assert result.after == repair(model, batch(), method="lsuv").after


def test_wrapped_models_are_repaired_inside() -> None:
    model = deep()
    wrapped = nn.DataParallel(model)
    made = repair(wrapped, batch())
    assert is_same(made.model, state(repair(model, batch()).model))
    result = repair(wrapped, batch(), in_place=True)
    assert result.model is wrapped
    assert is_same(model, state(made.model))


def test_in_place_touches_no_parameter_that_is_not_repaired() -> None:
    model = deep(norm="layer")
    versions = {name: p._version for name, p in model.named_parameters()}
    repair(model, batch(), method="lsuv", in_place=True)
    norms = [name for name, p in model.named_parameters() if p._version == versions[name]]
    assert norms == [
        n for n, m in model.named_modules() if isinstance(m, nn.LayerNorm) for n in (f"{n}.weight", f"{n}.bias")
    ]
    assert all(p.grad is None for p in model.parameters())


def test_a_dict_of_inputs_is_refused_with_a_cure() -> None:
    with pytest.raises(ConversionError, match=r"got a dict. Pass tuple\(inputs.values\(\)\)"):
        repair(deep(), {"x": batch()})


def test_a_model_made_in_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(ConversionError, match="inference_mode"):
        repair(model, torch.randn(8, 4))


@pytest.mark.usefixtures("unchecked")
def test_lists_of_samples_are_counted_in_the_error() -> None:
    with pytest.raises(ShapeError, match=r"repair needs a batch, or a tuple of batches; got 40 x list\. Pass tensors"):
        repair(deep(), [[1.0] * 20] * 40)
    with pytest.raises(ShapeError, match=r"got Tensor, list\. Pass tensors"):
        repair(deep(), (batch(), [1.0]))
