"""Adapters give the trained model back to the last bit, on the right base model and on no other."""

from __future__ import annotations

import base64
import copy
import dataclasses
import errno
import os
from pathlib import Path

import pytest
import torch
from foreign_norms import BatchNormAct2d, GlobalResponseNorm, LlamaRMSNorm
from torch import Tensor, nn

from onlynorm.errors import ConversionError, FormatError, ShapeError, StorageError, UnknownNameError, ValueRangeError
from onlynorm.models import CifarResNet
from onlynorm.tuning import (
    Adapters,
    apply_adapter,
    load_adapter,
    only_norms,
    read_adapter,
    save_adapter,
    take_adapter,
)


class Channels(nn.Module):
    """Puts the channels of images last for a norm that wants them there."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.inner = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.movedim(1, -1)).movedim(-1, 1)


class ResponseNorm(GlobalResponseNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight * (x * x.norm(dim=(1, 2), keepdim=True)) + self.bias


NORMS = {
    "batch": lambda: nn.BatchNorm2d(4),
    "batch without momentum": lambda: nn.BatchNorm2d(4, momentum=None),
    "sync": lambda: nn.SyncBatchNorm(4),
    "batch with activation": lambda: BatchNormAct2d(4),
    "layer": lambda: Channels(nn.LayerNorm(4)),
    "layer without bias": lambda: Channels(nn.LayerNorm(4, bias=False)),
    "rms": lambda: Channels(nn.RMSNorm(4)),
    "llama rms": lambda: Channels(LlamaRMSNorm(4)),
    "group": lambda: nn.GroupNorm(2, 4),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "response": lambda: Channels(ResponseNorm(4)),
}


def images(seed: int = 0) -> Tensor:
    return torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def make(norm: str = "batch", n_classes: int = 5) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        body = nn.Sequential(nn.Conv2d(3, 4, 3), NORMS[norm](), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        body.append(nn.Linear(4, n_classes))
    return body


def train(model: nn.Module, *, seed: int = 0, steps: int = 3) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    model.train()
    for step in range(steps):
        optimizer.zero_grad()
        model(images(100 * seed + step)).square().sum().sqrt().backward()
        optimizer.step()
    model.eval()


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("norm", [n for n in NORMS if n != "sync"])
def test_a_reloaded_model_is_the_trained_one_to_the_last_bit(norm: str, tmp_path: Path) -> None:
    model = make(norm)
    only_norms(model, also="5")
    train(model)
    save_adapter(model, tmp_path / "a.safetensors")
    fresh = make(norm).eval()
    assert not torch.equal(fresh(images(7)), model(images(7)))
    load_adapter(fresh, tmp_path / "a.safetensors")
    assert torch.equal(fresh(images(7)), model(images(7)))
    assert same(bits(fresh), bits(model))


@pytest.mark.parametrize("norm", list(NORMS))
def test_switch_disable_merge_and_unmerge_are_exact(norm: str) -> None:
    model = make(norm).eval()
    only_norms(model)
    base = bits(model)
    adapters = Adapters(model)
    if norm == "sync":  # its training pass needs several processes, so its values are moved by hand
        with torch.no_grad():
            model[1].weight += 0.3
    else:
        train(model, seed=1)
    adapters.capture("a")
    after = bits(model)
    assert not same(base, after)
    adapters.disable()
    assert same(bits(model), base)
    adapters.switch("a")
    assert same(bits(model), after)
    adapters.merge()
    assert same(bits(model), after)
    adapters.disable()
    assert same(bits(model), after), "merged: this is the base now"
    adapters.unmerge()
    assert same(bits(model), base)


def test_several_adapters_on_different_layers_live_side_by_side(tmp_path: Path) -> None:
    base = CifarResNet(8).eval()
    for name, which in (("first", "layer1*"), ("last", "layer3*")):
        model = copy.deepcopy(base)
        only_norms(model, which=which, statistics="freeze")
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p += 0.1
        save_adapter(model, tmp_path / f"{name}.safetensors")
    before = bits(base)
    adapters = Adapters(base)
    for name in ("first", "last"):
        adapters.add(name, tmp_path / f"{name}.safetensors")
    adapters.switch("first")
    adapters.switch("last")
    changed = {name for name, t in base.state_dict().items() if not torch.equal(t, before[name])}
    assert changed
    assert all(name.startswith("layer3") for name in changed), "what the first held is back to the base"
    assert list(adapters) == ["first", "last"]
    adapters.remove("last")
    assert same(bits(base), before)


def test_the_average_is_the_weighted_mean_of_values() -> None:
    model = make()
    adapters = Adapters(model)
    only_norms(model, statistics="freeze")
    for name, value in (("a", 2.0), ("b", 6.0)):
        with torch.no_grad():
            model[1].weight.fill_(value)
        adapters.capture(name)
    adapters.average({"a": 3.0, "b": 1.0}, name="mean")
    assert torch.equal(model[1].weight, torch.full((4,), 3.0))
    assert adapters.active == "mean"
    for weights in ({}, {"a": 1.0, "b": -1.0}, {"a": float("nan")}):
        with pytest.raises(ValueRangeError, match="finite weights with a sum other than zero"):
            adapters.average(weights, name="none")


def test_heads_of_different_sizes_are_swapped_with_their_adapters(tmp_path: Path) -> None:
    base = make(n_classes=5).eval()
    other = make(n_classes=2)
    only_norms(other, also="5")
    train(other)
    save_adapter(other, tmp_path / "two.safetensors")
    adapters = Adapters(base)
    adapters.add("two", tmp_path / "two.safetensors")
    adapters.switch("two")
    assert torch.equal(base(images()), other(images()))
    assert base[5].out_features == 2
    adapters.disable()
    assert base(images()).shape == (8, 5)
    third = make(n_classes=3)
    only_norms(third, also="5")
    adapters.add("three", take_adapter(third))
    with pytest.raises(ShapeError, match="tensors of one shape"):
        adapters.average({"two": 1.0, "three": 1.0})


def test_half_precision_halves_the_file_and_rounds(tmp_path: Path) -> None:
    model = CifarResNet(20)
    only_norms(model, statistics="freeze")
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p += torch.linspace(0.0, 0.1, p.numel())
    save_adapter(model, tmp_path / "whole.safetensors")
    save_adapter(model, tmp_path / "half.safetensors", dtype="float16")
    whole, half = (read_adapter(tmp_path / f"{name}.safetensors") for name in ("whole", "half"))
    saved = os.path.getsize(tmp_path / "whole.safetensors") - os.path.getsize(tmp_path / "half.safetensors")
    assert abs(saved - 2 * whole.n_numbers) <= 64, "two bytes a number, but for the padding of the header"
    for name, t in whole.tensors.items():
        assert torch.equal(half.tensors[name], t.half())


def test_the_wrong_base_is_refused_and_the_difference_named(tmp_path: Path) -> None:
    model = make()
    only_norms(model)
    save_adapter(model, tmp_path / "a.safetensors")
    other = make()
    with torch.no_grad():
        other[0].bias[0] += 1.0
    before = bits(other)
    with pytest.raises(ConversionError, match=r"of 4 tensors of this one 1 of other values \(0\.bias\)"):
        load_adapter(other, tmp_path / "a.safetensors")
    assert same(bits(other), before)
    with pytest.raises(ConversionError, match=r"of another name, shape or type \(5\.bias, 5\.weight\)"):
        load_adapter(make(n_classes=6), tmp_path / "a.safetensors")
    with pytest.raises(ConversionError, match="4 tensors beside its own; this one has 5"):
        load_adapter(make().append(nn.PReLU()), tmp_path / "a.safetensors")
    with pytest.raises(ConversionError, match=r"the model has none for 1\.bias"):
        load_adapter(nn.Sequential(nn.Conv2d(3, 4, 3)), tmp_path / "a.safetensors")


def test_one_hash_of_all_values_decides_and_the_marks_only_name_what_differs() -> None:
    model, other = make(), make()
    own = take_adapter(model)
    marks = base64.b64decode(own.base)
    assert len(marks) == 16 + 3 * 4, "sixteen bytes, and three for each weight and bias beside the norm's"
    forged = base64.b64encode(bytes([marks[0] ^ 1]) + marks[1:]).decode()
    with pytest.raises(ConversionError, match="of 4 tensors of this one some are others"):
        apply_adapter(other, dataclasses.replace(own, base=forged))
    for damaged in ("", "?", base64.b64encode(marks[:-1]).decode(), base64.b64encode(marks[:8]).decode()):
        with pytest.raises(FormatError, match="a readable fingerprint"):
            apply_adapter(other, dataclasses.replace(own, base=damaged))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    model = make()
    only_norms(model)
    path = tmp_path / "a.safetensors"
    save_adapter(model, path)
    data = path.read_bytes()
    for place in range(0, len(data), 7):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(FormatError, match="needs"):
            load_adapter(model, path)
    path.write_bytes(data[:-1])
    with pytest.raises(FormatError, match="altered or cut short"):
        load_adapter(model, path)
    with pytest.raises(StorageError, match="readable file"):
        load_adapter(model, tmp_path / "nothing.safetensors")


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    only_norms(model)
    path = tmp_path / "a.safetensors"
    save_adapter(model, path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    train(model)
    with pytest.raises(StorageError, match="No space left on device"):
        save_adapter(model, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_bad_input_is_refused() -> None:
    with pytest.raises(ConversionError, match="a model with norms; got none in Linear"):
        take_adapter(nn.Linear(2, 2))
    model = make()
    with pytest.raises(UnknownNameError, match=r"dtype.*'float17'.*float16"):
        save_adapter(model, "unused", dtype="float17")
    adapters = Adapters(model)
    with pytest.raises(UnknownNameError, match=r"adapter.*'a'"):
        adapters.switch("a")
    with pytest.raises(ConversionError, match="active adapter; got none"):
        adapters.merge()
    with pytest.raises(ConversionError, match="merged adapter; got none"):
        adapters.unmerge()
    adapters.capture("a")
    with pytest.raises(ConversionError, match="'a' is taken"):
        adapters.capture("a")
