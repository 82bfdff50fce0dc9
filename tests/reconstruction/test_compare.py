"""Comparisons: verify in batches and the accuracies beside it, against the slow way."""

from __future__ import annotations

import json

import pytest
import torch
from tensors import normal
from torch import Tensor, nn

from onlynorm import Wide
from onlynorm.errors import ShapeError
from onlynorm.models import mlp
from onlynorm.reconstruction import reconstruct, verify
from onlynorm.reconstruction.verify import compare

INPUTS = normal(23, 6)
LABELS = torch.randint(0, 4, (23,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def pair() -> tuple[nn.Module, nn.Module]:
    target = mlp((6, 5, 4)).double()
    return target, reconstruct(target, INPUTS[:10], Wide(activation=nn.ReLU(), excess=0.9)).network


@pytest.mark.parametrize("batch_size", [1, 7, 50])
def test_accuracies_are_those_of_the_whole_set(pair: tuple[nn.Module, nn.Module], batch_size: int) -> None:
    target, network = pair
    told: list[tuple[int, int, str]] = []
    found = compare(*pair, INPUTS, labels=LABELS, batch_size=batch_size, progress=lambda *counts: told.append(counts))
    assert found.target_accuracy == float((target(INPUTS).argmax(1) == LABELS).double().mean())
    assert found.network_accuracy == float((network(INPUTS).argmax(1) == LABELS).double().mean())
    whole = verify(*pair, INPUTS)
    assert found.check.agreement == whole.agreement
    assert found.check.outside == whole.outside
    assert found.check.relative_error == pytest.approx(whole.relative_error, rel=1e-9)
    assert told[-1][:2] == (23, 23)
    assert len(told) == -(-23 // batch_size)
    assert f"accuracy {100 * found.target_accuracy:.2f} % of the target" in str(found)
    assert json.loads(json.dumps(found.as_dict()))["n_samples"] == 23


def test_without_labels_there_is_no_accuracy(pair: tuple[nn.Module, nn.Module]) -> None:
    for labels in (None, LABELS[:0]):
        found = compare(*pair, INPUTS, labels=labels)
        assert (found.target_accuracy, found.network_accuracy) == (None, None)
        assert str(found) == str(found.check)


def test_a_network_is_its_own_equal_and_keeps_no_hooks(pair: tuple[nn.Module, nn.Module]) -> None:
    target, _ = pair
    found = compare(target, target, INPUTS, labels=LABELS, batch_size=10)
    assert found.check.max_error == 0.0
    assert found.target_accuracy == found.network_accuracy
    assert not target._forward_hooks


def test_hooks_are_gone_after_an_error_too(pair: tuple[nn.Module, nn.Module]) -> None:
    target, _ = pair
    with pytest.raises(ShapeError, match=r"one tensor of the same shape"):
        compare(target, mlp((6, 3)).double(), INPUTS, labels=LABELS)
    assert not target._forward_hooks
    with pytest.raises(ShapeError, match=r"a label per sample, 23; got 5"):
        compare(target, target, INPUTS, labels=LABELS[:5])


def test_nan_predicts_no_class() -> None:
    class Nan(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full((len(x), 3), torch.nan)

    labels = torch.zeros(8, dtype=torch.long)
    found = compare(Nan(), Nan(), torch.ones(8, 2), labels=labels)
    assert (found.target_accuracy, found.network_accuracy) == (0.0, 0.0)
    assert found.check.agreement == 0.0
