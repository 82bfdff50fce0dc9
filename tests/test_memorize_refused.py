"""`memorize` on points that repeat or cannot be told apart: equal labels merge, the rest is refused by name."""

from __future__ import annotations

import pytest
import torch
from samples import normals, some_labels

from onlynorm.errors import MemoryLimitError, ShapeError, UnknownNameError, ValueRangeError
from onlynorm.identity.memorize import memorize


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
    with pytest.raises(ValueRangeError, match=r"float64 can tell apart.*(17 and 4|4 and 17)|projected.*4 and 17"):
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
    with pytest.raises(ShapeError, match="one point and one number"):
        memorize(x[:0], labels[:0])
    with pytest.raises(ShapeError, match="one point and one number"):
        memorize(torch.tensor(1.0), torch.tensor(0))
    with pytest.raises(ShapeError, match="one label per point, 5 whole numbers"):
        memorize(x, labels[:4])
    with pytest.raises(ShapeError, match="argmax"):
        memorize(x, torch.eye(5).long())
    with pytest.raises(ValueRangeError, match="from 0 to 4; got -1 to 3"):
        memorize(x, labels - 1, n_classes=5)
    with pytest.raises(ValueRangeError, match="from 0 to 2; got 0 to 4"):
        memorize(x, labels, n_classes=3)
    with pytest.raises(ValueRangeError, match="n_classes needs whole-number labels"):
        memorize(x, labels.double(), n_classes=3)
    with pytest.raises(MemoryLimitError, match="Number the classes without gaps"):
        memorize(x, labels * 10**7)
    with pytest.raises(ValueRangeError, match="squares fit into float64"):
        memorize(x * 1e200, labels)


def test_odd_options_are_refused() -> None:
    x, labels = normals(5, 3), torch.arange(5)
    for width in (1, 2):
        with pytest.raises(ValueRangeError, match="width needs a whole number from 3 on"):
            memorize(x, labels, width=width)
    with pytest.raises(ValueRangeError, match="from 8 on"):
        memorize(x, normals(5, 7), width=5)
    with pytest.raises(UnknownNameError, match="principal"):
        memorize(x, labels, projection="principle")
    with pytest.raises(ValueRangeError, match="seed needs"):
        memorize(x, labels, seed=-1)
