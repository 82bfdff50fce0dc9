"""Fast orthogonal transforms against the matrices they never build, and their words, which are pinned."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from torch import Tensor

from onlynorm.features import draw
from onlynorm.features.fast_orthogonal import ROUNDS, FastOrthogonal, count_additions, count_parameters
from onlynorm.features.orthogonal import haar_matrix
from onlynorm.features.streams import Stream
from onlynorm.features.structured import FastOrthoCond

EPS = torch.finfo(torch.float64).eps
SIZES = (1, 2, 3, 5, 7, 12, 64, 100)
SIGNS = [
    [[1, 1, 1, -1, 1], [-1, 1, 1, 1, 1]],
    [[1, 1, -1, 1, 1], [1, -1, -1, 1, 1]],
    [[-1, -1, 1, -1, 1], [-1, -1, 1, -1, 1]],
]
ORDERS = [[3, 4, 0, 2, 1], [0, 2, 1, 4, 3], [4, 2, 3, 0, 1]]
COLUMN = [
    "0x1.e000000000000p-2",
    "0x1.2800000000000p-1",
    "-0x1.d000000000000p-2",
    "0x1.3000000000000p-2",
    "0x1.9000000000000p-2",
]


def transform(n: int, seed: int = 7) -> FastOrthogonal:
    return FastOrthogonal.draw(n, seed=seed, layer="conv", part="left")


def vectors(*shape: int) -> Tensor:
    return torch.from_numpy(Stream(3, "vectors", "test").normals(0, math.prod(shape))).reshape(shape)


def hadamard(m: int) -> Tensor:
    """Sylvester's matrix, doubled until it has m rows, with orthonormal columns."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < m:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(m)


def slow_matrix(fast: FastOrthogonal) -> Tensor:
    """F as the product of its steps."""
    n, made = fast.n, torch.eye(fast.n, dtype=torch.float64)
    m = 2 ** int(math.log2(n))
    for signs, order in zip(fast.signs, fast.orders, strict=True):
        made = made[order]
        for sign, start in zip(signs, (0, n - m), strict=False):
            block = torch.eye(n, dtype=torch.float64)
            block[start : start + m, start : start + m] = hadamard(m)
            made = block @ (sign[:, None] * made)
    return made


def rounding(n: int) -> float:
    """Each addition of the two blocks of a round rounds once, and so do a few multiplications."""
    return 8 * ROUNDS * (math.log2(n) + 2) * EPS


def test_golden_values_pin_signs_orders_and_a_column() -> None:
    fast = transform(5)
    assert fast.signs.tolist() == SIGNS
    assert fast.orders.tolist() == ORDERS
    assert [float(value).hex() for value in fast.columns(2, 3)[0]] == COLUMN
    large = FastOrthogonal.draw(4608, seed=0, layer="", part="right")
    found = hashlib.sha256(large.digest_bytes()).hexdigest()
    assert found == "88a633962a6bfc2d2e1c54ce01566461e2221187377e70afd4d26e68c5f0892a"


@pytest.mark.parametrize("n", SIZES)
def test_it_is_the_product_of_its_steps(n: int) -> None:
    fast, x = transform(n), vectors(3, n)
    matrix = slow_matrix(fast)
    assert (fast.apply(x) - x @ matrix.mT).abs().max() <= rounding(n) * x.norm()
    assert (fast.apply_transpose(x) - x @ matrix).abs().max() <= rounding(n) * x.norm()


@pytest.mark.parametrize("n", [*SIZES, 4608])
def test_it_is_orthogonal_at_every_size(n: int) -> None:
    fast, x = transform(n), vectors(4, n)
    assert (fast.apply_transpose(fast.apply(x)) - x).norm() <= rounding(n) * x.norm()
    assert (fast.apply(fast.apply_transpose(x)) - x).norm() <= rounding(n) * x.norm()
    some = fast.columns(0, min(n, 64))
    assert (some @ some.mT - torch.eye(len(some))).abs().max() <= rounding(n)


@pytest.mark.parametrize("n", [*SIZES, 4608])
def test_a_block_alone_equals_that_block_of_the_whole(n: int) -> None:
    fast, stop = transform(n), min(n, 40)
    for make in (fast.columns, fast.rows):
        whole = make(0, stop)
        assert torch.equal(make(stop // 2, stop), whole[stop // 2 :])
    x = vectors(5, 2, n)
    assert torch.equal(fast.apply(x)[3], fast.apply(x[3]))
    assert torch.equal(fast.apply(x[:0]), x[:0])


def test_rows_are_those_of_the_matrix_that_columns_make() -> None:
    fast = transform(100)
    assert (fast.rows(0, 100) - fast.columns(0, 100).mT).abs().max() <= rounding(100)


@pytest.mark.parametrize("n", [100, 129, 255, 576])
def test_entries_are_as_even_as_those_of_a_haar_matrix(n: int) -> None:
    fast = [transform(n, seed).columns(0, n) * math.sqrt(n) for seed in range(4)]
    haar = [torch.from_numpy(haar_matrix(Stream(seed, "haar", "left"), n)) * math.sqrt(n) for seed in range(4)]
    # Of n^2 normal numbers, all four draws stay below this with a probability of more than 0.999.
    limit = math.sqrt(2 * math.log(4 * n**2 / 1e-3))
    assert max(float(one.abs().max()) for one in (*fast, *haar)) <= limit
    moments = [sum(float(one.pow(4).mean()) for one in some) / 4 for some in (fast, haar)]
    assert moments == pytest.approx([3.0 * n / (n + 2)] * 2, abs=12 / n)


def test_seeds_layers_and_parts_give_other_matrices() -> None:
    found = {
        FastOrthogonal.draw(12, seed=seed, layer=layer, part=part).digest_bytes()
        for seed in (0, 1) for layer in ("", "a") for part in ("left", "right")
    }  # fmt: skip
    assert len(found) == 8


@pytest.mark.parametrize("n", SIZES)
def test_it_keeps_a_few_numbers_for_each_entry(n: int) -> None:
    fast = transform(n)
    assert fast.signs.numel() + fast.orders.numel() == count_parameters(n) <= 3 * ROUNDS * n
    assert count_additions(n) <= 2 * ROUNDS * n * math.log2(n)


def test_gradients_pass_back_through_the_inverse() -> None:
    fast, x = transform(7), vectors(2, 7).requires_grad_()
    weights = vectors(2, 7)
    (fast.apply(x) * weights).sum().backward()
    assert x.grad is not None
    assert (x.grad - fast.apply_transpose(weights)).abs().max() <= rounding(7) * weights.norm()
    assert torch.autograd.gradcheck(fast.apply, (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions_stay_what_they_are(dtype: torch.dtype) -> None:
    fast, x = transform(100), vectors(3, 100).to(dtype)
    found = fast.apply(x)
    assert found.dtype == dtype
    exact = fast.apply(x.double())
    assert (found.double() - exact).abs().max() <= rounding(100) / EPS * torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize("shape", [(3, 5), (8, 4), (5, 2, 3, 3), (1, 1), (12, 7)])
@pytest.mark.parametrize("kernel", ["first", "second"])
def test_apply_is_the_product_with_both_factors(shape: tuple[int, ...], kernel: str) -> None:
    features = draw("fast_ortho_cond", shape, kernel=kernel, seed=4)
    structure = features.structure
    assert isinstance(structure, FastOrthoCond)
    left, right = structure.left_factor.columns(0, features.rows).mT, structure.right_factor.rows(0, features.cols)
    gamma = vectors(2, features.n_features)
    made = left @ gamma.reshape(2, features.rows, features.cols) @ right
    limit = 2 * rounding(features.rows * features.cols) * gamma.norm()
    assert (structure.apply(gamma) - made).abs().max() <= limit
    assert (structure.solve(made) - gamma).abs().max() <= limit
    x, v = vectors(3, features.cols), vectors(3, features.rows)
    assert (structure.transform_inputs(x) - x @ right.mT).abs().max() <= limit
    assert (structure.transform_outputs(v) - v @ left.mT).abs().max() <= limit
