"""Only norms are trained, statistics do what was asked for, and everything can be undone."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from foreign_norms import FrozenBatchNorm2d
from torch import Tensor, nn

from onlynorm.errors import ConversionError, UnknownNameError
from onlynorm.models import CifarResNet
from onlynorm.tuning import init_gamma, only_norms


class Net(nn.Module):
    """A convolution, a batch norm, dropout, a layer norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.ln = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.ln(self.drop(torch.relu(self.bn(self.conv(x))).mean((2, 3)))))


def images(n: int = 16, seed: int = 0) -> Tensor:
    return 3.0 * torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) + 1.0


def trained(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


NORMS = {"bn.weight", "bn.bias", "ln.weight", "ln.bias"}


def test_only_norms_are_trained_and_undo_brings_all_back() -> None:
    model = Net()
    model.conv.bias.requires_grad_(False)
    before = trained(model)
    handle = only_norms(model)
    assert trained(model) == NORMS == {name for name, _ in handle.named_parameters()}
    assert (handle.n_trainable, handle.n_total) == (16, 138)
    handle.undo()
    assert trained(model) == before


@pytest.mark.parametrize("also", ["head", ("head",), ("head.weight", "head.bias"), ("he*",)])
def test_heads_are_trained_along(also: str | tuple[str, ...]) -> None:
    model = Net()
    only_norms(model, also=also)
    assert trained(model) == NORMS | {"head.weight", "head.bias"}


@pytest.mark.parametrize("which", ["b*", lambda norm: norm.kind == "batch"])
def test_norms_are_chosen_by_pattern_or_function(which: object) -> None:
    model = Net()
    only_norms(model, which=which)  # type: ignore[arg-type]
    assert trained(model) == {"bn.weight", "bn.bias"}


@pytest.mark.parametrize(("which", "told"), [("layer4.*", "'layer4.*'"), (lambda norm: False, "a function")])
def test_a_choice_that_fits_no_norm_is_told_which_norms_there_are(which: object, told: str) -> None:
    with pytest.raises(ConversionError, match=rf"which needs to fit a norm; got {re.escape(told)}.* norms are .*'bn'"):
        only_norms(Net(), which=which)  # type: ignore[arg-type]


def test_a_step_changes_norms_only() -> None:
    model = Net().train()
    handle = only_norms(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(handle.parameters(), lr=0.1)
    model(images()).square().sum().backward()
    optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == NORMS


def statistics_after(model: nn.Module) -> Tensor:
    model.train()
    model(images())
    return model.get_submodule("bn").running_mean.clone()


def test_tracked_statistics_follow_the_batches() -> None:
    model = Net()
    only_norms(model, statistics="track")
    assert not torch.equal(statistics_after(model), torch.zeros(4))


@pytest.mark.parametrize("statistics", ["freeze", "recalibrate"])
@pytest.mark.parametrize("wrap", [lambda m: m, copy.deepcopy, lambda m: copy.deepcopy(copy.deepcopy(m)), nn.Sequential])
def test_frozen_statistics_stay_after_train(statistics: str, wrap: object) -> None:
    model = Net()
    only_norms(model, statistics=statistics)
    wrapped = wrap(model)  # type: ignore[operator]
    inner = wrapped[0] if isinstance(wrapped, nn.Sequential) else wrapped
    wrapped.train()
    wrapped(images())
    assert torch.equal(inner.bn.running_mean, torch.zeros(4))
    assert not inner.bn.training
    assert inner.drop.training, "the rest of the model follows train() as ever"
    wrapped.eval()
    assert not inner.drop.training


def test_a_deep_copy_keeps_a_policy_of_its_own() -> None:
    model = Net()
    handle = only_norms(model, statistics="freeze")
    twin = copy.deepcopy(model)
    handle.undo()
    assert not torch.equal(statistics_after(model), torch.zeros(4))
    assert torch.equal(statistics_after(twin), torch.zeros(4))


def test_frozen_statistics_survive_compilation() -> None:
    model = Net()
    only_norms(model, statistics="freeze")
    compiled = torch.compile(model, backend="eager")
    compiled.train()
    compiled(images())
    assert torch.equal(model.bn.running_mean, torch.zeros(4))


def test_recalibration_averages_over_the_batches_with_dropout_off() -> None:
    model = Net()
    handle = only_norms(model, statistics="recalibrate")
    model.train()
    batches = [images(seed=s) for s in range(3)]
    handle.recalibrate(batches)
    seen = torch.stack([model.conv(x).mean((0, 2, 3)) for x in batches])
    torch.testing.assert_close(model.bn.running_mean, seen.mean(0).detach())
    assert not model.bn.training
    assert model.drop.training
    before = model.bn.running_mean.clone()
    model.train()
    model(images(seed=9))
    assert torch.equal(model.bn.running_mean, before)


def test_undo_gives_statistics_back_to_train() -> None:
    model = Net()
    only_norms(model, statistics="freeze").undo()
    assert not torch.equal(statistics_after(model), torch.zeros(4))
    assert "train" not in model.bn.__dict__


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(4, affine=False),
        nn.LayerNorm([4, 6, 6], elementwise_affine=False),
        nn.GroupNorm(2, 4, affine=False),
        nn.InstanceNorm2d(4),
        nn.RMSNorm([4, 6, 6], elementwise_affine=False),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_norms_without_scale_get_one_that_changes_nothing(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm).eval()
    wanted = model(images())
    handle = only_norms(model, add_affine=True)
    torch.testing.assert_close(model(images()), wanted)
    assert handle.n_trainable >= 4
    assert all(name.startswith("1.") for name in trained(model))
    handle.undo()
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias"]
    torch.testing.assert_close(model(images()), wanted)


def test_frozen_batch_norms_are_thawed_on_request() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), FrozenBatchNorm2d(4), nn.GroupNorm(2, 4))
    handle = only_norms(model)
    assert trained(model) == {"2.weight", "2.bias"}
    assert "thaw=True" in str(handle)
    handle.undo()
    wanted = model(images())
    handle = only_norms(model, thaw=True)
    assert trained(model) == {"1.weight", "1.bias", "2.weight", "2.bias"}
    torch.testing.assert_close(model(images()), wanted)
    handle.undo()
    assert {name for name, _ in model[1].named_buffers()} == {"weight", "bias", "running_mean", "running_var"}


def test_a_tied_parameter_is_trained_if_one_of_its_names_is() -> None:
    norm = nn.LayerNorm(3)
    model = nn.ModuleDict({"a": norm, "b": norm, "c": nn.Linear(3, 3)})
    only_norms(model)
    assert trained(model) == {"a.weight", "a.bias"}


def test_the_table_says_what_is_trained() -> None:
    text = str(only_norms(CifarResNet(20), also="linear", statistics="freeze"))
    assert "layer3.2.bn2.weight" in text
    assert "2,026 of 269,722 parameters are trained (0.751 %)" in text
    assert "19 norms, statistics: freeze; also: linear" in text


@pytest.mark.parametrize(
    ("how", "low", "high"),
    [("uniform", 0.0, 1.0), ("ones", 1.0, 1.0), ("fixed", 0.5, 0.5), ("positive-negative", -1.0, 1.0)],
)
def test_scales_start_as_frankle_et_al_compared_them(how: str, low: float, high: float) -> None:
    model = CifarResNet(20)
    handle = only_norms(model)
    init_gamma(handle, how=how, seed=3)
    scales = torch.cat([p.detach() for name, p in handle.named_parameters() if name.endswith("weight")])
    shifts = torch.cat([p.detach() for name, p in handle.named_parameters() if name.endswith("bias")])
    assert float(scales.min()) >= low
    assert float(scales.max()) <= high
    if low < high:
        # 688 uniform numbers: their mean lies within five standard errors of the middle.
        assert abs(float(scales.mean()) - (low + high) / 2) <= 5.0 * (high - low) / (12 * len(scales)) ** 0.5
    assert not shifts.any()


def test_bad_input_is_refused_and_changes_nothing() -> None:
    model = Net()
    before = trained(model)
    with pytest.raises(UnknownNameError, match=r"statistics.*'freez'.*freeze"):
        only_norms(model, statistics="freez")
    with pytest.raises(UnknownNameError, match=r"heat.*head"):
        only_norms(model, also="heat")
    with pytest.raises(ConversionError, match="norms to train; got none in Sequential"):
        only_norms(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ConversionError, match="no scale and no shift"):
        only_norms(nn.Sequential(nn.LayerNorm(2, elementwise_affine=False)))
    assert trained(model) == before
    handle = only_norms(model)
    with pytest.raises(ConversionError, match=r"already prepared\. Call undo"):
        only_norms(model)
    with pytest.raises(UnknownNameError, match=r"gamma.*'one'.*ones"):
        init_gamma(handle, how="one")
