"""`diagnose` on odd models: layers called twice or in place, outputs and arguments of any kind, no targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diagnosed import CLASSES, INPUTS, Twice, deep, named
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.errors import ConversionError, ValueRangeError
from onlynorm.frozen import to_norm_only
from onlynorm.models import cifar_resnet, mlp, vit
from onlynorm.rank import diagnose, repair
from onlynorm.reconstruction import reconstruct
from onlynorm.seeds import own_randomness, seeded

IMAGES = torch.randn(12, 3, 8, 8, generator=seeded(0), dtype=torch.float64)


def test_in_place_activations_are_read_after_and_layers_before_them() -> None:
    plain = deep(depth=4, width=24)
    sly = deep(depth=4, width=24, activation=lambda: nn.ReLU(inplace=True))
    assert diagnose(plain, INPUTS, CLASSES).layers == diagnose(sly, INPUTS, CLASSES).layers


def test_a_module_that_is_called_twice_is_read_twice() -> None:
    found = diagnose(Twice(), INPUTS, CLASSES)
    assert [layer.label for layer in found.layers if layer.has_weights] == [
        "first", "shared", "shared (call 2)", "last",
    ]  # fmt: skip
    first, second = named(found)["shared"], named(found)["shared (call 2)"]
    assert (first.depth, second.depth) == (2, 3)
    assert first.r != second.r
    assert first.gradient == second.gradient  # of the one weight


def test_activations_by_functions_are_seen_where_the_next_layer_takes_them_in() -> None:
    found = named(diagnose(Twice(), INPUTS, CLASSES))
    assert found["input of shared"].scale < found["first"].scale
    assert found["input of last"].is_layer_input


def test_blocks_show_what_skips_have_added() -> None:
    network = cifar_resnet(8, width=4)
    found = named(diagnose(network, torch.randn(8, 3, 32, 32, generator=seeded(0)), torch.arange(8)))
    assert found["layer2.0"].kind == "block"
    assert found["layer2.0"].is_layer_input
    assert found["layer2.0"].gradient is None


def test_transformers_have_their_channels_last() -> None:
    found = named(diagnose(vit(depth=2, width=24), torch.randn(6, 3, 32, 32, generator=seeded(0)), torch.arange(6)))
    assert found["blocks.0.mlp.fc1"].n_units == 96
    assert found["patch_embed.proj"].n_units == 24
    assert found["blocks.1"].n_units == 24


def conv_net() -> nn.Sequential:
    with own_randomness(0):
        return nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(80, 6), nn.ReLU(),
            nn.Linear(6, 4),
        ).double()  # fmt: skip


@pytest.mark.parametrize("convert", [to_norm_only, lambda model: reconstruct(model.eval(), IMAGES).network])
def test_frozen_layers_are_read_like_the_layers_that_they_replace(convert: Callable[[nn.Module], nn.Module]) -> None:
    plain, frozen = conv_net(), convert(conv_net())
    wanted, found = (diagnose(one, IMAGES, torch.arange(12) % 4, mode="eval") for one in (plain, frozen))
    assert [(one.label, one.depth, one.shape, one.n_units, one.has_weights) for one in found.layers] == [
        (one.label, one.depth, one.shape, one.n_units, one.has_weights) for one in wanted.layers
    ]
    assert [one.r for one in found.layers] == pytest.approx([one.r for one in wanted.layers], rel=1e-6)


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
    assert [layer.label for layer in found.layers if layer.has_weights] == ["0", "2", "4"]
    assert named(found)["2"].gradient is not None


def test_half_precision_is_read() -> None:
    found = diagnose(deep("layer", depth=3).bfloat16(), INPUTS.bfloat16(), CLASSES)
    assert found.is_trainable
    assert found.alignment is not None


# ------------------------------------------------------------------------------- wrappers, graphs, other kinds of input


@pytest.mark.parametrize(
    "make", [torch.jit.trace, lambda model, inputs: torch.jit.script(model)], ids=["trace", "script"]
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_traced_and_scripted_models_are_refused_whole_and_as_parts(make: Callable[..., nn.Module]) -> None:
    hidden = make(deep(depth=3), INPUTS)
    for model, where in ((hidden, "as the model"), (nn.Sequential(hidden, nn.Linear(10, 10)), "at '0'")):
        with pytest.raises(ConversionError, match=f"diagnose needs layers that Python calls; got .* {where}"):
            diagnose(model, INPUTS, CLASSES)
        with pytest.raises(ConversionError, match=f"repair needs layers that Python calls; got .* {where}"):
            repair(model, INPUTS)


def test_exported_models_are_refused() -> None:
    exported = torch.export.export(deep(depth=3), (INPUTS,)).module()
    with pytest.raises(ConversionError, match="diagnose needs layers that Python calls; got an exported graph"):
        diagnose(exported, INPUTS, CLASSES)
    with pytest.raises(ConversionError, match="repair needs layers that Python calls; got an exported graph"):
        repair(exported, INPUTS)


def test_graphs_of_fx_call_their_layers_and_are_read() -> None:
    plain, graph = deep(depth=4, width=16), torch.fx.symbolic_trace(deep(depth=4, width=16))
    assert diagnose(graph, INPUTS, CLASSES).layers == diagnose(plain, INPUTS, CLASSES).layers
    assert repair(graph, INPUTS, method="lsuv").after == repair(plain, INPUTS, method="lsuv").after


def test_models_without_layers_of_weights_are_refused() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ReLU()
            self.weight = nn.Parameter(torch.ones(10, 64))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(functional.linear(x, self.weight))

    for model in (nn.ReLU(), nn.Sequential(nn.BatchNorm1d(64), nn.Tanh()), Functional()):
        with pytest.raises(ConversionError, match=r"calls layers with weights as modules.*which calls none"):
            diagnose(model, INPUTS)


def test_parameters_outside_of_layers_are_reported() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 10, bias=False)
            self.weight = nn.Parameter(torch.ones(96, 10))

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(self.layer(x), self.weight)

    assert diagnose(Half(), INPUTS).skipped[0] == "60.0% of the parameters, which belong to no layer that was called"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_wrappers_are_looked_through() -> None:
    plain = deep(depth=4, width=16)
    found = diagnose(plain, INPUTS, CLASSES)
    compiled = torch.compile(plain)
    assert isinstance(compiled, nn.Module)
    for wrapped in (nn.DataParallel(plain), compiled, nn.DataParallel(nn.DataParallel(plain))):
        again = diagnose(wrapped, INPUTS, CLASSES)
        assert again.layers == found.layers
        assert again.last_layer == "6"


def test_compiled_parts_are_read_and_repaired_like_others() -> None:
    def network(*, is_compiled: bool) -> nn.Sequential:
        with own_randomness(0):
            model = mlp((64, 32, 32, 32, 10))
        if is_compiled:
            model[2] = torch.compile(model[2], backend="eager")
            with torch.no_grad():
                model(INPUTS)  # compiled before the hooks come
        return model

    plain, compiled = (diagnose(network(is_compiled=some), INPUTS, CLASSES) for some in (False, True))
    assert compiled.n_layers == plain.n_layers == 4
    assert compiled.score == pytest.approx(plain.score)
    before, after = (repair(network(is_compiled=some), INPUTS, method="lsuv") for some in (False, True))
    assert not after.unseen
    assert [one.scale for one in after.after.layers] == pytest.approx([one.scale for one in before.after.layers])


def test_arrays_are_taken_as_inputs_and_targets() -> None:
    network, found = deep(depth=3), diagnose(deep(depth=3), INPUTS, CLASSES)
    assert diagnose(network, INPUTS.numpy(), CLASSES.numpy().astype("uint16")).layers == found.layers
    assert diagnose(network, (INPUTS.numpy(),), CLASSES.tolist()).loss == found.loss


def test_labels_beyond_the_outputs_are_refused() -> None:
    for odd in (10, -1):
        with pytest.raises(ValueRangeError, match=f"class labels need to be integers from 0 to 9.*got {odd}"):
            diagnose(deep(depth=2), INPUTS, torch.where(CLASSES == 3, odd, CLASSES))


def test_inputs_that_the_model_does_not_take_are_named() -> None:
    with pytest.raises(ConversionError, match=r"got \(96, 32\) float32, on which Sequential failed with RuntimeError"):
        diagnose(deep(depth=2), INPUTS[:, :32], CLASSES)
    with pytest.raises(ConversionError, match=r"got \(96, 64\) float64, on which Sequential failed with RuntimeError"):
        diagnose(deep(depth=2), INPUTS.double(), CLASSES)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_give_nearly_the_same_diagnosis(dtype: torch.dtype) -> None:
    found = diagnose(deep("layer", depth=3), INPUTS, CLASSES)
    again = diagnose(deep("layer", depth=3).to(dtype), INPUTS.to(dtype), CLASSES)
    digits = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    for one, other in zip(found.layers, again.layers, strict=True):
        assert one.r == pytest.approx(other.r, rel=256 * digits)


def test_large_numbers_of_double_precision_are_finite() -> None:
    network = deep(depth=3).double()
    with torch.no_grad():
        network[0].weight *= 1e60
    assert all(layer.is_finite for layer in diagnose(network, INPUTS.double()).layers)


def test_autocast_reaches_the_model_and_not_the_measures() -> None:
    network = deep(depth=8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = diagnose(network, INPUTS, CLASSES)
        assert torch.is_autocast_enabled("cpu")
    plain = diagnose(network, INPUTS, CLASSES)
    assert found.loss != plain.loss  # the passes are those of training
    assert found.alignment == pytest.approx(plain.alignment, abs=1e-3)
    # products of bfloat16 numbers would leave nothing of what is beyond one
    assert found.alignment is not None
    assert plain.alignment is not None
    assert (1.0 - found.alignment) == pytest.approx(1.0 - plain.alignment, rel=0.2)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_a_caller_without_gradients_gets_the_same_diagnosis(guard: Callable[[], Any]) -> None:
    network = deep(depth=3)
    with guard():
        found = diagnose(network, INPUTS * 1.0, CLASSES)
        made = repair(network, INPUTS * 1.0, method="lsuv")
    assert found.layers == diagnose(network, INPUTS, CLASSES).layers
    assert made.after == repair(network, INPUTS, method="lsuv").after


@pytest.mark.parametrize(
    "norm", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm]
)
@pytest.mark.filterwarnings("ignore:.*spectral_norm:FutureWarning")
def test_normalised_weights_are_left_as_they_were(norm: Callable[[nn.Module], nn.Module]) -> None:
    with own_randomness(0):
        network = deep(depth=3, width=16)
        norm(network[2])
    kept = {name: value.clone() for name, value in network.state_dict().items()}
    held = {name: value for name, value in vars(network[2]).items() if isinstance(value, Tensor)}
    assert diagnose(network, INPUTS, CLASSES).is_trainable
    assert all(torch.equal(kept[name], value) for name, value in network.state_dict().items())
    assert all(vars(network[2])[name] is value for name, value in held.items())


def test_hooks_of_the_caller_stay_and_run() -> None:
    network, calls = deep(depth=3), []

    def double(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        calls.append("forward")
        return 2.0 * output

    def halve(_: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        return (0.5 * given[0],)

    network[2].register_forward_hook(double)
    network[2].register_forward_pre_hook(halve)
    kept = [[dict(getattr(m, name)) for m in network.modules()] for name in ("_forward_hooks", "_forward_pre_hooks")]
    scales = named(diagnose(network, INPUTS, CLASSES))
    with torch.no_grad():
        assert scales["4"].scale == pytest.approx(float(network(INPUTS).square().mean().sqrt()), rel=1e-4)
    made = repair(network, INPUTS, method="lsuv")
    # the hooks cancel each other in the first product, so unit outputs are doubled halves
    assert made.after.weighted_layers[-1].scale == pytest.approx(1.0, rel=1e-4)
    assert calls
    assert kept == [
        [dict(getattr(m, name)) for m in network.modules()] for name in ("_forward_hooks", "_forward_pre_hooks")
    ]


def test_buffers_that_the_forward_pass_makes_are_taken_away() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "mask"):
                self.register_buffer("mask", torch.ones(10))
            return self.layer(x) * self.mask

    model = Cached()
    diagnose(model, INPUTS, CLASSES)
    assert not dict(model.named_buffers())
