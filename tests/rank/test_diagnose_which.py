"""`diagnose(which=...)`: chosen modules only, with the same measures, depths and gradients as in the whole table."""

from __future__ import annotations

import pytest
import torch
from tensors import normal
from torch import nn

import onlynorm as on
from onlynorm.errors import ConversionError, UnknownNameError
from onlynorm.models import cifar_resnet, mlp, vit

IMAGES = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(6) % 3


@pytest.mark.parametrize(
    ("make", "which"),
    [
        (lambda: cifar_resnet(8, width=2, n_classes=3), "layer2.*"),
        (lambda: cifar_resnet(8, width=2, n_classes=3), ["conv1", "layer3.0.bn2"]),
        (lambda: vit(patch=4, depth=2, width=8, heads=2, image_size=8, n_classes=3), "blocks.1.*"),
    ],
)
def test_chosen_modules_have_the_rows_of_the_whole_table(make: type[nn.Module], which: str | list[str]) -> None:
    model = make()
    whole, chosen = (on.diagnose(model, IMAGES, LABELS, which=one, max_columns=None) for one in (None, which))
    rows = {(layer.name, layer.call): layer for layer in whole.layers}
    assert 0 < len(chosen.layers) < len(whole.layers)
    for layer in chosen.layers:
        if layer.kind == "input":
            continue  # in the whole table it may be the output of another module
        assert layer == rows[layer.name, layer.call]
    for name in ("loss", "alignment", "sample_cosine", "contrast", "directions", "last_layer", "skipped"):
        assert getattr(chosen, name) == getattr(whole, name)
    assert chosen.tree == whole.tree
    assert str(chosen)
    assert chosen.plot().curves


def test_a_chosen_container_has_the_measures_of_the_module_whose_output_it_returns() -> None:
    model = cifar_resnet(8, width=2, n_classes=3)
    whole, chosen = (on.diagnose(model, IMAGES, which=one, max_columns=None) for one in (None, "layer1"))
    (layer,) = chosen.layers
    block = next(one for one in whole.layers if one.name == "layer1.0")
    assert (layer.name, layer.kind, layer.depth) == ("layer1", "block", 3)
    assert (layer.r, layer.scale, layer.shape) == (block.r, block.scale, block.shape)


def test_the_input_of_a_chosen_layer_is_measured_as_the_output_of_the_one_before() -> None:
    model, x = mlp((4, 6, 6, 2)).double(), normal(8, 4)
    whole, chosen = (on.diagnose(model, x, LABELS.repeat(2)[:8] % 2, which=one) for one in (None, "2"))
    names = [layer.name for layer in chosen.layers]
    assert names == ["input of 2", "2"]
    before = next(layer for layer in whole.layers if layer.name == "1")
    first = chosen.layers[0]
    assert (first.r, first.scale, first.signal_gradient) == (before.r, before.scale, before.signal_gradient)
    assert [layer.depth for layer in chosen.layers] == [1, 2]


def test_a_collapse_outside_the_chosen_layers_is_not_judged() -> None:
    deep = mlp((4, *[16] * 30, 2)).double()
    x, labels = normal(16, 4), torch.arange(16) % 2
    assert "rank" in str(on.diagnose(deep, x, labels).verdict)
    first = on.diagnose(deep, x, which="0")
    assert first.verdict.word == "healthy"
    assert "all 1 layers" in first.verdict.findings[0]


@pytest.mark.parametrize(
    ("which", "error", "words"),
    [
        ("layer9", UnknownNameError, "module of which="),
        (["0", "nothing"], UnknownNameError, "'nothing'"),
        (3, ConversionError, "which must be a list"),
        ([3], ConversionError, "which needs names of modules; got a int"),
        ([], ConversionError, "needs which= to match a module that is called"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_patterns_that_match_nothing_are_refused(which: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        on.diagnose(mlp((4, 6, 2)).double(), normal(8, 4), which=which)  # type: ignore[arg-type]


def test_a_module_without_a_measured_signal_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)).double()
    with pytest.raises(ConversionError, match="returns a batch of signals; got none"):
        on.diagnose(model, normal(8, 4), which="1")
