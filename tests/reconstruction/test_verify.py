"""Verification: how far two networks differ, which inputs leave the range, and where every number comes from."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from rebuilding import reconstruct_with
from tensors import normal
from torch import Tensor, nn

from onlynorm import Wide, plan
from onlynorm.errors import ConversionError, ShapeError, ValueRangeError
from onlynorm.frozen.form import find_blocks
from onlynorm.intervals.tensor import Box
from onlynorm.models import mlp
from onlynorm.reconstruction import collapse, reconstruct, verify
from onlynorm.reconstruction.verify import count_entries

X = normal(30, 6)


def net() -> nn.Sequential:
    return mlp((6, 5, 4)).double().eval()


def rebuilt(network: nn.Module, inputs: Any = X, **options: Any) -> nn.Module:
    return reconstruct_with(network, inputs, **options).network


def moved(network: nn.Sequential, amount: float) -> nn.Sequential:
    """The network with its first output moved by an amount."""
    other = copy.deepcopy(network)
    with torch.no_grad():
        other[-1].bias[0] += amount
    return other


def test_errors_are_those_of_the_outputs() -> None:
    network = net()
    other = moved(network, 0.5)
    check = verify(network, other, X)
    wanted, made = network(X).detach(), other(X).detach()
    assert check.max_error == pytest.approx(0.5, rel=1e-12)
    assert check.relative_error == pytest.approx(float((made - wanted).norm() / wanted.norm()), rel=1e-12)
    assert check.agreement == pytest.approx(float((made.argmax(1) == wanted.argmax(1)).double().mean()), rel=1e-12)
    assert check.n_samples == 30
    assert check.is_same(check.relative_error)
    assert not check.is_same(0.99 * check.relative_error)


@pytest.mark.parametrize("with_images", [False, True])
def test_a_sample_without_a_batch_axis_is_one_sample(with_images: bool) -> None:
    network, inputs = net(), X[0]
    if with_images:
        network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3)).double().eval()
        inputs = normal(3, 7, 7)
    other = reconstruct(network, inputs, Wide(activation=nn.ReLU()))
    assert other.calibration is not None
    assert other.calibration.n_samples == 1
    for target in (network, other):
        check = verify(target, other, inputs)
        assert check.n_samples == len(check.sample_errors) == 1
        assert str(check).startswith("1 sample: ")
    assert verify(network, other, inputs[None]).n_samples == 1
    assert verify(network, other, torch.stack([inputs] * 3)).n_samples == 3
    assert plan(network, inputs).n_samples == plan(network, inputs[None]).n_samples == 64


@pytest.mark.parametrize("batch_size", [1, 7, 30, 100])
def test_batch_by_batch_is_the_same_as_at_once(batch_size: int) -> None:
    network = net()
    other = rebuilt(network, X[:5], excess=0.5)
    told: list[tuple[int, int, str]] = []
    whole = verify(network, other, X)
    parts = verify(network, other, X, batch_size=batch_size, progress=lambda *words: told.append(words))
    assert parts.relative_error == pytest.approx(whole.relative_error, rel=1e-9)
    assert (parts.agreement, parts.outside, parts.n_samples) == (whole.agreement, whole.outside, whole.n_samples)
    assert [news[:2] for news in told] == [
        (min(done, 30), 30) for done in range(batch_size, 30 + batch_size, batch_size)
    ]


def test_samples_that_leave_the_range_are_counted_over_all_batches() -> None:
    network = net()
    other = rebuilt(network, activation=nn.ReLU())
    mixed = torch.cat([X[:15], 100.0 * X[:15]])
    assert verify(network, other, mixed, batch_size=4).outside == 0.5
    assert verify(network, other, mixed).outside == 0.5


def test_inputs_outside_the_certified_box_are_counted_and_said() -> None:
    network = net()
    box = Box(torch.full((6,), -4.0, dtype=torch.float64), torch.full((6,), 4.0, dtype=torch.float64))
    other = rebuilt(network, box=box, activation=nn.ReLU())
    inside = verify(network, other, X, box=box)
    assert inside.outside_box == 0.0
    assert "0.00 % outside the certified box" in str(inside)
    shifted = torch.cat([X[:10], X[:20] + 100.0])
    outside = verify(network, other, shifted, box=box)
    assert outside.outside_box == pytest.approx(2 / 3)
    assert outside.outside > 0.6
    assert "66.67 % outside the certified box" in str(outside)
    assert "certified" not in str(verify(network, other, X))
    assert verify(network, other, X).outside_box is None
    with pytest.raises(ShapeError, match=r"a box needs the shape of one sample, \(6,\); got \(5,\)"):
        verify(network, other, X, box=Box(torch.zeros(5), torch.ones(5)))


class Mixed(nn.Module):
    """Tokens in; an embedding and a parameter that are left, norms of three kinds, a tied layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.place = nn.Parameter(torch.ones(6))
        self.norm = nn.LayerNorm(6)
        self.one = nn.Linear(6, 6)
        self.two = self.one
        self.batch_norm = nn.BatchNorm1d(6)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.norm(self.embed(tokens).mean(1) + self.place)
        return self.batch_norm(self.two(torch.tanh(self.one(h))))


def test_every_number_is_from_the_seed_in_a_norm_or_listed() -> None:
    network = Mixed().double().eval()
    tokens = torch.arange(24).reshape(8, 3) % 7
    other = rebuilt(network, tokens, activation=nn.ReLU())
    check = verify(network, other, tokens)
    n_features = find_blocks(other)["one"].n_features
    assert check.n_frozen == n_features * 12
    assert check.n_norm == 4 * n_features + 4 * 6 + 2 * 6 + 4 * 6  # two norms of the block, layer norm, batch norm
    assert check.others == ("place", "embed.weight")
    assert check.n_other == 6 + 42
    assert check.is_reproducible
    assert not check.is_only_norms
    assert "48 neither (place, embed.weight)" in str(check)


def test_a_network_of_linear_layers_becomes_a_seed_and_norms() -> None:
    check = verify(net(), rebuilt(net(), activation=nn.ReLU()), X)
    assert check.is_only_norms
    assert check.n_other == 0
    assert "every frozen tensor comes from the seed" in str(check)
    assert "no others" in str(check)


def test_the_parameter_of_an_activation_is_neither_norm_nor_frozen() -> None:
    check = verify(net(), rebuilt(net(), activation=nn.PReLU()), X)
    assert check.others == ("0.activation.weight",)
    assert not check.is_only_norms


def test_a_collapsed_network_has_no_frozen_numbers() -> None:
    plain = collapse(rebuilt(net()))
    n_frozen, n_norm, others = count_entries(plain)
    assert (n_frozen, n_norm) == (0, 0)
    assert others == {"0.weight": 30, "0.bias": 5, "2.weight": 20, "2.bias": 4}


def test_a_changed_frozen_weight_is_noticed() -> None:
    other = rebuilt(net())
    other[2].map(0).left[1, 1] += 1e-12
    check = verify(net(), other, X)
    assert not check.is_reproducible
    assert not check.is_only_norms
    assert "FROZEN TENSORS DIFFER" in str(check)


def test_not_a_number_never_looks_like_agreement() -> None:
    other = moved(net(), float("nan"))
    for batch_size in (None, 4):
        check = verify(net(), other, X, batch_size=batch_size)
        assert check.max_error != check.max_error
        assert not check.is_same(1e300)


def test_outputs_of_one_number_per_sample_or_in_all_are_compared() -> None:
    class Reduced(nn.Module):
        def __init__(self, layer: nn.Module, axes: tuple[int, ...]) -> None:
            super().__init__()
            self.layer, self.axes = layer, axes

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).mean(self.axes)

    for axes, n_samples in (((1,), 30), ((0, 1), 1)):
        network = Reduced(nn.Linear(6, 4).double(), axes)
        check = verify(network, rebuilt(network), X)
        assert check.is_same(1e-9)
        assert check.n_samples == n_samples


def test_precisions_may_differ() -> None:
    network = net()
    check = verify(network, copy.deepcopy(network).float(), X)
    assert 1e-9 < check.relative_error < 1e-5


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


@pytest.mark.parametrize(
    ("other", "inputs", "options", "kind", "says"),
    [
        (mlp((6, 3)), X, {}, ShapeError, r"one tensor of the same shape; got torch.Size\(\[30, 4\]\) and .*30, 3\]"),
        (Pair(), X, {}, ShapeError, r"got torch.Size\(\[30, 4\]\) and tuple\. Wrap them so that they return their log"),
        (net(), X.to("meta"), {}, ConversionError, r"inputs .*values; got .* on the meta device"),
        (net(), X[:0], {}, ValueRangeError, r"verify needs a batch of finite inputs; got shape \(0, 6\)"),
        (net(), X / 0.0, {}, ValueRangeError, r"empty or with NaN or infinity"),
        (net(), normal(30, 7), {}, ConversionError, r"the network needs inputs .*; got \(30, 7\) float64"),
        (net(), X, {"batch_size": 0}, ValueRangeError, r"batch_size .* from 1; got 0"),
        (nn.Sequential(nn.Dropout()), X, {}, ValueRangeError, r"verify needs a target in evaluation mode; got Dropout"),
    ],
)
def test_bad_input_is_refused(
    other: nn.Module, inputs: Any, options: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        verify(net(), other, inputs, **options)


def test_inputs_of_different_lengths_cannot_be_cut_into_batches() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return self.layer(x) + shift

    network = Two().double().eval()
    inputs = (X, normal(4))
    other = rebuilt(network, inputs)
    assert verify(network, other, inputs).is_same(1e-9)
    with pytest.raises(ShapeError, match=r"same number of samples; got \[\(30, 6\), \(4,\)\]\. Leave batch_size out"):
        verify(network, other, inputs, batch_size=8)


class Broken(nn.Module):
    """A network whose outputs for some samples are no numbers."""

    def __init__(self, inner: nn.Module, value: float) -> None:
        super().__init__()
        self.inner, self.value = inner, value
        self.limit = float(X[:, 0].sort().values[2])

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x).clone()
        made[x[:, 0] <= self.limit, 1] = self.value
        return made


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("sides", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("batch_size", [None, 2, 7])
def test_outputs_that_are_no_numbers_never_agree(
    value: float, sides: tuple[bool, bool], batch_size: int | None
) -> None:
    pair = [Broken(net(), value).eval() if is_broken else net() for is_broken in sides]
    check = verify(*pair, X, batch_size=batch_size)
    assert check.n_not_finite == 3
    assert check.agreement == 27 / 30
    assert not check.is_same(1e300)
    assert not check.max_error <= 1e300
    assert str(check).startswith("NaN OR INFINITY IN THE OUTPUT OF 3 OF 30 samples")
    assert verify(net(), net(), X).n_not_finite == 0


def test_outputs_whose_size_overflows_do_not_count_as_equal() -> None:
    class Huge(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: Tensor) -> Tensor:
            return self.factor * (1.0 + x.abs())

    assert not verify(Huge(1e200), Huge(1e150), X).is_same(0.5)


def test_a_reconstruction_stands_for_its_network() -> None:
    result = reconstruct(net(), X)
    assert verify(net(), result, X) == verify(net(), result.network, X)
    assert verify(result, collapse(result), X).is_same(1e-9)
    assert verify(net(), result, X.numpy()) == verify(net(), result, X)


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_network_is_refused_by_name() -> None:
    with pytest.raises(ConversionError, match=r"verify needs a model, a torch.nn.Module; got 'net'"):
        verify(net(), "net", X)  # type: ignore[arg-type]
    with pytest.raises(ConversionError, match=r"collapse needs a model, a torch.nn.Module; got None"):
        collapse(None)  # type: ignore[arg-type]
    with pytest.raises(ConversionError, match=r"inputs .*tensor; got 'x'"):
        verify(net(), net(), "x")  # type: ignore[arg-type]
    assert verify(net(), net(), [X.numpy()]).max_error == 0.0  # type: ignore[arg-type]


def test_complex_outputs_are_refused_rather_than_compared_by_their_real_parts() -> None:
    class Waves(nn.Module):
        def __init__(self, phase: complex) -> None:
            super().__init__()
            self.layer, self.phase = net(), phase

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.phase

    with pytest.raises(ShapeError, match="complex128"):
        verify(Waves(1j), Waves(2j), X)
