"""Bad input to `reconstruct`: networks, batches, boxes and words are refused with the cure."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from rebuilding import Branches, X, is_untouched, net, with_norm
from tensors import normal
from torch import Tensor, nn

from onlynorm import Ranges, Wide
from onlynorm.errors import ConversionError, ShapeError, UnknownNameError, ValueRangeError
from onlynorm.intervals.tensor import Box
from onlynorm.reconstruction import Construction, reconstruct


@pytest.mark.parametrize(
    ("dtype", "says"),
    [
        (torch.float16, r"got torch.float16\. Call model.float\(\)"),
        (torch.bfloat16, r"got torch.bfloat16\. Call model.float\(\)"),
        (torch.complex64, r"got torch.complex64\. Write complex layers as real ones"),
    ],
)
def test_other_precisions_are_refused(dtype: torch.dtype, says: str) -> None:
    with pytest.raises(ConversionError, match=rf"needs a float32 or float64 model; {says}"):
        reconstruct(nn.Sequential(nn.Linear(6, 4, dtype=dtype)), X)


def test_mixed_missing_and_empty_parameters_are_refused() -> None:
    mixed = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4).double())
    with pytest.raises(ConversionError, match=r"got torch.float32 and torch.float64\. Call model.float"):
        reconstruct(mixed, X)
    with pytest.raises(ConversionError, match=r"got no parameters\. Pass a model with layers"):
        reconstruct(nn.Sequential(nn.ReLU()), X)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(6, 5))
    with pytest.raises(
        ConversionError, match=r"needs a model whose weights have values; got a Sequential on the meta device"
    ):
        reconstruct(empty, X)


def test_numbers_that_are_not_finite_are_named_by_their_place() -> None:
    for place, tensor in (("0", "weight"), ("0", "bias"), ("1", "running_var"), ("1", "weight")):
        network = with_norm()
        with torch.no_grad():
            getattr(network.get_submodule(place), tensor)[0] = torch.nan
        with pytest.raises(ValueRangeError, match=rf"NaN or infinity in the {tensor} of '{place}'\. Load a checkpoint"):
            reconstruct(network, X)


def test_a_layer_that_receives_infinity_is_named() -> None:
    class Overflowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.exp(1e6 * self.first(x)))

    with pytest.raises(ValueRangeError, match=r"'second' receives NaN or infinity on this batch"):
        reconstruct(Overflowing().double().eval(), X)


@pytest.mark.parametrize("module", [nn.BatchNorm1d(5), nn.Dropout()], ids=["BatchNorm1d", "Dropout"])
def test_training_mode_is_refused_with_what_it_means(module: nn.Module) -> None:
    network = nn.Sequential(nn.Linear(6, 5), module.train()).double()
    name = type(module).__name__
    with pytest.raises(
        ValueRangeError, match=rf"evaluation mode; got {name} in training mode at '1', whose output depends.*eval\(\)"
    ):
        reconstruct(network, X)


@pytest.mark.parametrize(
    ("inputs", "kind", "says"),
    [
        (X[:0], ValueRangeError, r"calibration needs a batch of finite inputs; got shape \(0, 6\), empty"),
        (X / 0.0, ValueRangeError, r"batch of finite inputs; got shape \(30, 6\).*NaN or infinity"),
        (X.to("meta"), ConversionError, r"inputs .*values; got .* on the meta device"),
        (X.to(torch.complex128), ValueRangeError, r"calibration needs real inputs; got torch.complex128"),
        ((), ShapeError, r"a batch, or a tuple of batches; got nothing"),
        (
            normal(30, 7),
            ConversionError,
            r"the network needs inputs .*; got \(30, 7\) float64.*failed with: .*shapes cannot be mult",
        ),
        (
            (X, X),
            ConversionError,
            r"the network needs inputs .*; got \(30, 6\) float64, \(30, 6\) float64.*positional arguments",
        ),
    ],
)
def test_bad_batches_are_refused(inputs: Any, kind: type[Exception], says: str) -> None:
    network = net()
    before = copy.deepcopy(network.state_dict())
    with pytest.raises(kind, match=says):
        reconstruct(network, inputs)
    assert is_untouched(network, before)


def test_a_layer_that_is_not_called_is_refused_before_anything_is_solved() -> None:
    network = net()
    network[0].spare = nn.Linear(2, 2).double()
    with pytest.raises(ConversionError, match=r"'0.spare' was not on this batch\. Remove the unused layer"):
        reconstruct(network, X)


def test_a_layer_called_by_keyword_is_refused() -> None:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(input=x)

    with pytest.raises(ConversionError, match=r"'layer' is called with input\. Call it as layer\(x\)"):
        reconstruct(Keyword().double().eval(), X)


def test_a_network_that_cannot_be_copied_is_refused() -> None:
    network = net()
    network[0].cached = network[0].weight * 2.0
    with pytest.raises(ConversionError, match=r"needs to be copied; copy.deepcopy"):
        reconstruct(network, X)


@pytest.mark.usefixtures("unchecked")
def test_unknown_words_are_refused() -> None:
    for construction in ("wide", Wide, nn.ReLU()):
        with pytest.raises(ConversionError, match=r"construction needs .*; got .*Pass onlynorm.Wide\(\)"):
            reconstruct(net(), X, construction)
    with pytest.raises(ValueRangeError, match=r"construction needs one of .*got Construction\(\)\. Pass onlynorm"):
        reconstruct(net(), X, Construction())
    with pytest.raises(UnknownNameError, match=r"features needs a known name; got 'he_norml'"):
        reconstruct(net(), X, Wide(features="he_norml"))


@pytest.mark.usefixtures("unchecked")
def test_a_bare_function_is_no_activation_of_a_block() -> None:
    with pytest.raises(ValueRangeError, match=r"activation needs a module.*got .*tanh.*Pass torch.nn.Tanh\(\)"):
        reconstruct(net(), X, Wide(activation=torch.tanh))


def test_an_error_needs_outputs_to_compare() -> None:
    class Silent(nn.Sequential):
        def forward(self, x: Tensor) -> None:
            super().forward(x)

    network = Silent(nn.Linear(6, 4)).double().eval()
    assert len(reconstruct(network, X).layers) == 1
    with pytest.raises(ConversionError, match=r"error needs a network that returns tensors"):
        reconstruct(network, X, error=1e-8)


def test_boxes_that_do_not_hold_the_batch_are_refused() -> None:
    box = Box(torch.full((6,), -1.0), torch.full((6,), 1.0))
    with pytest.raises(ValueRangeError, match=r"box .* calibration batch; got inputs outside"):
        reconstruct(net(), X, ranges=Ranges(box=box))
    with pytest.raises(ShapeError, match=r"shape of one sample, \(6,\); got \(5,\)"):
        reconstruct(net(), X, ranges=Ranges(box=Box(torch.zeros(5), torch.ones(5))))
    network = Branches().double().eval()
    inputs = (torch.zeros(2, 3, dtype=torch.long), normal(2, 1, 6, 6))
    with pytest.raises(ValueRangeError, match=r"a box needs a network with one input; got 2"):
        reconstruct(network, inputs, ranges=Ranges(box=box))
