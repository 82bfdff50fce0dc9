"""`memorize` on points that repeat or cannot be told apart: equal labels merge, the rest is refused by name."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from samples import normals, some_labels

from onlynorm.errors import (
    ConversionError,
    MemoryLimitError,
    ShapeError,
    ToleranceError,
    UnknownNameError,
    ValueRangeError,
)
from onlynorm.identity.memorization.memorize import memorize
from onlynorm.identity.memorization.memorizer import Memorizer

memorize_module = sys.modules["onlynorm.identity.memorization.memorize"]  # the package has a function of that name


def test_repeated_points_with_equal_labels_merge() -> None:
    x, labels = normals(20, 4), some_labels(20, 3)
    x[3], labels[3] = x[11], labels[11]
    twice = torch.cat([x, x, -0.0 * x[:1]])
    many = torch.cat([labels, labels, labels[:1]])
    network = memorize(twice, many)
    assert network.facts is not None
    assert network.facts.n_points == 20
    assert network.facts.n_merged == 21
    assert torch.equal(network.classify(twice), many)


def test_repeated_points_with_different_labels_are_named() -> None:
    x, labels = normals(20, 4), some_labels(20, 3)
    x[3], labels[3], labels[11] = x[11], 0, 1
    with pytest.raises(ValueRangeError, match="equal points with different targets at 3 and 11"):
        memorize(x, labels)
    with pytest.raises(ValueRangeError, match="at 3 and 11"):
        memorize(x, labels.double())


def test_many_conflicts_are_counted() -> None:
    x = normals(10, 4)
    with pytest.raises(ValueRangeError, match=r"4 and 14 and 5 more"):
        memorize(torch.cat([x, x]), torch.arange(20))


def test_points_that_the_principal_directions_drop_are_named() -> None:
    x = torch.zeros(40, 30, dtype=torch.float64)
    x[:, :2] = normals(40, 2)
    x[1, :2] = x[0, :2]
    x[1, 20] = 1e-9  # a direction of next to no variance
    with pytest.raises(ValueRangeError, match=r"(at 0 and 1|got 1 and 0|got 0 and 1)"):
        memorize(x, torch.arange(40), projection="principal", width=3)


def test_points_below_the_resolution_of_float64_are_named() -> None:
    x = normals(30, 8)
    x[17] = x[4] * (1.0 + 4e-16)
    with pytest.raises(ValueRangeError, match=r"distinct in the hidden space.*(17 and 4|4 and 17)"):
        memorize(x, torch.arange(30))


@pytest.mark.usefixtures("unchecked")
def test_points_and_targets_that_cannot_be_memorized_are_refused() -> None:
    x, labels = normals(5, 3), torch.arange(5)
    bad = x.clone()
    bad[2, 1] = torch.nan
    with pytest.raises(ValueRangeError, match="finite points; got NaN or infinity at 2"):
        memorize(bad, labels)
    with pytest.raises(ValueRangeError, match="finite targets"):
        memorize(x, torch.tensor([0.0, 1.0, torch.inf, 0.0, 0.0]))
    with pytest.raises(ShapeError, match="at least one point"):
        memorize(x[:0], labels[:0])
    with pytest.raises(ShapeError, match="at least one point"):
        memorize(torch.tensor(1.0), torch.tensor(0))
    with pytest.raises(ShapeError, match="one label per point, 5 "):
        memorize(x, labels[:4])
    with pytest.raises(ShapeError, match="argmax"):
        memorize(x, torch.eye(5).long())
    with pytest.raises(ValueRangeError, match="from 0 to 4; got -1 to 3"):
        memorize(x, labels - 1, n_classes=5)
    with pytest.raises(ValueRangeError, match="from 0 to 2; got 0 to 4"):
        memorize(x, labels, n_classes=3)
    with pytest.raises(ValueRangeError, match=r"n_classes needs .*labels"):
        memorize(x, labels.double(), n_classes=3)
    with pytest.raises(MemoryLimitError, match="Number the classes without gaps"):
        memorize(x, labels * 10**7)
    with pytest.raises(ValueRangeError, match=r"float64 .* up to \d\.\de-31\d"):
        memorize(x * 1e-310, labels)  # a weight that scales them to one does not exist
    with pytest.raises(ValueRangeError, match=r"n_classes .* from 1 .*; got 'three'"):
        memorize(x, labels, n_classes="three")  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="projection needs a known name; got None"):
        memorize(x, labels, projection=None)  # type: ignore[arg-type]
    with pytest.raises(ConversionError, match=r"points .*tensor; got None"):
        memorize(None, labels)  # type: ignore[arg-type]


def test_odd_options_are_refused() -> None:
    x, labels = normals(5, 3), torch.arange(5)
    for width in (1, 2):
        with pytest.raises(ValueRangeError, match=r"width .* from 3"):
            memorize(x, labels, width=width)
    with pytest.raises(ValueRangeError, match="from 8"):
        memorize(x, normals(5, 7), width=5)
    with pytest.raises(UnknownNameError, match="principal"):
        memorize(x, labels, projection="principle")
    with pytest.raises(ValueRangeError, match="seed "):
        memorize(x, labels, seed=-1)


def test_points_that_are_equal_only_in_the_hidden_space_are_said_to_be_so() -> None:
    x = normals(40, 3)
    x[:3] *= 1e-60  # among the others these three are one point
    with pytest.raises(ValueRangeError, match=r"equal .*different targets at 0 and 1, 0 and 2"):
        memorize(x, torch.arange(40))


def test_inputs_whose_digits_are_lost_to_an_offset_are_refused_with_the_cure() -> None:
    with pytest.raises(ValueRangeError, match="Subtract the mean of the inputs"):
        memorize(normals(100, 4) + 1e12, torch.arange(100))


def test_a_network_that_misses_a_target_is_never_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    x, targets = normals(40, 4), normals(40, 2, seed=1)

    def distorted(network: Memorizer, lift: Any, filled: Any, read: Any) -> None:
        copy_into(network, lift, filled, read)
        with torch.no_grad():
            network.values.weight.mul_(1.0 + 1e-4)

    copy_into = memorize_module._copy_into
    monkeypatch.setattr(memorize_module, "_copy_into", distorted)
    with pytest.raises(ToleranceError, match=r"within 1e-06 of the largest target.* left \d+ of 40 points wrong"):
        memorize(x, targets)
    assert torch.equal(memorize(x, torch.arange(40)).classify(x), torch.arange(40))  # no class is lost by 1e-4

    def mixed_up(network: Memorizer, lift: Any, filled: Any, read: Any) -> None:
        copy_into(network, lift, filled, read)
        with torch.no_grad():
            network.values.weight.copy_(network.values.weight.flip(0))

    monkeypatch.setattr(memorize_module, "_copy_into", mixed_up)
    with pytest.raises(ToleranceError, match=r"every class .* left 40 of 40 points wrong"):
        memorize(x, torch.arange(40))
