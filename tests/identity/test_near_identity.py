"""`near_identity_`: the last layers of residual branches are found and made small, in networks of many kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensors import normal
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.errors import ConversionError, UnknownNameError
from onlynorm.identity import all_convolutional, near_identity_
from onlynorm.models import cifar_resnet, mlp, resnet, vit

IMAGES = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Parallel(nn.Module):
    """x + f(x) + scale * g(x), behind an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(10, 4), nn.Parameter(torch.zeros(1, 4))
        self.f, self.g = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.scale, self.head = nn.Parameter(torch.ones(4)), nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        found: Tensor = self.head(x + self.f(x) + self.scale * self.g(x))
        return found


class Gated(nn.Module):
    """x + f(x) sigmoid(g(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.f(x) * torch.sigmoid(self.g(x))
        return made


class NormedBranch(nn.Module):
    """x + norm(f(x)) with a norm without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.layer_norm(self.f(x), (4,))


def encoder(*, norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


BLOCKS = [f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)]
CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, list[str]]] = {
    "resnet": (lambda: resnet(18, width=4, n_classes=2), IMAGES, [f"{b}.bn2" for b in BLOCKS]),
    "cifar resnet": (lambda: cifar_resnet(8, width=2, n_classes=2), IMAGES, [f"layer{i}.0.bn2" for i in (1, 2, 3)]),
    "all-convolutional": (
        lambda: all_convolutional(7, width=4, init="standard"), IMAGES, [f"blocks.{i}.conv2" for i in range(3)]
    ),
    "vit": (
        lambda: vit(patch=8, depth=2, width=8, heads=2, image_size=16, n_classes=3), IMAGES,
        [f"blocks.{i}.{last}" for i in range(2) for last in ("attn.proj", "mlp.fc2")],
    ),
    **{
        f"encoder, norm first {first}": (
            lambda first=first: encoder(norm_first=first), normal(2, 5, 8).float(),
            [f"layers.{i}.{last}" for i in range(2) for last in ("self_attn.out_proj", "linear2")],
        )
        for first in (True, False)
    },
    "parallel branches": (Parallel, torch.arange(5), ["f", "g.2"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_last_layers_of_all_branches_are_found_and_nothing_else_changes(name: str) -> None:
    make, inputs, places = CASES[name]
    model = make().train()
    next(model.parameters()).requires_grad_(False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    flags = [(p.requires_grad, p.grad) for p in model.parameters()]
    state = torch.get_rng_state()
    assert list(near_identity_(model, inputs)) == places
    assert torch.equal(torch.get_rng_state(), state)
    assert [(p.requires_grad, p.grad) for p in model.parameters()] == flags
    assert all(module.training for module in model.modules())
    changed = {
        key.rpartition(".")[0] for key, value in model.state_dict().items() if not torch.equal(value, before[key])
    }
    assert changed == set(places)


def test_a_layer_is_drawn_as_in_the_paper_and_from_the_seed() -> None:
    model = all_convolutional(7, width=32, init="standard")
    near_identity_(model, IMAGES, seed=3)
    for block in model.residual_blocks:
        channels = block.conv2.out_channels
        spread = float(block.conv2.weight.detach().std()) * 9 * channels
        assert spread == pytest.approx(1.0, abs=4.0 / block.conv2.weight.numel() ** 0.5)  # four standard errors
    same, other = (all_convolutional(7, width=32, init="standard") for _ in range(2))
    near_identity_(same, IMAGES, seed=3)
    near_identity_(other, which="blocks.*.conv2", seed=4)
    assert torch.equal(same.residual_blocks[0].conv2.weight, model.residual_blocks[0].conv2.weight)
    assert not torch.equal(other.residual_blocks[0].conv2.weight, model.residual_blocks[0].conv2.weight)


def test_with_zero_every_block_is_its_shortcut_and_still_learns() -> None:
    model = all_convolutional(7, width=4, init="standard")
    near_identity_(model, IMAGES, zero=True)
    for block in model.residual_blocks:
        x = torch.randn(2, block.conv1.in_channels, 4, 4)
        assert torch.equal(block(x), block.shortcut(x))
    model(IMAGES).square().sum().backward()
    assert all(float(block.conv2.weight.grad.abs().max()) > 0.0 for block in model.residual_blocks)


def test_patterns_name_the_layers_without_inputs() -> None:
    gated = Gated()
    bias = gated.g.bias.detach().clone()
    assert near_identity_(gated, which=["f"], zero=True) == ("f",)
    x = torch.randn(3, 4)
    assert torch.equal(gated(x), x)
    assert torch.equal(gated.g.bias, bias)


def _parametrized() -> nn.Module:
    model = Parallel()
    nn.utils.parametrizations.weight_norm(model.f)
    return model


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("make", "inputs", "options", "words"),
    [
        (lambda: mlp((3, 4, 2)), torch.ones(2, 3), {}, "got a Sequential, in whose forward pass none was found"),
        (lambda: nn.LSTM(3, 3), torch.ones(2, 4, 3), {}, "none was found"),
        (Gated, torch.ones(2, 4), {}, "got one that ends in . and ., as with a gate"),
        (NormedBranch, torch.ones(2, 4), {}, "got one that ends in a norm without parameters"),
        (_parametrized, torch.arange(3), {}, "got a parametrized one at 'f'"),
        (Gated, None, {}, "got neither"),
        (Gated, torch.ones(2, 7), {}, r"got \(2, 7\) float32, on which Gated failed"),
        (Gated, None, {"which": 3}, "which must be a list"),
        (Gated, None, {"which": [3]}, "got a int"),
    ],
)
def test_what_has_no_last_layer_is_refused(
    make: Callable[[], nn.Module], inputs: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConversionError, match=words):
        near_identity_(make(), inputs, **options)


def test_a_pattern_must_match() -> None:
    with pytest.raises(UnknownNameError, match="layer of which="):
        near_identity_(Gated(), which="h")
