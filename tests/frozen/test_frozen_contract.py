"""What every frozen map and every frozen layer promises, whatever its features and its construction."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from rebuilding import reconstruct_with
from tensors import normal
from torch import Tensor, nn

import onlynorm as on
from onlynorm.errors import ConversionError
from onlynorm.features import draw, semicircle_spectrum
from onlynorm.frozen import FrozenOptions, to_norm_only, wrap
from onlynorm.frozen.form import FrozenLayer, find_frozen
from onlynorm.frozen.maps import FrozenMap, kind_of, make_map, map_from_settings
from onlynorm.reconstruction.verify import count_entries
from onlynorm.seeds import own_randomness

EPS32 = torch.finfo(torch.float32).eps


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().abs().max())


CHOICES: dict[str, dict[str, Any]] = {
    "id_cond": {},
    "sparse": {"features": "id_cond", "density": 0.6},
    "scaled": {"features": "id_cond", "spectrum": 9.0},
    "given": {"features": "id_cond", "spectrum": semicircle_spectrum(6 * 2 * 4, condition=3.0)},
    "ortho_cond": {},
    "fast_ortho_cond": {},
    "kron_normal": {},
    "id_cond_minimal": {"shared_column": 1},
    "he_normal": {"excess": 1.5},
    "blocks": {"features": "he_normal", "n_blocks": 6},
    "sparse_he_normal": {"excess": 2.0, "density": 0.8},
}


def choose(name: str, **more: Any) -> FrozenOptions:
    return FrozenOptions(**{"features": name, **CHOICES[name], **more})


class MapContract:
    """Inherited by one class per kind of weight: `shape` and `groups` of a weight with 48 entries."""

    shape: tuple[int, ...]
    groups = 1

    @pytest.fixture(params=CHOICES)
    def frozen(self, request: pytest.FixtureRequest) -> FrozenMap:
        return make_map(self.shape, choose(request.param), groups=self.groups)

    def gammas(self, frozen: FrozenMap, seed: int = 0) -> tuple[Tensor, ...]:
        first = normal(frozen.n_features, seed=seed)
        is_minimal = frozen.features.name == "id_cond_minimal"
        return (first, normal(self.shape[0], seed=seed + 1)) if is_minimal else (first,)

    def test_the_weight_has_its_shape_and_is_linear_in_gamma(self, frozen: FrozenMap) -> None:
        one, two = self.gammas(frozen), self.gammas(frozen, seed=5)
        assert frozen(*one).shape == frozen.shape == self.shape
        mixed = (2.0 * one[0] - two[0], *one[1:])
        wanted = 2.0 * frozen(*one) - frozen(two[0], *one[1:])
        assert torch.allclose(frozen(*mixed), wanted, rtol=1e-12, atol=1e-12)

    def test_solving_for_a_weight_that_gammas_make_gives_it_back(self, frozen: FrozenMap) -> None:
        weight = frozen(*self.gammas(frozen))
        again = frozen(*frozen.solve(weight))
        assert distance(again, weight) <= 1e-8 * float(weight.abs().max())

    def test_weight_and_constant_are_those_of_the_two_frozen_layers(self, frozen: FrozenMap) -> None:
        f, n = frozen.features, frozen.n_copies
        left, right = f.left(), f.right()
        values = None if frozen.spectrum is None else frozen.values
        right = right if values is None else values[:, None] * right
        gamma, beta = normal(frozen.n_features), normal(frozen.n_features, seed=7)
        parts = [left @ (part[:, None] * right) for part in gamma.chunk(n)]
        wanted = torch.cat([f.as_weight(part) for part in parts])
        assert distance(frozen.weight(gamma), wanted) <= 1e-13 * frozen.n_features
        added = torch.cat([(left @ part).reshape(f.shape[0], -1).sum(1) for part in beta.chunk(n)])
        assert distance(frozen.constant(beta), added) <= 1e-13 * frozen.n_features

    def test_a_feature_stays_inside_its_group(self, frozen: FrozenMap) -> None:
        gamma, *others = self.gammas(frozen)
        gamma = gamma.clone()
        if frozen.features.density is None:  # every group then has as many features
            gamma[: len(gamma) // self.groups] = 0.0
            by_group = frozen(gamma, *others).reshape(self.groups, -1)
            assert not bool(by_group[0].any())
            assert self.groups == 1 or bool(by_group[1:].any())

    def test_a_lower_precision_and_back_loses_nothing(self, frozen: FrozenMap) -> None:
        before = [held.clone() for held in frozen.stored_tensors()]
        half = frozen.half()
        assert all(held.dtype == torch.float32 for held in half.stored_tensors() if held.is_floating_point())
        assert half.float().is_reproducible()
        frozen.double()
        assert all(torch.equal(*pair) for pair in zip(before, frozen.stored_tensors(), strict=True))

    def test_a_weight_in_float64_does_not_see_the_precision_of_what_is_stored(self, frozen: FrozenMap) -> None:
        gammas = self.gammas(frozen)
        wanted = frozen.weight(*gammas)
        if frozen.spectrum is None:
            assert distance(frozen.float().weight(*gammas), wanted) <= 1e-13 * frozen.n_features

    def test_numbers_are_counted_and_come_from_the_seed(self, frozen: FrozenMap) -> None:
        held_by_features = frozen.features.structure.numbers() if frozen.features.name == "fast_ortho_cond" else []
        assert frozen.n_frozen == sum(held.numel() for held in [*frozen.stored_tensors(), *held_by_features])
        assert frozen.is_reproducible()
        for held in [] if isinstance(frozen.spectrum, Tensor) else frozen.stored_tensors():
            held.view(-1)[0] += 1
            assert not frozen.is_reproducible()
            held.view(-1)[0] -= 1

    def test_settings_make_the_same_map(self, frozen: FrozenMap) -> None:
        gammas = self.gammas(frozen)
        for is_stored in (True, False):
            again = map_from_settings(frozen.settings(), is_stored=is_stored, dtype=torch.float64)
            assert (again.digest(), again.origin()) == (frozen.digest(), frozen.origin())
            assert (again.n_frozen, again.n_features) == (frozen.n_frozen, frozen.n_features)
            assert torch.equal(again(*gammas), frozen(*gammas))
            assert is_stored or not frozen.features.has_factors or again.stored_tensors() == []


class TestLinearMaps(MapContract):
    shape = (6, 8)


class TestConvolutionMaps(MapContract):
    shape = (6, 2, 2, 2)


class TestGroupedMaps(MapContract):
    shape, groups = (6, 2, 2, 2), 3


class TestMapsOfBlocks(MapContract):
    """Those of the blocks that reconstruct makes, with the kernel in the second layer."""

    shape = (6, 2, 2, 2)

    @pytest.fixture(
        params=[
            "id_cond",
            "sparse",
            "ortho_cond",
            "fast_ortho_cond",
            "kron_normal",
            "id_cond_minimal",
            "he_normal",
            "sparse_he_normal",
        ]
    )
    def frozen(self, request: pytest.FixtureRequest) -> FrozenMap:
        o = choose(request.param)
        drawn = draw(
            o.features, self.shape, excess=o.excess, density=o.density, shared_column=o.shared_column, kernel="second"
        )
        return kind_of(drawn)(drawn)


@pytest.mark.parametrize("features", ["ortho_cond", "fast_ortho_cond", "kron_normal", "id_cond_minimal", "he_normal"])
def test_groups_have_the_frozen_numbers_of_one(features: str) -> None:
    whole = make_map((6, 2, 3), choose(features), groups=3)
    one = make_map((2, 2, 3), choose(features))
    gammas = [normal(n) for n in ((whole.n_features, 6) if features == "id_cond_minimal" else (whole.n_features,))]
    parts = zip(*(gamma.chunk(3) for gamma in gammas), strict=True)
    assert torch.equal(whole(*gammas), torch.cat([one(*part) for part in parts]))


def test_blocks_that_cut_through_groups_are_refused() -> None:
    with pytest.raises(ConversionError, match=r"in 3 groups needs a multiple of 3 blocks.*got 2\. Leave n_blocks out"):
        make_map((6, 2), choose("he_normal", n_blocks=2), groups=3)


PLAIN = {
    "linear": lambda: nn.Linear(5, 4),
    "conv1d": lambda: nn.Conv1d(4, 6, 3, padding=1, groups=2, bias=False),
    "conv2d": lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1, padding_mode="circular"),
    "grouped": lambda: nn.Conv2d(4, 4, (3, 2), groups=4, dilation=(1, 2)),
    "conv3d": lambda: nn.Conv3d(2, 3, 2),
}


class LayerContract:
    """Inherited by one class per family of layers, which makes `layer` from an ordinary one of float64."""

    def make(self, plain: nn.Module, inputs: Tensor, kind: str) -> FrozenLayer:
        raise NotImplementedError

    def kinds(self) -> tuple[str, ...]:
        raise NotImplementedError

    @pytest.fixture(params=PLAIN)
    def plain(self, request: pytest.FixtureRequest) -> nn.Module:
        with own_randomness(1):
            return PLAIN[request.param]().double().eval()

    def inputs(self, plain: nn.Module) -> Tensor:
        n_in = getattr(plain, "in_features", 0) or plain.in_channels
        return normal(6, n_in, *(5,) * (plain.weight.ndim - 2), seed=3)

    def each(self, plain: nn.Module) -> list[FrozenLayer]:
        kinds = [kind for kind in self.kinds() if kind != "deep" or getattr(plain, "groups", 1) == 1]
        return [self.make(plain, self.inputs(plain), kind) for kind in kinds]

    def test_the_layer_computes_what_the_ordinary_one_does(self, plain: nn.Module) -> None:
        x = self.inputs(plain)
        for layer in self.each(plain):
            assert distance(layer(x), plain(x)) <= 1e-7, layer
            made = layer.to_plain()
            assert type(made) is type(plain)
            assert distance(made(x), plain(x)) <= 1e-7

    def test_collapse_makes_an_ordinary_network(self, plain: nn.Module) -> None:
        for layer in self.each(plain):
            network = on.collapse(nn.Sequential(layer, nn.ReLU()).eval())
            assert type(network[0]) is type(plain)
            assert not find_frozen(network)

    def test_verify_counts_norms_and_frozen_numbers_and_nothing_else(self, plain: nn.Module) -> None:
        x = self.inputs(plain)
        for layer in self.each(plain):
            check = on.verify(nn.Sequential(plain), nn.Sequential(layer).eval(), x)
            assert check.is_only_norms
            assert check.others == ()
            assert check.n_frozen == layer.n_frozen
            parameters = sum(p.numel() for p in layer.parameters())
            assert parameters <= check.n_norm <= 2 * parameters  # with the statistics of batch norms
            assert layer.n_features > 0

    def test_float32_and_back_loses_nothing_of_the_frozen_numbers(self, plain: nn.Module) -> None:
        x = self.inputs(plain)
        for layer in self.each(plain):
            wanted = layer(x).detach()
            low = layer.float()
            assert low.is_reproducible()
            assert low(x.float()).dtype == torch.float32
            assert layer.double().is_reproducible()
            assert distance(layer(x), wanted) <= 1e4 * EPS32 * float(wanted.abs().max())

    def test_copies_and_state_dicts_carry_all_of_it(self, plain: nn.Module) -> None:
        x = self.inputs(plain)
        for layer in self.each(plain):
            again = copy.deepcopy(layer)
            with torch.no_grad():
                for parameter in again.parameters():
                    parameter.zero_()
            again.load_state_dict(layer.state_dict())
            assert torch.equal(again(x), layer(x))
            assert count_entries(again) == count_entries(layer)

    def test_a_file_is_the_layer(self, plain: nn.Module, tmp_path: Any) -> None:
        x = self.inputs(plain)
        for number, layer in enumerate(self.each(plain)):
            path = tmp_path / str(number)
            on.save(nn.Sequential(layer), path)
            for storage in ("dense", "seed"):
                again = on.load(path, like=nn.Sequential(copy.deepcopy(plain)), storage=storage)
                assert type(again[0]) is type(layer)
                assert torch.equal(again(x), layer(x)), layer
                assert again[0].digest() == layer.digest()
                assert again[0].is_reproducible()

    def test_half_precision_rounds_the_output_and_not_the_frozen_numbers(self, plain: nn.Module) -> None:
        x = self.inputs(plain).bfloat16()
        for layer in self.each(plain):
            wanted = layer(x.double())
            low = layer.bfloat16()
            assert low(x).dtype == torch.bfloat16
            assert low.is_reproducible()
            size = float(wanted.detach().abs().max())
            assert distance(low(x).double(), wanted) <= 0.1 * size


class TestNormOnlyLayers(LayerContract):
    def kinds(self) -> tuple[str, ...]:
        return ("id_cond", "scaled", "ortho_cond", "fast_ortho_cond", "kron_normal", "id_cond_minimal", "he_normal")

    def make(self, plain: nn.Module, inputs: Tensor, kind: str) -> FrozenLayer:
        return wrap(plain, choose(kind)).eval()  # type: ignore[arg-type]


class TestBlocks(LayerContract):
    def kinds(self) -> tuple[str, ...]:
        return (
            "id_cond",
            "ortho_cond",
            "fast_ortho_cond",
            "kron_normal",
            "id_cond_minimal",
            "he_normal",
            "residual",
            "low_rank",
            "deep",
            "multilayer",
        )

    def make(self, plain: nn.Module, inputs: Tensor, kind: str) -> FrozenLayer:
        is_construction = kind in ("residual", "low_rank", "deep", "multilayer")
        choices: dict[str, Any] = {"construction": kind} if is_construction else {"features": kind}
        if choices.get("features") != "id_cond_minimal":
            choices["activation"] = nn.ReLU()
        made = reconstruct_with(nn.Sequential(plain), inputs, **choices).network[0]
        assert isinstance(made, FrozenLayer)
        return made


def test_collapsed_layers_share_what_norm_only_layers_shared() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    network = on.collapse(to_norm_only(nn.Sequential(first, second), features="ortho_cond"))
    assert network[0].weight is network[1].weight
    assert network[0].bias is not network[1].bias
