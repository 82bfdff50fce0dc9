"""Every norm is found, whatever it is called and wherever it comes from, and nothing else is."""

from __future__ import annotations

import pytest
import torch
from foreign_norms import BatchNormAct2d, FrozenBatchNorm2d, GlobalResponseNorm, LlamaRMSNorm
from torch import nn
from torch.nn.utils import parametrizations

from onlynorm.modules import find_norms


class OldLayerNorm(nn.Module):
    """Parameters called gamma and beta."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(size))
        self.beta = nn.Parameter(torch.zeros(size))


class ABN(nn.Module):
    """A short form as its name."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))


class HeadLayerNorm(nn.Module):
    """A scale for each channel of each head, as a matrix."""

    def __init__(self, n_heads: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n_heads, size))


class PreNormEncoder(nn.Module):
    """A wrapper with a norm in its name, whose layers are in a list."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([PreNorm(size)])


class PreNorm(nn.Module):
    """A wrapper with a norm in its name: only the norm inside is one."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.fn = nn.Linear(size, size)


class NormedLinear(nn.Module):
    """A layer with a norm in its name and a matrix inside."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, 2 * size))


@pytest.mark.parametrize(
    ("norm", "kind", "tensors", "has_statistics", "is_frozen"),
    [
        (nn.BatchNorm1d(4), "batch", ("weight", "bias"), True, False),
        (nn.BatchNorm2d(4), "batch", ("weight", "bias"), True, False),
        (nn.BatchNorm3d(4, track_running_stats=False), "batch", ("weight", "bias"), False, False),
        (nn.SyncBatchNorm(4), "batch", ("weight", "bias"), True, False),
        (nn.LayerNorm(4), "layer", ("weight", "bias"), False, False),
        (nn.LayerNorm(4, bias=False), "layer", ("weight",), False, False),
        (nn.RMSNorm(4), "rms", ("weight",), False, False),
        (nn.GroupNorm(2, 4), "group", ("weight", "bias"), False, False),
        (nn.InstanceNorm2d(4, affine=True), "instance", ("weight", "bias"), False, False),
        (nn.InstanceNorm2d(4, affine=True, track_running_stats=True), "instance", ("weight", "bias"), True, False),
        (LlamaRMSNorm(4), "rms", ("weight",), False, False),
        (FrozenBatchNorm2d(4), "batch", ("weight", "bias"), True, True),
        (BatchNormAct2d(4), "batch", ("weight", "bias"), True, False),
        (GlobalResponseNorm(4), "other", ("weight", "bias"), False, False),
        (OldLayerNorm(4), "layer", ("gamma", "beta"), False, False),
        (ABN(4), "batch", ("weight", "bias"), False, False),
        (HeadLayerNorm(2, 2), "layer", ("weight",), False, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_norm_is_recognised(
    norm: nn.Module, kind: str, tensors: tuple[str, ...], has_statistics: bool, is_frozen: bool
) -> None:
    found = find_norms(nn.Sequential(nn.Linear(4, 4), norm))
    assert [n.name for n in found.norms] == ["1"]
    only = found.norms[0]
    assert (only.kind, only.tensors, only.n_channels) == (kind, tensors, 4)
    assert (only.has_statistics, only.is_frozen) == (has_statistics, is_frozen)
    assert found.skipped == ()


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (nn.BatchNorm2d(4, affine=False), "no scale and no shift"),
        (nn.LayerNorm(4, elementwise_affine=False), "no scale and no shift"),
        (nn.InstanceNorm1d(4), "no scale and no shift"),
        (nn.LocalResponseNorm(2), "no scale and no shift"),
        (nn.Identity(), "an Identity"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_has_nothing_to_tune_is_listed_with_the_reason(norm: nn.Module, reason: str) -> None:
    found = find_norms(nn.ModuleDict({"norm1": norm}))
    assert found.norms == ()
    assert [item.name for item in found.skipped] == ["norm1"]
    assert reason in found.skipped[0].reason
    assert reason in str(found)


def test_wrappers_and_layers_with_norm_in_their_name_are_no_norms() -> None:
    found = find_norms(
        nn.ModuleDict({"a": PreNorm(4), "b": NormedLinear(4), "c": nn.Identity(), "d": PreNormEncoder(4)})
    )
    assert [n.name for n in found.norms] == ["a.norm", "d.layers.0.norm"]
    assert found.skipped == ()


def test_weight_norms_are_reported_apart() -> None:
    with pytest.warns(FutureWarning, match="weight_norm"):
        old = nn.utils.weight_norm(nn.Linear(3, 3))
    model = nn.ModuleDict({"new": parametrizations.weight_norm(nn.Linear(3, 3)), "old": old, "norm": nn.LayerNorm(3)})
    found = find_norms(model)
    assert found.weight_norms == ("new.weight", "old.weight")
    assert [n.name for n in found.norms] == ["norm"]
    assert "weight norm (normalises a weight, not a signal): new.weight" in str(found)


def test_a_norm_at_several_places_is_one_norm() -> None:
    norm = nn.LayerNorm(4)
    found = find_norms(nn.ModuleDict({"a": norm, "b": nn.Sequential(norm)}))
    assert [n.names for n in found.norms] == [("a", "b.0")]


def test_a_norm_alone_is_found() -> None:
    assert [n.name for n in find_norms(nn.LayerNorm(4)).norms] == [""]


def test_a_lazy_norm_is_found_once_its_size_is_known() -> None:
    model = nn.Sequential(nn.LazyBatchNorm1d())
    assert find_norms(model).norms == ()
    model(torch.zeros(2, 3))
    assert [n.n_channels for n in find_norms(model).norms] == [3]
