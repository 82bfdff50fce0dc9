"""Reference networks: their shapes, their seeds, and that building one spends nobody else's random numbers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from onlynorm.errors import ShapeError, UnknownNameError, ValueRangeError
from onlynorm.models import NORMS, CifarResNet, cifar_resnet, mlp, resnet, vgg, vit
from onlynorm.models.build import n_groups
from onlynorm.modules import find_norms
from onlynorm.seeds import own_randomness


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.integers(0, 2**64 - 1))
def test_an_mlp_walks_through_its_widths_with_activations_in_between(widths: list[int], seed: int) -> None:
    network = mlp(widths, seed=seed)
    linears, activations = list(network)[::2], list(network)[1::2]
    assert [(layer.in_features, layer.out_features) for layer in linears] == list(itertools.pairwise(widths))
    assert len(activations) == len(linears) - 1
    assert all(isinstance(layer, nn.ReLU) for layer in activations)
    assert network(torch.ones(4, widths[0])).shape == (4, widths[-1])


def test_the_activation_is_the_one_that_was_asked_for() -> None:
    network = mlp((3, 4, 5, 2), activation=nn.Tanh)
    assert [type(layer) for layer in network] == [nn.Linear, nn.Tanh, nn.Linear, nn.Tanh, nn.Linear]
    assert network[1] is not network[3]


def test_equal_seeds_give_equal_networks_and_different_seeds_do_not() -> None:
    first, again, other = (mlp((6, 5, 4), seed=seed) for seed in (1, 1, 2))
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
        assert not torch.equal(weight, other.state_dict()[name])


def test_the_weights_are_those_torch_gives_at_this_seed() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        reference = nn.Linear(6, 5)
    assert torch.equal(mlp((6, 5), seed=11)[0].weight, reference.weight)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    mlp((6, 5, 4), seed=9)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_generators_of_gpus_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(torch, "manual_seed", calls.append)
    mlp((6, 5, 4), seed=9)
    assert calls == [], "torch.manual_seed seeds every device"


@pytest.mark.parametrize("widths", [(), (3,), (3, 0), (0, 3), (3, -1, 2)])
def test_widths_that_make_no_network_are_refused(widths: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"mlp needs at least two widths, all positive; got .*Try \(64, 32, 10\)"):
        mlp(widths)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_that_is_no_word_of_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(ValueRangeError, match=r"seed .* integer in \[0, 2\^64\); got "):
        mlp((3, 2), seed=seed)


# ---------------------------------------------------------------------------------------------- VGG


def test_the_usual_vgg_has_17_convolutions_of_64_channels_and_one_linear_layer() -> None:
    network = vgg()
    convolutions = [layer for layer in network if isinstance(layer, nn.Conv2d)]
    assert [layer.weight.shape for layer in convolutions] == [(64, 3, 3, 3), *[(64, 64, 3, 3)] * 16]
    assert all(layer.bias is None for layer in convolutions)
    assert [type(layer) for layer in network][-3:] == [nn.AdaptiveAvgPool2d, nn.Flatten, nn.Linear]
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in network) == 17
    assert network.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@settings(max_examples=20)
@given(
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=3),
    st.sampled_from(NORMS),
    st.integers(1, 3),
    st.integers(4, 9),
)
def test_a_vgg_walks_through_its_stages(stages: list[list[int]], norm: str, n_inputs: int, image_size: int) -> None:
    network = vgg(stages, activation=nn.Tanh, norm=norm, n_classes=5, in_channels=n_inputs, image_size=image_size)
    widths = [width for stage in stages for width in stage]
    convolutions = [layer for layer in network if isinstance(layer, nn.Conv2d)]
    assert [(c.in_channels, c.out_channels) for c in convolutions] == list(itertools.pairwise([n_inputs, *widths]))
    assert all((c.bias is None) == (norm != "none") for c in convolutions)
    assert sum(isinstance(layer, nn.Tanh) for layer in network) == len(widths)
    assert sum(isinstance(layer, nn.MaxPool2d) for layer in network) == len(stages) - 1
    assert len(find_norms(network).norms) == (0 if norm == "none" else len(widths))
    assert network.eval()(torch.zeros(2, n_inputs, image_size, image_size)).shape == (2, 5)


def test_a_vgg_is_a_function_of_its_seed_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = (vgg([[3, 4]], seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first[0].weight, again[0].weight)
    assert not torch.equal(first[0].weight, other[0].weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": []}, r"stages of positive widths.*Try \[\[8, 8\], \[16, 16\]\]"),
        ({"stages": [[4], []]}, r"stages of positive widths"),
        ({"stages": [[4, 0]]}, r"stages of positive widths"),
        ({"stages": [[4]], "n_classes": 0}, r"positive in_channels and n_classes"),
        ({"stages": [[4], [4], [4]], "image_size": 3}, r"halves its images 2 times and needs .*4 pixels; got "),
    ],
)
def test_stages_that_make_no_network_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        vgg(**options)


# ---------------------------------------------------------------------------------------------- norms and inits


@pytest.mark.parametrize("norm", NORMS)
def test_an_mlp_has_the_norm_that_was_asked_for_behind_every_hidden_layer(norm: str) -> None:
    network = mlp((6, 8, 12, 3), norm=norm)
    kinds = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm, "group": nn.GroupNorm, "none": None}
    inside = [nn.Linear, *([] if norm == "none" else [kinds[norm]]), nn.ReLU]
    assert [type(layer) for layer in network] == [*inside, *inside, nn.Linear]
    assert network(torch.ones(4, 6)).shape == (4, 3)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("make", [lambda norm: resnet(18, width=8, norm=norm), lambda norm: cifar_resnet(8, norm=norm)])
def test_a_residual_network_has_the_norm_that_was_asked_for_everywhere(make: Any, norm: str) -> None:
    network = make(norm)
    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
    found = find_norms(network)
    # A layer norm of images is torch's group norm with one group.
    wanted = {"batch": nn.BatchNorm2d, "layer": nn.GroupNorm, "group": nn.GroupNorm}
    assert len(found.norms) == (0 if norm == "none" else len(convolutions))
    assert all(isinstance(network.get_submodule(item.name), wanted[norm]) for item in found.norms)
    assert all((c.bias is None) == (norm != "none") for c in convolutions)
    groups = {m.num_groups for m in network.modules() if isinstance(m, nn.GroupNorm)}
    assert groups == ({1} if norm == "layer" else {n_groups(c.out_channels) for c in convolutions} if groups else set())
    assert bool(torch.isfinite(network.eval()(torch.ones(2, 3, 32, 32))).all())


@given(st.integers(1, 4096))
def test_groups_divide_the_channels_and_none_is_a_single_number_unless_it_must_be(n_channels: int) -> None:
    n = n_groups(n_channels)
    assert n_channels % n == 0
    assert 1 <= n <= 8
    assert n == 1 or n_channels // n >= 4


@pytest.mark.parametrize(
    "make",
    [
        lambda init, seed: mlp((50, 40, 30), norm="batch", init=init, seed=seed),
        lambda init, seed: vgg([[6, 7]], init=init, seed=seed),
        lambda init, seed: cifar_resnet(8, width=6, init=init, seed=seed),
        lambda init, seed: resnet(18, width=4, init=init, seed=seed),
    ],
)
def test_asymmetric_weights_are_uniform_above_zero(make: Any) -> None:
    before = torch.get_rng_state()
    network, again, standard = make("asymmetric", 3), make("asymmetric", 3), make("standard", 3)
    assert torch.equal(torch.get_rng_state(), before)
    for name, layer in network.named_modules():
        if not isinstance(layer, nn.Linear | nn.Conv2d):
            continue
        weight, bound = layer.weight.detach(), 2.0 / layer.weight[0].numel() ** 0.5
        assert torch.equal(weight, again.get_submodule(name).weight)
        assert float(weight.min()) >= 0.0
        assert float(weight.max()) <= bound
        # The mean of n uniform numbers is within five standard errors, bound / sqrt(12 n), of the middle.
        assert abs(float(weight.mean()) - bound / 2) <= 5 * bound / (12 * weight.numel()) ** 0.5
        assert bool((standard.get_submodule(name).weight < 0.0).any())


def test_the_seeded_cifar_network_is_the_one_that_the_class_draws_at_this_seed() -> None:
    with own_randomness(4):
        reference = CifarResNet(8)
    made = cifar_resnet(8, seed=4)
    assert all(torch.equal(value, made.state_dict()[key]) for key, value in reference.state_dict().items())


@pytest.mark.parametrize(
    "make",
    [lambda **k: mlp((3, 2), **k), lambda **k: vgg([[2]], **k), lambda **k: cifar_resnet(8, **k), resnet],
)
def test_norms_and_inits_of_no_known_name_are_refused(make: Any) -> None:
    with pytest.raises(UnknownNameError, match=r"norm needs a known name; got 'bacth'\. Did you mean 'batch'"):
        make(norm="bacth")
    with pytest.raises(UnknownNameError, match=r"init needs a known name; got 'symmetric'\. Did you mean 'asymmetric'"):
        make(init="symmetric")


# ---------------------------------------------------------------------------------------------- ResNet and ViT


@pytest.mark.parametrize(
    ("depth", "n_parameters", "n_norms"), [(18, 11_689_512, 20), (34, 21_797_672, 36), (50, 25_557_032, 53)]
)
def test_residual_networks_have_the_sizes_that_torchvision_publishes(
    depth: int, n_parameters: int, n_norms: int
) -> None:
    network = resnet(depth)
    assert sum(p.numel() for p in network.parameters()) == n_parameters
    assert len(find_norms(network).norms) == n_norms


def test_residual_networks_have_the_names_that_torchvision_uses() -> None:
    names = set(resnet(50, width=4).state_dict())
    assert {
        "conv1.weight", "bn1.running_var", "layer1.0.conv3.weight", "layer1.0.downsample.0.weight",
        "layer1.0.downsample.1.num_batches_tracked", "layer3.5.bn2.bias", "layer4.2.conv2.weight", "fc.bias",
    } <= names  # fmt: skip
    shallow = set(resnet(18, width=4).state_dict())
    assert "layer1.0.downsample.0.weight" not in shallow
    assert "layer2.0.downsample.0.weight" in shallow
    assert not any("conv3" in name for name in shallow)


def test_a_residual_network_computes_what_its_layers_say() -> None:
    network = resnet(50, width=4, n_classes=7, in_channels=2).eval()
    images = torch.rand(2, 2, 64, 64, generator=torch.Generator().manual_seed(0))

    def block(x: torch.Tensor, b: Any) -> torch.Tensor:
        y = torch.relu(b.bn1(b.conv1(x)))
        y = torch.relu(b.bn2(b.conv2(y)))
        y = b.bn3(b.conv3(y))
        return torch.relu(y + (b.downsample(x) if b.downsample else x))

    x = torch.relu(network.bn1(network.conv1(images)))
    x = nn.functional.max_pool2d(x, 3, 2, 1)
    sizes = [tuple(x.shape[1:])]
    for stage in (network.layer1, network.layer2, network.layer3, network.layer4):
        for b in stage:
            x = block(x, b)
        sizes.append(tuple(x.shape[1:]))
    assert sizes == [(4, 16, 16), (16, 16, 16), (32, 8, 8), (64, 4, 4), (128, 2, 2)]
    assert [network.layer2[0].conv1.stride, network.layer2[0].conv2.stride] == [(1, 1), (2, 2)]
    assert torch.equal(network(images), network.fc(x.mean((2, 3))))


def test_residual_networks_of_no_known_shape_are_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"depth of a ResNet needs a known name; got '20'"):
        resnet(20)
    with pytest.raises(ShapeError, match=r"needs a positive width; got 0"):
        resnet(18, width=0)
    with pytest.raises(ShapeError, match=r"needs a positive n_classes; got -1"):
        cifar_resnet(8, n_classes=-1)


def test_a_vit_has_plain_layer_norms_only_and_is_a_function_of_its_seed() -> None:
    before = torch.get_rng_state()
    first, again, other = (vit(depth=2, width=12, heads=3, patch=8, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    found = find_norms(first)
    assert [norm.name for norm in found.norms] == [
        "blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2", "norm"
    ]  # fmt: skip
    assert {norm.class_name for norm in found.norms} == {"LayerNorm"}
    state = first.state_dict()
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in state.items())
    assert not torch.equal(state["pos_embed"], other.state_dict()["pos_embed"])
    assert first(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_the_attention_of_a_vit_is_the_softmax_of_scaled_products() -> None:
    attention = vit(depth=1, width=12, heads=3, patch=16).blocks[0].attn.double()
    x = torch.rand(2, 5, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    query, key, value = attention.qkv(x).split(12, dim=-1)
    mixed = torch.empty_like(x)
    for head in range(3):
        part = slice(4 * head, 4 * head + 4)
        weights = torch.softmax(query[..., part] @ key[..., part].mT / 2.0, dim=-1)  # 2 = sqrt(4 numbers per head)
        mixed[..., part] = weights @ value[..., part]
    torch.testing.assert_close(attention(x), attention.proj(mixed), rtol=0, atol=12 * 5 * 2**-52)


@pytest.mark.parametrize(
    "sizes", [{"width": 10, "heads": 3}, {"patch": 5}, {"depth": 0}, {"heads": 0}, {"n_classes": 0}]
)
def test_sizes_that_make_no_vit_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ShapeError, match=r"vit needs positive sizes, .*Try width=192"):
        vit(**sizes)


def test_a_vit_says_which_images_it_was_made_for() -> None:
    with pytest.raises(ShapeError, match=r"needs images of 4 patches; got 9, from images \(3, 48, 48\)"):
        vit(depth=1, width=4, heads=1, patch=16)(torch.zeros(1, 3, 48, 48))
