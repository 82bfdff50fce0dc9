"""Which networks look trained: initialisations of all kinds do not, trained networks do."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from diagnosed import CLASSES, INPUTS, SPLIT
from torch import Tensor, nn

from onlynorm.errors import ConversionError, MissingDataError
from onlynorm.models import cifar_resnet, load_model, mlp
from onlynorm.rank import METHODS, repair
from onlynorm.rank.coverage import is_layer, weight_of
from onlynorm.rank.trained import find_training
from onlynorm.seeds import own_randomness, seeded

Init = Callable[[Tensor], object]


def sign(model: nn.Module) -> str:
    """The first sign of training in all layers of a model."""
    found = [(name, module) for name, module in model.named_modules() if is_layer(module)]
    layers = ((name, layer, weight_of(layer), layer is found[-1][1]) for name, layer in found)
    return find_training(model, layers)


def fully_connected() -> nn.Sequential:
    return mlp((64, *[48] * 6, 10), norm="layer")


def convolutional() -> nn.Module:
    return cifar_resnet(8, width=16)


INITS: dict[str, Init] = {
    "uniform": lambda w: nn.init.kaiming_uniform_(w, a=5**0.5),
    "he": nn.init.kaiming_normal_,
    "xavier": nn.init.xavier_normal_,
    "orthogonal": lambda w: nn.init.orthogonal_(w, 2**0.5),
    "truncated": lambda w: nn.init.trunc_normal_(w, std=0.02),
    "positive": lambda w: nn.init.uniform_(w, 0.0, 0.2),
    "sparse": lambda w: w.normal_() * (torch.rand_like(w) < 0.2),
    "zeros": nn.init.zeros_,
    "constant": lambda w: nn.init.constant_(w, 0.1),
    "identity": lambda w: nn.init.dirac_(w) if w.ndim > 2 else nn.init.eye_(w),
}


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("make", [fully_connected, convolutional])
def test_initialised_networks_do_not_look_trained(make: Callable[[], nn.Module], init: str) -> None:
    with own_randomness(3), torch.no_grad():
        model = make()
        for module in model.modules():
            if is_layer(module):
                INITS[init](weight_of(module))
    assert sign(model) == ""


@pytest.mark.parametrize(
    "draw",
    [
        lambda p: nn.init.constant_(p, 0.0),
        lambda p: nn.init.normal_(p, std=1e-6),
        lambda p: nn.init.uniform_(p, -0.08, 0.08),
        lambda p: nn.init.normal_(p, std=0.05),
    ],
    ids=["zero", "tiny", "uniform like the weights", "normal like the weights"],
)
def test_biases_that_are_constant_or_drawn_do_not_look_trained(draw: Init) -> None:
    with own_randomness(1), torch.no_grad():
        model = mlp((20, *[24] * 8, 5))
        for parameter in model.parameters():
            draw(parameter)
    assert sign(model) == ""


@pytest.mark.parametrize("method", ["mirrored", "lsuv", "orthogonal", "near_identity", "batch_norm", "residual"])
def test_repaired_networks_do_not_look_trained(method: str) -> None:
    made = repair(mlp((64, *[32] * 6, 10), seed=1), INPUTS, method=method).model
    assert sign(made) == ""


def test_running_statistics_say_nothing() -> None:
    model = mlp((64, 32, 32, 10), norm="batch").train()
    model(INPUTS)
    assert int(model.state_dict()["1.num_batches_tracked"]) == 1
    assert sign(model) == ""


def trained(model: nn.Module, *, adam: bool, n_steps: int) -> nn.Module:
    """The model after some steps with batches of 64 on the digits."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3) if adam else torch.optim.SGD(model.parameters(), 0.1)
    generator = seeded(0)
    for _ in range(n_steps):
        chosen = torch.randint(len(SPLIT.train_inputs), (64,), generator=generator)
        loss = nn.functional.cross_entropy(model(SPLIT.train_inputs[chosen]), SPLIT.train_labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize(
    ("norm", "init"), [("none", "uniform"), ("none", "he"), ("none", "orthogonal"), ("batch", "he")]
)
def test_networks_that_were_trained_look_so(norm: str, init: str, adam: bool) -> None:
    model = mlp((64, 48, 48, 48, 10), norm=norm)
    with own_randomness(0), torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear) and init != "uniform":
                INITS[init](module.weight)
                nn.init.zeros_(module.bias)
    assert sign(model) == ""
    assert sign(trained(model, adam=adam, n_steps=150 if adam else 400)) != ""


def test_a_little_in_every_weight_is_a_sign_that_no_weight_shows_alone() -> None:
    def network(n_layers: int) -> nn.Sequential:
        with own_randomness(2), torch.no_grad():
            model = mlp((48, *[48] * n_layers))
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    module.weight *= torch.linspace(0.92, 1.08, 48)[:, None]
                    nn.init.zeros_(module.bias)
        return model

    assert sign(network(1)) == ""
    found = sign(network(32))
    assert "rows of different size" in found
    assert "in all weights together" in found


def test_a_pretrained_network_looks_trained() -> None:
    try:
        model = load_model("resnet20")
    except MissingDataError as error:
        pytest.skip(str(error))
    assert "norm" in sign(model)
    for module in model.modules():  # the weights alone tell it too
        if isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
    assert "weight" in sign(model)


# ------------------------------------------------------------------------------- what repair does about it


@functools.cache
def _sick_and_trained() -> nn.Module:
    model = mlp((64, 48, 48, 48, 10))
    trained(model, adam=True, n_steps=150)
    with torch.no_grad():
        model[4].weight *= 100.0
        model[6].weight /= 100.0
    return model


def sick_and_trained() -> nn.Module:
    """A trained network of which two scaled layers have spoiled the gradient ratio and nothing else."""
    return copy.deepcopy(_sick_and_trained())


def test_auto_leaves_a_network_that_looks_trained_as_it_is_and_says_why() -> None:
    model = sick_and_trained()
    result = repair(model, INPUTS, targets=CLASSES)
    assert result.method == "nothing"
    assert "looks trained" in str(result)
    assert "force=True" in result.remark
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), result.model.parameters(), strict=True))
    assert repair(model, INPUTS, targets=CLASSES, force=True).method == "mirrored"


@pytest.mark.parametrize("method", METHODS)
def test_no_method_changes_a_network_that_looks_trained_without_force(method: str) -> None:
    model = sick_and_trained()
    kept = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ConversionError, match=r"looks trained: .* Pass force=True"):
        repair(model, INPUTS, targets=CLASSES, method=method, in_place=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), kept, strict=True))
    assert repair(model, INPUTS, targets=CLASSES, method=method, n_steps=1, force=True).method == method
