"""The operator equals its materialised matrix in every shape, precision, block size and batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import onlynorm as on
from onlynorm.errors import MemoryLimitError, ShapeError, ValueRangeError
from onlynorm.solvers import operator as khatri_rao
from onlynorm.solvers.operator import FeatureSource, KhatriRao, Operator, times_power

EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Case:
    """One random operator with everything to compare it with; `eps` is the rounding of its precision."""

    left: Tensor
    right: Tensor
    block: int | None
    batch: tuple[int, ...]
    seed: int

    @property
    def operator(self) -> KhatriRao:
        return KhatriRao(self.left, self.right, block=self.block)

    @property
    def matrix(self) -> Tensor:
        """M column by column from its definition, in float64."""
        columns = [torch.outer(a, b).flatten() for a, b in zip(self.left.mT, self.right, strict=True)]
        return torch.stack(columns, dim=1).double()

    @property
    def eps(self) -> float:
        return torch.finfo(self.left.dtype).eps

    def normal(self, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(*self.batch, *shape, generator=generator, dtype=self.left.dtype)

    def near(self, found: Tensor, expected: Tensor, bound: Tensor, terms: int) -> bool:
        """Entrywise within rounding: `terms` additions of products whose sizes add up to `bound`."""
        return bool(((found.double() - expected).abs() <= (terms + 4) * self.eps * bound + 1e-300).all())


@st.composite
def cases(draw: st.DrawFn) -> Case:
    out, inp, feat = (draw(st.integers(1, 9)) for _ in range(3))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    seed = draw(st.integers(0, 2**20))
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(out, feat, generator=generator, dtype=dtype)
    right = torch.randn(feat, inp, generator=generator, dtype=dtype)
    block = draw(st.none() | st.integers(1, feat + 2))
    batch = draw(st.sampled_from([(), (3,), (2, 1)]))
    return Case(left, right, block, batch, seed)


@given(cases())
def test_apply_is_the_product_with_the_matrix(case: Case) -> None:
    gamma = case.normal(case.operator.n_features)
    found = case.operator.apply(gamma)
    expected = gamma.double() @ case.matrix.mT
    bound = gamma.double().abs() @ case.matrix.abs().mT
    assert found.shape == (*case.batch, case.operator.out, case.operator.inp)
    assert found.dtype == case.left.dtype
    assert case.near(found.flatten(-2), expected, bound, case.operator.n_features)


@given(cases())
def test_transpose_is_the_product_with_the_transposed_matrix(case: Case) -> None:
    residual = case.normal(case.operator.out, case.operator.inp)
    found = case.operator.transpose(residual)
    expected = residual.double().flatten(-2) @ case.matrix
    bound = residual.double().abs().flatten(-2) @ case.matrix.abs()
    assert found.shape == (*case.batch, case.operator.n_features)
    assert case.near(found, expected, bound, case.operator.equations)


@given(cases())
def test_gram_apply_is_transpose_after_apply(case: Case) -> None:
    gamma = case.normal(case.operator.n_features)
    expected = case.operator.transpose(case.operator.apply(gamma))
    assert torch.equal(case.operator.gram_apply(gamma), expected)
    with_buffer = case.operator.gram_apply(gamma, work=case.operator.scratch())
    columns = case.matrix.mT @ case.matrix
    bound = gamma.double().abs() @ (case.matrix.abs().mT @ case.matrix.abs())
    terms = case.operator.n_features + case.operator.equations
    assert case.near(with_buffer, gamma.double() @ columns, bound, terms)


@given(cases())
def test_row_gram_apply_is_apply_after_transpose(case: Case) -> None:
    residual = case.normal(case.operator.out, case.operator.inp)
    found = case.operator.row_gram_apply(residual)
    rows = case.matrix @ case.matrix.mT
    bound = residual.double().abs().flatten(-2) @ (case.matrix.abs() @ case.matrix.abs().mT)
    assert found.shape == residual.shape
    assert case.near(
        found.flatten(-2),
        residual.double().flatten(-2) @ rows,
        bound,
        case.operator.equations + case.operator.n_features,
    )


@given(cases())
def test_both_grams_are_products_of_the_matrix(case: Case) -> None:
    size = case.matrix.abs()
    terms = case.operator.equations + case.operator.n_features
    assert case.near(case.operator.gram(), case.matrix.mT @ case.matrix, size.mT @ size, terms)
    assert case.near(case.operator.row_gram(), case.matrix @ case.matrix.mT, size @ size.mT, terms)


@given(cases())
def test_materialise_squares_and_norm_agree_with_the_definition(case: Case) -> None:
    operator, matrix = case.operator, case.matrix
    assert torch.equal(operator.materialise(), (case.left[:, None, :] * case.right.mT[None]).flatten(0, 1))
    assert case.near(operator.column_squares(), matrix.square().sum(0), matrix.square().sum(0), operator.equations)
    assert operator.one_norm() == pytest.approx(float(matrix.abs().sum(0).max()), rel=operator.equations * case.eps)
    double = operator.materialise(dtype=torch.float64)
    assert double.dtype == torch.float64
    assert double.mT.is_contiguous(), "column-major, as LAPACK wants it"


@given(cases(), st.integers(-60, 60), st.integers(-60, 60))
def test_scaled_multiplies_exactly(case: Case, left_power: int, right_power: int) -> None:
    left, right = case.operator.scaled(left_power, right_power).dense()
    assert torch.equal(left, case.left * 2.0**left_power)
    assert torch.equal(right, case.right * 2.0**right_power)


@given(cases(), st.data())
def test_restrict_keeps_the_chosen_rows(case: Case, data: st.DataObject) -> None:
    def some(n: int) -> Tensor:
        flags = data.draw(st.lists(st.booleans(), min_size=n, max_size=n).filter(any))
        return torch.tensor(flags)

    outputs, inputs = some(case.operator.out), some(case.operator.inp)
    rows = (outputs[:, None] & inputs[None, :]).flatten()
    found = case.operator.restrict(outputs, inputs).materialise()
    assert torch.equal(found, case.operator.materialise()[rows])
    features = some(case.operator.n_features)
    found = case.operator.restrict(outputs, inputs, features).materialise()
    assert torch.equal(found, case.operator.materialise()[rows][:, features])


@given(cases())
def test_to_and_cast_change_the_precision_and_nothing_else(case: Case) -> None:
    other = torch.float32 if case.left.dtype == torch.float64 else torch.float64
    for changed in (case.operator.to(other), case.operator.cast(other)):
        left, right = changed.dense()
        assert torch.equal(left, case.left.to(other))
        assert torch.equal(right, case.right.to(other))
    same = case.operator
    assert same.to(same.dtype) is same


@pytest.mark.parametrize(
    "name", ["he_normal", "sparse_he_normal", "orthogonal", "id_cond", "ortho_cond", "fast_ortho_cond", "kron_normal"]
)
@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (1, 4), (4, 1), (2, 3, 3)])
@pytest.mark.parametrize("block", [None, 4])
def test_regenerated_features_give_the_same_operator(name: str, shape: tuple[int, ...], block: int | None) -> None:
    features = on.draw(name, shape, seed=3)
    made = KhatriRao.regenerating(features, block=block)
    stored = KhatriRao(features.left(), features.right())
    assert isinstance(features, FeatureSource)
    assert not made.is_stored
    assert made.stored_bytes == 0
    assert stored.stored_bytes == 8 * features.n_features * (made.out + made.inp)
    assert torch.equal(made.materialise(), stored.materialise())
    assert all(torch.equal(a, b) for a, b in zip(made.dense(), stored.dense(), strict=True))
    gamma = torch.linspace(-1, 1, made.n_features, dtype=torch.float64)
    bound = stored.materialise().abs() @ gamma.abs()
    off = (made.apply(gamma) - stored.apply(gamma)).abs().flatten()
    assert bool((off <= made.n_features * torch.finfo(torch.float64).eps * bound).all())
    single = made.cast(torch.float32)
    assert (single.is_stored, single.dtype, single.block) == (False, torch.float32, made.block)
    assert made.to(torch.float32).is_stored
    assert torch.equal(single.materialise(), made.to(torch.float32).materialise())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("out", "inp"), [(3, 7), (7, 3), (1, 4), (4, 1), (5, 5)])
@pytest.mark.parametrize("feat", [1536, 2001])
@pytest.mark.parametrize("block", [None, 1600])
def test_many_features_are_summed_as_a_few(
    out: int, inp: int, feat: int, block: int | None, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(out, feat, generator=generator), torch.randn(feat, inp, generator=generator)
    for batch in ((), (2,)):
        case = Case(left.to(dtype), right.to(dtype), block, batch, 0)
        matrix, operator = case.matrix, case.operator
        residual = case.normal(out, inp)
        flat = residual.double().flatten(-2)
        seen = flat @ matrix
        assert case.near(operator.transpose(residual), seen, flat.abs() @ matrix.abs(), out * inp)
        sizes = flat.abs() @ (matrix.abs() @ matrix.abs().mT)
        found = operator.row_gram_apply(residual).flatten(-2)
        assert case.near(found, seen @ matrix.mT, sizes, feat)
        gamma = case.normal(feat)
        sizes = gamma.double().abs() @ matrix.abs().mT
        assert case.near(operator.apply(gamma).flatten(-2), gamma.double() @ matrix.mT, sizes, feat)


def test_sample_takes_every_nth_feature() -> None:
    features = on.draw("he_normal", (6, 5), seed=1)
    stored = KhatriRao(features.left(), features.right())
    left, right = stored.sample(4)
    assert torch.equal(left, features.left()[:, ::4].mT)
    assert torch.equal(right, features.right()[::4])
    assert left.data_ptr() == stored.dense()[0].data_ptr(), "a view, not a copy"
    left, right = KhatriRao.regenerating(features).sample(4)
    assert left.shape == (math.ceil(features.n_features / 4), 6)
    assert torch.equal(right, features.right()[: len(right)])


def test_large_operators_are_cut_into_blocks_that_fit_the_cache() -> None:
    features = on.draw("he_normal", (100, 100), n_features=60_000)
    made = KhatriRao.regenerating(features)
    assert made.block * 200 * 8 <= khatri_rao.CACHE_BYTES
    assert "regenerated" in repr(made)
    assert "10000 equations" in repr(made)
    assert made.excess == 6.0
    small = KhatriRao(torch.ones(2, 3), torch.ones(3, 4))
    assert small.block == 3
    assert "stored" in repr(small)
    assert isinstance(small, Operator)


@pytest.mark.parametrize("power", [0, 1, -1, 1073, -1073, 2000, -2000])
def test_powers_of_two_neither_overflow_nor_underflow_on_the_way(power: int) -> None:
    value = torch.tensor([2.0**-900 if power > 0 else 2.0**900], dtype=torch.float64)
    exponent = (-900 if power > 0 else 900) + power
    expected = 0.0 if exponent < -1074 else math.inf if exponent > 1023 else 2.0**exponent
    assert float(times_power(value, power)) == expected


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        ((4, 12), (11, 3), r"equal feat; got \(4, 12\) and \(11, 3\)\. Both must be matrices"),
        ((4, 12), (3, 12), r"got \(4, 12\) and \(3, 12\)\. If right is stored as \(inp, feat\), pass right\.mT"),
        ((4,), (4, 3), r"needs left \(out, feat\) and right \(feat, inp\).*got \(4,\)"),
        ((0, 5), (5, 3), r"at least one output, one input and one feature; got left \(0, 5\).*"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(left: tuple[int, ...], right: tuple[int, ...], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        KhatriRao(torch.ones(left), torch.ones(right))


@pytest.mark.usefixtures("unchecked")
def test_precisions_that_do_not_fit_are_refused() -> None:
    message = r"one floating dtype on one device; got torch\.float32 on cpu and torch\.float64.*Cast one"
    with pytest.raises(ShapeError, match=message):
        KhatriRao(torch.ones(2, 3), torch.ones(3, 2, dtype=torch.float64))
    with pytest.raises(ShapeError, match=r"one floating dtype.*got torch\.int64"):
        KhatriRao(torch.ones(2, 3, dtype=torch.int64), torch.ones(3, 2, dtype=torch.int64))


@pytest.mark.usefixtures("unchecked")
def test_arguments_of_wrong_shape_and_impossible_blocks_are_refused() -> None:
    operator = KhatriRao(torch.ones(2, 5), torch.ones(5, 3))
    with pytest.raises(ShapeError, match=r"apply needs gamma \(\.\.\., 5\); got \(4,\)\. One entry per feature"):
        operator.apply(torch.ones(4))
    for name in ("transpose", "row_gram_apply"):
        with pytest.raises(
            ShapeError, match=rf"{name} needs a matrix \(\.\.\., 2, 3\); got \(3, 2\).*kernel positions"
        ):
            getattr(operator, name)(torch.ones(3, 2))
    with pytest.raises(ValueRangeError, match=r"block .* from 1; got 0"):
        KhatriRao(torch.ones(2, 5), torch.ones(5, 3), block=0)


@pytest.mark.parametrize("shape", [(1, 150), (150, 1), (3, 70), (20, 15)])
@pytest.mark.parametrize("n_features", [96, 97, 140])
def test_the_gram_of_features_is_that_of_the_matrix_whatever_the_size(shape: tuple[int, int], n_features: int) -> None:
    generator = torch.Generator().manual_seed(n_features)
    left = torch.randn(shape[0], n_features, generator=generator, dtype=torch.float64)
    right = torch.randn(n_features, shape[1], generator=generator, dtype=torch.float64)
    found = KhatriRao(left, right).gram()
    matrix = (left[:, None, :] * right.mT[None]).flatten(0, 1)
    lengths = matrix.norm(dim=0)
    limit = 2 * shape[0] * shape[1] * EPS * torch.outer(lengths, lengths)
    assert bool(((found - matrix.mT @ matrix).abs() <= limit).all())


def test_a_matrix_beyond_the_memory_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=10**8))
    operator = KhatriRao(torch.ones(100, 9000), torch.ones(9000, 100))
    message = r"materialise of 10000 x 9000 needs 0.36 GB; got 0.1 GB of free memory\. Use apply and transpose"
    with pytest.raises(MemoryLimitError, match=message):
        operator.materialise()


@pytest.mark.parametrize("shape", [(1, 6), (5, 1), (3, 200), (200, 3), (8, 9), (11, 8), (16, 40)])
@pytest.mark.parametrize("block", [None, 300])
def test_the_gram_of_equations_is_that_of_the_matrix_whatever_the_shape(
    shape: tuple[int, int], block: int | None
) -> None:
    features = on.draw("he_normal", shape, n_features=700, seed=3)
    for operator in (
        KhatriRao(features.left(), features.right(), block=block),
        KhatriRao.regenerating(features, block=block),
    ):
        matrix, gram = operator.materialise(), operator.row_gram()
        # Sums of 700 products, rounded in two orders.
        assert float((gram - matrix @ matrix.mT).abs().max()) <= 1000 * EPS * float(gram.abs().max())
        assert float((gram - gram.mT).abs().max()) <= 1000 * EPS * float(gram.abs().max())


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4)])
def test_unit_features_have_length_one_and_gammas_that_count_their_lengths(shape: tuple[int, int]) -> None:
    features = on.draw("sparse_he_normal", shape, n_features=40, density=0.3, seed=1)
    gamma = torch.linspace(-1, 1, 40, dtype=torch.float64)
    for operator in (KhatriRao(features.left(), features.right()), KhatriRao.regenerating(features, block=7)):
        unit, lengths = operator.unit()
        sizes = unit.column_squares()
        is_zero = operator.column_squares() == 0
        assert bool(is_zero.any())
        assert torch.allclose(sizes, (~is_zero).double(), atol=100 * EPS)
        assert bool((lengths[is_zero] == 1).all())
        assert torch.allclose(unit.apply(gamma * lengths), operator.apply(gamma), atol=1000 * EPS)
        again, ones = unit.unit()
        assert torch.allclose(ones, torch.ones_like(ones), atol=100 * EPS)
        assert torch.allclose(again.apply(gamma), unit.apply(gamma), atol=1000 * EPS)
        assert torch.allclose(unit.to(torch.float32).apply(gamma.float()).double(), unit.apply(gamma), atol=1e-5)
        assert torch.allclose(unit.cast(torch.float32).apply(gamma.float()).double(), unit.apply(gamma), atol=1e-5)


@pytest.mark.parametrize(("shape", "n_features"), [((6, 5), 37), ((40, 90), 9001), ((90, 40), 9001), ((1, 30), 50)])
def test_borrowed_features_are_those_of_a_copy(shape: tuple[int, int], n_features: int) -> None:
    features = on.draw("he_normal", shape, n_features=n_features)
    stored = KhatriRao(features.left().double(), features.right().double())
    borrowed, copy = stored.borrow(torch.float32), stored.to(torch.float32)
    assert borrowed.dtype == torch.float32
    assert stored.borrow(torch.float64) is stored
    for mine, theirs in zip(borrowed.dense(), copy.dense(), strict=True):
        assert torch.equal(mine, theirs)
    gamma, matrix = torch.ones(n_features), torch.ones(shape)
    for mine, theirs in (
        (borrowed.apply(gamma), copy.apply(gamma)),
        (borrowed.transpose(matrix), copy.transpose(matrix)),
        (borrowed.row_gram_apply(matrix, work=borrowed.scratch()), copy.row_gram_apply(matrix)),
    ):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))
    assert stored.dense()[0].dtype == torch.float64
