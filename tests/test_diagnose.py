"""`diagnose`: what it measures against slow references, that it leaves no trace, odd models, and right verdicts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.data import digits, find_data, seeded
from onlynorm.errors import ConversionError, MissingDataError, ShapeError, UnknownNameError, ValueRangeError
from onlynorm.models import cifar_resnet, load_model, mlp, own_randomness, resnet, vit
from onlynorm.rank import Diagnosis, Layer, as_matrix, cosines, diagnose, rank_ratio, read_signal, soft_rank, unit_scale
from onlynorm.rank.probes import LastLayer
from onlynorm.rank.sample_gradients import (
    MAX_SAMPLES,
    cosine_between,
    layer_gradient,
    meaningless,
    neuron_alignment,
    sample_cosine,
)

SPLIT = digits()
INPUTS, CLASSES = SPLIT.train_inputs[:96], SPLIT.train_labels[:96]
EPS = torch.finfo(torch.float32).eps


def deep(norm: str = "none", *, depth: int = 32, width: int = 128, **choices: Any) -> nn.Sequential:
    return mlp((64, *[width] * (depth - 1), 10), norm=norm, **choices)


def named(found: Diagnosis) -> dict[str, Layer]:
    return {layer.place: layer for layer in found.layers}


# ------------------------------------------------------------------------------- what is measured


@pytest.mark.parametrize("shape", [(20, 12), (6, 30), (5, 4, 3, 3), (3, 40, 2, 2)])
def test_a_signal_is_read_as_the_measures_define_it(shape: tuple[int, ...]) -> None:
    activation = torch.randn(shape, generator=seeded(1)) + 0.3
    found = read_signal(activation, generator=None)
    H = as_matrix(activation)
    assert found.r == pytest.approx(float(rank_ratio(H)), rel=100 * EPS)
    assert found.soft_rank == int(soft_rank(unit_scale(H), 0.5))
    assert found.scale == pytest.approx(float(activation.square().mean().sqrt()), rel=100 * EPS)
    deviation = activation - activation.mean(0)
    assert found.spread == pytest.approx(float(deviation.square().sum() / activation.square().sum()), rel=100 * EPS)
    assert (found.n_units, found.n_columns, found.dead, found.is_finite) == (*H.shape, 0.0, True)


def test_channels_last_are_the_same_signal() -> None:
    activation = torch.randn(4, 6, 5, generator=seeded(2))
    first = read_signal(activation, channels=1, generator=None)
    last = read_signal(activation.mT.contiguous(), channels=-1, generator=None)
    assert last.r == pytest.approx(first.r, rel=100 * EPS)
    assert last.soft_rank == first.soft_rank
    assert (last.n_units, last.n_columns) == (first.n_units, first.n_columns) == (6, 20)


def test_scales_near_the_ends_of_the_numbers_are_read_too() -> None:
    activation = torch.randn(8, 5, generator=seeded(3))
    plain = read_signal(activation, generator=None)
    for factor in (1e30, 1e-30):
        found = read_signal(activation * factor, generator=None)
        assert found.r == pytest.approx(plain.r, rel=100 * EPS)
        assert found.scale == pytest.approx(factor * plain.scale, rel=100 * EPS)


def test_fewer_columns_change_r_by_no_more_than_their_number_explains() -> None:
    mixing = torch.randn(24, 24, generator=seeded(4)) * torch.logspace(0, -1, 24)
    activation = torch.einsum("ij,njp->nip", mixing, torch.randn(8, 24, 4096, generator=seeded(5)))
    whole = read_signal(activation, max_columns=None, generator=None)
    part = read_signal(activation, max_columns=1024, generator=seeded(0))
    assert (whole.n_columns, part.n_columns) == (8 * 4096, 1024)
    assert part.r == pytest.approx(1 / (1 / whole.r + 1 / 1024), rel=3 / 1024**0.5)  # three deviations of a mean
    assert part == read_signal(activation, max_columns=1024, generator=seeded(0))


def test_dead_units_are_those_that_are_zero_for_every_sample_and_position() -> None:
    activation = torch.relu(torch.randn(6, 8, 5, 5, generator=seeded(6)))
    activation[:, [1, 4]] = 0.0
    assert read_signal(activation, generator=None).dead == 0.25
    assert read_signal(torch.zeros(4, 3), generator=None).dead == 1.0


def test_one_column_is_refused() -> None:
    with pytest.raises(ValueRangeError, match="max_columns of two or more; got 1"):
        read_signal(torch.ones(3, 3), max_columns=1, generator=None)


def test_every_layer_of_a_plain_network_is_read_in_its_order() -> None:
    network = mlp((64, 16, 12, 10), norm="batch")
    found = diagnose(network, INPUTS, CLASSES)
    assert [(layer.place, layer.kind, layer.depth) for layer in found.layers] == [
        ("input", "input", 0),
        ("0", "Linear", 1), ("1", "batch norm", 1), ("2", "ReLU", 1),
        ("3", "Linear", 2), ("4", "batch norm", 2), ("5", "ReLU", 2),
        ("6", "Linear", 3),
    ]  # fmt: skip
    assert [layer.place for layer in found.layers if layer.is_taken_in] == ["input", "2", "5"]
    hidden = network.train()[:4](INPUTS)
    assert named(found)["3"].r == pytest.approx(float(rank_ratio(as_matrix(hidden.detach()))), rel=1e-4)


def test_gradients_are_those_of_a_backward_pass() -> None:
    network = mlp((64, 16, 10), norm="batch").train()
    found = named(diagnose(network, INPUTS, CLASSES))
    hidden = network[0](INPUTS)
    hidden.retain_grad()
    loss = functional.cross_entropy(network[1:](hidden), CLASSES)
    loss.backward()
    for name, layer in network.named_children():
        norms = [float(p.grad.norm()) for p in layer.parameters() if p.grad is not None]
        expected = None if not norms else pytest.approx(sum(n * n for n in norms) ** 0.5, rel=1e-4)
        assert found[name].gradient == expected
    assert hidden.grad is not None
    assert found["0"].signal_gradient == pytest.approx(float(hidden.grad.norm()), rel=1e-4)
    assert found["input"].signal_gradient is None


def loop_over_samples(network: nn.Module, layer: nn.Linear, inputs: Tensor, classes: Tensor) -> Tensor:
    """The gradient of the layer's weights for each sample by itself, flattened."""
    gradients = []
    for x, y in zip(inputs, classes, strict=True):
        loss = functional.cross_entropy(network(x[None]), y[None])
        gradients.append(torch.autograd.grad(loss, layer.weight)[0])
    return torch.stack(gradients).double()


def test_the_alignment_is_that_of_per_sample_gradients_one_by_one() -> None:
    network = deep(depth=4, width=24)
    found = diagnose(network, INPUTS[:20], CLASSES[:20])
    gradients = loop_over_samples(network, network[-1], INPUTS[:20], CLASSES[:20])
    whole = cosines(gradients.flatten(1).mT)
    assert found.sample_cosine == pytest.approx(float(whole.mean), abs=1e-5)
    for neuron in (0, 7):
        lines = cosines(gradients[:, neuron].mT)
        assert found.alignment == pytest.approx(float(lines.mean_absolute), abs=1e-5)


def test_with_positions_the_gradient_of_a_sample_is_the_sum_over_them() -> None:
    h, delta = torch.randn(5, 3, 4, generator=seeded(7)), torch.randn(5, 3, 2, generator=seeded(8))
    formed = torch.einsum("npo,npi->noi", delta, h).flatten(1)
    assert sample_cosine(LastLayer("x", h, delta)) == pytest.approx(float(cosines(formed.mT).mean), abs=1e-5)


def test_many_samples_are_thinned_out() -> None:
    n = 2 * MAX_SAMPLES + 1
    h = torch.ones(n, 1, 2)
    h[1::3] = -1.0  # every kept sample is the same up to its sign
    assert neuron_alignment(LastLayer("x", h, torch.ones(n, 1, 1))) == pytest.approx(1.0)


def test_the_gradient_on_random_inputs_is_compared_with_a_full_backward_pass() -> None:
    network = deep(depth=3, width=24)
    found = diagnose(network, INPUTS, CLASSES, seed=3)
    gradients = []
    for batch in (INPUTS, meaningless(INPUTS, seed=3)):
        gradients.append(torch.autograd.grad(functional.cross_entropy(network(batch), CLASSES), network[-1].weight)[0])
    expected = functional.cosine_similarity(gradients[0].flatten(), gradients[1].flatten(), dim=0)
    assert found.input_cosine == pytest.approx(float(expected), abs=1e-5)


def test_meaningless_inputs_have_the_same_mean_and_deviation_and_the_same_tokens() -> None:
    inputs = {"x": 5 + 3 * torch.randn(200, 50, generator=seeded(0)), "ids": torch.tensor([[3, 7], [7, 7]]), "p": 0.5}
    made = meaningless(inputs, seed=1)
    assert float(made["x"].mean()) == pytest.approx(float(inputs["x"].mean()), abs=5 * 3 / 100)  # five deviations
    assert float(made["x"].std()) == pytest.approx(float(inputs["x"].std()), rel=5 / 140)
    assert not torch.equal(made["x"], inputs["x"])
    assert set(made["ids"].flatten().tolist()) <= {3, 7}
    assert made["p"] == 0.5
    drawn = torch.randn(1000, generator=seeded(0))
    assert abs(cosine_between(meaningless(drawn, seed=0), drawn)) < 5 / 1000**0.5  # nobody is compared with itself


def test_directions_survive_numbers_whose_squares_do_not() -> None:
    a, b = torch.tensor([[1e-30, 2e-30]]), torch.tensor([[2e25, 4e25]])
    assert cosine_between(a, b) == pytest.approx(1.0)
    assert torch.isfinite(layer_gradient(LastLayer("x", a[:, None], b[:, None]))).all()


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
        with pytest.raises(RuntimeError, match="half-way"):
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
    assert diagnose(model, INPUTS, CLASSES, seed=6).layers != first.layers  # other units are dropped


def test_it_works_where_gradients_are_off() -> None:
    with torch.no_grad():
        assert diagnose(deep(depth=3), INPUTS, CLASSES).loss is not None


def test_training_mode_is_what_batch_norms_are_judged_in() -> None:
    network = deep("batch", depth=16).eval()
    assert diagnose(network, INPUTS, CLASSES).is_trainable
    assert not diagnose(network, INPUTS, CLASSES, mode="eval").is_trainable  # its statistics were never measured


# ------------------------------------------------------------------------------- odd models


def test_in_place_activations_are_read_after_and_layers_before_them() -> None:
    plain = deep(depth=4, width=24)
    sly = deep(depth=4, width=24, activation=lambda: nn.ReLU(inplace=True))
    assert diagnose(plain, INPUTS, CLASSES).layers == diagnose(sly, INPUTS, CLASSES).layers


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with own_randomness(0):
            self.first, self.shared, self.last = nn.Linear(64, 16), nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.first(x))
        x = functional.relu(self.shared(x))
        logits: Tensor = self.last(functional.relu(self.shared(x)))
        return logits


def test_a_module_that_is_called_twice_is_read_twice() -> None:
    found = diagnose(Twice(), INPUTS, CLASSES)
    assert [layer.place for layer in found.layers if layer.has_weights] == [
        "first", "shared", "shared (call 2)", "last",
    ]  # fmt: skip
    first, second = named(found)["shared"], named(found)["shared (call 2)"]
    assert (first.depth, second.depth) == (2, 3)
    assert first.r != second.r
    assert first.gradient == second.gradient  # of the one weight


def test_activations_by_functions_are_seen_where_the_next_layer_takes_them_in() -> None:
    found = named(diagnose(Twice(), INPUTS, CLASSES))
    assert found["input of shared"].scale < found["first"].scale
    assert found["input of last"].is_taken_in


def test_blocks_show_what_skips_have_added() -> None:
    network = cifar_resnet(8, width=4)
    found = named(diagnose(network, torch.randn(8, 3, 32, 32, generator=seeded(0)), torch.arange(8)))
    assert found["layer2.0"].kind == "block"
    assert found["layer2.0"].is_taken_in
    assert found["layer2.0"].gradient is None


def test_transformers_have_their_channels_last() -> None:
    found = named(diagnose(vit(depth=2, width=24), torch.randn(6, 3, 32, 32, generator=seeded(0)), torch.arange(6)))
    assert found["blocks.0.mlp.fc1"].n_units == 96
    assert found["patch_embed.proj"].n_units == 24
    assert found["blocks.1"].n_units == 24


@pytest.mark.parametrize(
    "wrap",
    [
        lambda logits: (logits, "state"),
        lambda logits: {"features": logits * 2, "logits": logits},
        lambda logits: type("Output", (), {"logits": logits})(),
        lambda logits: [logits],
    ],
)
def test_models_may_return_tuples_dicts_and_objects(wrap: Callable[[Tensor], Any]) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = deep(depth=3)

        def forward(self, x: Tensor) -> Any:
            return wrap(self.network(x))

    plain = diagnose(deep(depth=3), INPUTS, CLASSES)
    assert diagnose(Wrapped(), INPUTS, CLASSES).loss == plain.loss


def test_an_output_can_be_picked() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = deep(depth=2), deep(depth=2, seed=1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    found = diagnose(Pair(), INPUTS, CLASSES, output=lambda pair: pair[1])
    assert found.loss == diagnose(deep(depth=2, seed=1), INPUTS, CLASSES).loss
    assert found.last_layer == "b.2"
    assert named(found)["a.2"].gradient is None


def test_arguments_may_be_several_or_named() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = deep(depth=2)

        def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
            logits: Tensor = self.network(x + shift)
            return logits

    zero = torch.zeros(len(INPUTS), 1)
    assert diagnose(Sum(), {"x": INPUTS, "shift": zero}, CLASSES).loss == diagnose(deep(depth=2), INPUTS, CLASSES).loss
    assert diagnose(deep(depth=2), (INPUTS,), CLASSES).loss == diagnose(deep(depth=2), INPUTS, CLASSES).loss


def test_tokens_are_compared_with_tokens() -> None:
    with own_randomness(0):
        model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 50))
    tokens = torch.randint(50, (8, 6), generator=seeded(0))
    found = diagnose(model, tokens, tokens.roll(1, 1))
    assert found.input_cosine is not None
    assert named(found)["0"].n_units == 16
    assert found.is_trainable


def test_numbers_as_targets_mean_mean_squares() -> None:
    network, wanted = deep(depth=2), torch.randn(len(INPUTS), 10, generator=seeded(0))
    expected = functional.mse_loss(network(INPUTS), wanted).detach()
    assert diagnose(network, INPUTS, wanted).loss == pytest.approx(float(expected))


def test_a_loss_of_ones_own_needs_no_targets() -> None:
    found = diagnose(deep(depth=3), INPUTS, loss=lambda output, _: output.square().mean())
    assert found.loss is not None
    assert found.alignment is not None


def test_without_targets_gradients_are_left_out_and_that_is_said() -> None:
    found = diagnose(deep(), INPUTS)
    assert (found.loss, found.alignment, found.input_cosine) == (None, None, None)
    assert all(layer.gradient is None and layer.signal_gradient is None for layer in found.layers)
    assert found.skipped == ("everything about gradients, because no targets were given",)
    assert not found.is_trainable  # the collapse shows in the signals alone
    assert "no targets were given" in str(found)


def test_frozen_models_are_read_without_gradients() -> None:
    found = diagnose(deep(depth=3).requires_grad_(False), INPUTS, CLASSES)
    assert found.skipped == ("everything about gradients, because no parameter requires a gradient",)


def test_without_a_linear_layer_the_alignment_is_left_out() -> None:
    with own_randomness(0):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    found = diagnose(model, torch.randn(6, 3, 8, 8, generator=seeded(0)), torch.arange(6) % 5)
    assert found.skipped == ("the alignment of gradients, because no linear layer gets one",)
    assert named(found)["0"].gradient is not None


def test_random_inputs_can_be_left_out() -> None:
    assert diagnose(deep(depth=3), INPUTS, CLASSES, random_inputs=False).input_cosine is None


def test_layers_that_run_again_in_the_backward_pass_are_read_once() -> None:
    class Again(nn.Module):
        """Calls its layers once more when the gradient comes, as checkpointing does."""

        def __init__(self) -> None:
            super().__init__()
            self.network = deep(depth=4, width=16)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.network(x)

            def again(_: Tensor) -> None:
                self.network(x)

            logits.register_hook(again)
            return logits

    plain = diagnose(deep(depth=4, width=16), INPUTS, CLASSES)
    assert len(diagnose(Again(), INPUTS, CLASSES).layers) == len(plain.layers)


def test_parametrized_weights_are_no_layers() -> None:
    network = deep(depth=3, width=16)
    nn.utils.parametrizations.weight_norm(network[2])
    found = diagnose(network, INPUTS, CLASSES)
    assert [layer.place for layer in found.layers if layer.has_weights] == ["0", "2", "4"]
    assert named(found)["2"].gradient is not None


def test_half_precision_is_read() -> None:
    found = diagnose(deep("layer", depth=3).bfloat16(), INPUTS.bfloat16(), CLASSES)
    assert found.is_trainable
    assert found.alignment is not None


# ------------------------------------------------------------------------------- wrong use


@pytest.mark.parametrize("batch", [INPUTS[:1], INPUTS[:0], (), torch.tensor(1.0)])
def test_less_than_two_samples_are_refused(batch: Any) -> None:
    with pytest.raises(ShapeError, match="a batch of two samples or more, since one has rank one"):
        diagnose(deep(depth=2), batch)


def test_misuse_is_told_with_a_cure() -> None:
    network = deep(depth=2)
    with pytest.raises(UnknownNameError, match="mode needs a known name; got 'trian'"):
        diagnose(network, INPUTS, mode="trian")
    with pytest.raises(ShapeError, match=r"one class for each sample .* got output \(96, 10\) and targets \(95,\)"):
        diagnose(network, INPUTS, CLASSES[:-1])
    with pytest.raises(ShapeError, match="targets like the output"):
        diagnose(network, INPUTS, CLASSES.float())
    with pytest.raises(ShapeError, match=r"a loss of one number; got \(96,\)"):
        diagnose(network, INPUTS, CLASSES, loss=lambda o, t: functional.cross_entropy(o, t, reduction="none"))
    with pytest.raises(ConversionError, match="the usual losses need tensors"):
        diagnose(network, INPUTS, [1, 2])
    with pytest.raises(ConversionError, match="calls none"):
        diagnose(nn.Flatten(), INPUTS)
    with pytest.raises(ConversionError, match="has lazy ones"):
        diagnose(nn.LazyLinear(3), INPUTS)


def test_something_that_is_no_module_is_refused(unchecked: None) -> None:
    with pytest.raises(ConversionError, match="needs a torch Module; got builtin_function_or_method"):
        diagnose(torch.relu, INPUTS)  # type: ignore[arg-type]


def test_a_model_that_returns_no_tensor_is_refused() -> None:
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 2)

        def forward(self, x: Tensor) -> str:
            return f"{self.layer(x).shape}"

    assert len(diagnose(Silent(), INPUTS).layers) == 2
    with pytest.raises(ConversionError, match="a tensor in what the model returns; got str"):
        diagnose(Silent(), INPUTS, CLASSES)


# ------------------------------------------------------------------------------- verdicts


def test_a_deep_plain_network_is_untrainable_and_with_batch_norms_it_is_not() -> None:
    ill, well = diagnose(deep(), INPUTS, CLASSES), diagnose(deep("batch"), INPUTS, CLASSES)
    assert (ill.verdict.word, well.verdict.word) == ("untrainable", "healthy")
    assert ill.score < 1e-3 < 0.9 < well.score
    for words in ("collapses to rank 1.00", "of 32", "along one line (cosine 1.0000)", "on random inputs"):
        assert words in str(ill.verdict)
    assert ill.verdict.advice == "This network will not train at any learning rate. Add batch norms, or run repair."
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
    assert found.verdict.word == "untrainable"
    assert found.verdict.findings[0] == "100% of the units of 3 are dead: zero for every sample"
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
    assert found.verdict.word == "untrainable"
    assert "times as large at" in found.verdict.findings[0]
    assert "Draw smaller weights" in found.verdict.advice


def test_exploding_gradients_are_told() -> None:
    network = deep(depth=32, activation=nn.Tanh)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter *= 8
    found = diagnose(network, INPUTS, CLASSES)
    assert found.verdict.word == "untrainable"
    assert min(found.verdict.parts, key=lambda name: found.verdict.parts[name]) == "exploding"
    assert min(layer.r for layer in found.layers) > 1.5  # chaos, no collapse


def test_where_nan_begins_is_told() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x - 1.0).sqrt()

    network = nn.Sequential(*deep(depth=2)[:2], Root(), *deep(depth=3)[2:])
    found = diagnose(network, INPUTS, CLASSES)
    assert found.score == 0.0
    assert found.verdict.findings == ("numbers that are none (NaN or infinite) begin at 2 (Root), layer 1 of 3",)
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
