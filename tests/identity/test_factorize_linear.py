"""`factorize` of Linear layers, rectangular matrices and NumPy arrays: padded, exact, as a network and as a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from square_matrices import positive
from tensors import normal, relative
from torch import Tensor, nn

import onlynorm as on
from onlynorm.errors import ConversionError, FormatError, ShapeError, ValueRangeError
from onlynorm.identity import NearIdentity, factorize, least_norm, nearest_invertible
from onlynorm.identity.factorization.matrices import Decomposition
from onlynorm.identity.factorization.padding import complete
from onlynorm.storage import read_tensors, write_tensors

EXACT = 1e-12
SHAPES = [(3, 5), (5, 3), (1, 7), (7, 1), (4, 4), (10, 64)]


def layer_of(shape: tuple[int, int], *, bias: bool = True, seed: int = 0) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(shape[1], shape[0], bias=bias)


def outputs_of(layer: nn.Linear, x: Tensor) -> Tensor:
    """The outputs of the layer in float64."""
    return nn.functional.linear(x, layer.weight.double(), None if layer.bias is None else layer.bias.double()).detach()


@pytest.mark.parametrize("depth", [1, 2, 40])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_network_and_apply_compute_the_layer_with_its_bias(shape: tuple[int, int], bias: bool, depth: int) -> None:
    layer = layer_of(shape, bias=bias)
    found = factorize(layer, depth)
    assert (found.shape, found.depth) == (shape, depth)
    assert found.dim == max(shape)
    x = normal(6, shape[1])
    expected = outputs_of(layer, x)
    assert relative(found.apply(x), expected) <= EXACT
    assert relative(found.to_network()(x), expected) <= EXACT
    assert relative(found.apply(x[0]), expected[0]) <= EXACT
    rows, columns = shape
    assert relative(found.product()[:rows, :columns], layer.weight) <= EXACT
    assert found.least_norm <= found.max_norm
    if found.is_promised:
        assert found.max_norm <= found.bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_network_has_the_dtype_asked_for(dtype: torch.dtype) -> None:
    layer = layer_of((3, 5))
    network = factorize(layer, 8).to_network(dtype=dtype)
    assert {p.dtype for p in network.parameters()} == {dtype}
    x = normal(6, 5).to(dtype)
    made = network(x)
    assert made.dtype == dtype
    assert relative(made, outputs_of(layer, x.double())) <= 16 * torch.finfo(dtype).eps


def test_without_its_extra_rows_the_network_is_residual_layers_between_a_pad_and_a_cut() -> None:
    tall, wide = (factorize(layer_of(shape), 6).to_network() for shape in ((5, 3), (3, 5)))
    assert [type(module).__name__ for module in tall] == ["ConstantPad1d", *["NearIdentity"] * 6]
    assert [type(module).__name__ for module in wide] == [*["NearIdentity"] * 6, "Keep"]
    biases = [module.bias for module in wide if isinstance(module, NearIdentity)]
    assert [bias is None for bias in biases] == [True] * 5 + [False]
    assert "dim=5, bias=True" in repr(wide)


def test_complex_inputs_get_the_bias_once() -> None:
    layer = layer_of((3, 4))
    x = normal(2, 4)
    made = factorize(layer, 5).apply(torch.complex(x, 2.0 * x))
    assert relative(made.real, outputs_of(layer, x)) <= EXACT
    assert relative(made.imag, 2.0 * x @ layer.weight.double().mT) <= EXACT


@settings(max_examples=40)
@given(
    rows=st.integers(1, 9), columns=st.integers(1, 9), scale=st.sampled_from([1e-3, 1.0, 1e3]), seed=st.integers(0, 99)
)
def test_a_completed_matrix_keeps_the_range_of_singular_values_and_has_positive_determinant(
    rows: int, columns: int, scale: float, seed: int
) -> None:
    if rows == columns:
        columns += 1
    matrix = scale * normal(rows, columns, seed=seed)
    given_ = Decomposition.of(matrix)
    made = complete(given_)
    assert torch.equal(made.matrix[:rows, :columns], matrix)
    assert made.matrix.shape == (max(rows, columns),) * 2
    assert made.sign > 0
    slack = 1e-9 * given_.stretch + 1e-12
    assert made.stretch <= given_.stretch + slack


def test_an_isometry_into_more_dimensions_is_completed_to_the_nearest_rotation() -> None:
    matrix = torch.eye(5).double()[:3]
    assert factorize(matrix, 1).max_norm <= 1e-14  # the identity itself
    assert factorize(matrix.mT, 4).max_norm <= 1e-14


def test_the_lower_bound_holds_for_other_completions() -> None:
    matrix = normal(2, 4)
    for depth in (2, 9, 30):
        least = least_norm(matrix, depth)
        assert least == pytest.approx(least_norm(matrix.mT, depth))
        for seed in range(5):
            whole = torch.cat([matrix, normal(2, 4, seed=seed + 1)])
            assert least <= factorize(whole, depth).max_norm
    assert least_norm(matrix, 1) == pytest.approx(float(torch.linalg.matrix_norm(matrix - torch.eye(2, 4), 2)))


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint16", ">f8"])
def test_numpy_arrays_are_factorized_as_tensors_are(dtype: str) -> None:
    array = (4 * positive(4) + 2 * torch.eye(4)).round().numpy().astype(dtype)
    array = array[:, ::-1] if dtype == ">f8" else array
    tensor = torch.from_numpy(np.ascontiguousarray(array).astype("float64"))
    found = factorize(array, 12)
    assert torch.equal(found.factors(), factorize(tensor, 12).factors())
    x = normal(3, 4)
    assert relative(found.apply(x.numpy()), x @ tensor.mT) <= EXACT


def test_files_hold_the_shape_and_the_bias(tmp_path: Path) -> None:
    path = tmp_path / "factors.safetensors"
    layer, x = layer_of((3, 5)), normal(4, 5)
    found = factorize(layer, 6, method="spiral")
    on.save(found, path)
    back = on.load(path)
    assert torch.equal(back.apply(x), found.apply(x))
    assert back.as_dict() == found.as_dict()
    assert found.as_dict()["shape"] == [3, 5]
    assert str(back) == str(found)
    square = factorize(positive(3), 6, method="spiral")
    assert not {"shape", "has_bias"} & square.as_dict().keys()  # as in files of earlier versions


@pytest.mark.parametrize("shape", [[5, 3, 1], [3, 6], [0, 5], ["3", 5], [3.0, 5], 5])
def test_a_file_with_another_shape_is_refused(tmp_path: Path, shape: object) -> None:
    path = tmp_path / "factors.safetensors"
    on.save(factorize(layer_of((3, 5)), 6), path)
    document, tensors = read_tensors(path, kind="factorization", format=1, cure="")
    document["factorization"]["shape"] = shape
    write_tensors(path, tensors, kind="factorization", format=1, document=document)
    with pytest.raises(FormatError, match="a factorization needs matching tensors and metadata"):
        on.load(path)


@pytest.mark.parametrize("bias", [torch.ones(5).double(), torch.ones(3), torch.full((3,), float("nan")).double(), None])
def test_a_file_with_another_bias_is_refused(tmp_path: Path, bias: Tensor | None) -> None:
    path = tmp_path / "factors.safetensors"
    on.save(factorize(layer_of((3, 5)), 6), path)
    document, tensors = read_tensors(path, kind="factorization", format=1, cure="")
    tensors = {name: tensor for name, tensor in tensors.items() if name != "bias"}
    tensors |= {} if bias is None else {"bias": bias}
    write_tensors(path, tensors, kind="factorization", format=1, document=document)
    with pytest.raises(FormatError, match="a factorization needs matching tensors and metadata"):
        on.load(path)


def test_the_texts_say_what_is_returned() -> None:
    wide, tall = factorize(layer_of((3, 5)), 6), factorize(layer_of((5, 3), bias=False), 6)
    assert str(wide).startswith("3 x 5 and a bias as 6 layers I + A")
    assert "R is 3 x 5, the upper left part of a 5 x 5 matrix" in str(wide)
    assert "Drop the last 2 outputs" in wide.usage
    assert "Append 2 zeros to x" in tall.usage
    assert wide.view().title.startswith("A 3 x 5 matrix")


def test_the_figure_has_norms_over_depth_below_the_bound_of_the_paper() -> None:
    found = factorize(positive(6), 32)
    curves = {curve.label: curve for curve in found.plot().curves if curve.panel == "depth"}
    norms = dict(curves["largest |A|"].points())
    bounds = dict(curves["bound of the paper"].points())
    assert len(norms) > 20
    assert norms[32] == found.max_norm
    assert all(norms[depth] <= bounds[depth] for depth in norms)
    for depth in (16, 64):
        assert norms[depth] == pytest.approx(factorize(positive(6), depth, method=found.method).max_norm, rel=1e-9)


@pytest.mark.parametrize(
    ("matrix", "error", "message"),
    [
        (nn.LazyLinear(3), ConversionError, "got a LazyLinear that was never called"),
        (nn.Conv2d(3, 3, 1), ConversionError, "got a Conv2d module. Pass a matrix .* or an nn.Linear"),
        (torch.ones(2, 3), ValueRangeError, "needs a 2 x 3 matrix of full rank.*got rank 1 of 2"),
        (torch.ones(2, 3, 4), ShapeError, r"got shape \(2, 3, 4\)"),
        (torch.ones(0, 4), ShapeError, r"got shape \(0, 4\)"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_has_no_factors_is_refused(matrix: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        factorize(matrix, 4)  # type: ignore[arg-type]


def test_a_bias_that_is_not_finite_is_refused() -> None:
    layer = layer_of((3, 5))
    with torch.no_grad():
        layer.bias[0] = float("inf")
    with pytest.raises(ValueRangeError, match="bias of factorize must be finite"):
        factorize(layer, 4)


@pytest.mark.parametrize("shape", [(2, 5), (5, 2)])
def test_the_nearest_matrix_of_full_rank_is_factorized(shape: tuple[int, int]) -> None:
    made = nearest_invertible(torch.ones(shape), smallest=0.1)
    assert float(torch.linalg.matrix_norm(made - 1.0, 2)) == pytest.approx(0.1)
    assert factorize(made, 40).product_error <= 1e-10


@pytest.mark.usefixtures("unchecked")
def test_a_bias_has_one_entry_per_row() -> None:
    with pytest.raises(ShapeError, match=r"a layer x \+ A x \+ b needs a bias \(3,\); got \(2,\)"):
        NearIdentity(torch.ones(3, 3), torch.ones(2))
