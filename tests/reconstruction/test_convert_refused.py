"""Bad input to `reconstruct`: networks, batches, boxes and words are refused with the cure."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from rebuilding import Branches, X, batch, is_untouched, net, with_norm
from torch import Tensor, nn

from onlynorm.errors import ConversionError, ShapeError, UnknownNameError, ValueRangeError
from onlynorm.intervals.tensor import Box
from onlynorm.reconstruction import reconstruct


@pytest.mark.parametrize(
    ("dtype", "says"),
    [
        (torch.float16, r"got torch.float16\. Call network.float\(\)"),
        (torch.bfloat16, r"got torch.bfloat16\. Call network.float\(\)"),
        (torch.complex64, r"got torch.complex64\. Write complex layers as real ones"),
    ],
)
def test_other_precisions_are_refused(dtype: torch.dtype, says: str) -> None:
    with pytest.raises(ConversionError, match=rf"needs a float32 or float64 network; {says}"):
        reconstruct(nn.Sequential(nn.Linear(6, 4, dtype=dtype)), inputs=X)


def test_mixed_missing_and_empty_parameters_are_refused() -> None:
    mixed = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4).double())
    with pytest.raises(ConversionError, match=r"got torch.float32 and torch.float64\. Call network.float"):
        reconstruct(mixed, inputs=X)
    with pytest.raises(ConversionError, match=r"got no parameters\. Pass a network with layers"):
        reconstruct(nn.Sequential(nn.ReLU()), inputs=X)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(6, 5))
    with pytest.raises(
        ConversionError, match=r"needs a model whose weights have values; got a Sequential on the meta device"
    ):
        reconstruct(empty, inputs=X)


def test_numbers_that_are_not_finite_are_named_by_their_place() -> None:
    for place, tensor in (("0", "weight"), ("0", "bias"), ("1", "running_var"), ("1", "weight")):
        network = with_norm()
        with torch.no_grad():
            getattr(network.get_submodule(place), tensor)[0] = torch.nan
        with pytest.raises(ValueRangeError, match=rf"NaN or infinity in the {tensor} of '{place}'\. Load a checkpoint"):
            reconstruct(network, inputs=X)


def test_a_layer_that_receives_infinity_is_named() -> None:
    class Overflowing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.exp(1e6 * self.first(x)))

    with pytest.raises(ValueRangeError, match=r"'second' receives NaN or infinity on this batch"):
        reconstruct(Overflowing().double().eval(), inputs=X)


@pytest.mark.parametrize("module", [nn.BatchNorm1d(5), nn.Dropout()], ids=["BatchNorm1d", "Dropout"])
def test_training_mode_is_refused_with_what_it_means(module: nn.Module) -> None:
    network = nn.Sequential(nn.Linear(6, 5), module.train()).double()
    name = type(module).__name__
    with pytest.raises(
        ValueRangeError, match=rf"evaluation mode; got {name} in training mode at '1', whose output depends.*eval\(\)"
    ):
        reconstruct(network, inputs=X)


@pytest.mark.parametrize(
    ("inputs", "kind", "says"),
    [
        (X[:0], ValueRangeError, r"calibration needs a batch of finite inputs; got shape \(0, 6\), empty"),
        (X / 0.0, ValueRangeError, r"batch of finite inputs; got shape \(30, 6\).*NaN or infinity"),
        (X.to("meta"), ConversionError, r"inputs needs a tensor with values; got .* on the meta device"),
        (X.to(torch.complex128), ValueRangeError, r"calibration needs real inputs; got torch.complex128"),
        ((), ShapeError, r"a batch, or a tuple of batches; got nothing"),
        (
            batch(30, 7),
            ConversionError,
            r"take the inputs in its own precision; got \(30, 7\) float64.*failed with: .*shapes cannot be mult",
        ),
        (
            (X, X),
            ConversionError,
            r"take the inputs in its own precision; got \(30, 6\) float64, \(30, 6\) float64.*positional arguments",
        ),
    ],
)
def test_bad_batches_are_refused(inputs: Any, kind: type[Exception], says: str) -> None:
    network = net()
    before = copy.deepcopy(network.state_dict())
    with pytest.raises(kind, match=says):
        reconstruct(network, inputs=inputs)
    assert is_untouched(network, before)


def test_a_layer_that_is_not_called_is_refused_before_anything_is_solved() -> None:
    network = net()
    network[0].spare = nn.Linear(2, 2).double()
    with pytest.raises(ConversionError, match=r"'0.spare' was not on this batch\. Remove the unused layer"):
        reconstruct(network, inputs=X)


def test_a_layer_called_by_keyword_is_refused() -> None:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(input=x)

    with pytest.raises(ConversionError, match=r"'layer' is called with input\. Call it as layer\(x\)"):
        reconstruct(Keyword().double().eval(), inputs=X)


def test_a_network_that_cannot_be_copied_is_refused() -> None:
    network = net()
    network[0].cached = network[0].weight * 2.0
    with pytest.raises(ConversionError, match=r"needs to be copied, so that it is left alone; copy.deepcopy says"):
        reconstruct(network, inputs=X)


def test_unknown_words_are_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"field of a recipe needs a known name; got 'exces'\. Did you mean"):
        reconstruct(net(), inputs=X, exces=1.5)
    with pytest.raises(UnknownNameError, match=r"features needs a known name; got 'he_norml'"):
        reconstruct(net(), inputs=X, features="he_norml")


@pytest.mark.usefixtures("unchecked")
def test_a_bare_function_is_no_activation_of_a_block() -> None:
    with pytest.raises(ValueRangeError, match=r"activation needs a module.*got .*tanh.*Pass torch.nn.Tanh\(\)"):
        reconstruct(net(), inputs=X, activation=torch.tanh)


def test_an_error_needs_outputs_to_compare() -> None:
    class Silent(nn.Sequential):
        def forward(self, x: Tensor) -> None:
            super().forward(x)

    network = Silent(nn.Linear(6, 4)).double().eval()
    assert len(reconstruct(network, inputs=X).layers) == 1
    with pytest.raises(ConversionError, match=r"error needs a network that returns tensors"):
        reconstruct(network, inputs=X, error=1e-8)


def test_boxes_that_do_not_hold_the_batch_are_refused() -> None:
    box = Box(torch.full((6,), -1.0), torch.full((6,), 1.0))
    with pytest.raises(ValueRangeError, match=r"a box that holds the calibration batch; got inputs outside"):
        reconstruct(net(), inputs=X, box=box)
    with pytest.raises(ShapeError, match=r"shape of one sample, \(6,\); got \(5,\) and \(5,\)"):
        reconstruct(net(), inputs=X, box=Box(torch.zeros(5), torch.ones(5)))
    network = Branches().double().eval()
    inputs = (torch.zeros(2, 3, dtype=torch.long), batch(2, 1, 6, 6))
    with pytest.raises(ValueRangeError, match=r"a box needs a network with one input; got 2"):
        reconstruct(network, inputs=inputs, box=box)
