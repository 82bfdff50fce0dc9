"""`diagnose`: it leaves no trace, wrong use is told with a cure, and its verdicts are right."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from diagnosed import CLASSES, INPUTS, Twice, deep
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.data import find_data
from onlynorm.errors import ConversionError, MissingDataError, ShapeError, UnknownNameError
from onlynorm.models import load_model, mlp, resnet
from onlynorm.rank import diagnose, repair
from onlynorm.seeds import own_randomness, seeded

# ------------------------------------------------------------------------------- no trace


class Moody(nn.Module):
    """Draws from every generator, replaces a buffer, and may fail half-way."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.5))
        self.head = nn.Linear(16, 10)
        self.register_buffer("count", torch.zeros(1))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        x = self.body(x) + 1e-3 * (random.random() + float(np.random.rand()))
        if self.fails:
            raise RuntimeError("half-way")
        logits: Tensor = self.head(x)
        return logits


def state_of(model: nn.Module) -> list[Any]:
    tensors = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()]
    flags = [module.training for module in model.modules()]
    return [tensors, grads, hooks, flags, torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


# checks of shapes are off here: they look at random items of lists, drawn from Python's own generator
@pytest.mark.parametrize("fails", [False, True])
def test_a_diagnosis_leaves_no_trace_even_if_the_model_fails(fails: bool, unchecked: None) -> None:
    with own_randomness(0):
        model = Moody().eval()
    model.body[1].train()  # a mode that model.train() would not bring back
    functional.cross_entropy(model(INPUTS[:8]), CLASSES[:8]).backward()
    model.fails = fails
    kept, buffer = state_of(model), model.count
    if fails:
        with pytest.raises(
            ConversionError, match=r"got \(96, 64\) float32, on which Moody failed with RuntimeError: half-way"
        ):
            diagnose(model, INPUTS, CLASSES)
    else:
        diagnose(model, INPUTS, CLASSES)
    assert equal(state_of(model), kept)
    assert model.count is buffer


def test_equal_seeds_give_equal_diagnoses_whatever_was_drawn_before() -> None:
    with own_randomness(0):
        model = Moody()
    first = diagnose(model, INPUTS, CLASSES, seed=5)
    torch.rand(3)
    random.random()
    assert diagnose(model, INPUTS, CLASSES, seed=5).layers == first.layers
    assert diagnose(model, INPUTS, CLASSES, seed=6).layers != first.layers


def test_dropout_does_not_hide_a_collapse() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(64, 16, 3, batch_first=True, dropout=0.5)
            self.rest = nn.Sequential(*(m for layer in mlp((16, *[64] * 19, 10), activation=nn.Tanh)
                                        for m in (layer, nn.Dropout(0.5))))  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.rest(self.lstm(x[:, None])[0][:, 0])
            return logits

    model = Recurrent()
    assert diagnose(model, INPUTS, CLASSES).score < 0.1
    assert model.lstm.dropout == 0.5
    assert all(module.training for module in model.modules())


def test_it_works_where_gradients_are_off() -> None:
    with torch.no_grad():
        assert diagnose(deep(depth=3), INPUTS, CLASSES).loss is not None


def test_training_mode_is_what_batch_norms_are_judged_in() -> None:
    network = deep("batch", depth=16).eval()
    assert diagnose(network, INPUTS, CLASSES).is_trainable
    assert not diagnose(network, INPUTS, CLASSES, mode="eval").is_trainable  # its statistics were never measured


# ------------------------------------------------------------------------------- wrong use


@pytest.mark.parametrize("batch", [INPUTS[:1], INPUTS[:0], (), torch.tensor(1.0)])
def test_less_than_two_samples_are_refused(batch: Any) -> None:
    with pytest.raises(ShapeError, match="two samples"):
        diagnose(deep(depth=2), batch)


def test_misuse_is_told_with_a_cure() -> None:
    network = deep(depth=2)
    with pytest.raises(UnknownNameError, match="mode needs a known name; got 'trian'"):
        diagnose(network, INPUTS, mode="trian")
    with pytest.raises(ShapeError, match=r"one class for each sample .* got output \(96, 10\) and targets \(95,\)"):
        diagnose(network, INPUTS, CLASSES[:-1])
    with pytest.raises(ShapeError, match="targets of the shape of the output"):
        diagnose(network, INPUTS, CLASSES.float())
    with pytest.raises(ShapeError, match=r"one real number as a tensor; got shape \(96,\)"):
        diagnose(network, INPUTS, CLASSES, loss=lambda o, t: functional.cross_entropy(o, t, reduction="none"))
    with pytest.raises(ConversionError, match=r"targets .*tensor; got"):
        diagnose(network, INPUTS, {"labels": CLASSES})
    with pytest.raises(ShapeError, match=r"got output \(96, 10\) and targets \(2,\)"):
        diagnose(network, INPUTS, [1, 2])
    with pytest.raises(ConversionError, match="calls none"):
        diagnose(nn.Flatten(), INPUTS)
    with pytest.raises(ConversionError, match="got a lazy layer in LazyLinear"):
        diagnose(nn.LazyLinear(3), INPUTS)


def test_something_that_is_no_module_is_refused(unchecked: None) -> None:
    with pytest.raises(ConversionError, match=r"needs a model, a torch\.nn\.Module; got the function"):
        diagnose(torch.relu, INPUTS)  # type: ignore[arg-type]


def test_a_model_that_returns_no_tensor_is_refused() -> None:
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 2)

        def forward(self, x: Tensor) -> str:
            return f"{self.layer(x).shape}"

    assert len(diagnose(Silent(), INPUTS).layers) == 2
    with pytest.raises(ConversionError, match=r"a tensor in .* the model.*; got str"):
        diagnose(Silent(), INPUTS, CLASSES)


# ------------------------------------------------------------------------------- verdicts


def test_a_deep_plain_network_is_unhealthy_and_with_batch_norms_it_is_not() -> None:
    ill, well = diagnose(deep(), INPUTS, CLASSES), diagnose(deep("batch"), INPUTS, CLASSES)
    assert (ill.verdict.word, well.verdict.word) == ("unhealthy", "healthy")
    assert ill.score < 1e-3 < 0.9 < well.score
    for words in (
        "collapses to rank 1.00",
        "of 32",
        "in the last layer are parallel (mean |cosine| 1.0000)",
        "for random inputs",
    ):
        assert words in str(ill.verdict)
    assert ill.verdict.advice.endswith("Add batch norms or run repair.")
    assert ill.alignment == pytest.approx(1.0, abs=1e-6)
    # the deltas of different classes point away from each other, so the whole gradients do not align
    assert ill.sample_cosine is not None
    assert abs(ill.sample_cosine) < 0.1


def test_asymmetric_weights_break_batch_norms_and_that_shows() -> None:
    found = diagnose(deep("batch", depth=16, init="asymmetric"), INPUTS, CLASSES)
    assert found.directions == pytest.approx(1.0, abs=0.02)  # of 96 samples a line shows as 1 / (1 - 1 / 95)
    assert min(found.verdict.parts, key=lambda name: found.verdict.parts[name]) == "directions"
    assert found.verdict.word != "healthy"
    assert found.verdict.findings[0].startswith("the signal collapses to rank 1.000")
    assert "symmetric around zero" in found.verdict.advice


def test_the_trained_resnet_is_healthy() -> None:
    try:
        find_data("weights/resnet20_cifar10.safetensors")
        from onlynorm.data import cifar10

        split = cifar10()
    except MissingDataError as error:
        pytest.skip(str(error))
    found = diagnose(load_model("resnet20"), split.train_inputs[:16], split.train_labels[:16])
    assert found.verdict.word == "healthy"
    assert found.n_layers == 20
    assert found.last_layer == "linear"


def test_a_random_resnet_of_imagenets_shape_is_healthy() -> None:
    found = diagnose(resnet(18, width=8), torch.randn(16, 3, 64, 64, generator=seeded(0)), torch.arange(16))
    assert found.verdict.word == "healthy"
    assert found.n_layers == 21  # 17 convolutions, 3 of shortcuts, 1 linear layer


def test_dead_units_are_the_first_thing_told() -> None:
    network = deep(depth=4)
    with torch.no_grad():
        network[2].bias.fill_(-50.0)
    found = diagnose(network, INPUTS, CLASSES)
    assert found.verdict.word == "unhealthy"
    assert found.verdict.findings[0] == "100% of the units of 3 are dead (zero for every sample)"
    assert "leaky activation" in found.verdict.advice


def test_units_that_a_function_kills_are_seen_too() -> None:
    network = Twice()
    with torch.no_grad():
        network.shared.bias.fill_(-50.0)
    assert diagnose(network, INPUTS, CLASSES).verdict.findings[0].startswith("100% of the units of input of shared")


def test_a_growing_signal_is_told() -> None:
    network = deep(depth=16)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter *= 8
    found = diagnose(network, INPUTS, CLASSES)
    assert found.verdict.word == "unhealthy"
    assert "the signal grows by a factor of" in found.verdict.findings[0]
    assert "Draw smaller weights" in found.verdict.advice


def test_exploding_gradients_are_told() -> None:
    network = deep(depth=32, activation=nn.Tanh)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter *= 8
    found = diagnose(network, INPUTS, CLASSES)
    assert found.verdict.word == "unhealthy"
    assert min(found.verdict.parts, key=lambda name: found.verdict.parts[name]) == "exploding"
    assert min(layer.r for layer in found.layers) > 1.5  # chaos, no collapse


def test_where_nan_begins_is_told() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - 1.0).sqrt()

    network = nn.Sequential(*deep(depth=2)[:2], Root(), *deep(depth=3)[2:])
    found = diagnose(network, INPUTS, CLASSES)
    assert found.score == 0.0
    assert found.verdict.findings == ("first NaN or infinity at 2 (Root), layer 1 of 3",)
    assert [layer.is_finite for layer in found.layers] == [True, True, True, False, False, False, False]
    assert found.skipped == ("everything about gradients, because the loss is nan",)


def test_nan_inputs_are_told_as_such() -> None:
    broken = INPUTS.clone()
    broken[3, 5] = torch.nan
    assert "clean the data" in diagnose(deep(depth=2), broken, CLASSES).verdict.advice


def test_a_last_layer_of_zeros_is_no_illness() -> None:
    network = deep(depth=4)
    with torch.no_grad():
        network[-1].weight.zero_()
        network[-1].bias.zero_()
    assert diagnose(network, INPUTS, CLASSES).is_trainable


def test_zero_branches_of_residual_networks_are_no_illness() -> None:
    network = resnet(18, width=8)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith("bn2.weight"):
                parameter.zero_()
    images = torch.randn(16, 3, 64, 64, generator=seeded(0))
    assert diagnose(network, images, torch.arange(16)).is_trainable


# ------------------------------------------------------------------------------- what is advised


class Recurrent(nn.Module):
    """Deep in an LSTM, which no repair can change."""

    def __init__(self) -> None:
        super().__init__()
        with own_randomness(0):
            self.first, self.last = nn.Linear(64, 16), nn.Linear(16, 10)
            self.lstm = nn.LSTM(16, 16, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.lstm(self.first(x)[:, None])[0][:, 0])
        return logits


def test_errors_of_a_loss_or_an_output_function_are_raised_with_the_shapes() -> None:
    def l1(output: Tensor, targets: Tensor) -> Tensor:
        return (output - targets).abs().mean()

    fitting = (
        rf"\({len(INPUTS)}, 10\) float32 and \({len(INPUTS)},\) int64, on which l1 failed with RuntimeError: The size"
    )
    for verb in (diagnose, repair):
        with pytest.raises(
            ConversionError, match=f"needs a loss that accepts the output and the targets; got {fitting}"
        ):
            verb(deep(), INPUTS, CLASSES, loss=l1)
        with pytest.raises(ConversionError, match=r"output= needs a function of .*failed with KeyError: 'logits'"):
            verb(deep(), INPUTS, CLASSES, loss=l1, output=lambda returned: {"output": returned}["logits"])


@pytest.mark.parametrize("value", [1e30, float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_no_sign_of_health(value: float) -> None:
    found = diagnose(mlp((64, 32, 32, 10)), INPUTS, torch.full((len(INPUTS), 10), value))
    assert (found.score, found.verdict.word, found.is_trainable) == (0.0, "unhealthy", False)
    assert f"the loss is {found.loss}" in found.verdict.findings[0]
    assert "targets" in found.verdict.advice


def test_the_repair_that_is_advised_makes_positive_weights_healthy() -> None:
    model = deep(depth=3, width=32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.abs_()
    found = diagnose(model, INPUTS, CLASSES)
    assert not found.is_trainable
    assert "run repair" in found.verdict.advice
    assert repair(model, INPUTS, CLASSES).after.verdict.word == "healthy"


def test_repair_is_not_advised_where_it_cannot_change_the_layers() -> None:
    found = diagnose(Recurrent(), INPUTS, CLASSES)
    assert not found.is_trainable
    assert found.verdict.advice == "Plain SGD is unlikely to train this network; Adam may. Add batch norms."
    assert "run repair" in diagnose(deep(), INPUTS, CLASSES).verdict.advice


class Functional(nn.Module):
    """Most weights are used in functions: in a list, or as those of layers that are not called."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        with own_randomness(0):
            if kind == "list":
                self.weights = nn.ParameterList([nn.Parameter(torch.rand(64, 64) / 32) for _ in range(20)])
            else:
                self.inner = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(20)])
                for layer in self.inner:
                    nn.init.uniform_(layer.weight, 0.0, 1 / 32)
            self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        for weight in getattr(self, "weights", None) or [layer.weight for layer in self.inner]:
            x = torch.relu(x @ weight)
        logits: Tensor = self.head(x)
        return logits


@pytest.mark.parametrize("kind", ["list", "layers"])
def test_weights_outside_the_called_layers_are_a_finding_and_repair_is_not_advised(kind: str) -> None:
    model = Functional(kind)
    found = diagnose(model, INPUTS, CLASSES)
    unseen = 20 * 64 * 64 / sum(p.numel() for p in model.parameters())
    assert found.unseen_fraction == found.as_dict()["unseen_fraction"] == unseen
    text = f"{unseen:.1%} of the parameters are outside the called layers, and were not measured"
    assert found.verdict.findings[-1] == text
    assert text in str(found)
    assert not found.is_trainable
    assert "repair" not in found.verdict.advice
    assert str(repair(model, INPUTS, CLASSES)).startswith("not changed (")
    result = repair(model, INPUTS, CLASSES, method="mirrored")
    assert not result.after.is_trainable
    assert str(result).startswith("changed by mirrored (")
    before, after = result.before.score, result.after.score
    assert f"unhealthy (score {before:.2f}) -> still unhealthy (score {after:.2f})" in str(result)
    assert (result.view().title, result.view().verdict) == ("Changed network", "unhealthy → still unhealthy")


def test_a_layer_that_the_loss_does_not_use_is_no_obstacle_to_a_repair() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.spare = deep(), nn.Linear(1000, 1000)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.net(x)
            return logits

    model = Spare()
    found = diagnose(model, INPUTS, CLASSES)
    assert found.unseen_fraction > 0.5
    assert found.verdict.advice.endswith("Add batch norms or run repair.")
    result = repair(model, INPUTS, CLASSES)
    assert result.after.is_trainable
    assert str(result).startswith("repaired by mirrored (")


def test_repair_is_not_advised_for_frozen_layers_or_where_it_would_refuse() -> None:
    frozen = deep()
    for layer in list(frozen)[4:-2]:
        layer.requires_grad_(False)
    assert "repair" not in diagnose(frozen, INPUTS, CLASSES).verdict.advice
    trained = deep()
    with torch.no_grad():
        trained[0].weight += 0.2 * torch.outer(torch.arange(128) / 128.0, INPUTS.mean(0))  # of one sample, as it were
    assert "repair" not in diagnose(trained, INPUTS, CLASSES).verdict.advice


def test_nothing_claims_that_a_network_cannot_be_trained() -> None:
    """The words of all verdicts, pages and texts: plain SGD and likelihood."""
    for network in (deep(), deep("batch", depth=16, init="asymmetric"), Recurrent()):
        found = diagnose(network, INPUTS, CLASSES)
        for text in (str(found), found._repr_html_(), str(found.as_dict())):
            assert "will not train" not in text
            assert "untrainable" not in text
            assert "any learning rate" not in text
            assert "Plain SGD is unlikely to train this network; Adam may." in text


def test_targets_of_wide_unsigned_integers_are_class_labels() -> None:
    model, inputs, labels = nn.Linear(6, 3), torch.randn(32, 6), torch.arange(32) % 3
    assert diagnose(model, inputs, labels.to(torch.uint32)).loss == diagnose(model, inputs, labels).loss
