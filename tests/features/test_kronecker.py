"""Kronecker products of random factors: the grid, the least-norm solution and the spectrum."""

from __future__ import annotations

import dataclasses
import importlib
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import normal
from torch import Tensor, nn

import onlynorm as on
from onlynorm.errors import MemoryLimitError, ShapeError, ToleranceError, ValueRangeError
from onlynorm.features import Features, draw
from onlynorm.features.kronecker import ACCURATE, KronInverse, KronNormal, find_grid, grid_for_excess
from onlynorm.features.streams import Stream
from onlynorm.solvers import spectrum
from onlynorm.solvers.methods.closed_form import solve_closed_form
from onlynorm.solvers.spectrum import measure_spectrum, predict_features

EPS = torch.finfo(torch.float64).eps
SHAPES = [(4, 6), (6, 4), (1, 5), (5, 1), (1, 1), (3, 2, 3, 2)]


def structure_of(features: Features) -> KronNormal:
    assert isinstance(features.structure, KronNormal)
    return features.structure


def dense(features: Features) -> Tensor:
    return on.solvers.KhatriRao(features.left(), features.right()).materialise()


# ------------------------------------------------------------------------------- the grid


@given(rows=st.integers(1, 40), cols=st.integers(1, 40), excess=st.fractions(1, 4))
@settings(max_examples=200, deadline=None)
def test_the_number_of_features_is_enough_to_find_the_grid_again(rows: int, cols: int, excess: Fraction) -> None:
    n_q, n_d = grid_for_excess(rows, cols, excess)
    assert n_q >= rows
    assert n_d >= cols
    assert n_q * n_d >= excess * rows * cols
    found = find_grid(rows, cols, n_q * n_d)
    assert math.prod(found) == n_q * n_d
    assert found[0] >= rows
    assert found[1] >= cols
    ratios = sorted((Fraction(found[0], rows), Fraction(found[1], cols)))
    given = sorted((Fraction(n_q, rows), Fraction(n_d, cols)))
    assert ratios[1] / ratios[0] <= given[1] / given[0]


@pytest.mark.parametrize(
    ("sizes", "excess", "wanted"),
    [
        ((512, 4608), Fraction(5, 4), (573, 5152)),
        ((10, 512), Fraction(5, 4), (12, 573)),
        ((1, 40), Fraction(5, 4), (1, 50)),  # a single row is well conditioned at any size
        ((40, 1), Fraction(5, 4), (50, 1)),
        ((1, 1), Fraction(2), (1, 2)),
        ((3, 4), Fraction(1), (3, 4)),
        ((4, 9), Fraction(4), (8, 18)),
    ],
)
def test_the_excess_is_split_evenly(sizes: tuple[int, int], excess: Fraction, wanted: tuple[int, int]) -> None:
    assert grid_for_excess(*sizes, excess) == wanted
    assert find_grid(*sizes, math.prod(wanted)) == wanted


def test_counts_and_factors_of_drawn_features() -> None:
    features = draw("kron_normal", (6, 3, 2, 2), seed=4)
    assert features.grid_shape == (7, 14)
    assert (features.n_features, features.n_seen, features.n_frozen) == (98, 14, 7 * 6 + 14 * 12)
    assert features.excess >= 1.25
    structure = structure_of(features)
    assert structure.left_factor.shape == (6, 7)
    assert structure.right_factor.shape == (14, 12)
    # feature 17 = (q, d) = (1, 3)
    assert torch.equal(features.left(17, 18)[:, 0], structure.left_factor[:, 1])
    assert torch.equal(features.right(17, 18)[0], structure.right_factor[3])
    assert draw("kron_normal", (6, 12), n_features=98).grid_shape == (7, 14)
    # With the kernel in the second layer, an output of U2 sums over all its kernel positions.
    second = draw("kron_normal", (300, 20, 2, 2), kernel="second")
    assert float(structure_of(second).left_factor.var()) == pytest.approx(2 / (4 * second.grid_shape[0]), rel=0.01)


def test_factors_are_streams_of_their_own_with_he_variances() -> None:
    features = draw("kron_normal", (200, 300), seed=4, layer="a")
    structure = structure_of(features)
    n_q, n_d = features.grid_shape
    right = Stream(4, "a", "right/kron").normals(0, n_d * 300) * math.sqrt(2 / 300)
    left = Stream(4, "a", "left/kron").normals(0, n_q * 200) * math.sqrt(2 / n_q)
    assert torch.equal(structure.right_factor.flatten(), torch.from_numpy(right))
    assert torch.equal(structure.left_factor.mT.flatten(), torch.from_numpy(left))


def test_large_factors_are_those_of_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = draw("kron_normal", (9, 11)).weights_digest()
    monkeypatch.setattr("onlynorm.features.kronecker._PIECE", 7)
    assert draw("kron_normal", (9, 11)).weights_digest() == whole


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"excess": 0.9}, r"at least one feature per equation, 12; got excess=0\.9\. Use excess=1\.25"),
        ({"n_features": 11}, r"at least one feature per equation, 12; got n_features=11\. Use excess=1\.25"),
        ({"n_features": 13}, r"q at least 3 and d at least 4.*; got 13\. Use n_features=20, or pass excess"),
        ({"n_features": 16, "excess": 1.5}, "draw needs one of n_features and excess"),
        ({"density": 0.5}, "density needs a sparse distribution; got 0.5 for kron_normal"),
        ({"excess": math.inf}, "excess needs a positive finite number"),
    ],
)
def test_impossible_counts_are_refused_with_a_cure(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueRangeError, match=message):
        draw("kron_normal", (3, 4), **choices)
    assert draw("kron_normal", (3, 4), n_features=20).grid_shape == (4, 5)


def test_too_many_features_are_refused_before_anything_is_drawn() -> None:
    with pytest.raises(MemoryLimitError, match="gamma for each of"):
        draw("kron_normal", (10**6, 10**6))
    with pytest.raises(MemoryLimitError, match="kron_normal for a target of shape"):
        _ = draw("kron_normal", (1, 10**6)).structure


# ------------------------------------------------------------------------------- the solution


@pytest.mark.parametrize("excess", [1.0, 1.25, 2.0])
@pytest.mark.parametrize("kernel", ["first", "second"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gamma_is_the_least_norm_solution_of_the_dense_system(
    shape: tuple[int, ...], kernel: str, excess: float
) -> None:
    features = draw("kron_normal", shape, seed=2, kernel=kernel, excess=excess)
    target = normal(features.rows, features.cols)
    gamma, output_gamma, residual = solve_closed_form(structure_of(features), target)
    wanted = torch.linalg.lstsq(dense(features), target.flatten()[:, None], driver="gelsd").solution[:, 0]
    assert output_gamma is None
    assert float((gamma - wanted).norm()) <= 1e-10 * float(wanted.norm())
    assert residual <= 1e-13
    solution = on.solve_features(features, features.as_weight(target))
    assert solution.is_exact
    assert solution.method == "closed form"
    assert float((solution.gamma - wanted).norm()) <= 1e-10 * float(wanted.norm())


def test_the_least_norm_solution_is_not_a_solution_plus_a_null_vector() -> None:
    features = draw("kron_normal", (3, 4), excess=2.0, seed=1)
    M, target = dense(features), normal(3, 4)
    gamma = structure_of(features).solve(target)
    null = torch.linalg.svd(M).Vh[12:]
    assert null.shape[0] == features.n_features - 12
    assert float((null @ gamma).abs().max()) <= 1e-13 * float(gamma.norm())


@pytest.mark.parametrize("shape", [(5, 7), (7, 5)])
def test_transposed_factors_give_another_matrix(shape: tuple[int, int]) -> None:
    """Guards against a wrong transpose, which square factors of equal size would not reveal by their shapes."""
    features = draw("kron_normal", shape, excess=1.0, seed=3)
    structure, target, M = structure_of(features), normal(*shape), dense(features)
    gamma = structure.solve(target)
    assert features.grid_shape == shape
    assert float((M @ gamma - target.flatten()).norm()) <= 1e-10 * float(target.norm())
    size = float(target.norm())
    constant, back = features.left() @ gamma, target.flatten() @ M
    assert float((structure.apply(gamma).flatten() - M @ gamma).norm()) <= 1e-12 * float(gamma.norm())
    assert float((structure.transpose(target) - back).norm()) <= 1e-13 * float(back.norm())
    assert float((structure.constant(gamma) - constant).norm()) <= 1e-12 * float(gamma.norm())
    for wrong in (
        KronNormal(structure.left_factor.mT, structure.right_factor),
        KronNormal(structure.left_factor, structure.right_factor.mT),
    ):
        assert float((M @ wrong.solve(target) - target.flatten()).norm()) > 0.1 * size
        assert float((wrong.apply(gamma) - structure.apply(gamma)).norm()) > 0.1 * size
        assert float((wrong.transpose(target) - back).norm()) > 0.1 * float(back.norm())


def test_a_batch_of_targets_shares_the_factorizations(monkeypatch: pytest.MonkeyPatch) -> None:
    structure, targets, factored = structure_of(draw("kron_normal", (4, 3))), normal(5, 2, 4, 3), []
    original = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda gram: factored.append(len(gram)) or original(gram))
    gamma = structure.solve(targets)
    assert sorted(factored) == [3, 4]
    assert gamma.shape == (5, 2, structure.n_features)
    for i, j in np.ndindex(5, 2):
        assert torch.allclose(gamma[i, j], structure.solve(targets[i, j]), rtol=0, atol=1e-10 * float(gamma.norm()))
    assert float((structure.apply(gamma) - targets).norm()) <= 1e-13 * float(targets.norm())


def test_almost_singular_factors_are_factored_by_reflections() -> None:
    left, right = normal(6, 6, seed=1), normal(7, 7, seed=2)
    left[5] = left[4] + 1e-9 * left[5]  # the Gram matrix is singular in float64
    structure, target = KronNormal(left, right), normal(6, 7)
    inverse = KronInverse(structure)
    gamma = inverse(target)
    assert inverse._left.is_orthogonal
    assert float((structure.apply(gamma) - target).norm()) <= 1e-6 * float(target.norm())


def test_a_factor_that_cholesky_solves_badly_is_factored_again(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = normal(6, 6, seed=1), normal(7, 7, seed=2)
    monkeypatch.setattr("onlynorm.features.kronecker.MAX_RATIO", math.inf)
    monkeypatch.setattr("onlynorm.features.kronecker.MAX_REFINEMENTS", 0)
    left[5] = left[4] + 1e-6 * left[5]
    structure, target = KronNormal(left, right), normal(6, 7)
    inverse = KronInverse(structure)
    assert not inverse._left.is_orthogonal
    residual = float((structure.apply(inverse._once(target)) - target).norm() / target.norm())
    assert residual > 10 * ACCURATE
    better = float((structure.apply(inverse(target)) - target).norm() / target.norm())
    assert inverse._left.is_orthogonal
    assert better < 0.1 * residual


def test_bad_targets_are_refused_and_zero_stays_zero() -> None:
    structure = structure_of(draw("kron_normal", (3, 4)))
    with pytest.raises(ShapeError, match=r"kron_normal needs a matrix \(\.\.\., 3, 4\); got shape \(4, 3\)"):
        structure.solve(torch.zeros(4, 3))
    solution = on.solve_features(draw("kron_normal", (3, 4)), torch.zeros(3, 4), tolerance=1e-10)
    assert solution.residual == 0.0
    assert not bool(solution.gamma.any())


def test_a_tolerance_below_rounding_asks_for_a_larger_excess() -> None:
    with pytest.raises(ToleranceError, match=r"kron_normal features need to reach 1e-17; .*use a larger excess"):
        on.solve_features(draw("kron_normal", (9, 9)), normal(9, 9), tolerance=1e-17)


def test_a_plan_that_does_not_fit_offers_id_cond(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("onlynorm.reconstruction.plan")
    monkeypatch.setattr(module, "memory_limit", lambda: 2_000_000)
    network = nn.Sequential(nn.Linear(200, 200)).double()
    planned = on.plan(network, torch.rand(4, 200, dtype=torch.float64), on.Wide(features="kron_normal"))
    assert not planned.is_feasible
    assert any("id_cond" in str(cure) for cure in planned.cures), planned.cures


def test_the_condition_number_of_a_solution_is_that_of_the_law() -> None:
    features = draw("kron_normal", (8, 9))
    assert on.solve_features(features, normal(8, 9)).condition == predict_features(features).condition > 50


@pytest.mark.slow
def test_a_layer_of_a_resnet_18_is_solved_to_rounding() -> None:
    features = draw("kron_normal", (512, 512, 3, 3))
    target = normal(512, 512, 3, 3)
    solution = on.solve_features(features, target)
    structure = structure_of(features)
    made = structure.left_factor @ structure.grid(solution.gamma) @ structure.right_factor
    error = float((made - features.as_matrix(target)).norm() / target.norm())
    assert error <= 4e-14  # 8e-15 measured
    assert solution.residual == pytest.approx(error, rel=1e-3)


# ------------------------------------------------------------------------------- the spectrum


@pytest.mark.parametrize("unit_length", [True, False])
@pytest.mark.parametrize("shape", [(5, 6), (1, 7), (7, 1)])
def test_singular_values_are_those_of_the_matrix(shape: tuple[int, int], unit_length: bool) -> None:
    features = draw("kron_normal", shape, seed=3)
    M = dense(features)
    M = M / M.norm(dim=0) if unit_length else M / M.norm(dim=0).square().mean().sqrt()
    found = measure_spectrum(features, unit_length=unit_length)
    wanted = torch.linalg.svdvals(M).flip(0).numpy()
    assert np.abs(found.values - wanted).max() <= 1e-13 * wanted[-1]
    lengths = dense(features).norm(dim=0)
    assert found.length_spread == pytest.approx(float(lengths.std(correction=0) / lengths.mean()))


@pytest.mark.parametrize(
    ("shape", "excess"), [((24, 48), 1.25), ((16, 16), 2.0), ((10, 64), 1.25), ((12, 12), 1.0), ((1, 40), 1.25)]
)
def test_the_condition_number_is_the_product_of_two_laws(shape: tuple[int, int], excess: float) -> None:
    drawn = [draw("kron_normal", shape, excess=excess, seed=seed) for seed in range(25)]
    prediction = predict_features(drawn[0])
    (n_q, n_d), (rows, cols) = drawn[0].grid_shape, shape
    own = spectrum.condition_number(rows, n_q) * spectrum.condition_number(cols, n_d)
    assert prediction.condition == pytest.approx(own)
    measured = [measure_spectrum(one, unit_length=False).condition for one in drawn]
    assert 1 / 1.5 <= float(np.median(measured)) / prediction.condition <= 1.5
    assert prediction.spread is not None
    assert sum(one > prediction.spread * prediction.condition for one in measured) <= 5


@pytest.mark.parametrize(
    ("shape", "excess"), [((24, 48), 1.25), ((16, 30), 2.0), ((12, 12), 1.0), ((1, 60), 1.25), ((60, 1), 1.25)]
)
@pytest.mark.parametrize("unit_length", [True, False])
def test_singular_values_follow_the_product_law(shape: tuple[int, int], excess: float, unit_length: bool) -> None:
    found = measure_spectrum(draw("kron_normal", shape, excess=excess, seed=1), unit_length=unit_length)
    assert found.is_random
    assert found.follows_law is True, str(found)
    low, high = found.law_edges()
    assert 0.5 * low <= found.values[0]
    assert found.values[-1] <= 1.2 * high
    _, fractions, law = found.histogram(12)
    assert float(law.sum()) == pytest.approx(1.0, abs=1e-3)
    assert float(np.abs(fractions - law).max()) <= 2 * found.limit


def test_the_product_law_is_that_of_products_of_independent_values() -> None:
    features = draw("kron_normal", (20, 30), excess=1.5)
    samples = []
    (n_q, n_d), (rows, cols) = features.grid_shape, (features.rows, features.cols)
    for n, c in ((rows, n_q), (cols, n_d)):
        points = np.linspace(*spectrum.edges(n, c), 4001)
        samples.append(np.interp((np.arange(1500) + 0.5) / 1500, spectrum.cumulative(points, n, c), points))
    products = np.sort(np.outer(*samples).ravel())
    levels = (np.arange(len(products)) + 0.5) / len(products)
    assert float(np.abs(measure_spectrum(features).law_cumulative(products[::997]) - levels[::997]).max()) <= 2e-3
    pair = [measure_spectrum(draw("kron_normal", shape)) for shape in ((1, 60), (60, 1))]
    flat, tall = (found.law_cumulative(np.linspace(0, 3, 50)) for found in pair)
    assert np.array_equal(flat, tall)
    x, density = measure_spectrum(features).law_curve(400)
    assert float(np.trapezoid(density, x) if hasattr(np, "trapezoid") else np.trapz(density, x)) == pytest.approx(
        1.0, abs=0.02
    )


def test_other_features_do_not_follow_the_product_law() -> None:
    """Factors with the same shapes but a spectrum of their own."""
    features = draw("kron_normal", (24, 24))
    flat = torch.linalg.qr(structure_of(features).right_factor)[0]
    changed = dataclasses.replace(features)
    changed.__dict__["structure"] = KronNormal(structure_of(features).left_factor, flat)
    assert measure_spectrum(changed, unit_length=False).follows_law is False


def test_the_prediction_of_tiny_layers_at_unit_length_is_unknown() -> None:
    found = measure_spectrum(draw("kron_normal", (3, 50)))
    assert not found.prediction.is_known
    assert measure_spectrum(draw("kron_normal", (3, 50)), unit_length=False).prediction.is_known
    assert "unknown" in str(found)


def test_a_sweep_of_excesses_falls_from_the_square_case() -> None:
    found = spectrum.sweep_excess("kron_normal", (10, 12), excesses=(1.0, 1.5, 3.0), seeds=(0, 1, 2, 3, 4))
    assert found.medians[0] > 4 * found.medians[2]
    assert found.medians[1] > found.medians[2]
    assert all(not math.isnan(one) for one in found.law)


# ------------------------------------------------------------------------------- networks


@pytest.mark.parametrize("storage", ["dense", "seed"])
@pytest.mark.parametrize("activation", [None, nn.ReLU()], ids=["none", "relu"])
def test_a_network_is_rebuilt_saved_loaded_and_verified(
    storage: str, activation: nn.Module | None, tmp_path: Any
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 3, stride=2, groups=2, bias=False),
            nn.Flatten(), nn.Linear(36, 5),
        ).double().eval()  # fmt: skip
    x = normal(20, 3, 8, 8)
    made = on.reconstruct(
        target, x, on.Wide(features="kron_normal", activation=activation, excess=1.5), storage=storage
    )
    assert max(layer.residual for layer in made.layers) <= 1e-13
    on.save(made, tmp_path / "net")
    loaded = on.load(tmp_path / "net", like=target)
    check = on.verify(target, loaded, x)
    assert check.is_reproducible
    assert check.is_only_norms
    assert check.relative_error <= 1e-11
    assert torch.equal(loaded(x), made.network(x))
    assert float((on.collapse(loaded)(x) - target(x)).detach().abs().max()) <= 1e-12


def test_options_take_an_excess_but_no_minimum_width() -> None:
    assert on.Wide(features="kron_normal", excess=2.0).excess == 2.0
    with pytest.raises(ValueRangeError, match=r"width='minimum' needs random features.*got kron_normal"):
        on.Wide(features="kron_normal", width="minimum")
    for construction in (on.Deep, on.Multilayer):
        with pytest.raises(ValueRangeError, match=r"needs random features; got 'kron_normal', which is structured"):
            construction(features="kron_normal")
    with pytest.raises(ValueRangeError, match=r"at least one feature per equation, 12; got excess=0\.5"):
        on.reconstruct(nn.Sequential(nn.Linear(4, 3)), torch.rand(5, 4), on.Wide(features="kron_normal", excess=0.5))
