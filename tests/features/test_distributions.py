"""Every distribution: any block alone, the right statistics, the right shapes, and bits that never change."""

from __future__ import annotations

import hashlib
import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from onlynorm.errors import MemoryLimitError, ShapeError, UnknownNameError, ValueRangeError
from onlynorm.features import Features, distributions, draw, names, orthogonal, register
from onlynorm.features.draw import _count, check_shape
from onlynorm.features.streams import Stream

EPS = torch.finfo(torch.float64).eps
RANDOM = tuple(name for name in names() if name not in distributions.STRUCTURED)
SPARSE = ("sparse_he_normal", "er_normal", "er_sign")

# digest of a draw for a (3, 4, 2) target, seed 7, layer "conv", then left[0, 0], left[2, 5], right[5, 7]
GOLDEN = {
    "er_normal": (
        "124eea7916f664b5ff3036ce4656702e1787d70a8a4dce915f1bf8a7c072ec4b",
        "0x0.0p+0",
        "0x0.0p+0",
        "0x0.0p+0",
    ),
    "er_sign": ("857ee1bbd0cb3c0ce0511d1a49813ceff1de06843e08d4c0a129f19c39c079c4", "0x0.0p+0", "0x0.0p+0", "0x0.0p+0"),
    "he_normal": (
        "5f3e22b3681296625f506e0fd096d87c445c05d50bed738498690cf37978060b",
        "-0x1.44b5d1bae81cap-3",
        "0x1.4bea4f2407bb8p-5",
        "0x1.9c14de00c3296p-6",
    ),
    "fast_ortho_cond": (
        "c16483ef87291c4ccb93358f06c4aac3751ada331719267e3c827e9efa742f1e",
        "-0x1.1f0ed99bed9b2p-2",
        "-0x1.3fffffffffffep-1",
        "-0x1.6a09e667f3bcbp-3",
    ),
    "he_uniform": (
        "1aa34a8fc799fc25ee1a25db08c0c3a40498737fdd255ea9e6e63b6d18a52a56",
        "-0x1.a61112e651b7dp-3",
        "0x1.c8d2d3454d117p-5",
        "0x1.1c9f9b53d8390p-5",
    ),
    "id_cond": (
        "6a5ad9ac48f4c25f511f0eb1539ca121b6fa01ac9f29bbb04471e31511f716fa",
        "0x1.0000000000000p+0",
        "0x0.0p+0",
        "0x0.0p+0",
    ),
    "id_cond_minimal": (
        "819708c8ada4a5daa81cd8e445d6ee5f33b944809791205eed10de97bdd19e46",
        "0x1.0000000000000p+0",
        "0x0.0p+0",
        "0x0.0p+0",
    ),
    "kron_normal": (
        "0e71bbaa1a77fdadbdeebfd56580bc99a8bfd2eda576c2ad4d12a04cc11831c0",
        "0x1.4ac8eed17b78dp-5",
        "-0x1.4556f873563ffp-3",
        "-0x1.b7758386b25e3p-2",
    ),
    "ortho_cond": (
        "6ca9365b0dd77088e18de9b47dd63b55891d001fd77e21676c56dec8b3a03e1a",
        "-0x1.9dc6bf34419dcp-2",
        "0x1.156334e9f9d31p-4",
        "0x1.ce5947a1a6e21p-2",
    ),
    "orthogonal": (
        "3078092a97c9e49b873e68b83b95676633fed55c1799e1f75a57350beb14c01b",
        "-0x1.7217c33e936b6p-3",
        "-0x1.c0bbeb45909cap-4",
        "0x1.46ee10470792bp-1",
    ),
    "sparse_he_normal": (
        "ab11b302e21c07c8054b6f5c4085e8ac320754fcafd6575913178e850ee5075a",
        "0x0.0p+0",
        "0x0.0p+0",
        "0x0.0p+0",
    ),
    "uniform": (
        "460f010318ee4e9630b523ebf51f888e688785eb9c0043f174379714d211b7c7",
        "-0x1.d7e2897844e9cp-2",
        "0x1.febe868979590p-4",
        "0x1.48a7a55c58060p-5",
    ),
}


def golden_draw(name: str) -> Features:
    return draw(name, (3, 4, 2), seed=7, layer="conv")


def slow_matrix(features: Features) -> torch.Tensor:
    """The Khatri-Rao matrix, one column per feature."""
    left, right = features.left(), features.right()
    return torch.stack([torch.outer(left[:, f], right[f]).flatten() for f in range(features.n_features)], dim=1)


def test_every_distribution_has_golden_values() -> None:
    assert set(GOLDEN) == set(names())


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_values_pin_the_weights(name: str) -> None:
    features = golden_draw(name)
    left, right = features.left(), features.right()
    values = [float(x).hex() for x in (left[0, 0], left[2, 5], right[5, 7])]
    assert (features.weights_digest(), *values) == GOLDEN[name]


@given(
    name=st.sampled_from(names()),
    shape=st.lists(st.integers(1, 5), min_size=2, max_size=4).map(tuple),
    kernel=st.sampled_from(["first", "second"]),
    seed=st.integers(0, 2**64 - 1),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_any_block_equals_the_slice_of_the_whole(
    name: str, shape: tuple[int, ...], kernel: str, seed: int, data: st.DataObject
) -> None:
    features = draw(name, shape, kernel=kernel, seed=seed, layer="any")
    stop = data.draw(st.integers(0, features.n_features))
    start = data.draw(st.integers(0, stop))
    assert torch.equal(features.left(start, stop), features.left()[:, start:stop])
    assert torch.equal(features.right(start, stop), features.right()[start:stop])
    assert torch.equal(features.mask_left(start, stop), features.left(start, stop) != 0)
    assert torch.equal(features.mask_right(start, stop), features.right(start, stop) != 0)


@pytest.mark.parametrize("name", RANDOM)
def test_pieces_and_threads_do_not_change_a_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    features = draw(name, (5, 9), n_features=101)
    left, right, digest = features.left(), features.right(), features.weights_digest()
    monkeypatch.setattr(sys.modules["onlynorm.features.draw"], "_PIECE", 40)
    monkeypatch.setattr(orthogonal, "_PANEL", 30)
    assert torch.equal(features.left(), left)
    assert torch.equal(features.right(), right)
    assert features.weights_digest() == digest


@pytest.mark.parametrize("name", RANDOM)
def test_the_digest_is_that_of_all_float64_bytes_whatever_the_dtype(name: str) -> None:
    features = draw(name, (3, 4), seed=1, dtype=torch.float32)
    full = draw(name, (3, 4), seed=1)
    content = full.right().numpy().tobytes() + full.left().T.contiguous().numpy().tobytes()
    assert features.weights_digest() == full.weights_digest() == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_are_the_float64_numbers_rounded(name: str, dtype: torch.dtype) -> None:
    features, full = draw(name, (3, 4, 2), dtype=dtype), draw(name, (3, 4, 2))
    assert features.left().dtype == features.right().dtype == dtype
    assert torch.equal(features.left(), full.left().to(dtype))
    assert torch.equal(features.right(), full.right().to(dtype))


@pytest.mark.parametrize("name", RANDOM)
def test_more_features_keep_the_earlier_ones_up_to_the_scale(name: str) -> None:
    few, many = draw(name, (3, 4), n_features=20), draw(name, (3, 4), n_features=80)
    assert torch.equal(few.right(), many.right(0, 20))
    is_scaled = "he_" in name or name == "orthogonal"
    ratio = 2.0 if is_scaled else 1.0  # sqrt(80 / 20)
    assert torch.allclose(few.left(), ratio * many.left(0, 20), rtol=4 * EPS, atol=0)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("kernel", ["first", "second"])
@pytest.mark.parametrize("n_axes", [0, 1, 2, 3])
def test_two_source_layers_compose_to_the_target_layer(name: str, kernel: str, n_axes: int) -> None:
    shape = (2, 3, *(2, 3, 2)[:n_axes])
    features = draw(name, shape, kernel=kernel, seed=5)
    x = torch.from_numpy(Stream(0, "x", "").normals(0, 3 * 5**n_axes)).reshape(1, 3, *(5,) * n_axes)
    gamma = torch.from_numpy(Stream(0, "gamma", "").normals(0, features.n_features))
    conv = (functional.linear, functional.conv1d, functional.conv2d, functional.conv3d)[n_axes]
    hidden = conv(x, features.first_weight()) * gamma.reshape(1, -1, *(1,) * n_axes)
    matrix = features.left() @ torch.diag(gamma) @ features.right()
    expected = conv(x, features.as_weight(matrix))
    scale = float((features.left().abs() @ torch.diag(gamma.abs()) @ features.right().abs()).sum() * x.abs().max())
    difference = (conv(hidden, features.second_weight()) - expected).abs().max()
    assert difference <= features.n_features * EPS * scale
    assert torch.equal(features.as_matrix(features.as_weight(matrix)), matrix)


@pytest.mark.parametrize("kernel", ["first", "second"])
def test_sizes_follow_the_place_of_the_kernel(kernel: str) -> None:
    features = draw("he_normal", (2, 3, 5, 7), kernel=kernel, excess=1.5)
    assert (features.equations, features.n_features, features.excess) == (210, 315, 1.5)
    assert (features.rows, features.cols) == {"first": (2, 105), "second": (70, 3)}[kernel]
    assert slow_matrix(draw("er_sign", (2, 3), n_features=4)).shape == (6, 4)


def test_the_decimal_excess_is_taken_at_its_word() -> None:
    assert draw("er_sign", (2, 5), excess=1.1).n_features == 11
    assert draw("er_sign", (2, 5)).n_features == 13
    assert draw("er_sign", (2, 5), excess=0.01).n_features == 1


@pytest.mark.parametrize("kernel", ["first", "second"])
@pytest.mark.parametrize("name", ["he_normal", "he_uniform", "orthogonal", "sparse_he_normal"])
def test_entries_have_the_variance_of_he_within_five_standard_errors(name: str, kernel: str) -> None:
    features = draw(name, (8, 16, 3), kernel=kernel, n_features=4_800)
    second_fan_in = 4_800 * (3 if kernel == "second" else 1)
    for entries, fan_in in ((features.right(), features.cols), (features.left(), second_fan_in)):
        normed = entries * math.sqrt(fan_in / 2)
        spread = {"sparse_he_normal": 3 / 0.5 - 1, "he_uniform": 9 / 5 - 1}.get(name, 2.0)
        assert abs(normed.mean()) <= 5 / math.sqrt(entries.numel())
        assert abs((normed**2).mean() - 1) <= 5 * math.sqrt(spread / entries.numel())


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
def test_sparse_entries_stay_with_their_density(name: str, density: float) -> None:
    features = draw(name, (20, 30), n_features=1_000, density=density)
    for block, mask in ((features.left(), features.mask_left()), (features.right(), features.mask_right())):
        assert torch.equal(block != 0, mask)
        assert not torch.signbit(block[~mask]).any()  # no negative zeros: they would change the digest
        bound = 5 * math.sqrt(density * (1 - density) / mask.numel())
        assert abs(mask.double().mean() - density) <= bound


def test_unscaled_distributions_have_their_plain_entries() -> None:
    normal, sign, flat = (draw(n, (3, 4), seed=2, layer="a") for n in ("er_normal", "er_sign", "uniform"))
    numbers = Stream(2, "a", "right")
    kept = torch.from_numpy(numbers.normals(0, 60).reshape(15, 4)) * normal.mask_right()
    assert torch.equal(normal.right(), kept)
    assert set(sign.left().unique().tolist()) == {-1.0, 0.0, 1.0}
    assert torch.equal(flat.right(), torch.from_numpy(2 * numbers.uniforms(0, 60) - 1).reshape(15, 4))


def test_seeds_layers_and_sides_are_independent() -> None:
    def entries(seed: int, layer: str) -> list[torch.Tensor]:
        features = draw("er_normal", (4, 4), n_features=5_000, seed=seed, layer=layer, density=1.0)
        return [features.left().T.flatten(), features.right().flatten()]

    blocks = [*entries(0, "a"), *entries(1, "a"), *entries(0, "b")]
    correlation = torch.corrcoef(torch.stack(blocks)) - torch.eye(6)
    assert correlation.abs().max() <= 5 / math.sqrt(blocks[0].numel())


def test_features_of_equal_words_are_equal_and_readable() -> None:
    features = draw("sparse_he_normal", [3, 4, 2], seed=1, layer="conv", density=0.25)
    assert features == draw("sparse_he_normal", torch.Size([3, 4, 2]), seed=1, layer="conv", density=0.25)
    assert str(features) == (
        "sparse_he_normal features for a target of shape (3, 4, 2): 30 features for 24 equations (excess 1.25), "
        "left (3, 30), right (30, 8), seed 1, layer 'conv', density 0.25, kernel in the first layer, "
        "float64 on cpu"
    )
    assert not features.is_structured
    assert draw("id_cond", (3, 4)).is_structured


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributions, "_REGISTRY", dict(distributions._REGISTRY))


@pytest.mark.usefixtures("own_registry")
def test_a_user_can_register_a_distribution() -> None:
    @register("laplace", density=0.9)
    def laplace(side: distributions.Side, start: int, stop: int) -> distributions.Array:
        return side.signs(start, stop) * side.fan_in

    features = draw("laplace", (2, 3), n_features=50)
    assert "laplace" in names()
    assert features.density == 0.9
    assert set(features.right().unique().tolist()) == {-3.0, 0.0, 3.0}
    assert torch.equal(features.right(3, 9), features.right()[3:9])


@pytest.mark.usefixtures("own_registry")
def test_a_registered_function_that_fills_the_wrong_shape_is_refused() -> None:
    register("flat")(lambda side, start, stop: np.zeros(side.width))
    with pytest.raises(ShapeError, match=r"distribution 'flat' .*\(5, 3\) float64 entries; got \(3,\)"):
        draw("flat", (2, 3), n_features=5).right()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["", "he_normal", "id_cond", 3])
def test_a_taken_name_cannot_be_registered(name: str) -> None:
    with pytest.raises(ValueRangeError, match="register needs a new, non-empty name; got"):
        register(name)


def test_a_registered_density_is_checked() -> None:
    with pytest.raises(ValueRangeError, match=r"density needs a number in \(0, 1\]"):
        register("thin", density=0.0)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"got 'he_norml'\. Did you mean 'he_normal'"):
        draw("he_norml", (2, 3))


def test_an_unknown_kernel_place_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="kernel needs a known name; got 'third'"):
        draw("he_normal", (2, 3), kernel="third")


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, -1), (1,) * 6, (True, 2), (2, 2.5), ("2", 3), 5, None])
def test_a_shape_that_is_no_weight_is_refused(shape: object) -> None:
    with pytest.raises(ShapeError, match=r"shape needs 2 to 5 positive integers.*got"):
        check_shape(shape)


def test_draw_checks_its_shape_seed_and_layer() -> None:
    with pytest.raises(ShapeError, match="shape needs 2 to 5 positive integers"):
        draw("he_normal", (4, 0))
    with pytest.raises(ValueRangeError, match=r"seed .* integer"):
        draw("he_normal", (2, 3), seed=-1)
    with pytest.raises(ValueRangeError, match=r"layer needs a str .*UTF-8"):
        draw("he_normal", (2, 3), layer="\ud800")


@pytest.mark.parametrize("n_features", [0, -3, 2.5, True, "9"])
def test_a_count_that_is_no_count_is_refused(n_features: object) -> None:
    with pytest.raises(ValueRangeError, match="n_features needs a positive integer; got"):
        _count(n_features, None, 6)


@pytest.mark.parametrize("excess", [0.0, -1.0, math.inf, math.nan, True, "much"])
def test_an_excess_that_is_not_positive_is_refused(excess: object) -> None:
    with pytest.raises(ValueRangeError, match=r"excess needs a positive finite number.*got"):
        _count(None, excess, 6)


def test_both_counts_at_once_are_refused() -> None:
    with pytest.raises(ValueRangeError, match="draw needs one of n_features and excess; got n_features=9"):
        draw("he_normal", (2, 3), n_features=9, excess=1.5)


@pytest.mark.parametrize("name", [name for name in distributions.STRUCTURED if name != "kron_normal"])
def test_structured_features_refuse_another_count(name: str) -> None:
    own = draw(name, (2, 3)).n_features
    assert draw(name, (2, 3), n_features=own).n_features == own
    with pytest.raises(ValueRangeError, match=f"{name} needs exactly {own} features; got n_features=9"):
        draw(name, (2, 3), n_features=9)
    with pytest.raises(ValueRangeError, match=rf"{name} needs exactly {own} features; got .*excess=1\.5"):
        draw(name, (2, 3), excess=1.5)


@pytest.mark.parametrize("density", [0.0, 1.5, -0.1, math.nan])
@pytest.mark.parametrize("name", [*SPARSE, "id_cond"])
def test_a_density_outside_its_interval_is_refused(name: str, density: float) -> None:
    with pytest.raises(ValueRangeError, match=r"density needs a number in \(0, 1\]"):
        draw(name, (2, 3), density=density)


@pytest.mark.parametrize("name", ["he_normal", "orthogonal", "ortho_cond", "id_cond_minimal"])
def test_a_density_for_dense_features_is_refused(name: str) -> None:
    with pytest.raises(ValueRangeError, match=f"density needs a sparse distribution; got 0.5 for {name}"):
        draw(name, (2, 3), density=0.5)


def test_a_shared_column_for_other_features_is_refused() -> None:
    with pytest.raises(ValueRangeError, match="shared_column needs id_cond_minimal; got 1 for he_normal"):
        draw("he_normal", (2, 3), shared_column=1)


def test_a_dtype_without_fractions_is_refused() -> None:
    with pytest.raises(ValueRangeError, match=r"dtype .*floating-point.*; got torch\.int64"):
        draw("he_normal", (2, 3), dtype=torch.int64)


@pytest.mark.parametrize("name", ["he_normal", "id_cond"])
@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3), (0, 1_000)])
def test_a_block_out_of_range_is_refused(name: str, start: int, stop: int) -> None:
    features = draw(name, (2, 3))
    for block in (features.left, features.right, features.mask_left, features.mask_right):
        with pytest.raises(ValueRangeError, match=rf"0 <= start <= stop <= {features.n_features}; got"):
            block(start, stop)


def test_a_weight_or_matrix_of_another_shape_is_refused() -> None:
    features = draw("he_normal", (2, 3))
    with pytest.raises(ShapeError, match=r"as_matrix needs a weight of shape \(2, 3\); got \(3, 2\)"):
        features.as_matrix(torch.zeros(3, 2))
    with pytest.raises(ShapeError, match=r"as_weight needs a matrix of shape \(2, 3\); got \(3, 2\)"):
        features.as_weight(torch.zeros(3, 2))


@pytest.mark.usefixtures("unchecked")
def test_numpy_numbers_are_numbers() -> None:
    made = draw("er_normal", (2, 5), excess=np.float32(1.1), density=np.float32(0.5), seed=np.int64(3))  # type: ignore[arg-type]
    assert made.n_features == 11
    assert made == draw("er_normal", (2, 5), excess=1.1, density=0.5, seed=3)
    assert draw("he_normal", (2, 5), n_features=np.int32(7)).n_features == 7  # type: ignore[arg-type]


@pytest.mark.parametrize("excess", [1e300, 10**400, 2.0**62, np.float64(1e300), float("nan"), float("-inf")])
@pytest.mark.usefixtures("unchecked")
def test_an_excess_beyond_all_memory_is_refused(excess: Any) -> None:
    with pytest.raises(
        (ValueRangeError, MemoryLimitError), match=r"excess needs a positive finite number|smaller excess"
    ):
        draw("he_normal", (2, 5), excess=excess)


def test_features_that_do_not_fit_into_memory_are_refused_when_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**30))
    features = draw("he_normal", (200, 5), n_features=10**8)
    assert features.left(0, 3).shape == (200, 3)
    with pytest.raises(MemoryLimitError, match=r"1e\+08 features needs \d+ GB; got 1\.07 GB"):
        features.left()


@pytest.mark.parametrize("device", ["nope", "", "cuda:99", 0, None, 1.5])
@pytest.mark.usefixtures("unchecked")
def test_a_device_that_this_machine_has_not_is_refused(device: Any) -> None:
    with pytest.raises(ValueRangeError, match=r"device .*got .*Pass 'cpu'"):
        draw("he_normal", (2, 5), device=device)


def test_distributions_of_one_seed_and_layer_share_their_numbers_and_other_seeds_or_layers_do_not() -> None:
    def numbers(name: str, **names: Any) -> torch.Tensor:
        return draw(name, (40, 40), n_features=100, **{"seed": 0, "layer": "a", **names}).right().flatten()

    normal = numbers("he_normal")
    assert torch.equal(normal.argsort(), numbers("he_uniform").argsort())
    for other in ({"seed": 1}, {"layer": "b"}):
        both = torch.stack([normal, numbers("he_uniform", **other)])
        # Of 4,000 independent pairs the correlation is normal with a deviation of 1 / sqrt(4000).
        assert abs(float(torch.corrcoef(both)[0, 1])) < 5 / 4000**0.5
