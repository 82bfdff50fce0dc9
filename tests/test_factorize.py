"""Every invertible matrix is a product of layers near the identity: exact, small, honest about what cannot be."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from onlynorm.errors import (
    FormatError,
    MemoryLimitError,
    ShapeError,
    StorageError,
    ToleranceError,
    UnknownNameError,
    ValueRangeError,
)
from onlynorm.identity import (
    Factorization,
    NearIdentity,
    factorize,
    factors,
    least_norm,
    load_factors,
    nearest_invertible,
    paper_bound,
    random_matrix,
    save_factors,
    spiral_bound,
)
from onlynorm.identity.matrices import Decomposition
from onlynorm.identity.rotations import Rotation
from onlynorm.storage import write_tensors

ALL = ("root", "log", "polar", "spiral", "svd")
EPS = torch.finfo(torch.float64).eps
EXACT = 1e-11
"""Products here have up to 200 layers of 12 x 12: each adds a few roundings, 200 * 12 * eps = 5e-13 in all."""


def positive(dim: int, seed: int = 0) -> Tensor:
    matrix = random_matrix(dim, seed=seed)
    return matrix if torch.linalg.det(matrix) > 0 else matrix * torch.tensor([-1.0] + [1.0] * (dim - 1)).double()


def symmetric(dim: int, seed: int = 0) -> Tensor:
    """A symmetric positive definite matrix without negative eigenvalues: every method takes it."""
    half = random_matrix(dim, seed=seed)
    return half @ half.mT + 0.1 * torch.eye(dim).double()


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
    assert found.least_norm <= found.max_norm


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
    assert found.least_norm <= found.max_norm
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
    assert "spiral has the smallest largest norm" in found.reason
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
    # Attained: by a root of a stretching, and, up to sin against 2 sin of half, by small turns.
    assert least_norm(4.0 * torch.eye(2).double(), 2) == pytest.approx(1.0)
    assert least_norm(-torch.eye(4).double(), 90) == pytest.approx(math.sin(math.pi / 90))
    turn = Rotation(torch.eye(2).double(), torch.tensor([1.2]).double()).power(1)
    assert least_norm(turn, 6) == pytest.approx(math.sin(0.2))
    assert factorize(turn, 6).max_norm == pytest.approx(2 * math.sin(0.1))


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


def test_factors_that_memory_does_not_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = factorize(positive(4), 9)
    monkeypatch.setattr(factors, "memory_limit", lambda: 1000)
    with pytest.raises(MemoryLimitError, match=r"a tensor of 9 factors needs 1.15 kB; .*layers\(\) one by one"):
        found.factors()


def test_a_factorization_reads_well() -> None:
    text = str(factorize(positive(4), 40))
    assert text.startswith("4 x 4 as 40 layers I + A by spiral: largest |A| 0.")
    assert "the paper promises" in text
    assert "none can be below" in text


# ------------------------------------------------------------------------------- what is refused


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("matrix", "depth", "error", "message"),
    [
        (torch.ones(2, 3), 4, ShapeError, r"factorize needs a square matrix \(d, d\); got shape \(2, 3\)"),
        (torch.ones(0, 0), 4, ShapeError, r"got shape \(0, 0\)"),
        (torch.eye(2) * float("nan"), 4, ValueRangeError, "factorize needs finite numbers; got 4 that are not"),
        (torch.eye(2) * 1j, 4, ValueRangeError, "factorize needs real numbers; got torch.complex64"),
        (torch.eye(2), 0, ValueRangeError, "factorize needs a depth of one layer or more; got 0"),
        (torch.eye(2), 2.5, ValueRangeError, "factorize needs a depth of one layer or more; got 2.5"),
        (torch.eye(2), True, ValueRangeError, "factorize needs a depth of one layer or more; got True"),
        (torch.zeros(2, 2), 4, ValueRangeError, r"got rank 0 of 2.*nearest_invertible\(matrix\) is 1e-06 away"),
        (torch.ones(3, 3), 4, ValueRangeError, r"got rank 1 of 3.*3e-06 away in spectral norm"),
    ],
)
def test_misuse_is_refused_with_the_cure(matrix: Tensor, depth: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        factorize(matrix, depth)


@pytest.mark.parametrize(
    ("matrix", "depth", "method", "message"),
    [
        (positive(3), 9, "root", "method 'root' needs a symmetric matrix; got one .* Use method='auto'"),
        (-torch.eye(2).double(), 9, "root", "method 'root' needs positive eigenvalues; got -1"),
        (-torch.eye(2).double(), 9, "log", "method 'log' needs no eigenvalue on the negative axis; got -1"),
        (positive(3), 1, "polar", "method 'polar' needs a layer for each of its 2 stages; got depth 1"),
    ],
)
def test_a_method_that_does_not_serve_says_why(matrix: Tensor, depth: int, method: str, message: str) -> None:
    with pytest.raises(ValueRangeError, match=message):
        factorize(matrix, depth, method=method)


def test_an_unknown_method_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'polar'"):
        factorize(positive(2), 3, method="pollar")


def test_too_little_depth_is_no_error_but_said() -> None:
    found = factorize(1e-3 * torch.eye(2).double(), 4)
    assert not found.is_promised
    assert "Depth 4 is below 3 * 6.91" in found.reason
    assert "take 21 layers or more, or 1 for R scaled by 1e+03" in found.reason
    assert "for greater depth, would promise" in str(found)


def test_lost_digits_are_a_number_and_raise_where_a_tolerance_asks() -> None:
    matrix = 1e-12 * torch.eye(2).double()  # beside I, a layer of 1e-12 keeps four digits
    found = factorize(matrix, 1)
    assert 1e-8 < found.product_error < 1e-3
    assert "The product is off by" in found.reason
    with pytest.raises(ToleranceError, match=r"needs a product error of 1.0e-10; root reaches"):
        factorize(matrix, 1, tolerance=1e-10)
    assert factorize(matrix, 20, tolerance=1e-10).product_error <= 1e-10


@pytest.mark.usefixtures("unchecked")
def test_apply_refuses_inputs_of_another_size() -> None:
    with pytest.raises(ShapeError, match=r"apply needs inputs \(\.\.\., 3\); got \(2, 4\)"):
        factorize(positive(3), 4).apply(torch.ones(2, 4))


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
    with pytest.raises(ValueRangeError, match="needs a positive smallest singular value; got 0"):
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


# ------------------------------------------------------------------------------- files


def test_factors_come_back_from_a_file_the_same(tmp_path: Path) -> None:
    path = tmp_path / "factors.safetensors"
    for method in ("spiral", "svd"):
        matrix = positive(4)
        matrix[0] = -matrix[0]
        found = factorize(matrix, 20, method=method)
        save_factors(found, path)
        back = load_factors(path)
        assert torch.equal(back.factors(), found.factors())
        assert back.as_dict() == found.as_dict()
        assert str(back) == str(found)
        save_factors(back, tmp_path / "again.safetensors")
        assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()
    assert path.stat().st_size < 20 * 25 * 8 * 2


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "factors.safetensors"
    save_factors(factorize(positive(3), 5), path)
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(FormatError, match="does not match its checksum"):
        load_factors(path)
    with pytest.raises(StorageError, match="factors need the name of a file"):
        save_factors(factorize(positive(3), 5), tmp_path)


@pytest.mark.parametrize(
    ("has_core", "change"),
    [(False, {}), (True, {"runs": [0]}), (True, {"dim": 7}), (True, {"options": [{"max_norm": 1.0}]})],
    ids=["no core", "no layers", "another size", "an option without a name"],
)
def test_a_sealed_file_that_does_not_fit_together_is_refused(
    tmp_path: Path, has_core: bool, change: dict[str, object]
) -> None:
    path = tmp_path / "factors.safetensors"
    found = factorize(symmetric(3), 5, method="root")
    kept = {"core.0": found.runs[0].core.contiguous()} if has_core else {"other": torch.ones(1)}
    write_tensors(path, kept, kind="factorization", format=1, document={"factorization": found.as_dict() | change})
    with pytest.raises(FormatError, match=r"factors need the tensors and facts of their runs; factors\.safetensors"):
        load_factors(path)


def test_without_eigenvalues_nothing_is_claimed_and_the_logarithm_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(matrix: Tensor) -> Tensor:
        raise torch.linalg.LinAlgError("no convergence")  # type: ignore[attr-defined]

    monkeypatch.setattr(torch.linalg, "eig", fail)
    monkeypatch.setattr(torch.linalg, "eigvals", fail)
    found = factorize(positive(4), 12)
    assert found.method == "spiral"
    assert "log: needs eigenvalues; got none" in found.reason
    assert 0.0 < found.least_norm < found.max_norm
    with pytest.raises(ValueRangeError, match="method 'log' needs eigenvalues"):
        factorize(positive(4), 12, method="log")


@pytest.mark.usefixtures("unchecked")
def test_a_layer_near_the_identity_is_square() -> None:
    with pytest.raises(ShapeError, match=r"a layer x \+ A x needs a square A; got \(2, 3\)"):
        NearIdentity(torch.ones(2, 3))


def test_a_tolerance_is_positive() -> None:
    with pytest.raises(ValueRangeError, match="tolerance needs"):
        factorize(positive(2), 3, tolerance=-1.0)
