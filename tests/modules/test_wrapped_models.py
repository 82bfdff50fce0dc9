"""Compiled, parallel and scripted models and modules: used like the module inside, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_values import scripted
from torch import Tensor, nn

import onlynorm as on
from onlynorm.errors import ConversionError
from onlynorm.modules.walk import outputs_of

LABELS = torch.arange(12) % 3


def batch() -> Tensor:
    return torch.randn(12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def with_compiled_layer() -> nn.Module:
    model = network()
    model[0], model[2] = compiled(model[0]), compiled(model[2])
    return model


WRAPPERS: dict[str, Callable[[], nn.Module]] = {
    "compiled": lambda: compiled(network()),
    "parallel": lambda: nn.DataParallel(network()),
    "both": lambda: nn.DataParallel(compiled(network())),
}


def trained(model: nn.Module, **options: Any) -> list[Tensor]:
    on.only_norms(model, statistics="freeze")
    on.fit(model, (batch(), LABELS), schedule=on.Schedule(epochs=2, batch_size=6), **options)
    return [p.detach() for p in model.parameters()]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_model_gives_what_the_model_inside_gives(name: str) -> None:
    make, x = WRAPPERS[name], batch()
    plain = network().eval()
    result = on.reconstruct(make().eval(), x)
    assert torch.equal(result.network(x), on.reconstruct(plain, x).network(x))
    assert on.verify(make().eval(), result, x) == on.verify(plain, result, x)
    assert [row.costs.memory for row in on.plan(make(), x).layers if row.costs] == [
        row.costs.memory for row in on.plan(plain, x).layers if row.costs
    ]
    assert on.diagnose(make(), x, LABELS).score == on.diagnose(network(), x, LABELS).score
    assert torch.equal(on.collapse(result)(x), on.collapse(on.reconstruct(plain, x))(x))
    assert torch.allclose(outputs_of(on.fold(make().eval(), x).network(x))[0], plain(x), rtol=1e-12)
    norm_only = [on.to_norm_only(one, seed=0).eval()(x) for one in (make(), network())]
    assert torch.equal(*norm_only)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_are_rebuilt_and_folded(tmp_path: Path) -> None:
    model, x = with_compiled_layer().eval(), batch()
    result = on.reconstruct(model, x)
    assert len(result.layers) == 2
    assert on.verify(network().eval(), result, x).relative_error < 1e-10
    on.save(result, tmp_path / "net.safetensors")
    assert torch.equal(on.load(tmp_path / "net.safetensors", like=with_compiled_layer())(x), result.network(x))
    assert torch.allclose(on.fold(model, x).network(x), network().eval()(x), rtol=1e-12)
    for made in (on.plan(model, x).layers, on.diagnose(model, x, LABELS).weighted_layers):
        assert len(made) == 2


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("wrap", [compiled, nn.DataParallel])
@pytest.mark.parametrize("construction", [on.Wide, on.Residual, on.LowRank, on.Multilayer, on.Deep])
def test_a_wrapped_activation_is_the_activation_inside(wrap: Any, construction: Any, tmp_path: Path) -> None:
    x, options = batch(), construction(activation=wrap(nn.ReLU()))
    assert type(options.activation) is nn.ReLU
    result = on.reconstruct(network().eval(), x, options)
    on.save(result, tmp_path / "net.safetensors")
    loaded = on.load(tmp_path / "net.safetensors", like=network())
    assert torch.equal(loaded(x), result.network(x))


def test_a_wrapped_activation_has_the_rays_of_the_one_inside() -> None:
    assert on.Residual(activation=compiled(nn.GELU()), skip="outside").skip == "outside"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_loss_trains_like_the_loss_inside() -> None:
    losses = (nn.CrossEntropyLoss(), compiled(nn.CrossEntropyLoss()))
    plain, others = (trained(network(), loss=loss) for loss in losses)
    assert all(map(torch.equal, plain, others))


REFUSED: dict[str, Callable[[nn.Module], Any]] = {
    "reconstruct": lambda model: on.reconstruct(model, batch()),
    "plan": lambda model: on.plan(model, batch()),
    "fold": lambda model: on.fold(model),
    "fold on a batch": lambda model: on.fold(model, batch()),
    "diagnose": lambda model: on.diagnose(model, batch(), LABELS),
    "repair": lambda model: on.repair(model, batch(), LABELS),
    "to_norm_only": lambda model: on.to_norm_only(model),
    "only_norms": lambda model: on.only_norms(model),
    "Adapters": lambda model: on.Adapters(model),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_scripted_models_are_refused_as_such(name: str) -> None:
    for model in (torch.jit.script(network().eval()), torch.jit.trace(network().eval(), batch())):
        with pytest.raises(ConversionError, match=r"traced or scripted .* Pass the model that it was made from"):
            REFUSED[name](model)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_scripted_layer_is_left_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 3), scripted()).eval()
    x = batch().float()
    result = on.reconstruct(model, x)
    assert [layer.name for layer in result.layers] == ["0"]
    with pytest.raises(ConversionError, match=r"certified ranges need a rule .* Use calibrated ranges"):
        on.reconstruct(model, x, ranges=on.Ranges(box=on.Box(x.amin(0) - 1, x.amax(0) + 1)))
    planned = on.plan(model, x)
    assert [row.name for row in planned.layers] == ["0"]
    assert "left as it is: 1" in str(planned)
