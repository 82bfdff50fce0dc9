"""Tuned models folded for inference and back: same outputs, every norm accounted for, the original to the last bit."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tensors import normal
from torch import Tensor, nn
from torch.nn import functional

from onlynorm.errors import ConversionError, ShapeError, ValueRangeError
from onlynorm.models import CifarResNet, mlp
from onlynorm.modules import Affine, find_norms
from onlynorm.modules.fold import FoldedModel, fold, unfold
from onlynorm.seeds import own_randomness
from onlynorm.tuning import load_adapter, only_norms, save_adapter, take_adapter

ROUNDING = 1e-12
"""A dozen layers of float64 sums of up to a hundred terms, each with another rounding."""
SINGLE = 1e-5
"""The same in float32."""


def settled(model: nn.Module, seed: int = 1) -> nn.Module:
    """In double precision and evaluation mode, with norms that do something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.double().modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                tensors = (module.weight, module.bias, module.running_mean, module.running_var)
                for tensor in (t for t in tensors if t is not None):
                    tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator, dtype=torch.float64))
    return model.eval()


def resnet() -> nn.Module:
    with own_randomness(0):
        return settled(CifarResNet(8, width=4))


@torch.no_grad()
def difference(one: nn.Module, other: nn.Module, x: Tensor) -> float:
    wanted = one(x)
    return float((other(x) - wanted).abs().max() / wanted.abs().max())


def bits(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.state_dict())


def assert_same_bits(one: nn.Module, other: nn.Module) -> None:
    first, second = bits(one), bits(other)
    assert list(first) == list(second)
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert torch.equal(tensor, second[name]), name


# ------------------------------------------------------------------------------- what is folded


@pytest.mark.parametrize("given", ["traced", "seen"])
def test_a_resnet_is_folded_whole(given: str) -> None:
    model, x = resnet(), normal(3, 3, 8, 8)
    before = copy.deepcopy(model)
    made = fold(model) if given == "traced" else fold(model, x)
    norms = [norm.name for norm in find_norms(model).norms]
    assert sorted(norm for _, norm in made.folded) == sorted(norms)
    assert made.kept == ()
    assert find_norms(made.network).norms == ()
    assert difference(model, made.network, x) <= ROUNDING
    assert_same_bits(model, before)
    assert str(made).startswith(f"{len(norms)} of {len(norms)} norms are ")


def test_both_ways_find_the_same_norms() -> None:
    model, x = resnet(), normal(2, 3, 8, 8)
    traced, seen = fold(model), fold(model, x)
    assert set(traced.folded) == set(seen.folded)
    assert_same_bits(traced.network, seen.network)


def test_single_precision_is_rounded_once() -> None:
    model, x = resnet().float(), normal(3, 3, 8, 8).float()
    made = fold(model)
    assert all(p.dtype == torch.float32 for p in made.network.parameters())
    exact = fold(copy.deepcopy(model).double()).network.get_submodule("conv1").weight
    assert torch.equal(made.network.get_submodule("conv1").weight, exact.float())
    assert difference(model, made.network, x) <= SINGLE


def test_a_linear_layer_takes_its_norm_and_refuses_other_axes() -> None:
    model = settled(nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2)))
    made = fold(model)
    assert made.folded == (("0", "1"),)
    assert difference(model, made.network, normal(7, 5)) <= ROUNDING
    with pytest.raises(ShapeError, match=r"needs inputs with 2 dimensions; got \(4, 3, 3\).*Unfold the network"):
        made.network(normal(4, 3, 5))  # the norm would have worked along the middle axis


def test_nested_and_grouped_layers_are_folded() -> None:
    inner = nn.Sequential(nn.Conv1d(4, 6, 3, groups=2, bias=False), nn.BatchNorm1d(6))
    model = settled(nn.ModuleDict({"stem": nn.Sequential(inner, nn.GELU())})["stem"])
    made = fold(model)
    assert made.folded == (("0.0", "0.1"),)
    assert difference(model, made.network, normal(3, 4, 9)) <= ROUNDING


class Wired(nn.Module):
    """A layer, a norm, and what `way` puts between or beside them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm: nn.Module = nn.BatchNorm2d(3)
        if way == "no statistics":
            self.norm = nn.BatchNorm2d(3, track_running_stats=False)
        if way == "own forward":
            self.norm = Activated(3)
        if way == "group norm":
            self.norm = nn.GroupNorm(1, 3)
        if way == "frozen look-alike":
            self.norm = FrozenBatchNorm(3)
        if way == "hooked":
            self.conv.register_forward_hook(lambda *_: None)
        if way == "parametrized":
            nn.utils.parametrizations.weight_norm(self.conv)
        if way == "shared layer":
            self.again = nn.Sequential(self.conv)
        if way == "norm first":
            self.norm = nn.BatchNorm2d(2)

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        if self.way == "norm first":
            return self.conv(self.norm(x))
        if self.way == "functional":
            return self.norm(functional.conv2d(x, self.conv.weight))
        h = self.conv(x)
        if self.way == "activation between":
            h = torch.relu(h)
        if self.way == "in place":
            torch.relu_(h)
        made = h if self.way == "not called" else self.norm(h)
        if self.way == "norm twice":
            made = self.norm(made)
        if self.way == "layer twice":
            made = made + self.conv(x).tanh()
        if self.way == "shared layer":
            made = made + self.again(x).tanh()
        if self.way == "used elsewhere":
            made = made + h
        if self.way == "weight used":
            made = made + functional.conv2d(x, self.conv.weight)
        return made if extra is None else made + extra


class Activated(nn.BatchNorm2d):
    """A batch norm with its activation inside, as timm writes it."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.relu(super().forward(input))


class FrozenBatchNorm(nn.Module):
    """A batch norm of buffers, as detection models have it."""

    def __init__(self, n: int) -> None:
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.5), ("running_var", 2.0)):
            self.register_buffer(name, torch.full((n,), value))

    def forward(self, x: Tensor) -> Tensor:
        tensors = (self.running_mean, self.running_var, self.weight, self.bias)
        return functional.batch_norm(x, *tensors, training=False)  # type: ignore[arg-type]


KEPT = [
    ("activation between", "not the output of a Linear or Conv", "not the output of a Linear or Conv"),
    ("norm first", "not the output of a Linear or Conv", "not the output of a Linear or Conv"),
    ("functional", "not the output of a Linear or Conv", "not the output of a Linear or Conv"),
    ("parametrized", "not the output of a Linear or Conv", "not the output of a Linear or Conv"),
    ("in place", "used elsewhere too", "in place before it"),
    ("norm twice", "it is called 2 times", "it is called 2 times"),
    ("not called", "it is called 0 times", "it is called 0 times"),
    ("layer twice", "its layer conv is used more than once", "its layer conv is called 2 times"),
    ("shared layer", "its layer conv is used more than once", "its layer conv is called 2 times"),
    ("used elsewhere", "its output is used elsewhere too", "output of conv is used elsewhere too"),
    ("weight used", "used elsewhere too", "the output would change"),
    ("no statistics", "it has no running statistics", "it has no running statistics"),
    ("own forward", "overrides forward", "overrides forward"),
    ("hooked", "conv has hooks", "hook"),
    ("group norm", "its statistics from every input", "its statistics from every input"),
    ("frozen look-alike", "not a batch norm of torch", "not a batch norm of torch"),
]


@pytest.mark.parametrize(("way", "traced", "seen"), KEPT, ids=[way for way, *_ in KEPT])
def test_what_cannot_be_folded_stays_and_says_why(way: str, traced: str, seen: str) -> None:
    x = normal(4, 2, 5, 5)
    model = settled(Wired(way))
    for made, reason in ((fold(model), traced), (fold(model, x), seen)):
        assert made.folded == ()
        assert [norm.name for norm in made.kept] == ["norm"]
        assert reason in made.kept[0].reason
        assert f"kept: norm ({type(model.norm).__name__}): " in str(made)
        assert torch.equal(made.network(x), model(x))


def test_the_same_wiring_without_obstacles_is_folded() -> None:
    x, model = normal(4, 2, 5, 5), settled(Wired("plain"))
    for made in (fold(model), fold(model, x)):
        assert made.folded == (("conv", "norm"),)
        assert difference(model, made.network, x) <= ROUNDING


class Untraceable(nn.Module):
    """Looks at its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x if float(x.sum()) > -1e9 else -x))


def test_a_model_that_cannot_be_traced_is_folded_by_a_batch() -> None:
    model, x = settled(Untraceable()), normal(5, 3)
    with pytest.raises(ConversionError, match=r"trace.*; Untraceable .*fold\(model, inputs"):
        fold(model)
    made = fold(model, x)
    assert made.folded == (("linear", "norm"),)
    assert difference(model, made.network, x) <= ROUNDING


# ------------------------------------------------------------------------------- and back


@pytest.mark.parametrize("after", ["at once", "copied", "pickled", "moved"])
def test_unfolded_is_the_original_to_the_last_bit(after: str) -> None:
    model, x = resnet().float(), normal(3, 3, 8, 8).float()
    folded: Any = fold(model)
    if after != "at once":
        folded = folded.network
    if after == "copied":
        folded = copy.deepcopy(folded)
    if after == "pickled":
        folded = pickle.loads(pickle.dumps(folded))
    if after == "moved":
        folded = folded.to("cpu").train().eval()
    back = unfold(folded)
    assert_same_bits(model, back)
    assert torch.equal(back(x), model(x))
    assert not any(hasattr(module, "n_axes") for module in back.modules())
    assert fold(back).folded == fold(model).folded


def test_the_folded_model_shares_no_number_with_the_original() -> None:
    model = resnet()
    before, made = copy.deepcopy(model), fold(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert_same_bits(unfold(made), before)


def test_another_precision_stays_the_one_the_model_has_now() -> None:
    back = unfold(fold(resnet()).network.float())
    assert {p.dtype for p in back.parameters()} == {torch.float32}
    assert difference(back, resnet().float(), normal(2, 3, 8, 8).float()) == 0.0


def test_tied_layers_are_tied_again() -> None:
    model = settled(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)))
    model[2].weight = model[0].weight  # type: ignore[index, union-attr]
    made, x = fold(model), normal(4, 3)
    assert made.folded == (("0", "1"),)
    assert difference(model, made.network, x) <= ROUNDING
    back: Any = unfold(made)
    assert back[0].weight is back[2].weight
    assert torch.equal(back(x), model(x))


def test_what_was_never_folded_or_changed_since_is_refused() -> None:
    made = fold(resnet())
    with pytest.raises(ConversionError, match=r"not folded; .*unfold\(model\) first"):
        fold(made.network)
    with torch.no_grad():
        made.network.get_submodule("conv1").weight[0] += 1e-6  # type: ignore[operator, index]
    with pytest.raises(ConversionError, match=r"conv1 changed since"):
        unfold(made)
    with pytest.raises(ConversionError, match=r"unfold needs a model that fold made; got CifarResNet without"):
        unfold(resnet())
    with pytest.raises(ValueRangeError, match=r"folding needs a target in evaluation mode"):
        fold(resnet().train())


def test_a_model_without_norms_to_fold_comes_back_as_it_is() -> None:
    with own_randomness(0):
        model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)).eval()
    made = fold(model)
    assert (made.folded, len(made.kept)) == ((), 1)
    assert_same_bits(model, made.network)


# ------------------------------------------------------------------------------- tuned models


def tuned(path: Path) -> tuple[nn.Module, nn.Module]:
    """(base, tuned model); the adapter of the second is at the path."""
    base = resnet()
    model = copy.deepcopy(base)
    only_norms(model, also="linear", statistics="freeze")
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.mul_(1.25)
    save_adapter(model, path)
    return base, model


def test_a_tuned_model_is_folded_and_unfolded_with_its_choice(tmp_path: Path) -> None:
    _, model = tuned(tmp_path / "a.safetensors")
    x = normal(3, 3, 8, 8)
    made = fold(model)
    assert difference(model, made.network, x) <= ROUNDING
    assert not any(p.requires_grad for n, p in made.network.named_parameters() if not n.startswith("linear"))
    with pytest.raises(ConversionError, match=r"an adapter needs a model with norms; got none"):
        save_adapter(made.network, tmp_path / "b.safetensors")
    back = unfold(made)
    assert_same_bits(model, back)
    assert {n for n, p in back.named_parameters() if p.requires_grad} == {
        n for n, p in model.named_parameters() if p.requires_grad
    }
    back.train()
    assert not any(m.training for m in back.modules() if isinstance(m, nn.BatchNorm2d)), "statistics stay frozen"
    save_adapter(back, tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_an_adapter_is_refused_by_a_folded_model_and_fits_the_unfolded_one(tmp_path: Path) -> None:
    base, model = tuned(tmp_path / "a.safetensors")
    made = fold(base)
    before = copy.deepcopy(made.network)
    with pytest.raises(ConversionError, match=r"they are folded\. Call unfold\(model\) first"):
        load_adapter(made.network, tmp_path / "a.safetensors")
    assert all("unfold(model)" in skipped.reason for skipped in find_norms(made.network).skipped)
    assert len(find_norms(made.network).skipped) == len(made.folded)
    assert_same_bits(made.network, before)
    back = unfold(made)
    load_adapter(back, tmp_path / "a.safetensors")
    assert torch.equal(back(normal(3, 3, 8, 8)), model(normal(3, 3, 8, 8)))


# ------------------------------------------------------------------------------- single norms


def test_one_norm_is_a_map_and_back() -> None:
    model: Any = settled(nn.Sequential(nn.BatchNorm2d(3)))
    map, x = fold(model[0]), normal(2, 3, 4, 4)
    assert isinstance(map, Affine)
    assert not isinstance(map, FoldedModel)
    norm = unfold(map, mean=torch.zeros(3).double(), variance=torch.ones(3).double())
    assert difference(model, norm, x) <= ROUNDING
    with pytest.raises(ShapeError, match=r"needs a mean and a variance"):
        unfold(map)


def test_mlps_are_folded() -> None:
    model = settled(mlp((5, 7, 6, 3), norm="batch"))
    made = fold(model)
    assert len(made.folded) == len(find_norms(model).norms) > 0
    assert difference(model, made.network, normal(4, 5)) <= ROUNDING


def test_a_model_of_which_nothing_was_folded_is_unfolded_to_itself() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)).eval()
    only_norms(model)
    folded = fold(model)
    assert folded.folded == ()
    back = unfold(folded)
    assert all(torch.equal(a, b) for a, b in zip(back.state_dict().values(), model.state_dict().values(), strict=True))
    assert take_adapter(back).tensors.keys() == take_adapter(folded.network).tensors.keys()
    assert fold(folded.network).folded == ()
    with pytest.raises(ConversionError, match="unfold needs a model that fold made"):
        unfold(back)
