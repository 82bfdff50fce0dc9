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
from foreign_norms import BatchNormAct2d, GlobalResponseNorm, LlamaRMSNorm, OwnBatchNorm
from tensors import single_normal
from torch import Tensor, nn

import onlynorm as on
from onlynorm.errors import ConversionError, FormatError, ShapeError, StorageError, UnknownNameError, ValueRangeError
from onlynorm.models import CifarResNet
from onlynorm.storage import read_tensors, write_tensors
from onlynorm.tuning import (
    Adapters,
    apply_adapter,
    load_adapter,
    only_norms,
    save_adapter,
    take_adapter,
    write_peft,
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
    return single_normal(8, 3, 6, 6, seed=seed)


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


# ------------------------------------------------------------------------------- what else training changes


def mixed(middle: nn.Module) -> nn.Sequential:
    """A network with a module of some kind between a convolution and a norm to train."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(3, 4, 3), middle, nn.GroupNorm(2, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(4, 5),
        )  # fmt: skip


def spectral(is_new: bool) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        conv = nn.Conv2d(4, 4, 1)
        return nn.utils.parametrizations.spectral_norm(conv) if is_new else nn.utils.spectral_norm(conv)


MIDDLES = {
    "batch without affine": lambda: nn.BatchNorm2d(4, affine=False),
    "instance without affine": lambda: nn.InstanceNorm2d(4, track_running_stats=True),
    "own class": lambda: OwnBatchNorm(4),
    "own class that updates in evaluation too": lambda: OwnBatchNorm(4, is_stubborn=True),
    "spectral norm": lambda: spectral(True),
    "old spectral norm": lambda: spectral(False),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1)),
}


@pytest.mark.parametrize("middle", list(MIDDLES))
@pytest.mark.parametrize("statistics", ["track", "freeze"])
@pytest.mark.filterwarnings("ignore:.*spectral_norm")
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_whatever_training_changes_is_in_the_adapter(middle: str, statistics: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    base = mixed(MIDDLES[middle]())
    state = bits(base)
    only_norms(base, statistics=statistics)
    train(base)
    save_adapter(base, tmp_path / "a.safetensors")
    fresh = mixed(MIDDLES[middle]())
    fresh.load_state_dict(state)
    load_adapter(fresh, tmp_path / "a.safetensors")
    assert same(bits(fresh), bits(base))
    # A norm that updates in evaluation too changes with every call: both models are called once.
    assert torch.equal(fresh.eval()(images(7)), base.eval()(images(7)))


def test_frozen_statistics_that_were_recalibrated_are_in_the_adapter(tmp_path: Path) -> None:
    model = make()
    handle = only_norms(model, statistics="freeze")
    assert not take_adapter(model).has_statistics
    handle.recalibrate([images()])
    assert save_adapter(model, tmp_path / "a.safetensors").has_statistics
    fresh = make()
    load_adapter(fresh, tmp_path / "a.safetensors")
    assert same(bits(fresh), bits(model))


def test_a_change_outside_the_adapter_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    model = make()
    only_norms(model)
    model[5].weight.requires_grad_(True)  # trained behind the back of only_norms
    train(model)
    with pytest.raises(ConversionError, match=r"1 .*tensors changed \(5\.weight\)"):
        save_adapter(model, path)
    with pytest.raises(ConversionError, match=r"5\.weight"):
        take_adapter(model)
    assert not path.exists()

    loaded = make()
    only_norms(loaded)
    loaded.load_state_dict({name: t + 1 for name, t in loaded.state_dict().items()})
    with pytest.raises(ConversionError, match=r"4 .*tensors changed .* load weights before only_norms"):
        save_adapter(loaded, path)

    cast = make()
    only_norms(cast)
    cast.double()
    with pytest.raises(ConversionError, match=r"6 tensors changed"):
        save_adapter(cast, path)

    grown = make()
    only_norms(grown)
    grown[0].register_buffer("extra", torch.zeros(3))
    with pytest.raises(ConversionError, match=r"0 missing and 1 new ones \(0\.extra\)"):
        save_adapter(grown, path)


def test_an_adapter_of_some_norms_pins_the_others(tmp_path: Path) -> None:
    model = CifarResNet(8)
    other, moved = copy.deepcopy(model), copy.deepcopy(model)
    only_norms(model, which="layer3*", statistics="freeze")
    save_adapter(model, tmp_path / "a.safetensors")
    with torch.no_grad():
        other.layer1[0].bn1.weight[0] = 3.0
    with pytest.raises(ConversionError, match=r"1 with other values \(layer1\.0\.bn1\.weight\)"):
        load_adapter(other, tmp_path / "a.safetensors")
    moved.layer1[0].bn1.running_mean[0] = 3.0
    with pytest.raises(ConversionError, match=r"1 with other values \(layer1\.0\.bn1\.running_mean\)"):
        load_adapter(moved, tmp_path / "a.safetensors")


def test_statistics_that_were_left_out_by_choice_are_not_compared(tmp_path: Path) -> None:
    model = make()
    only_norms(model)
    train(model)
    on.save(take_adapter(model, statistics=False), tmp_path / "a.safetensors")
    adapter = on.load(tmp_path / "a.safetensors")
    assert not adapter.has_statistics
    fresh = make()
    fresh[1].running_mean += 1.0
    apply_adapter(fresh, adapter)
    assert torch.equal(fresh[1].weight, model[1].weight)


def test_forged_documents_are_refused(tmp_path: Path) -> None:
    adapter = take_adapter(make())
    sound = {"heads": [], "statistics": True, "base": adapter.base}
    path = tmp_path / "forged.safetensors"
    for change in (
        {"heads": None}, {"heads": [[1]]}, {"heads": ["nobody"]}, {"statistics": 1}, {"base": None}, {"tied": []},
        {"tied": {"a": ["b"]}}, {"tied": {"a": "nobody"}}, {"buffers": ["nobody"]}, {"added": [1]}, {"free": "all"},
        {"free": [["a"]]},
    ):  # fmt: skip
        write_tensors(path, adapter.tensors, kind="adapter", format=2, document={**sound, **change})
        with pytest.raises(FormatError, match=r"forged\.safetensors lacks them"):
            on.load(path)


def test_files_of_format_1_are_read(tmp_path: Path) -> None:
    # The fingerprint of format 1 leaves out all norms, not only those of the adapter.
    model = make()
    adapter = take_adapter(model)
    document = {"heads": [], "statistics": True, "base": adapter.base}
    path = tmp_path / "old.safetensors"
    write_tensors(path, adapter.tensors, kind="adapter", format=1, document=document)
    assert on.load(path).free == "norms"
    load_adapter(make(), path)


# ------------------------------------------------------------------------------- tied tensors


class Tied(nn.Module):
    """A language model in small: the head is the transposed embedding."""

    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.embedding = nn.Embedding(7, 4)
            self.norm = nn.LayerNorm(4)
            self.lm_head = nn.Linear(4, 7, bias=False)
        self.lm_head.weight = self.embedding.weight if is_tied else nn.Parameter(self.embedding.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.norm(self.embedding(x)))


@pytest.mark.parametrize("also", ["lm_head", "embedding", ("lm_head", "embedding")])
def test_tied_weights_are_saved_once_and_fit_a_fresh_base(also: str | tuple[str, ...], tmp_path: Path) -> None:
    tokens = torch.arange(7)
    model = Tied()
    handle = only_norms(model, also=also)
    model(tokens).square().sum().backward()
    torch.optim.SGD(handle.parameters(), lr=0.1).step()
    adapter = save_adapter(model, tmp_path / "a.safetensors")
    assert adapter.n_entries == 28 + 8
    for is_tied in (True, False):
        fresh = Tied(is_tied=is_tied)
        load_adapter(fresh, tmp_path / "a.safetensors")
        assert torch.equal(fresh(tokens), model(tokens))
    adapters = Adapters(base := Tied())
    wanted = base(tokens)
    adapters.add("a", tmp_path / "a.safetensors")
    adapters.switch("a")
    assert torch.equal(base(tokens), model(tokens))
    adapters.disable()
    assert torch.equal(base(tokens), wanted)
    assert base.lm_head.weight is base.embedding.weight


def test_an_adapter_of_an_untied_model_does_not_fit_a_tied_one() -> None:
    model = Tied(is_tied=False)
    only_norms(model, also="lm_head")
    with pytest.raises(ConversionError, match=r"tied.*; here embedding\.weight"):
        apply_adapter(Tied(), take_adapter(model))


def test_a_norm_at_several_places_is_saved_once(tmp_path: Path) -> None:
    def twice() -> nn.Sequential:
        norm = nn.BatchNorm2d(3)
        return nn.Sequential(norm, nn.Sequential(norm))

    model = twice()
    only_norms(model)
    train(model)
    adapter = save_adapter(model, tmp_path / "a.safetensors")
    assert len(adapter.tensors) == 5
    fresh = twice()
    load_adapter(fresh, tmp_path / "a.safetensors")
    assert same(bits(fresh), bits(model))


# ------------------------------------------------------------------------------- affine maps that were added

BARE = {
    "batch": lambda: nn.BatchNorm2d(4, affine=False),
    "group": lambda: nn.GroupNorm(2, 4, affine=False),
    "instance": lambda: nn.InstanceNorm2d(4),
    "layer": lambda: nn.LayerNorm([4, 4, 4], elementwise_affine=False),
    "rms": lambda: nn.RMSNorm([4, 4, 4], elementwise_affine=False),
}


@pytest.mark.parametrize("name", list(BARE))
def test_an_affine_map_that_was_added_is_added_to_a_fresh_base(name: str, tmp_path: Path) -> None:
    model = mixed(BARE[name]())
    only_norms(model, add_affine=True, also="6")
    train(model)
    save_adapter(model, tmp_path / "a.safetensors")
    fresh = mixed(BARE[name]()).eval()
    load_adapter(fresh, tmp_path / "a.safetensors")
    assert same(bits(fresh), bits(model))
    assert torch.equal(fresh(images(7)), model(images(7)))

    base = mixed(BARE[name]()).eval()
    before, wanted = bits(base), base(images(7))
    adapters = Adapters(base)
    adapters.add("a", tmp_path / "a.safetensors")
    assert same(bits(base), before)
    adapters.switch("a")
    assert torch.equal(base(images(7)), model(images(7)))
    adapters.merge()
    adapters.disable()
    assert torch.equal(base(images(7)), model(images(7)))
    adapters.unmerge()
    assert same(bits(base), before)
    assert torch.equal(base(images(7)), wanted)
    with pytest.raises(ConversionError, match="PEFT needs an adapter of norms and heads"):
        write_peft(on.load(tmp_path / "a.safetensors"), tmp_path / "peft")


# ------------------------------------------------------------------------------- all or nothing


def test_an_adapter_that_fails_while_it_is_loaded_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mixed(nn.BatchNorm2d(4, affine=False))
    only_norms(model, add_affine=True, also="6")
    train(model)
    adapter = take_adapter(model)
    fresh = mixed(nn.BatchNorm2d(4, affine=False))
    before = bits(fresh)
    plain_copy, calls = Tensor.copy_, []

    def fail_late(self: Tensor, *args: object) -> Tensor:
        calls.append(self)
        if len(calls) == 4:
            raise RuntimeError("out of memory")
        return plain_copy(self, *args)

    monkeypatch.setattr(Tensor, "copy_", fail_late)
    with pytest.raises(ConversionError, match=r"failed with: out of memory"):
        apply_adapter(fresh, adapter)
    monkeypatch.undo()
    assert same(bits(fresh), before)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_an_added_scale_of_another_kind_of_number_is_refused(dtype: torch.dtype) -> None:
    model = mixed(nn.BatchNorm2d(4, affine=False))
    handle = only_norms(model, add_affine=True)
    adapter = take_adapter(model)
    (name,) = [f"{place}.weight" for place in adapter.added]
    odd = dataclasses.replace(adapter, tensors=adapter.tensors | {name: adapter.tensors[name].to(dtype)})
    handle.undo()
    before = bits(model)
    with pytest.raises(ConversionError, match=rf"shape and dtype; got {name} \(4,\) {dtype} for \(4,\) floating-point"):
        apply_adapter(model, odd)
    assert same(bits(model), before)


def test_a_head_whose_parts_do_not_fit_together_is_refused() -> None:
    model = make(n_classes=5)
    only_norms(model, also="5.weight")
    other = make(n_classes=2)
    before = bits(other)
    with pytest.raises(ConversionError, match=r"; got 5\.weight \(5, 4\)"):
        apply_adapter(other, take_adapter(model))
    assert same(bits(other), before)


# ------------------------------------------------------------------------------- several adapters


@pytest.mark.parametrize("order", ["capture", "disable", "switch", "undo"])
def test_a_head_that_is_trained_later_has_its_base_value_remembered(order: str) -> None:
    model = make().eval()
    base = bits(model)
    adapters = Adapters(model)
    adapters.capture("base")
    handle = only_norms(model, also="5")
    train(model)
    if order == "undo":  # the handle forgets what was trained: the change is noticed
        handle.undo()
        with pytest.raises(ConversionError, match=r"5\.\w+.* changed since Adapters\(model\)"):
            adapters.capture("a")
        return
    after = bits(model)
    if order == "capture":
        adapters.capture("a")
        adapters.disable()
    elif order == "disable":
        adapters.disable()
    else:
        adapters.switch("base")
    assert same(bits(model), base)
    if order == "capture":
        adapters.switch("a")
        assert same(bits(model), after)


def test_a_change_that_no_adapter_holds_is_not_taken_for_the_base_model() -> None:
    model = make()
    adapters = Adapters(model)
    with torch.no_grad():
        model[5].weight += 1.0
    with pytest.raises(ConversionError, match=r"5\.weight changed since Adapters\(model\)"):
        adapters.capture("a")
    other = make()
    only_norms(other, also="5")
    with pytest.raises(ConversionError, match=r"base model's value of '5\.weight'"):
        adapters.add("b", take_adapter(other))


def test_buffers_that_training_changes_come_back_with_the_base_model() -> None:
    model = mixed(spectral(True))
    adapters = Adapters(model)
    base = bits(model)
    only_norms(model)
    train(model)
    after = bits(model)
    adapters.capture("a")
    adapters.disable()
    assert same(bits(model), base)
    adapters.switch("a")
    assert same(bits(model), after)


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
        with pytest.raises(ValueRangeError, match=r"finite weights.*sum"):
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
    save_adapter(model, tmp_path / "half.safetensors", dtype=torch.float16)
    whole, half = (on.load(tmp_path / f"{name}.safetensors") for name in ("whole", "half"))
    saved = os.path.getsize(tmp_path / "whole.safetensors") - os.path.getsize(tmp_path / "half.safetensors")
    assert abs(saved - 2 * whole.n_entries) <= 64, "two bytes per entry, except for the padding of the header"
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
    with pytest.raises(ConversionError, match=r"4 tensors, 1 with other values \(0\.bias\)"):
        load_adapter(other, tmp_path / "a.safetensors")
    assert same(bits(other), before)
    with pytest.raises(ConversionError, match=r"another name, shape or dtype \(5\.bias, 5\.weight\)"):
        load_adapter(make(n_classes=6), tmp_path / "a.safetensors")
    with pytest.raises(ConversionError, match="4 other tensors; got 5"):
        load_adapter(make().append(nn.PReLU()), tmp_path / "a.safetensors")
    with pytest.raises(ConversionError, match=r"no 1\.bias"):
        load_adapter(nn.Sequential(nn.Conv2d(3, 4, 3)), tmp_path / "a.safetensors")


def test_one_hash_of_all_values_decides_and_the_marks_only_name_what_differs() -> None:
    model, other = make(), make()
    own = take_adapter(model)
    marks = base64.b64decode(own.base)
    assert len(marks) == 16 + 3 * 4, "sixteen bytes, and three for each weight and bias beside the norm's"
    forged = base64.b64encode(bytes([marks[0] ^ 1]) + marks[1:]).decode()
    with pytest.raises(ConversionError, match="4 tensors, some"):
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
    with pytest.raises(FormatError, match="altered or truncated"):
        load_adapter(model, path)
    with pytest.raises(StorageError, match="readable file"):
        load_adapter(model, tmp_path / "nothing.safetensors")


@pytest.mark.parametrize("field", ["heads", "buffers", "added", "free", "tied", "statistics", "base"])
@pytest.mark.parametrize("value", [3, "x", [3], [[]], {"a": []}, {"a": "x"}])
def test_forged_files_are_refused(field: str, value: object, tmp_path: Path) -> None:
    model = make()
    only_norms(model)
    path = tmp_path / "a.safetensors"
    save_adapter(model, path)
    document, tensors = read_tensors(path, kind="adapter", format=2, cure="")
    rest = {name: document[name] for name in ("heads", "free", "statistics", "base") if name in document}
    write_tensors(path, tensors, kind="adapter", format=2, document={**rest, field: value})
    with pytest.raises((FormatError, ConversionError), match="needs"):
        load_adapter(make(), path)


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
    with pytest.raises(ValueRangeError, match=r"dtype needs one of .*torch\.float16; got torch\.int64"):
        save_adapter(model, "unused", dtype=torch.int64)
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


class ShyNorm(nn.Module):
    """A norm whose running mean is not in the state dict."""

    def __init__(self, n_channels: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(n_channels), persistent=False)
        self.weight = nn.Parameter(torch.ones(n_channels))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.running_mean.lerp_(x.detach().mean(0), 0.1)
        return (x - self.running_mean) * self.weight


def test_statistics_that_are_not_in_the_state_dict_are_in_the_adapter(tmp_path: Path) -> None:
    base = nn.Sequential(nn.Linear(4, 4), ShyNorm(4))
    model = copy.deepcopy(base)
    only_norms(model)
    x = single_normal(8, 4)
    model.train()(x + 3.0)
    save_adapter(model, tmp_path / "a.safetensors")
    load_adapter(base, tmp_path / "a.safetensors")
    assert torch.equal(base.eval()(x), model.eval()(x))


def test_heads_of_any_memory_layout_are_saved(tmp_path: Path) -> None:
    base = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    model = copy.deepcopy(base).to(memory_format=torch.channels_last)
    only_norms(model, also=("0",))
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    save_adapter(model, tmp_path / "a.safetensors")
    load_adapter(base, tmp_path / "a.safetensors")
    assert torch.equal(base[0].weight, model[0].weight)


class Drift(nn.Module):
    """Scales by two buffers that training moves, one of them an integer; a third grows with the batch, as a cache."""

    def __init__(self, *, is_persistent: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4), persistent=is_persistent)
        self.register_buffer("calls", torch.tensor(0), persistent=is_persistent)
        self.register_buffer("cache", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.5)
            self.calls += 1
        if len(self.cache) < len(x):
            self.cache = torch.ones(len(x))
        return (x - self.mean) * (1.0 + self.calls) * self.cache[: len(x), None]


@pytest.mark.parametrize("is_persistent", [True, False])
@pytest.mark.parametrize("statistics", ["track", "freeze"])
def test_buffers_of_any_type_in_the_state_dict_or_not_are_in_the_adapter(
    is_persistent: bool, statistics: str, tmp_path: Path
) -> None:
    base = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), Drift(is_persistent=is_persistent))
    model, fresh = copy.deepcopy(base), copy.deepcopy(base)
    x = single_normal(8, 4)
    adapters = Adapters(model)
    only_norms(model, statistics=statistics)
    model.train()(x + 3.0)
    trained = model.eval()(x)
    saved = save_adapter(model, tmp_path / "a.safetensors")
    assert set(saved.buffers) == {"2.mean", "2.calls"}
    load_adapter(fresh, tmp_path / "a.safetensors")
    assert torch.equal(fresh.eval()(x), trained)
    adapters.capture("a")
    adapters.disable()
    assert torch.equal(model(x), base.eval()(x))
    adapters.switch("a")
    assert torch.equal(model(x), trained)
