"""`factorize` where it cannot serve: wrong use, methods that do not fit, digits that are lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from square_matrices import positive
from torch import Tensor

from onlynorm.errors import ConversionError, ShapeError, ToleranceError, UnknownNameError, ValueRangeError
from onlynorm.identity import NearIdentity, factorize


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("matrix", "depth", "error", "message"),
    [
        (torch.ones(3), 4, ShapeError, r"factorize needs a matrix \(rows, columns\); got shape \(3,\)"),
        (torch.ones(0, 0), 4, ShapeError, r"got shape \(0, 0\)"),
        (torch.eye(2) * float("nan"), 4, ValueRangeError, "factorize .*finite.*; got 4 "),
        (torch.eye(2) * 1j, 4, ValueRangeError, "factorize .*real.*; got torch.complex64"),
        (torch.eye(2), 0, ValueRangeError, "depth of factorize .* from 1 to 1000000; got 0"),
        (torch.eye(2), 2.5, ValueRangeError, "depth of factorize .* got 2.5"),
        (torch.eye(2), True, ValueRangeError, "depth of factorize .* got True"),
        (torch.eye(2), 10**30, ValueRangeError, "depth of factorize .* from 1 to 1000000"),
        (torch.zeros(2, 2), 4, ValueRangeError, r"got rank 0 of 2.*nearest_invertible\(matrix\) .*1e-06"),
        (torch.ones(3, 3), 4, ValueRangeError, r"got rank 1 of 3.*distance of 3e-06"),
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


@pytest.mark.usefixtures("unchecked")
def test_a_method_is_a_name() -> None:
    for method in (None, 3, ["spiral"], np.array(["spiral", "log"])):
        with pytest.raises(UnknownNameError, match="method needs a known name"):
            factorize(positive(2), 3, method=method)  # type: ignore[arg-type]
    with pytest.raises(ConversionError, match=r"factorize .*tensor; got None"):
        factorize(None, 3)  # type: ignore[arg-type]


def test_an_unknown_method_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'polar'"):
        factorize(positive(2), 3, method="pollar")


def test_too_little_depth_is_no_error_but_said() -> None:
    found = factorize(1e-3 * torch.eye(2).double(), 4)
    assert not found.is_promised
    assert "Depth 4 is below 3 * 6.91" in found.reason
    assert "21 layers, or 1 for R scaled by 1e+03" in found.reason
    assert "for larger depth" in str(found)


def test_lost_digits_are_a_number_and_raise_where_a_tolerance_asks() -> None:
    matrix = 1e-12 * torch.eye(2).double()  # beside I, a layer of 1e-12 keeps four digits
    found = factorize(matrix, 1)
    assert 1e-8 < found.product_error < 1e-3
    assert "The product error is" in found.reason
    with pytest.raises(ToleranceError, match=r"needs a product error of 1.0e-10; root reaches"):
        factorize(matrix, 1, tolerance=1e-10)
    assert factorize(matrix, 20, tolerance=1e-10).product_error <= 1e-10


@pytest.mark.usefixtures("unchecked")
def test_apply_refuses_inputs_of_another_size() -> None:
    with pytest.raises(ShapeError, match=r"apply needs inputs \(\.\.\., 3\); got \(2, 4\)"):
        factorize(positive(3), 4).apply(torch.ones(2, 4))


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


def test_singular_values_that_overflow_are_refused() -> None:
    with pytest.raises(ValueRangeError, match=r"singular values .*float64; got .*entries up to 1\.5e\+308"):
        factorize(torch.full((3, 3), 1.5e308, dtype=torch.float64) * torch.eye(3).add(0.5).clamp(max=1.0), 10)


def test_a_tolerance_is_positive() -> None:
    with pytest.raises(ValueRangeError, match="tolerance "):
        factorize(positive(2), 3, tolerance=-1.0)
