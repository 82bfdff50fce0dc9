"""Every invertible matrix is a product of layers near the identity: exact, small, honest about what cannot be."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from square_matrices import positive, symmetric
from torch import Tensor

from onlynorm.errors import MemoryLimitError, ValueRangeError
from onlynorm.identity import (
    Factorization,
    NearIdentity,
    factorize,
    least_norm,
    nearest_invertible,
    paper_bound,
    random_matrix,
    spiral_bound,
)
from onlynorm.identity.factorization import factors
from onlynorm.identity.factorization.matrices import Decomposition
from onlynorm.identity.factorization.rotations import Rotation

ALL = ("root", "log", "polar", "spiral", "svd")
EPS = torch.finfo(torch.float64).eps
EXACT = 1e-11
"""Products here have up to 200 layers of 12 x 12: each adds a few roundings, 200 * 12 * eps = 5e-13 in all."""


def one_by_one(found: Factorization) -> Tensor:
    """The slow reference: every layer built and multiplied."""
    product = torch.eye(found.dim + found.n_extra).double()
    for layer in found.layers():
        product = product + layer @ product
    return product


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# ------------------------------------------------------------------------------- what comes out


@pytest.mark.parametrize("method", ALL)
@pytest.mark.parametrize(("dim", "depth"), [(1, 6), (2, 7), (5, 40), (12, 200)])
def test_layers_multiply_to_the_matrix_and_the_numbers_are_those_of_the_layers(
    method: str, dim: int, depth: int
) -> None:
    matrix = symmetric(dim)
    found = factorize(matrix, depth, method=method)
    assert found.method == method
    assert found.depth == depth == len(found.factors())
    assert off(one_by_one(found), matrix) <= EXACT
    assert off(found.product(), matrix) <= EXACT
    assert found.product_error <= EXACT
    norms = torch.linalg.matrix_norm(found.factors(), 2)
    assert found.max_norm == pytest.approx(float(norms.max()), rel=1e-9)
    assert found.least_norm <= found.max_norm * (1 + 1e-9)  # equal for some matrices, and rounded on two paths


@settings(max_examples=30)
@given(
    dim=st.integers(1, 5),
    depth=st.integers(1, 40),
    seed=st.integers(0, 10**6),
    logs=st.lists(st.floats(-6, 6), min_size=5, max_size=5),
)
def test_any_invertible_matrix_is_met_within_its_bounds(dim: int, depth: int, seed: int, logs: list[float]) -> None:
    left, right = (torch.linalg.qr(random_matrix(dim, seed=seed, name=side))[0] for side in ("left", "right"))
    values = torch.tensor(logs[:dim], dtype=torch.float64).exp()
    matrix = left * values @ right
    found = factorize(matrix, depth)
    x = random_matrix(dim, seed=seed, name="x")
    # I + A loses what is small beside I: a layer that shrinks by exp(-6) at depth one costs three digits.
    slack = 1e3 * EPS * depth * math.exp(max(0.0, -min(logs[:dim])) / depth) * float(values.max() / values.min())
    assert float((found.apply(x) - x @ matrix.mT).abs().max()) <= slack * max(1.0, float(values.max()))
    assert found.n_extra == (torch.linalg.det(matrix) < 0)
    assert found.stretch == pytest.approx(max(abs(log) for log in logs[:dim]), abs=1e-9)
    assert found.max_norm <= spiral_bound(found.stretch, depth) * (1 + 1e-9) + 1e-12
    assert found.least_norm <= found.max_norm * (1 + 1e-9)
    if found.is_promised:
        assert found.max_norm <= found.bound == paper_bound(found.stretch, depth)


def test_auto_takes_the_smallest_norm_and_says_why() -> None:
    matrix = positive(9, seed=1)
    found = factorize(matrix, 24)
    norms = {}
    for method in ALL:
        try:
            norms[method] = factorize(matrix, 24, method=method).max_norm
        except ValueRangeError:
            continue
    assert found.max_norm == min(norms.values()) == norms["spiral"]
    assert norms["svd"] > norms["polar"] > norms["spiral"]
    assert {option.method for option in found.options} == {"root", "log", "polar", "spiral"}
    assert "spiral has the smallest maximum norm" in found.reason
    assert "root: needs a symmetric matrix" in found.reason


@pytest.mark.parametrize(
    ("matrix", "method"),
    [(symmetric(4), "root"), (Rotation(torch.eye(4).double(), torch.tensor([1.0, 2.0]).double()).power(1), "polar")],
    ids=["positive definite", "rotation"],
)
def test_where_constructions_agree_the_one_that_stores_one_layer_is_taken(matrix: Tensor, method: str) -> None:
    found = factorize(matrix, 10)
    assert found.method == method
    assert [(run.count, run.rotation) for run in found.runs] == [(10, None)]
    assert found.max_norm == pytest.approx(factorize(matrix, 10, method="spiral").max_norm, rel=1e-12)


def test_the_logarithm_is_spared_where_its_eigenvalues_alone_need_more() -> None:
    # All eigenvalues at an angle of 2.9: the logarithm needs at least that much, and the spiral exactly.
    matrix = Rotation(torch.eye(4).double(), torch.tensor([2.9, 2.9]).double()).power(1)
    (log,) = (option for option in factorize(matrix, 30).options if option.method == "log")
    assert log.obstacle.startswith("its eigenvalues alone need 0.096")


def test_norms_fall_like_one_over_the_depth() -> None:
    matrix = positive(6)
    norms = [factorize(matrix, depth).max_norm * depth for depth in (100, 200, 400)]
    assert norms[2] == pytest.approx(norms[1], rel=0.02)
    assert norms[1] == pytest.approx(norms[0], rel=0.04)


def test_layers_of_a_spiral_differ_and_have_one_norm() -> None:
    found = factorize(positive(5), 12, method="spiral")
    layers = found.factors()
    norms = torch.linalg.matrix_norm(layers, 2)
    assert float(norms.max() - norms.min()) <= 1e3 * EPS
    assert float((layers[1] - layers[0]).norm()) > 0.01
    assert len(found.runs) == 1


def test_a_matrix_far_from_scale_one_is_met_at_enough_depth() -> None:
    for scale in (1e150, 1e-150):
        found = factorize(scale * positive(3), 1200)
        assert found.product_error <= 1e-9  # 1200 layers that grow to 1e150
        assert found.is_promised


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [1e-307, 1e-200, 1e-30, 1e200, 1e300])
def test_the_logarithm_of_tiny_and_huge_matrices_neither_warns_nor_fails(scale: float) -> None:
    for seed in range(6):
        matrix = random_matrix(4, seed=seed)
        found = factorize(matrix * scale, 2000)
        assert found.product_error < 1e-9
        options = {option.method: option.max_norm for option in found.options}
        if not math.isnan(options["log"]):  # the scale adds the same number to every logarithm
            assert options["log"] >= found.max_norm * (1.0 - 1e-9)


def test_the_logarithm_does_not_depend_on_the_scale() -> None:
    matrix = torch.tensor([[2.0, 1.0, 0.0], [-1.0, 1.0, 0.5], [0.0, -0.5, 3.0]], dtype=torch.float64)
    near = torch.eye(3) + factorize(matrix, 500, method="log").runs[0].core
    far = torch.eye(3) + factorize(matrix * 2.0**-300, 500, method="log").runs[0].core
    torch.testing.assert_close(far, near * 2.0 ** (-300 / 500), rtol=0.0, atol=1e-13)


def test_integers_and_single_precision_are_taken_in_double() -> None:
    whole = factorize(torch.tensor([[2, 1], [0, 3]]), 8)
    assert whole.product().dtype == torch.float64
    assert factorize(torch.tensor([[2.0, 1.0], [0.0, 3.0]]), 8).max_norm == whole.max_norm


# ------------------------------------------------------------------------------- the paper's own construction


def test_the_papers_stages_keep_its_bound_at_a_depth_that_divides_well() -> None:
    matrix = positive(8, seed=3)
    stretch = Decomposition.of(matrix).stretch
    for depth in (math.ceil(3 * stretch) + 20, 100, 300):
        found = factorize(matrix, depth, method="svd")
        assert found.max_norm <= paper_bound(stretch, depth)


def test_layers_are_shared_out_so_that_no_stage_has_a_much_larger_norm() -> None:
    found = factorize(positive(6), 60, method="polar")
    norms = [float(torch.linalg.matrix_norm(run.core, 2)) for run in found.runs]
    assert min(norms) > 0.8 * max(norms)
    # One layer moved to the other stage makes the larger norm larger.
    counts = [run.count for run in found.runs]
    assert sum(counts) == 60
    assert min(counts) > 1


# ------------------------------------------------------------------------------- bounds


def test_no_factorization_is_below_the_least_norm() -> None:
    # Attained: by a root of a stretching, and by turns in equal steps.
    assert least_norm(4.0 * torch.eye(2).double(), 2) == pytest.approx(1.0)
    assert least_norm(-torch.eye(4).double(), 90) == pytest.approx(2 * math.sin(math.pi / 180))
    turn = Rotation(torch.eye(2).double(), torch.tensor([1.2]).double()).power(1)
    assert least_norm(turn, 6) == pytest.approx(2 * math.sin(0.1))
    assert factorize(turn, 6).max_norm == pytest.approx(2 * math.sin(0.1))
    both = 3.0 * turn  # a turn and a stretching at once need more than either alone
    assert least_norm(both, 6) == pytest.approx(abs(cmath.exp((math.log(3.0) + 1.2j) / 6) - 1.0))
    assert factorize(both, 6).max_norm == pytest.approx(least_norm(both, 6))


def test_random_layers_are_never_below_the_least_norm_of_their_product() -> None:
    for seed in range(100):
        depth, dim, size = 2 + seed % 4, 1 + seed % 3, 0.05 + 0.9 * ((7 * seed) % 11) / 11
        layers = torch.stack([random_matrix(dim, seed=seed, name=f"layer {i}") for i in range(depth)])
        layers = size * layers / torch.linalg.matrix_norm(layers, 2)[:, None, None]
        product = torch.eye(dim).double()
        for layer in layers:
            product = product + layer @ product
        assert least_norm(product, depth) <= size * (1.0 + 1e-9)


@pytest.mark.parametrize("n_more", [1, 2, 3])
def test_the_floor_of_a_negative_determinant_holds_for_every_padding(n_more: int) -> None:
    n_tried = 0
    for seed in range(60):
        dim = 1 + seed % 3
        padded = random_matrix(dim + n_more, seed=seed, name="padded")
        if torch.linalg.det(padded[:dim, :dim]) > 0:
            padded[0] = -padded[0]
        if torch.linalg.det(padded) < 0:
            padded[-1] = -padded[-1]
        for depth in (4, 30):
            n_tried += 1
            assert least_norm(padded[:dim, :dim], depth) <= factorize(padded, depth).max_norm * (1.0 + 1e-9)
    assert n_tried == 120


@pytest.mark.parametrize("value", [-1e-9, -0.1, -1.0, -30.0])
@pytest.mark.parametrize("depth", [2, 7, 100])
def test_a_negative_number_is_turned_by_less_than_half_a_turn(value: float, depth: int) -> None:
    found = factorize(torch.tensor([[value]]).double(), depth)
    assert found.n_extra == 1
    assert found.product_error <= 1e-9
    printed = factorize(torch.tensor([[value]]).double(), depth, method="svd").max_norm if depth > 2 else math.inf
    assert found.least_norm <= found.max_norm <= printed
    if value < -1e-3 and found.max_norm < 1.0:
        assert found.max_norm <= found.least_norm * (1.0 + 1e-5)  # the floor is attained


def test_minus_one_costs_what_the_best_padding_does() -> None:
    assert factorize(-torch.eye(1).double(), 100).max_norm == pytest.approx(0.02193, rel=1e-3)  # pi / 100 = 0.0314


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_one_layer_needs_no_dimension_more(dim: int) -> None:
    matrix = positive(dim)
    matrix[0] = -matrix[0]
    found = factorize(matrix, 1)
    assert (found.n_extra, found.usage, found.depth) == (0, "", 1)
    torch.testing.assert_close(found.factors()[0], matrix - torch.eye(dim).double())
    assert found.max_norm == pytest.approx(found.least_norm)
    assert "layer is R - I" in found.reason
    with pytest.raises(ValueRangeError, match="'polar' needs two layers or more for a negative determinant"):
        factorize(matrix, 1, method="polar")


@pytest.mark.parametrize(("dim", "most"), [(2, 0.25), (4, 0.4), (16, 0.3), (64, 0.25)])
def test_the_spiral_is_near_the_floor_for_random_matrices(dim: int, most: float) -> None:
    above = []
    for seed in range(10):
        matrix = random_matrix(dim, seed=seed, name="gap")
        matrix[0] *= torch.linalg.det(matrix).sign()
        found = factorize(matrix, 64, method="spiral")
        above.append(found.max_norm / found.least_norm - 1.0)
    assert 0.0 <= min(above) <= max(above) <= most


def test_the_smaller_bound_is_below_the_papers_from_its_depth_on() -> None:
    for stretch in (0.0, 0.3, 2.0, 9.0):
        for depth in (max(1, math.ceil(3 * stretch)), 40, 400):
            assert spiral_bound(stretch, depth) <= 0.4 * paper_bound(stretch, depth)


# ------------------------------------------------------------------------------- negative determinants, networks


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_a_negative_determinant_takes_one_dimension_more(dim: int) -> None:
    matrix = positive(dim)
    matrix[0] = -matrix[0]
    found = factorize(matrix, 30)
    assert (found.n_extra, found.dim) == (1, dim)
    assert found.factors().shape == (30, dim + 1, dim + 1)
    x = random_matrix(dim, name="x")
    assert off(found.apply(x), x @ matrix.mT) <= EXACT
    assert off(found.to_network()(x).detach(), x @ matrix.mT) <= EXACT
    assert "Append a zero to x" in found.usage
    assert found.usage in str(found)
    assert ("-R" in found.usage) == (dim % 2 == 1)
    assert torch.linalg.det(found.product()) > 0


def test_a_tiny_matrix_of_negative_determinant_stays_well_conditioned() -> None:
    matrix = 1e-9 * positive(3)
    matrix[0] = -matrix[0]
    assert factorize(matrix, 80).stretch == pytest.approx(Decomposition.of(matrix).stretch)


def test_the_network_is_residual_trainable_and_computes_the_matrix() -> None:
    matrix = positive(4)
    found = factorize(matrix, 9)
    network = found.to_network()
    assert [type(layer) for layer in network] == [NearIdentity] * 9
    assert len(list(network.parameters())) == 9
    x = random_matrix(4, name="x")
    assert off(network(x).detach(), x @ matrix.mT) <= EXACT
    assert off(found.apply(x.float()), (x @ matrix.mT).float()) <= 1e-5
    assert found.apply(x[0]).shape == (4,)
    assert found.usage == ""


def test_apply_takes_integers_as_the_numbers_they_are() -> None:
    matrix = positive(3)
    x = torch.arange(-6, 6).reshape(4, 3)
    found = factorize(matrix, 20)
    for whole in (x, x.to(torch.int8), x.numpy()):
        assert found.apply(whole).dtype == torch.float64
        assert off(found.apply(whole), x.double() @ matrix.mT) <= EXACT
    assert off(found.apply(x > 0), (x > 0).double() @ matrix.mT) <= EXACT


@pytest.mark.parametrize("method", ["spiral", "polar"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once_and_not_in_every_layer(dtype: torch.dtype, method: str) -> None:
    matrix = positive(8)
    found = factorize(matrix, 1000, method=method)
    x = random_matrix(8, name="x").to(dtype)
    made = found.apply(x)
    assert made.dtype == dtype
    assert off(made.double(), x.double() @ matrix.mT) <= torch.finfo(dtype).eps


def test_autocast_takes_no_digits_and_complex_inputs_are_two_real_ones() -> None:
    matrix, x = positive(4), random_matrix(4, name="x")
    found = factorize(matrix, 200)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = found.apply(x.float())
    assert made.dtype == torch.float32
    assert off(made.double(), x @ matrix.mT) <= 1e-4
    assert (
        off(found.apply(torch.complex(x, 2.0 * x)), torch.complex(x, 2.0 * x) @ matrix.mT.to(torch.complex128)) <= EXACT
    )


def test_numpy_arrays_are_factored() -> None:
    matrix = positive(3)
    assert torch.equal(factorize(matrix.numpy(), 9).product(), factorize(matrix, 9).product())
    assert torch.equal(nearest_invertible(matrix.numpy()), nearest_invertible(matrix))
    assert least_norm(matrix.numpy(), 9) == least_norm(matrix, 9)


def test_factors_that_memory_does_not_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = factorize(positive(4), 9)
    monkeypatch.setattr(factors, "memory_limit", lambda: 1000)
    with pytest.raises(MemoryLimitError, match=r"a tensor of 9 factors needs 1.16 kB; .*layers\(\)"):
        found.factors()


def test_a_factorization_reads_well() -> None:
    text = str(factorize(positive(4), 40))
    assert text.startswith("4 x 4 as 40 layers I + A by spiral: largest |A| 0.")
    assert "bound of the paper" in text
    assert "lower bound" in text


# ------------------------------------------------------------------------------- the nearest invertible matrix


@pytest.mark.parametrize("matrix", [torch.ones(3, 3), torch.diag(torch.tensor([2.0, 0.0, -1.0])), torch.zeros(2, 2)])
def test_the_suggestion_can_be_factored_and_is_as_near_as_stated(matrix: Tensor) -> None:
    near = nearest_invertible(matrix, smallest=1e-3)
    assert float(torch.linalg.matrix_norm(near - matrix.double(), 2)) == pytest.approx(1e-3)
    assert torch.linalg.det(near) > 0
    found = factorize(near, 60)
    assert found.n_extra == 0
    assert found.product_error <= 1e-10


def test_an_invertible_matrix_is_its_own_nearest() -> None:
    matrix = positive(4)
    assert off(nearest_invertible(matrix), matrix) <= 64 * EPS
    with pytest.raises(ValueRangeError, match=r"smallest singular value .* number in \(0, inf\); got 0"):
        nearest_invertible(matrix, smallest=0)


# ------------------------------------------------------------------------------- rotations


@settings(max_examples=30)
@given(dim=st.integers(1, 7), seed=st.integers(0, 10**6), n_minus=st.integers(0, 3))
def test_a_rotation_is_its_planes_and_angles(dim: int, seed: int, n_minus: int) -> None:
    basis = torch.linalg.qr(random_matrix(dim, seed=seed))[0]
    signs = torch.ones(dim).double()
    signs[: min(2 * n_minus, dim // 2 * 2)] = -1.0  # half turns, the case in which eigenvalues repeat
    matrix = basis * signs @ basis.mT
    rotation = Rotation.of(matrix)
    assert off(rotation.power(1), matrix) <= 1e3 * EPS
    assert off(rotation.power(0.5) @ rotation.power(0.5), matrix) <= 1e3 * EPS
    assert rotation.largest <= math.pi
    first, half = rotation.split()
    assert off(first.power(1) @ half.power(1), matrix) <= 1e3 * EPS
    step = float(torch.linalg.matrix_norm(rotation.power(1 / 3) - torch.eye(dim), 2))
    assert step == pytest.approx(rotation.step_norm(3), abs=1e3 * EPS)


def test_a_reflection_is_no_rotation() -> None:
    with pytest.raises(ValueRangeError, match="a rotation needs determinant one; got a reflection"):
        Rotation.of(torch.diag(torch.tensor([1.0, -1.0, 1.0])).double())
