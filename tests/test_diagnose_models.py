"""`diagnose` on odd models: layers called twice or in place, outputs and arguments of any kind, no targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diagnosed import CLASSES, INPUTS, Twice, deep, named
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.data import seeded
from onlynorm.models import cifar_resnet, own_randomness, vit
from onlynorm.rank import diagnose


def test_in_place_activations_are_read_after_and_layers_before_them() -> None:
    plain = deep(depth=4, width=24)
    sly = deep(depth=4, width=24, activation=lambda: nn.ReLU(inplace=True))
    assert diagnose(plain, INPUTS, CLASSES).layers == diagnose(sly, INPUTS, CLASSES).layers


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
