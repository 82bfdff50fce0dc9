"""Structured features against the ordinary layers and norms they stand for, and what they cost."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from earlier_files import CASES, FOLDER, make_target
from rebuilding import reconstruct_with
from tensors import normal
from torch import Tensor, nn
from torch.nn import functional

import onlynorm as on
from onlynorm.errors import FormatError, ShapeError
from onlynorm.features import Features, draw
from onlynorm.features.draw import factor_rows
from onlynorm.frozen import pair, streaming
from onlynorm.frozen.pair import NormOnlyBlock
from onlynorm.frozen.streaming import find_sharing, fold_kernel
from onlynorm.modules.affine import SharedNorm, Sharing, affine, make_norm, set_affine
from onlynorm.modules.layers import layer_options
from onlynorm.reconstruction.constructions import wide
from onlynorm.storage import read_tensors, write_tensors

ROUNDING = 1e-12
"""Sums of a few hundred products of order one, in another order."""
CONVOLVE = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


LAYERS = {
    "linear": lambda: nn.Linear(5, 4),
    "strided": lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1),
    "grouped": lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2),
    "circular": lambda: nn.Conv2d(2, 3, 3, padding=2, padding_mode="circular"),
    "replicated": lambda: nn.Conv3d(2, 2, 2, padding=1, padding_mode="replicate"),
}
FEATURES: dict[str, dict[str, Any]] = {
    "id_cond": {}, "ortho_cond": {}, "fast_ortho_cond": {}, "kron_normal": {}, "id_cond_minimal": {"shared_column": 1},
    "sparse": {"density": 0.6},
}  # fmt: skip


def make_block(layer: nn.Module, features: str, kernel: str, **options: Any) -> NormOnlyBlock:
    """A block with arbitrary norms in place of the layer."""
    groups = getattr(layer, "groups", 1)
    shape = (layer.weight.shape[0] // groups, *layer.weight.shape[1:])
    name = "id_cond" if features == "sparse" else features
    drawn = [draw(name, shape, layer=f"{i}", kernel=kernel, **FEATURES[features]) for i in range(groups)]
    block = NormOnlyBlock(layer_options(layer), drawn, **options)
    n, n_seen, out = block.n_features, len(block.low), block.second_norm.num_features
    mean, variance = normal(n_seen, seed=2), 0.5 + normal(n_seen).square()
    set_affine(block.first_norm, normal(n), normal(n, seed=1), mean=mean, variance=variance)
    set_affine(block.second_norm, normal(out, seed=3), normal(out, seed=4))
    return block


def ordinary(block: NormOnlyBlock, inputs: Tensor) -> tuple[Tensor, nn.Module]:
    """What a network of ordinary layers with all frozen weights computes, and its first norm."""
    kernel, norm = block.features[0].kernel, block.first_norm
    plain = make_norm(block.norms, block.n_features, axes=block.axes, dtype=torch.float64).train(norm.training)
    plain.load_state_dict({
        name: value if len(value.shape) == 0 or len(value) == block.n_features else block.spread(value, slice(None))
        for name, value in norm.state_dict().items()
    })  # fmt: skip
    hidden = torch.cat([
        apply(block, one.first_weight(), part, kernel == "first") for _, one, part in block.group_inputs(inputs)
    ], 1)  # fmt: skip
    hidden = block.activation(plain(hidden))
    parts = zip(hidden.split([one.n_features for one in block.features], 1), block.features, strict=True)
    made = torch.cat([apply(block, one.second_weight(), part, kernel == "second") for part, one in parts], 1)
    return block.second_norm(made), plain


def apply(block: NormOnlyBlock, weight: Tensor, x: Tensor, holds_kernel: bool) -> Tensor:
    if not block.axes:
        return x @ weight.mT
    stride, dilation = (block.options[name] if holds_kernel else 1 for name in ("stride", "dilation"))
    return CONVOLVE[block.axes](x, weight, stride=stride, dilation=dilation)


def inputs_of(layer: nn.Module, n: int = 5) -> Tensor:
    return normal(n, layer.weight.shape[1] * getattr(layer, "groups", 1), *(7,) * (layer.weight.ndim - 2), seed=5)


@pytest.mark.parametrize("activation", [None, nn.Sigmoid(), nn.ReLU()], ids=["none", "sigmoid", "relu"])
@pytest.mark.parametrize("kernel", ["first", "second"])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_grid_computes_what_all_its_frozen_weights_would(
    layer: str, features: str, kernel: str, activation: nn.Module | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = LAYERS[layer]()
    inputs = inputs_of(target)
    for storage, norms, n_bytes in (("dense", "batch", 2**20), ("seed", "affine", 256)):
        monkeypatch.setattr(streaming, "HIDDEN_BYTES", n_bytes)
        monkeypatch.setattr("onlynorm.frozen.pair.PATCH_BYTES", n_bytes)
        block = make_block(target, features, kernel, activation=activation, storage=storage, norms=norms)
        wanted = ordinary(block, inputs)[0].detach()
        with torch.no_grad():
            assert torch.allclose(block(inputs), wanted, rtol=ROUNDING, atol=ROUNDING)
        assert torch.allclose(block(inputs), wanted, rtol=ROUNDING, atol=ROUNDING)  # as gradients need it


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("layer", ["linear", "grouped"])
@pytest.mark.parametrize("activation", [None, nn.Sigmoid()], ids=["none", "sigmoid"])
def test_a_grid_trains_as_its_ordinary_layers_do(layer: str, features: str, activation: nn.Module | None) -> None:
    target = LAYERS[layer]()
    block, inputs = make_block(target, features, "first", activation=activation), inputs_of(target)
    block.first_norm.train()
    wanted, plain = ordinary(block, inputs)
    made = block(inputs)
    assert torch.allclose(made, wanted, rtol=ROUNDING, atol=ROUNDING)
    made.square().sum().backward()
    wanted.square().sum().backward()
    for name, parameter in plain.named_parameters():
        own = block.first_norm.get_parameter(name).grad
        assert torch.allclose(own, parameter.grad, rtol=1e-10, atol=1e-10 * float(parameter.grad.abs().max()))
    for name in ("running_mean", "running_var"):
        spread = block.spread(block.first_norm.get_buffer(name), slice(None))
        assert torch.allclose(spread, plain.get_buffer(name), rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("activation", [None, nn.ReLU(), nn.LeakyReLU(0.3), nn.Tanh()], ids=str)
@pytest.mark.parametrize("kernel", ["first", "second"])
def test_a_rebuilt_grid_is_its_target_and_collapses_to_it(
    features: str, activation: nn.Module | None, kernel: str
) -> None:
    target = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1)).double().eval()
    choices: dict[str, Any] = {"features": features}
    if features == "sparse":
        choices = {"features": "id_cond", "density": 0.6}
        mask = draw("id_cond", (4, 3, 3, 3), density=0.6, layer="0", kernel=kernel)
        assert mask.structure is not None
        kept = mask.as_weight(mask.structure.apply(torch.ones(mask.n_features)))
        target[0].weight.data *= kept
    inputs = inputs_of(target[0])
    made = reconstruct_with(target, inputs, activation=activation, kernel=kernel, **choices)
    tolerance = 1e-7 if isinstance(activation, nn.Tanh) else 1e-10
    check = on.verify(target, made, inputs)
    assert check.is_same(tolerance)
    assert check.outside == 0.0
    assert on.verify(target, made, 100 * inputs).outside == 1.0
    assert on.verify(target, on.collapse(made), inputs).is_same(1e-11)
    # kron_normal has ceil(sqrt(1.25) n) distinct inputs
    n_seen = {"first": 31, "second": 4} if features == "kron_normal" else {"first": 27, "second": 3}
    assert len(made.network[0].low) == n_seen[kernel]


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("activation", [None, nn.ReLU()], ids=["none", "relu"])
def test_no_sample_gives_no_output(layer: str, features: str, activation: nn.Module | None) -> None:
    target = LAYERS[layer]().double()
    empty = inputs_of(target, n=0)
    for kernel in ("first", "second"):
        block = make_block(target, features, kernel, activation=activation)
        assert block(empty).shape == target(empty).shape
        with torch.no_grad():
            assert block(empty).shape == target(empty).shape


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("storage", ["dense", "seed"])
def test_files_of_an_earlier_version_are_the_same_function(name: str, storage: str) -> None:
    target, inputs = make_target(name)
    loaded = on.load(FOLDER / f"{name}.safetensors", like=CASES[name][0](), storage=storage)
    tolerance = 1e-7 if name in ("ortho_cond_second", "sparse") else 1e-10  # windows of tanh and sigmoid
    check = on.verify(target, loaded, inputs)
    assert check.is_same(tolerance)
    assert check.is_reproducible
    assert check.outside == 0.0
    assert on.verify(target, on.collapse(loaded), inputs).is_same(tolerance)


def test_a_file_of_an_earlier_version_with_missing_numbers_is_refused(tmp_path: Path) -> None:
    document, tensors = read_tensors(FOLDER / "minimal.safetensors", kind="network of norms", format=1, cure="")
    tensors["0.low"] = tensors["0.low"][:-1]
    write_tensors(tmp_path / "short", tensors, kind="network of norms", format=1, document=document)
    with pytest.raises(FormatError, match=r"low has shape \(210,\) for 211 features"):
        on.load(tmp_path / "short", like=CASES["minimal"][0]())


def test_a_file_has_two_numbers_for_every_weight(tmp_path: Path) -> None:
    target = nn.Sequential(nn.Linear(400, 400)).eval()
    for features in ("id_cond", "ortho_cond", "fast_ortho_cond"):
        made = on.reconstruct(target, normal(4, 400).float(), on.Wide(features=features, activation=nn.ReLU()))
        on.save(made, tmp_path / features)
        assert (tmp_path / features).stat().st_size <= 2.05 * 4 * 400**2


@pytest.mark.parametrize("n_groups", [1, 3])
@pytest.mark.parametrize("inputs", [None, "given"])
def test_a_value_per_input_is_spread_over_its_channels(n_groups: int, inputs: str | None) -> None:
    index = torch.cat([torch.arange(12) % 4 + 4 * group for group in range(n_groups)])
    sharing = Sharing(12 * n_groups, (4,) * n_groups, None if inputs is None else index.__getitem__)
    values = normal(4 * n_groups)
    for which in (slice(None), slice(0, 8), slice(4, 12), slice(3, 9), slice(8, 12 * n_groups)):
        assert torch.equal(sharing.spread(values, which), values[index[which]])


def test_a_shared_norm_is_a_batch_norm_of_copies() -> None:
    norm, plain = SharedNorm(Sharing(6, (3,))), nn.BatchNorm2d(6, dtype=torch.float64)
    inputs = normal(4, 3, 5, 5)
    for one in (norm, plain):
        set_affine(one, normal(6), normal(6, seed=1))
    assert torch.allclose(norm(inputs), plain(inputs.repeat(1, 2, 1, 1)), rtol=ROUNDING, atol=ROUNDING)
    assert torch.equal(norm.running_mean.repeat(2), plain.running_mean)
    assert [torch.equal(*pair) for pair in zip(affine(norm), affine(plain), strict=True)] == [True, True]
    with pytest.raises(ShapeError, match=r"a shared norm needs a batch \(samples, 3, \*positions\); got \(4, 6\)"):
        norm(normal(4, 6))


@pytest.mark.parametrize("features", FEATURES)
def test_features_of_one_input_see_the_same(features: str) -> None:
    name = "id_cond" if features == "sparse" else features
    one: Features = draw(name, (3, 4, 2), **FEATURES[features])
    assert one.structure is not None
    sharing = find_sharing([one])
    assert sharing is not None
    index = sharing.spread(torch.arange(one.n_seen))
    assert torch.equal(one.right(), factor_rows(one, "right")[index])
    values = normal(one.n_features)
    matrix = factor_rows(one, "left").mT @ one.structure.grid(values) @ factor_rows(one, "right")
    assert torch.allclose(matrix, one.left() @ torch.diag(values) @ one.right(), rtol=ROUNDING, atol=ROUNDING)
    assert torch.allclose(one.structure.constant(values), one.left() @ values, rtol=ROUNDING, atol=ROUNDING)
    assert find_sharing([draw("he_normal", (3, 4))]) is None


def test_a_kernel_folds_as_a_convolution_with_one_nonzero_per_output() -> None:
    values = normal(2, 3 * 6, 9, 8)
    one_hot = torch.eye(18, dtype=torch.float64).reshape(3, 6, 18).mT.reshape(3, 18, 3, 2)
    wanted = functional.conv2d(values, one_hot, stride=(2, 1), dilation=(1, 2))
    assert torch.allclose(fold_kernel(values, (3, 2), (2, 1), (1, 2)), wanted, rtol=ROUNDING, atol=ROUNDING)


def test_only_the_norms_of_a_grid_learn() -> None:
    made = on.reconstruct(nn.Sequential(nn.Linear(5, 4)).eval(), normal(9, 5).float(), on.Wide(features="id_cond"))
    network = copy.deepcopy(made.network)
    norms = on.only_norms(network)
    assert {name for name, p in network.named_parameters() if p.requires_grad} == {
        f"0.{norm}.{name}" for norm in ("first_norm", "second_norm") for name in ("weight", "bias")
    }
    assert sum(norm.n_channels for norm in norms.norms) == 24


@pytest.mark.parametrize("kernel", ["first", "second"])
@pytest.mark.parametrize("activation", [nn.Identity(), nn.Tanh()])
@pytest.mark.parametrize("learns", [False, True])
def test_the_parts_in_which_minimal_features_are_computed_do_not_matter(
    kernel: str, activation: nn.Module, learns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = LAYERS["grouped"]()
    block = make_block(layer, "id_cond_minimal", kernel, activation=activation)
    inputs = normal(3, 4, 8, 7)

    def computed() -> list[Tensor]:
        sums = [wide._row_sums(block, group, one) for group, one in enumerate(block.features)]
        if not learns:
            return [block(inputs).detach(), *sums]
        block.zero_grad()
        made = block(inputs)
        made.square().sum().backward()
        return [made.detach(), *(values.grad for values in block.parameters() if values.grad is not None), *sums]

    block.requires_grad_(learns)
    whole = computed()
    for size in (1, 13, 26):
        monkeypatch.setattr(pair, "PART", size)
        monkeypatch.setattr(wide, "PART", size)
        (made, *found), (expected, *others) = computed(), whole
        assert torch.equal(made, expected)
        # The gradient of the shared feature is summed in another order.
        assert all(torch.allclose(*both, rtol=ROUNDING, atol=ROUNDING) for both in zip(found, others, strict=True))


def test_inputs_of_fast_orthogonal_features_are_not_overwritten() -> None:
    for layer, inputs in ((LAYERS["linear"](), normal(4, 5)), (nn.Conv1d(3, 2, 4), normal(2, 3, 4))):
        block = make_block(layer, "fast_ortho_cond", "first", activation=nn.Tanh())
        before = inputs.clone()
        with torch.no_grad():
            made = block(inputs)
        assert torch.equal(inputs, before)
        assert torch.equal(made, block(inputs.clone().requires_grad_()).detach())
