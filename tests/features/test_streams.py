"""The number format: words, uniforms, normals, masks and orders, pinned for ever and reached in any order."""

from __future__ import annotations

import hashlib
import math
import statistics
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtri

from onlynorm.errors import ValueRangeError
from onlynorm.features.normals import CHUNK, NormalTransform, log_of_small
from onlynorm.features.streams import Stream, check_density, check_range, check_seed

N = 200_000  # numbers behind every statistic; a bound of five standard errors fails once in two million seeds

GOLDEN_KEY = 0xF4B8826D2811D809FB6B62E210E9E521
GOLDEN_WORDS = [
    0x32BA244E596A3243,
    0xA90D6641EC189D26,
    0xA6DDD3CDD08E64A0,
    0xF9FA6FE6004A619C,
    0x182BDB50D17B1D12,
    0xA42CDF8F9F4DB3D2,
]
GOLDEN_UNIFORMS = [
    "0x1.95d12272cb51cp-3",
    "0x1.521acc83d8313p-1",
    "0x1.4dbba79ba11cdp-1",
    "0x1.f3f4dfcc0094dp-1",
    "0x1.82bdb50d17b18p-4",
    "0x1.4859bf1f3e9b7p-1",
]
GOLDEN_NORMALS = [
    "-0x1.b24c36b3ac1f0p-1",
    "0x1.a75eda30849b9p-2",
    "0x1.8f9c64b3221b1p-2",
    "0x1.fc63be4940ebap+0",
    "-0x1.5063d2e3f513bp+0",
    "0x1.72a61d4786022p-2",
]
GOLDEN_FAR_WORD = 0xFC8234FE4BDAF403  # number 10^15
GOLDEN_PERMUTATION = [4, 0, 5, 6, 2, 1, 8, 9, 7, 3]
GOLDEN_MASK = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0]
GOLDEN_SIGNS = [1.0, -1.0, -1.0, -1.0, 1.0, -1.0, -1.0, -1.0]
GOLDEN_DIGEST = (
    "1afdd7dd19192d535fb80797aeb821ba06550c756b41c7b0608310b0300c0328"  # SHA-256 of the first 100,000 normals
)


def golden_stream() -> Stream:
    return Stream(seed=20240229, layer="layer1.0.conv1", part="left")


def philox4x64_10(counter: int, key: int) -> list[int]:
    """One block of four words, written from the published description of the generator."""
    bits = 2**64 - 1
    c = [counter >> (64 * i) & bits for i in range(4)]
    k = [key & bits, key >> 64]
    for _ in range(10):
        p0, p1 = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(p1 >> 64) ^ c[1] ^ k[0], p1 & bits, (p0 >> 64) ^ c[3] ^ k[1], p0 & bits]
        k = [(k[0] + 0x9E3779B97F4A7C15) & bits, (k[1] + 0xBB67AE8584CAA73B) & bits]
    return c


def test_golden_values_pin_the_format() -> None:
    stream = golden_stream()
    assert stream.key == GOLDEN_KEY
    assert stream.words(0, 6).tolist() == GOLDEN_WORDS
    assert [x.hex() for x in stream.uniforms(0, 6).tolist()] == GOLDEN_UNIFORMS
    assert [x.hex() for x in stream.normals(0, 6).tolist()] == GOLDEN_NORMALS
    assert int(stream.words(10**15, 10**15 + 1)[0]) == GOLDEN_FAR_WORD
    assert stream.permutation(10).tolist() == GOLDEN_PERMUTATION
    assert stream.mask(0.3, 0, 16).astype(int).tolist() == GOLDEN_MASK
    assert stream.signs(0, 8).tolist() == GOLDEN_SIGNS
    assert hashlib.sha256(stream.normals(0, 100_000).astype("<f8").tobytes()).hexdigest() == GOLDEN_DIGEST


@given(
    seed=st.integers(0, 2**64 - 1),
    layer=st.text(st.characters(exclude_categories=("Cs",)), max_size=12),
    start=st.integers(0, 2**60),
    n=st.integers(0, 13),
)
@settings(max_examples=60, deadline=None)
def test_words_are_those_of_an_independent_philox(seed: int, layer: str, start: int, n: int) -> None:
    name, part = layer.encode(), b"left/mask"
    fields = b"onlynorm stream v1" + seed.to_bytes(8, "little")
    fields += len(name).to_bytes(8, "little") + name + len(part).to_bytes(8, "little") + part
    key = int.from_bytes(hashlib.sha256(fields).digest()[:16], "little")
    expected = [philox4x64_10(1 + i // 4, key)[i % 4] for i in range(start, start + n)]
    assert Stream(seed, layer, "left/mask").words(start, start + n).tolist() == expected


def written_normal(u: float, tables: list[tuple[float, ...]]) -> float:
    """One normal in plain Python floats, step by step as docs/features.md writes it."""

    def horner(c: tuple[float, ...], x: float) -> float:
        v = c[0] * x + c[1]
        for a in c[2:]:
            v = v * x + a
        return v

    q = u - 0.5
    r = 0.180625 - q * q
    if r >= 0:
        return horner(tables[0], r) / horner(tables[1], r) * q
    m, e = math.frexp(0.5 - abs(q))
    if m < float.fromhex("0x1.6a09e667f3bcdp-1"):
        m, e = 2 * m, e - 1
    f = (m - 1) / (m + 1)
    s = horner(tuple(2 / n for n in range(23, 0, -2)), f * f) * f
    s = s + e * float.fromhex("0x1.a39ef35793c76p-33")
    t = math.sqrt(-(s + e * float.fromhex("0x1.62e42fee00000p-1")))
    above, below, x = (tables[2], tables[3], t - 1.6) if t <= 5 else (tables[4], tables[5], t - 5)
    return math.copysign(horner(above, x) / horner(below, x), q)


def test_normals_are_bit_for_bit_those_of_the_written_format() -> None:
    text = (Path(__file__).parents[2] / "docs" / "features.md").read_text(encoding="utf-8")
    lines = text.split("| A | B | C | D | E | F |\n")[1].splitlines()[1:9]
    rows = [[float(cell) for cell in line.strip("|").split("|")] for line in lines]
    tables = list(zip(*rows, strict=True))
    tails = np.concatenate([2.0 ** -np.arange(2, 54), 1 - 2.0 ** -np.arange(2, 54)])
    uniforms = np.concatenate([golden_stream().uniforms(0, 5_000), tails])
    assert normals_of(uniforms).tolist() == [written_normal(u, tables) for u in uniforms.tolist()]
    for value in (hex(GOLDEN_KEY), *map(hex, GOLDEN_WORDS[:3]), *GOLDEN_UNIFORMS[:3], *GOLDEN_NORMALS[:3]):
        assert value in text


@given(start=st.integers(0, 3 * CHUNK), n=st.integers(0, 2 * CHUNK))
@settings(max_examples=15, deadline=None)
def test_any_range_alone_equals_the_same_range_of_the_whole(start: int, n: int) -> None:
    stream, stop = golden_stream(), start + n
    for kind in ("words", "uniforms", "normals", "signs"):
        whole = getattr(stream, kind)(0, 5 * CHUNK)
        assert np.array_equal(getattr(stream, kind)(start, stop), whole[start:stop])
    assert np.array_equal(stream.mask(0.7, start, stop), stream.mask(0.7, 0, 5 * CHUNK)[start:stop])


def test_names_that_concatenate_alike_have_different_streams() -> None:
    streams = [Stream(0, "ab", "c"), Stream(0, "a", "bc"), Stream(0, "", "abc"), Stream(0, "abc", "")]
    streams += [Stream(1, "ab", "c"), Stream(2**63, "ab", "c"), Stream(0, "äb", "c")]
    assert len({s.key for s in streams}) == len(streams)


@pytest.mark.parametrize("word", [0, 1, 2**63 - 1, 2**63, 2**64 - 4097, 2**64 - 1])
def test_uniforms_of_extreme_words_are_inside_the_open_interval(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "words", lambda *_: np.array([word], dtype=np.uint64))
    (u,) = golden_stream().uniforms(0, 1).tolist()
    assert 0.0 < u < 1.0
    assert u == ((word >> 12) + 0.5) / 2**52
    assert u * 2**53 % 2 == 1  # an odd multiple of 2^-53: never exactly one half, so that no normal is zero


def normals_of(uniforms: np.ndarray) -> np.ndarray:
    return NormalTransform(uniforms.size)(uniforms, out=np.empty_like(uniforms))


def test_normals_are_the_normal_quantiles_of_the_uniforms() -> None:
    grid = np.concatenate([2.0 ** -np.arange(2, 54), 1 - 2.0 ** -np.arange(2, 54)])  # far into both tails
    uniforms = np.concatenate([golden_stream().uniforms(0, N), grid, 0.5 + 2.0 ** -np.arange(4, 54)])
    exact = ndtri(uniforms)
    assert np.abs(normals_of(uniforms) - exact).max() <= 8 * np.finfo(float).eps * np.abs(exact).max()
    assert np.all(np.abs(normals_of(uniforms) - exact) <= 1e-14 * np.abs(exact))


def test_normals_agree_with_the_standard_library() -> None:
    uniforms = golden_stream().uniforms(0, 2_000)
    normal = statistics.NormalDist()
    expected = np.array([normal.inv_cdf(u) for u in uniforms.tolist()])
    assert np.all(np.abs(normals_of(uniforms) - expected) <= 8 * np.finfo(float).eps * np.abs(expected))


def test_normals_are_antisymmetric_bit_for_bit() -> None:
    uniforms = golden_stream().uniforms(0, 10_000)
    assert np.array_equal(normals_of(1.0 - uniforms), -normals_of(uniforms))


def test_the_logarithm_is_that_of_the_library_up_to_rounding() -> None:
    x = np.exp(-37.0 * golden_stream().uniforms(0, N))
    exact = np.log(x)
    assert np.all(np.abs(log_of_small(x) - exact) <= 4 * np.finfo(float).eps * np.abs(exact))


def test_moments_of_normals_are_within_five_standard_errors() -> None:
    z = golden_stream().normals(0, N)
    # E z^k and its variance E z^2k - (E z^k)^2 for k = 1..4
    for k, (mean, variance) in {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96)}.items():
        assert abs((z**k).mean() - mean) <= 5 * math.sqrt(variance / N)


def test_neighbouring_seeds_layers_and_parts_are_uncorrelated() -> None:
    base = Stream(0, "conv", "left").normals(0, N)
    for other in (Stream(1, "conv", "left"), Stream(0, "conv2", "left"), Stream(0, "conv", "right")):
        assert abs((base * other.normals(0, N)).mean()) <= 5 / math.sqrt(N)
    assert abs((base[1:] * base[:-1]).mean()) <= 5 / math.sqrt(N - 1)


@pytest.mark.parametrize("density", [1e-3, 0.1, 1 / 3, 0.5, 0.999])
def test_a_mask_keeps_its_density_within_five_standard_errors(density: float) -> None:
    kept = golden_stream().mask(density, 0, N).mean()
    assert abs(kept - density) <= 5 * math.sqrt(density * (1 - density) / N)


def test_a_mask_compares_words_with_the_exact_integer_threshold() -> None:
    stream = golden_stream()
    words = stream.words(0, 64).tolist()
    for density in (1 / 3, math.ldexp(words[0], -64), math.nextafter(words[1] / 2**64, 1.0), 2.0**-64):
        assert stream.mask(density, 0, 64).tolist() == [w < Fraction(density) * 2**64 for w in words]
    assert stream.mask(1.0, 0, 64).all()


@given(n=st.integers(0, 300))
@settings(max_examples=20, deadline=None)
def test_a_permutation_holds_every_index_once(n: int) -> None:
    assert sorted(golden_stream().permutation(n).tolist()) == list(range(n))


def test_the_first_place_of_a_permutation_is_uniform() -> None:
    n, trials = 5, 4_000
    firsts = [Stream(seed, "", "order").permutation(n)[0] for seed in range(trials)]
    counts = np.bincount(firsts, minlength=n)
    assert np.all(np.abs(counts - trials / n) <= 5 * math.sqrt(trials / n * (1 - 1 / n)))


@pytest.mark.parametrize("seed", [-1, 2**64, True, 1.5, "0", None])
def test_a_seed_outside_64_bits_is_refused(seed: object) -> None:
    with pytest.raises(ValueRangeError, match=r"seed .* integer in \[0, 2\^64\); got"):
        check_seed(seed)


def test_a_stream_checks_its_seed_and_takes_numpy_integers() -> None:
    with pytest.raises(ValueRangeError, match=r"seed .* integer"):
        Stream(2**64, "", "left")
    assert check_seed(np.int64(7)) == 7


def test_a_name_that_cannot_be_encoded_is_refused() -> None:
    with pytest.raises(ValueRangeError, match=r"layer needs a str .*UTF-8"):
        Stream(0, "\ud800", "left")
    with pytest.raises(ValueRangeError, match=r"part needs a str .*UTF-8"):
        Stream(0, "", "\ud800")


@pytest.mark.parametrize("density", [0.0, -0.5, 1.0001, math.nan, True, "half", None])
def test_a_density_outside_its_interval_is_refused(density: object) -> None:
    with pytest.raises(ValueRangeError, match=r"density needs a number in \(0, 1\].*got"):
        check_density(density)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3), (0, 11), (0.0, 3), (0, True)])
def test_a_range_out_of_bounds_is_refused(start: object, stop: object) -> None:
    with pytest.raises(ValueRangeError, match=r"0 <= start <= stop <= 10; got"):
        check_range(start, stop, 10)
