"""Half precision around rebuilt networks: blocks keep float32, and the rest is as exact as the target would be."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from rebuilding import reconstruct_with
from safetensors.torch import load_file
from tensors import normal, relative
from torch import nn

import onlynorm as on
from onlynorm.errors import ConversionError, FormatError
from onlynorm.frozen.form import find_blocks

LOW = [torch.bfloat16, torch.float16]
IMAGES = normal(40, 3, 8, 8).float()


def convnet() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(72, 10),
    ).eval()  # fmt: skip


@pytest.fixture(scope="module", params=["wide", "low_rank", "residual", "multilayer", "deep"])
def result(request: pytest.FixtureRequest) -> on.reconstruction.Reconstruction:
    options: dict[str, Any] = {"features": "orthogonal"} if request.param in ("deep", "multilayer") else {}
    if request.param == "deep":
        options["inputs_per_slice"] = 6
    return reconstruct_with(convnet(), IMAGES, activation=nn.ReLU(), construction=request.param, **options)


def rounding(dtype: torch.dtype) -> float:
    """What three layers lose that round weights, inputs and outputs: eps / 2 each, doubled to have room."""
    return 2 * 3 * 3 * torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("dtype", LOW)
def test_autocast_around_a_rebuilt_network_costs_no_more_than_around_the_target(
    result: on.reconstruction.Reconstruction, dtype: torch.dtype
) -> None:
    network = convnet()
    with torch.no_grad():
        wanted = network(IMAGES)
        with torch.autocast("cpu", dtype=dtype):
            made, plain = result.network(IMAGES), network(IMAGES)
    assert made.dtype == plain.dtype == dtype
    assert relative(made, wanted) < rounding(dtype)
    assert relative(plain, wanted) < rounding(dtype)


@pytest.mark.parametrize("dtype", LOW)
def test_a_network_cast_to_half_keeps_its_blocks_in_float32(
    result: on.reconstruction.Reconstruction, dtype: torch.dtype
) -> None:
    network, cast = convnet(), copy.deepcopy(result.network).to(dtype)
    for block in find_blocks(cast).values():
        assert {tensor.dtype for tensor in (*block.parameters(), *block.buffers()) if tensor.is_floating_point()} == {
            torch.float32
        }
    assert cast[1].weight.dtype == dtype
    with torch.no_grad():
        wanted, made = network(IMAGES), cast(IMAGES.to(dtype))
    assert made.dtype == dtype
    assert relative(made, wanted) < rounding(dtype)
    check = on.verify(network, cast, IMAGES)
    assert check.relative_error < rounding(dtype)
    assert check.is_reproducible


@pytest.mark.parametrize("dtype", LOW)
def test_a_file_in_half_keeps_its_blocks_in_float32(
    result: on.reconstruction.Reconstruction, dtype: torch.dtype, tmp_path: Path
) -> None:
    on.save(result, tmp_path / "net", dtype=dtype)
    stored = load_file(tmp_path / "net")
    assert stored["1.weight"].dtype == dtype
    assert {value.dtype for name, value in stored.items() if name.startswith("3.") and value.is_floating_point()} == {
        torch.float32
    }
    loaded = on.load(tmp_path / "net", like=convnet())
    assert loaded[1].weight.dtype == dtype
    assert on.verify(convnet(), loaded, IMAGES).relative_error < rounding(dtype)


def test_autocast_around_reconstruct_collapse_and_load_changes_nothing(tmp_path: Path) -> None:
    plain = on.reconstruct(convnet(), IMAGES, on.Wide(activation=nn.ReLU()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = on.reconstruct(convnet(), IMAGES, on.Wide(activation=nn.ReLU()))
        on.save(inside, tmp_path / "net")
        loaded = on.load(tmp_path / "net", like=convnet())
        collapsed = on.collapse(inside)
    for other in (inside.network, loaded):
        pairs = zip(plain.network.state_dict().values(), other.state_dict().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert on.verify(on.collapse(plain), collapsed, IMAGES).max_error == 0.0


def test_a_solve_inside_autocast_is_the_same() -> None:
    left, right, target = normal(12, 240).float(), normal(240, 16).float(), normal(12, 16).float()
    plain = on.solve(left, right, target, method="krylov")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = on.solve(left, right, target, method="krylov")
    assert torch.equal(plain.gamma, inside.gamma)


def test_blocks_refuse_what_their_layers_would_refuse() -> None:
    block = on.reconstruct(convnet(), IMAGES).network[6]
    x = normal(4, 72)
    with pytest.raises(ConversionError, match=r"norms in torch.float32 and inputs in torch.float64"):
        block(x)
    with pytest.raises(ConversionError, match=r"norms in torch.float32 and inputs in torch.int64"):
        block(x.long())
    for parameter in block.parameters():
        parameter.data = parameter.data.bfloat16()  # past `to`, as some training frameworks do
    with pytest.raises(ConversionError, match=r"norms in torch.bfloat16 and inputs in torch.float32"):
        block(x.float())


def test_a_file_with_blocks_in_half_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onlynorm.frozen import checkpoint

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "LOWEST", torch.float16)  # as files were written before
        on.save(on.reconstruct(convnet(), IMAGES), tmp_path / "net", dtype=torch.bfloat16)
    with pytest.raises(FormatError, match=r"torch.bfloat16"):
        on.load(tmp_path / "net", like=convnet())
