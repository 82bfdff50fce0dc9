"""Saved networks: the same bits again from seed and norms."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import safetensors.torch
import torch
from rebuilding import CONSTRUCTIONS, rebuilt
from tensors import normal
from torch import Tensor, nn

import onlynorm as on
from onlynorm.errors import ValueRangeError
from onlynorm.frozen.form import find_blocks
from onlynorm.models import mlp


class Everything(nn.Module):
    """Nested modules, a tied layer, a norm of its own, an embedding that is left, a buffer, a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3))
        self.shared = nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular", groups=3)
        self.again = self.shared
        self.embed = nn.Embedding(4, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.tensor([0.1, 0.2, 0.3]))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf, 0.0]), persistent=False)
        self.head = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.stem(x))
        h = h + torch.tanh(self.shared(h)) + self.again(h)
        h = self.scale * h.mean((2, 3)) + self.embed(torch.tensor([1], device=h.device)) + self.shift
        return self.head(h * torch.exp(self.mask))


def trained(dtype: torch.dtype = torch.float64) -> Everything:
    """A network whose every tensor differs from a fresh one's, always the same."""
    network = Everything().to(dtype).eval()
    with torch.no_grad():
        for number, (name, value) in enumerate(network.state_dict().items()):
            if value.is_floating_point():
                noise = normal(*value.shape, seed=number).to(dtype)
                value.copy_(1.0 + noise.abs() if name.endswith("var") else noise)
    return network


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("storage", ["dense", "seed"])
def test_a_loaded_network_gives_the_same_bits(dtype: torch.dtype, storage: str, tmp_path: Path) -> None:
    x = normal(8, 2, 5, 5).to(dtype)
    target = trained(dtype)
    result = rebuilt(target, x, activation=nn.ReLU())
    on.save(result, tmp_path / "net.safetensors")
    into = Everything()
    before = copy.deepcopy(into.state_dict())
    loaded = on.load(tmp_path / "net.safetensors", like=into, storage=storage)
    assert torch.equal(loaded(x), result.network(x))
    assert loaded.shared is loaded.again
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert not any(m.training for m in loaded.modules())
    assert on.verify(target, loaded, x).is_reproducible
    assert isinstance(into.head, nn.Linear)
    assert into.training
    assert all(torch.equal(value, before[name]) for name, value in into.state_dict().items())


@pytest.mark.parametrize(
    "features",
    ["he_uniform", "orthogonal", "sparse_he_normal", "id_cond", "ortho_cond", "fast_ortho_cond", "kron_normal"],
)
@pytest.mark.parametrize("norms", ["batch", "affine"])
def test_every_distribution_and_both_kinds_of_norms_come_back(features: str, norms: str, tmp_path: Path) -> None:
    x = normal(20, 6)
    network = rebuilt(mlp((6, 5, 4)).double(), x, features=features, norms=norms, activation=nn.LeakyReLU(0.2)).network
    on.save(network, tmp_path / "net")
    loaded = on.load(tmp_path / "net", like=mlp((6, 5, 4), seed=1))
    assert torch.equal(loaded(x), network(x))
    assert find_blocks(loaded)["0"].activation.negative_slope == 0.2


@pytest.mark.parametrize("construction", sorted(CONSTRUCTIONS))
def test_every_construction_comes_back(construction: str, tmp_path: Path) -> None:
    x = normal(20, 6)
    network = rebuilt(mlp((6, 6, 6)).double(), x, construction=construction, activation=nn.ReLU()).network
    on.save(network, tmp_path / "net")
    for storage in ("dense", "seed"):
        loaded = on.load(tmp_path / "net", like=mlp((6, 6, 6)), storage=storage)
        assert torch.equal(loaded(x), network(x))
        assert torch.equal(on.collapse(loaded)(x), on.collapse(network)(x))


@pytest.mark.parametrize(
    "activation",
    [None, nn.GELU("tanh"), nn.Softplus(2.0, 15.0), nn.Hardtanh(-2.0, 3.0), nn.ELU(0.5), nn.PReLU(init=0.3), nn.Tanh()],
    ids=lambda activation: type(activation).__name__,
)
def test_activations_of_torch_come_back_by_name(activation: nn.Module | None, tmp_path: Path) -> None:
    x = normal(20, 6)
    network = rebuilt(mlp((6, 5, 4)).double(), x, activation=activation).network
    on.save(network, tmp_path / "net")
    loaded = on.load(tmp_path / "net", like=mlp((6, 5, 4)))
    assert str(find_blocks(loaded)["0"].activation) == str(find_blocks(network)["0"].activation)
    assert torch.equal(loaded(x), network(x))


class Bent(nn.Module):
    """An activation of the user's own that looks at its numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.asinh(x) if bool(torch.isfinite(x).all()) else x


def test_an_activation_of_ones_own_is_handed_to_load(tmp_path: Path) -> None:
    x = normal(20, 6)
    network = rebuilt(mlp((6, 5, 4)).double(), x, activation=Bent()).network
    on.save(network, tmp_path / "net")
    assert torch.equal(on.load(tmp_path / "net", like=mlp((6, 5, 4)), activation=Bent())(x), network(x))
    with pytest.raises(ValueRangeError, match=r"activation 'Bent'; got none.*activation="):
        on.load(tmp_path / "net", like=mlp((6, 5, 4)))
    with pytest.raises(ValueRangeError, match=r"needs the activation Bent; got ReLU"):
        on.load(tmp_path / "net", like=mlp((6, 5, 4)), activation=nn.ReLU())


def test_folded_norms_and_a_single_layer_come_back(tmp_path: Path) -> None:
    x = normal(8, 2, 5, 5)
    result = rebuilt(trained(), x, fold_norms=True)
    assert result.folded == ("stem.1",)
    on.save(result, tmp_path / "net")
    assert torch.equal(on.load(tmp_path / "net", like=Everything())(x), result.network(x))
    alone = rebuilt(nn.Linear(6, 4).double(), normal(9, 6)).network
    on.save(alone, tmp_path / "alone")
    assert torch.equal(on.load(tmp_path / "alone", like=nn.Linear(6, 4))(normal(9, 6)), alone(normal(9, 6)))


def test_no_frozen_weight_is_in_the_file_and_the_bytes_are_always_the_same(tmp_path: Path) -> None:
    x = normal(8, 2, 5, 5)
    for number in range(2):
        on.save(rebuilt(trained(), x, activation=nn.ReLU()), tmp_path / f"{number}")
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()
    stored = safetensors.torch.load_file(tmp_path / "0")
    network = rebuilt(trained(), x, activation=nn.ReLU()).network
    assert stored.keys() < network.state_dict().keys()
    largest = max(block.n_features for block in find_blocks(network).values())
    assert max(value.numel() for value in stored.values()) == largest


def test_numbers_may_be_stored_in_single_precision(tmp_path: Path) -> None:
    x = normal(20, 6)
    network = rebuilt(mlp((6, 5, 4)).double(), x, activation=nn.ReLU()).network
    on.save(network, tmp_path / "net", dtype=torch.float32)
    loaded = on.load(tmp_path / "net", like=mlp((6, 5, 4)).double())
    assert torch.equal(loaded(x.float()), copy.deepcopy(network).float()(x.float()))
    with pytest.raises(ValueRangeError, match=r"dtype needs one of torch.float64, .*got torch.int64"):
        on.save(network, tmp_path / "net", dtype=torch.int64)
    with torch.no_grad():
        network[0].first_norm.weight[0] = 1e300
    with pytest.raises(ValueRangeError, match=r"'0.first_norm.weight' needs to fit into torch.float32; it overflows"):
        on.save(network, tmp_path / "net", dtype=torch.float32)
