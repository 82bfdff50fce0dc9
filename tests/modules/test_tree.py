"""The tree of a model: output shapes, parameters and what is trained, in a table that fits a terminal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import onlynorm as on
from onlynorm import models
from onlynorm.errors import ValueRangeError
from onlynorm.modules import ModuleTree
from onlynorm.modules.tree import WIDTH, recording

IMAGES = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def tree_of(model: nn.Module, x: Tensor) -> ModuleTree:
    with recording(model) as recorder:
        model(x)
    return recorder.tree()


def test_rows_have_shapes_and_parameters_of_every_module() -> None:
    model = models.cifar_resnet(8, width=2)
    handle = on.only_norms(model)
    tree = tree_of(model, IMAGES)
    rows = {row.name: row for row in tree.rows}
    assert list(rows) == [name for name, _ in model.named_modules()]
    for name, module in model.named_modules():
        assert rows[name].n_parameters == sum(p.numel() for p in module.parameters())
        assert rows[name].kind == type(module).__name__
    assert rows["conv1"].shape == (4, 2, 16, 16)
    assert (rows["conv1"].state, rows["bn1"].state, rows["layer1"].state) == ("frozen", "trainable", "partly")
    assert rows[""].n_trainable == handle.n_trainable
    assert not any(module._forward_hooks for module in model.modules())
    lines = str(tree).splitlines()
    assert lines[0].split() == ["module", "output", "parameters", "state"]
    assert lines[2].split() == ["conv1", "(Conv2d)", "4", "x", "2", "x", "16", "x", "16", "54", "frozen"]
    assert lines[-1] == f"{handle.n_total:,} parameters: {handle.n_trainable} trainable, " + (
        f"{handle.n_total - handle.n_trainable:,} frozen"
    )


def test_plan_and_diagnosis_have_the_same_tree_but_for_the_batch() -> None:
    model = models.cifar_resnet(8, width=2).eval()
    planned, found = on.plan(model, IMAGES).tree, on.diagnose(model, IMAGES, torch.arange(4)).tree
    assert planned is not None
    assert found is not None
    assert [row.name for row in planned.rows] == [row.name for row in found.rows]
    for one, other in zip(planned.rows, found.rows, strict=True):
        assert (one.n_parameters, one.n_trainable) == (other.n_parameters, other.n_trainable)
        assert one.shape is not None
        assert other.shape is not None
        assert one.shape[1:] == other.shape[1:]
    assert "tree" not in on.plan(model, IMAGES).as_dict()
    assert "Modules" in on.diagnose(model, IMAGES).view().tables


def test_large_models_show_the_levels_that_fit_and_all_on_request() -> None:
    tree = tree_of(models.resnet(50, width=4), IMAGES)
    lines = str(tree).splitlines()
    assert len(lines) == 28
    assert lines[-1] == "25 of 133 modules are shown; text(max_rows=None) has all"
    assert len(tree.text(max_rows=None).splitlines()) == 135
    assert max(map(len, tree.text(max_rows=None).splitlines())) <= WIDTH
    long = tree_of(models.mlp((3, *[2] * 90, 2)), torch.ones(2, 3))
    assert len(str(long).splitlines()) == 53
    with pytest.raises(ValueRangeError, match="max_rows must be an integer from 1"):
        tree.text(max_rows=0)


def test_long_names_are_cut_and_uncalled_modules_have_no_shape() -> None:
    model = nn.Sequential()
    model.add_module("a" * 90, nn.Linear(3, 2))
    model.unused = nn.Linear(2, 2)  # type: ignore[assignment]
    model.forward = lambda x: model[0](x)  # type: ignore[method-assign]
    lines = str(tree_of(model, torch.ones(2, 3))).splitlines()
    assert all(len(line) <= WIDTH for line in lines)
    assert "…" in lines[2]
    assert lines[3].split()[:3] == ["unused", "(Linear)", "-"]


def test_frozen_layers_are_one_row_and_weight_norm_is_not_entered() -> None:
    tree = tree_of(on.to_norm_only(models.mlp((3, 4, 2))), torch.ones(2, 3))
    assert [row.kind for row in tree.rows] == ["Sequential", "NormOnlyLinear", "ReLU", "NormOnlyLinear"]
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    assert len(tree_of(nn.Sequential(normed), torch.ones(2, 3)).rows) == 2


def test_shared_modules_are_counted_once() -> None:
    shared = nn.Linear(3, 3)
    tree = tree_of(nn.Sequential(shared, nn.ReLU(), shared), torch.ones(2, 3))
    assert tree.rows[0].n_parameters == 12
    assert len(tree.rows) == 3
